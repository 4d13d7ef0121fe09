"""What `memory --nsys` prints of the device's memory by range."""

from __future__ import annotations

import pytest

from cs_systems.cli._memory_text import print_ranges, spans
from cs_systems.record import Row

MIB = 2**20


def row(phase: str, layer: str, took: int, freed: int, most: int, predicted: int | None = None) -> Row:
    sizes = {"allocated_bytes": took, "freed_bytes": freed, "change_bytes": took - freed, "most_bytes": most}
    return {"phase": phase, "layer": layer, "allocations": 1.0, **sizes, "predicted_bytes": predicted}


def test_layers_alike_are_one_row_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [row("forward", f"block {i}", 30 * MIB, 10 * MIB, (i + 1) * 20 * MIB, 20 * MIB) for i in range(12)]
    print_ranges([row("forward", "embedding", MIB, 0, MIB), *blocks], "small ctx 256 batch 4 · naive · fp32", "tensors")
    said = capsys.readouterr().out
    assert "forward  block 0 … block 11" in said
    assert said.count("block 0") == 1
    assert "240" in said
    assert "cudaMalloc and cudaFree calls recorded by nsys, of tensors" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["block 0", "block 1", "block 2", "block 4"], "block 0 … block 2, block 4"),
        (["block 0", "block 2"], "block 0, block 2"),
        (["0", "outside of modules"], "0, outside of modules"),
        (["block 10", "block 11", "lm_head"], "block 10 … block 11, lm_head"),
        (["block 3", "block 2", "block 0"], "block 0, block 2 … block 3"),  # as backward meets them
    ],
)
def test_only_blocks_that_follow_one_another_are_told_by_their_ends(names: list[str], said: str) -> None:
    assert spans(names) == said


def test_of_a_cache_it_says_what_shows_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    print_ranges([row("forward", "block 0", MIB, 0, MIB)], "small", "the caching allocator's requests")
    said = " ".join(capsys.readouterr().out.split())
    assert "freed tensors stay in the allocator's cache; add --no-caching-allocator to see each tensor" in said
    assert "predicted" not in said
    print_ranges([], "small", "the caching allocator's requests")
    assert "no recorded step called cudaMalloc" in capsys.readouterr().out
