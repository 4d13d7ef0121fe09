"""Blocks by repetition of kernels, and refusals where a guess would be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution import module_tables, tables
from cs_systems.analysis.attribution.inferred_layers import Repetition, repetition
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.core.range_names import UNATTRIBUTED
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Op, Ops
from tests.analysis.attribution.made import Made
from tests.analysis.attribution.test_foreign import AUTOGRAD, kernel, marked

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
BLOCK = ("layer_norm", "gemm_qkv", "flash_fwd", "gemm_out", "layer_norm", "gemm_up", "gelu", "gemm_down")
MIXER = tuple(f"{name}_of_a_mixer" for name in BLOCK)
TICK_S = 2.0**-10


def found_in(names: Sequence[str]) -> Repetition | None:
    codes = np.unique(np.array(names), return_inverse=True)[1]
    return repetition(codes, np.full(len(names), TICK_S), np.array(["gemm" in name for name in names]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["embed", *BLOCK * 5, "layer_norm", "head"], (1, 8, 5)),
        (["embed", *(BLOCK + MIXER) * 3, "head"], (1, 16, 3)),  # two kinds of blocks in turns
        ([*BLOCK * 2, "head"], None),  # twice is no repetition
        (["gelu"] * 50, None),  # without a matrix product
        (["gemm", "gelu", "add"] * 2, None),
        ([*"abcdefgha", *BLOCK * 3], (9, 8, 3)),  # a pair of kernels has the same distance
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


# limits


SHORT = BLOCK[:4]
MOSTLY = [*zip(SHORT * 3, (2, 2, 1, 1, 2, 2, 1, 1, 2, 1, 1, 1), strict=True), ("embed", 3)]  # 17 of 20 ticks in blocks


def even(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, 1) for name in names]


def of_passes(*forwards: Sequence[tuple[str, int]], backward: Sequence[tuple[str, int]] = ()) -> Made:
    """Return a trace of passes with kernels of so many ticks; the passes of backward are equal."""
    made, now = Made(), 0
    for forward in forwards:
        for phase, kernels in (("forward", forward), ("backward", backward)):
            begin = now
            for name, ticks in kernels:
                made.kernel(name, now * TICK_S, (now + ticks) * TICK_S)
                now += ticks
            if kernels:
                made.range(phase, begin * TICK_S, now * TICK_S)
    return made


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        (MOSTLY, [], "with 85% of forward's time (confidence: high)"),
        (
            MOSTLY,
            MOSTLY,
            "with 85% of forward's time, and as many in backward, with 85% of its time (confidence: high)",
        ),
        (
            [*even(SHORT * 3), ("embed", 8)],
            [*even(SHORT * 3), ("embed_bwd", 8)],
            "with 60% of forward's time, and as many in backward, with 60% of its time (confidence: medium)",
        ),
    ],
)
def test_blocks_of_exactly_the_least_share_count(
    forward: Sequence[tuple[str, int]], backward: Sequence[tuple[str, int]], said: str
) -> None:
    made = of_passes(forward, backward=backward).profile()
    assert [*layers(made)] == ["block 0", "block 1", "block 2", "unattributed"]
    assert said in made.how_layered[0]


@pytest.mark.parametrize(("ticks", "has_blocks"), [(8, True), (9, False)])
def test_sequence_numbers_that_explain_the_least_share_of_backward_count(ticks: int, has_blocks: bool) -> None:
    """No kernels of backward repeat, and one of them ran in no operator."""
    backward = [*even([f"gemm_{n}_bwd" for n in range(12)]), ("embed_bwd", ticks)]
    made = of_passes(even(SHORT * 3), backward=backward)
    operators = [
        Op(name, (12 * half + n) * TICK_S, (12 * half + n + 0.5) * TICK_S, 1, n, half)
        for half, name in enumerate(("aten::mm", "MmBackward0"))
        for n in range(12)
    ]
    found = profile(replace(made.trace(), ops=Ops.of(operators)))
    assert ("; backward by autograd's sequence numbers, with 60% of its time" in found.how_layered[0]) is has_blocks
    assert (layers(found)["block 0"][1] is not None) is has_blocks


def test_passes_with_unequal_numbers_of_blocks_have_none() -> None:
    made = of_passes(even(BLOCK * 3), even(BLOCK * 4), backward=even(["loss_bwd"])).profile()
    assert [*layers(made)] == ["unattributed"]


def test_reason_without_blocks_names_the_pass_that_repeats_most() -> None:
    others = [[f"gemm_{n}" for n in range(count)] for count in (36, 24)]
    made = of_passes(*(even([*BLOCK * 3, *names]) for names in others), backward=even(["loss_bwd"])).profile()
    assert "at best 8 kernels repeat 3 times, with 50% of the time" in str(module_tables.why_nothing(made))


def test_blocks_are_searched_in_twenty_different_passes() -> None:
    different = [even([f"{name}_{n}" for name in SHORT] * 3) for n in range(21)]
    places = of_passes(*different, different[0], backward=even(["loss_bwd"])).profile().places
    assert [places[13 * n].layer for n in (0, 19, 20, 21)] == ["block 0", "block 0", UNATTRIBUTED, "block 0"]
