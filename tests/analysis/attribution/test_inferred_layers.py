"""Blocks by repetition of kernels, and refusals where a guess would be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution import module_tables, tables
from cs_systems.analysis.attribution.inferred_layers import Repetition, repetition
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.readers import read
from tests.analysis.attribution.test_foreign import AUTOGRAD, kernel, marked

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
BLOCK = ("layer_norm", "gemm_qkv", "flash_fwd", "gemm_out", "layer_norm", "gemm_up", "gelu", "gemm_down")
MIXER = tuple(f"{name}_of_a_mixer" for name in BLOCK)


def found_in(names: Sequence[str]) -> Repetition | None:
    codes = np.unique(np.array(names), return_inverse=True)[1]
    return repetition(codes, np.ones(len(names)), np.array(["gemm" in name for name in names]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["embed", *BLOCK * 5, "layer_norm", "head"], (1, 8, 5)),
        (["embed", *(BLOCK + MIXER) * 3, "head"], (1, 16, 3)),  # two kinds of blocks in turns
        ([*BLOCK * 2, "head"], None),  # twice is no repetition
        (["gelu"] * 50, None),  # without a matrix product
        (["gemm", "gelu", "add"] * 2, None),
    ],
)
def test_period_of_kernel_names_is_the_period_of_blocks(
    names: Sequence[str], expected: tuple[int, int, int] | None
) -> None:
    found = found_in(names)
    assert (found and tuple(found)[:3]) == expected


def step(forward: Sequence[str], backward: Sequence[str] = ()) -> list[Event]:
    """Return two steps of marked phases; a kernel takes 1 µs, and its launch comes 1,000 µs before it."""
    events: list[Event] = []
    for begin in (0, 500):
        half = begin + len(forward)
        events += [marked("step", begin, begin + 400), marked("forward", begin, half)]
        events += [marked("backward", half, half + len(backward))] if backward else []
        for at, name in enumerate((*forward, *backward), begin):
            thread = AUTOGRAD if at >= half else 1
            events += kernel(name, 1000 + at, 1001 + at, launched=at, thread=thread)
    return events


def layers(made: Profile) -> dict[str, tuple[Any, Any]]:
    return {row["layer"]: (row["forward_s"], row["backward_s"]) for row in tables.layers(made)}


def test_blocks_of_forward_and_backward_are_found(write_trace: WriteTrace) -> None:
    back = [f"{name}_bwd" for name in reversed(BLOCK)]
    slow = ["gemm_head_bwd", *back * 4, "embedding_bwd"]
    made = profile(read(write_trace(step(["embed", *BLOCK * 4, "head"], slow))))
    us = pytest.approx
    assert layers(made) == {
        **{f"block {n}": (us(8e-6), us(8e-6)) for n in range(4)},
        "unattributed": (us(2e-6), us(2e-6)),
    }
    assert (
        "no range names a layer: 4 blocks are found by repetition, 8 kernels each, with 94% of forward's time, and as "
        "many in backward, with 94% of its time (confidence: high)" in made.how_layered[0]
    )
    assert made.how_layered[0] in tables.notes("layers", made, tables.layers(made))
    backward = [k for k in made.trace.kernels if k.function.name == "gemm_down_bwd"]
    assert len(backward) == 8
    first = made.places[next(i for i, k in enumerate(made.trace.kernels) if k.function.name == "gemm_down_bwd")]
    assert first.layer == "block 3"  # backward runs from the last block on


def test_backward_that_repeats_less_often_has_no_blocks(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace(step(["embed", *BLOCK * 4, "head"], [*MIXER * 3, "end"]))))
    assert layers(made)["block 0"] == (pytest.approx(8e-6), None)
    assert "so backward has no blocks (confidence: medium)" in made.how_layered[0]


@pytest.mark.parametrize(
    "forward",
    [
        [f"gemm_{n}" for n in range(40)],
        [*BLOCK * 3, *(f"gemm_{n}" for n in range(40))],  # most of the time is elsewhere
    ],
)
def test_unclear_repetition_gives_no_blocks_and_a_note(write_trace: WriteTrace, forward: Sequence[str]) -> None:
    made = profile(read(write_trace(step(forward))))
    assert [*layers(made)] == ["unattributed"]
    assert "forward's kernels do not repeat as those of blocks do" in str(module_tables.why_nothing(made))


def test_named_layers_are_not_guessed(write_trace: WriteTrace) -> None:
    events = [*step(["embed", *BLOCK * 4, "head"]), marked("embedding", 0, 1)]
    assert [*layers(profile(read(write_trace(events))))] == ["embedding", "unattributed"]


def test_inferred_blocks_of_a_real_trace_match_its_ranges(
    kineto_profile: Profile, with_blocks: list[Event], write_trace: WriteTrace
) -> None:
    """In the fixture a block ends with its last operator, so a kernel or two at its edges may differ."""
    marked_places = profile(read(write_trace(with_blocks))).places
    pairs = Counter(
        (guess.layer, truth.layer)
        for guess, truth in zip(kineto_profile.places, marked_places, strict=True)
        if guess.layer.startswith("block")
    )
    assert sum(count for (guess, truth), count in pairs.items() if guess == truth) >= 0.95 * sum(pairs.values())
    assert {guess for guess, _ in pairs} == {f"block {n}" for n in range(4)}
