"""Modules and blocks from the calls of modules in Python's stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution import module_tables, tables
from cs_systems.analysis.attribution.profile import profile
from cs_systems.cli import main
from cs_systems.readers import read
from cs_systems.readers._called_modules import called_modules
from cs_systems.readers.forms.columns import Range
from tests.analysis.attribution.test_foreign import AUTOGRAD, event, kernel

Tree = Sequence[Any]  # a name, then the trees of its calls


def calls(tree: Tree, start: float, end: float) -> Iterator[Range]:
    """Yield the calls of a tree; nested calls divide the time of the call around them."""
    name, *inside = tree
    yield Range(f"nn.Module: {name}", start, end, 1)
    each = (end - start) * 0.96 / max(1, len(inside))
    for number, below in enumerate(inside):
        yield from calls(below, start + number * each, start + (number + 0.999) * each)


def blocks(tree: Tree) -> dict[str, str]:
    found = called_modules([*calls(tree, 0, 1)])
    assert found
    return {row["path"]: row["block"] for row in found[1].rows if row["block"] and row["class"] != "Linear"}


def block(number: int) -> Tree:
    return (f"Block_{number}", (f"Linear_{2 * number}",), (f"Linear_{2 * number + 1}",))


def test_repeated_modules_are_blocks() -> None:
    tree = ("GPT_0", ("Embedding_0",), block(0), block(1), ("Linear_9",))
    assert blocks(tree) == {"GPT.Block_0": "block 0", "GPT.Block_1": "block 1"}


def test_blocks_that_the_script_calls_itself_are_found() -> None:
    of_script = [call for number in range(2) for call in calls(block(number), number, number + 0.9)]
    found = called_modules(of_script)
    assert found
    assert [row["layer"] for row in found[1].rows if row["class"] == "Block"] == ["block 0", "block 1"]


def test_encoder_and_decoder_are_stages_and_stay_apart() -> None:
    stack = [(f"Stack_{n}", block(3 * n), block(3 * n + 1), block(3 * n + 2)) for n in range(2)]
    assert [*blocks(("T5_0", *stack)).values()] == [
        *(f"T5.Stack_0.Block {n}" for n in range(3)),
        *(f"T5.Stack_1.Block {n}" for n in range(3)),
    ]


def test_experts_inside_a_block_do_not_count_as_blocks() -> None:
    def layer(number: int) -> Tree:
        attention = (f"Attention_{number}", (f"Linear_{9 * number}",), (f"Linear_{9 * number + 1}",))
        experts = [(f"Expert_{8 * number + n}", (f"Linear_{100 + 8 * number + n}",)) for n in range(2)]
        return (f"Layer_{number}", attention, *experts)

    found = called_modules([*calls(("MoE_0", layer(0), layer(1)), 0, 1)])
    assert found
    assert {row["block"] for row in found[1].rows} == {None, "block 0", "block 1"}
    assert {row["part"] for row in found[1].rows if "Expert" in row["path"]} == {"ffn"}


def test_kernels_of_forward_and_backward_belong_to_modules(write_trace: Callable[..., Path]) -> None:
    """Backward runs in autograd's thread and finds the module by the sequence number."""
    stacks = [
        event("python_function", call.name, call.start_s * 100, call.end_s * 100)
        for call in calls(("GPT_0", block(0), block(1)), 0, 1)
    ]
    numbered = {"Sequence number": 5, "Fwd thread id": 0}
    path = write_trace(
        [
            *stacks,
            event("cpu_op", "aten::mm", 50, 55, **numbered),
            *kernel("gemm", 110, 120, launched=51),
            event("cpu_op", "MmBackward0", 150, 160, AUTOGRAD, **(numbered | {"Fwd thread id": 1})),
            *kernel("gemm", 170, 190, launched=151, thread=AUTOGRAD),
        ]
    )
    made = profile(read(path))
    (row,) = [row for row in tables.layers(made) if row["time_s"]]
    assert (row["layer"], row["forward_s"], row["backward_s"]) == (
        "block 1", pytest.approx(10e-6), pytest.approx(20e-6),
    )  # fmt: skip
    assert {row["path"] for row in module_tables.blocks(made)} == {"GPT.Block_0", "GPT.Block_1"}
    assert "layers are the modules that Python's stacks name" in made.how_layered[0]


def test_hint_lists_no_module_or_operator(write_trace: Callable[..., Path]) -> None:
    path = write_trace(
        [
            event("python_function", "nn.Module: GPT_0", 0, 9),
            event("user_annotation", "aten::view, op_id = 314290", 1, 2),
            event("user_annotation", "mine", 0, 9),
            *kernel("gemm", 10, 20, launched=5),
        ]
    )
    (note,) = (note for note in profile(read(path)).notes if "--range" in note)
    assert note.endswith("a time with --between: 'mine' (1×)")


def test_missing_phases_are_unknown_and_long_paths_are_shortened(
    write_trace: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Inference has no backward by which forward could be recognised."""
    tree = ("ModelWithAVeryLongNameForGeneration_0", ("TheEncoderOfTheModelWithAVeryLongName_0", block(0), block(1)))
    stacks = [event("python_function", call.name, call.start_s * 100, call.end_s * 100) for call in calls(tree, 0, 1)]
    path = write_trace([*stacks, *kernel("gemm", 110, 120, launched=5), *kernel("gemm", 130, 140, launched=60)])
    made = profile(read(path))
    for table in (module_tables.modules, module_tables.classes, module_tables.tree):
        assert {(row["forward_s"], row["backward_s"]) for row in table(made)} == {(None, None)}
    assert main(["analyze", str(path), "--table", "tree"]) == 0
    shown = capsys.readouterr().out
    assert "fwd" not in shown
    assert max(map(len, shown.splitlines()[3:])) < 110
