"""Output of `memory --nsys`: device memory by range."""

from __future__ import annotations

import pytest

from cs_systems.cli._memory_text import print_ranges
from cs_systems.core.printable import spans
from cs_systems.record import Row

MIB = 2**20


def row(phase: str, layer: str, took: int, freed: int, most: int, predicted: int | None = None) -> Row:
    sizes = {"allocated_bytes": took, "freed_bytes": freed, "change_bytes": took - freed, "most_bytes": most}
    return {"phase": phase, "layer": layer, "allocations": 1.0, **sizes, "predicted_bytes": predicted}


def test_equal_layers_are_one_row_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [row("forward", f"block {i}", 30 * MIB, 10 * MIB, (i + 1) * 20 * MIB, 20 * MIB) for i in range(12)]
    print_ranges([row("forward", "embedding", MIB, 0, MIB), *blocks], "small ctx 256 batch 4 · naive · fp32", "tensors")
    output = capsys.readouterr().out
    assert "forward  block 0 … block 11" in output
    assert output.count("block 0") == 1
    assert "240" in output
    assert "cudaMalloc and cudaFree calls recorded by nsys, of tensors" in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["block 0", "block 1", "block 2", "block 4"], "block 0 … block 2, block 4"),
        (["block 0", "block 2"], "block 0, block 2"),
        (["0", "outside of modules"], "0, outside of modules"),
        (["block 10", "block 11", "lm_head"], "block 10 … block 11, lm_head"),
        (["block 3", "block 2", "block 0"], "block 0, block 2 … block 3"),  # in the order of backward
    ],
)
def test_only_consecutive_blocks_are_shortened_to_a_span(names: list[str], message: str) -> None:
    assert spans(names) == message


def test_caching_allocator_note_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    print_ranges([row("forward", "block 0", MIB, 0, MIB)], "small", "the caching allocator's requests")
    output = " ".join(capsys.readouterr().out.split())
    assert "freed tensors stay in the allocator's cache; add --no-caching-allocator to see each tensor" in output
    assert "predicted" not in output
    print_ranges([], "small", "the caching allocator's requests")
    assert "no recorded step called cudaMalloc" in capsys.readouterr().out
