"""Limits of leaks, unused graphs, kept outputs, copies of weights and of models, in histories of an allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import Allocation
from cs_systems.analysis.memory.categories import Attributed, Attribution
from cs_systems.analysis.memory.counterfactual import peak_without
from cs_systems.analysis.memory.graphs import kept_output, unused_graphs
from cs_systems.analysis.memory.groups import (
    EARLIER_GRADIENTS,
    GRADIENTS,
    IN_BLOCKS,
    _ends_with_graph,
    _has_backward,
    _logits,
    _of_foreach,
    earlier_pass,
    groups,
    weight_copies,
)
from cs_systems.analysis.memory.leaks import leak
from cs_systems.analysis.memory.model_copies import model_copies
from cs_systems.analysis.memory.phases import Place
from tests.analysis.memory.caching_allocator import MIB, CachingAllocator
from tests.analysis.memory.test_categories import BACKWARD, FORWARD, MAIN, OPTIMIZER, SETUP, found_in, frame

Do = Callable[[CachingAllocator], None]


def history(folder: Path, do: Do, before: Sequence[int] = ()) -> Attribution:
    """Return what is found in a history that begins with blocks of these sizes."""
    allocator = CachingAllocator()
    for size in before:
        allocator.alloc(size)
    allocator.start()
    do(allocator)
    return found_in(allocator.snapshot(), folder)


def line(number: int, function: str = "forward") -> tuple[Any, ...]:
    return (frame(function, line=number), *MAIN)


# leaks


def training(steps: int, kept: Callable[[int, CachingAllocator], None], update: bool = False) -> Do:
    """Return steps of forward and backward that keep something."""

    def do(allocator: CachingAllocator) -> None:
        for step in range(steps):
            activation = allocator.alloc(8 * MIB, line(1))
            kept(step, allocator)
            gradient = allocator.alloc(2 * MIB, BACKWARD)
            allocator.free(activation, BACKWARD)
            allocator.free(gradient, OPTIMIZER if update else MAIN)

    return do


@pytest.mark.parametrize(("lines", "is_graph"), [(2, False), (3, True)])
@pytest.mark.parametrize("update", [False, True])
def test_leak_has_the_median_of_its_steps_and_the_line_that_leaves_most(
    tmp_path: Path, lines: int, is_graph: bool, update: bool
) -> None:
    def kept(step: int, allocator: CachingAllocator) -> None:
        for number in range(lines):
            allocator.alloc((1 + number + step % 2) * MIB, line(20 + number))

    found = leak(history(tmp_path, training(7, kept, update)))
    assert found is not None
    of_odd, of_even = (sum(1 + number + odd for number in range(lines)) for odd in (1, 0))
    assert (found.step_bytes, found.steps, found.sites) == (of_odd * MIB, 7, lines)
    assert (found.is_graph, found.site) == (is_graph, "train.py:99 <module>" if is_graph else "train.py:21 forward")
    assert len(found.allocations) == 6 * lines
    assert found.peak_without_bytes == (8 + of_even + 2) * MIB


def test_line_that_leaves_nothing_in_one_step_between_is_no_leak(tmp_path: Path) -> None:
    def but(*without: int) -> Any:
        def kept(step: int, allocator: CachingAllocator) -> None:
            for _ in range(2 * (step not in without)):
                allocator.alloc(MIB, line(20))

        return leak(history(tmp_path, training(6, kept)))

    assert but(0, 5) is not None
    assert but(1) is None
    assert but(4) is None


def test_leak_without_backward_has_a_step_per_forward(tmp_path: Path) -> None:
    def do(allocator: CachingAllocator) -> None:
        for _ in range(6):
            activation = allocator.alloc(8 * MIB, line(1))
            allocator.alloc(MIB, line(20))
            allocator.free(activation, line(2))
            allocator.free(allocator.alloc(MIB, MAIN), MAIN)

    found = leak(history(tmp_path, do))
    assert found is not None
    assert (found.step_bytes, found.steps, found.site) == (MIB, 6, "train.py:20 forward")


def test_leak_is_counted_per_update_of_several_passes(tmp_path: Path) -> None:
    def do(allocator: CachingAllocator) -> None:
        for _ in range(6):
            allocator.alloc(MIB, line(20))
            for _ in range(2):
                activation = allocator.alloc(8 * MIB, line(1))
                gradient = allocator.alloc(2 * MIB, BACKWARD)
                allocator.free(activation, BACKWARD)
                allocator.free(gradient, BACKWARD)
            allocator.free(allocator.alloc(MIB, OPTIMIZER), OPTIMIZER)

    found = leak(history(tmp_path, do))
    assert found is not None
    assert (found.step_bytes, found.steps, found.site) == (MIB, 6, "train.py:20 forward")


# graphs and outputs


def released(count: int, lines: int, passes: int = 1, at_once: bool = True) -> Do:
    def do(allocator: CachingAllocator) -> None:
        for _ in range(passes):
            held = [allocator.alloc(4 * MIB, line(number % lines)) for number in range(count)]
            for number, address in enumerate(held):
                allocator.free(address, MAIN)
                if not at_once and number == 1:
                    allocator.free(allocator.alloc(512, MAIN), MAIN)

    return do


@pytest.mark.parametrize(
    ("count", "lines", "at_once", "peak_mib"),
    [(5, 3, True, 20), (4, 3, True, None), (5, 2, True, None), (6, 3, False, None), (7, 3, False, 20)],
)
def test_graph_is_five_allocations_of_three_lines_freed_at_once(
    tmp_path: Path, count: int, lines: int, at_once: bool, peak_mib: int | None
) -> None:
    found = unused_graphs(history(tmp_path, released(count, lines, at_once=at_once)))
    assert (found and found.peak_bytes) == (peak_mib and peak_mib * MIB)
    if found:
        assert (found.at_peak, found.site) == (1, "train.py:99 <module>")
        assert found.peak_without_bytes == (0 if at_once else 8 * MIB)


def outputs(lives: int, frames: tuple[Any, ...] = MAIN, layers: int = 1) -> Do:
    """Return passes with an output that lives so many allocations of the same line longer than its own."""

    def do(allocator: CachingAllocator) -> None:
        held: list[int] = []
        for _ in range(6):
            for _ in range(layers):
                held.append(allocator.alloc(4 * MIB, line(30)))
            if len(held) > lives:
                allocator.free(held.pop(0), frames)

    return do


@pytest.mark.parametrize(
    ("lives", "frames", "is_kept"),
    [(0, MAIN, False), (1, MAIN, True), (2, MAIN, False), (1, BACKWARD, False)],
    ids=["freed before", "freed after the next", "three at once", "freed by backward"],
)
def test_output_is_kept_if_it_is_freed_after_the_next_one_is_made(
    tmp_path: Path, lives: int, frames: tuple[Any, ...], is_kept: bool
) -> None:
    found = kept_output(history(tmp_path, outputs(lives, frames)))
    assert (found is not None) is is_kept
    if found:
        assert (found.bytes, found.site, found.peak_without_bytes) == (4 * MIB, "train.py:30 forward", 4 * MIB)


# copies of weights


def autocast(*made: int, last: Any = FORWARD) -> Do:
    def do(allocator: CachingAllocator) -> None:
        held = [allocator.alloc(size, last) for size in made]
        for address in held:
            allocator.free(address, MAIN)

    return do


A, B = 8 * MIB, 16 * MIB
LARGE_BYTES = 65_536  # of a weight that is no vector


@pytest.mark.parametrize(
    ("weights", "made", "copies"),
    [
        ([A, B], [A // 2, B // 2], 2),
        ([A, B], [A // 2], 0),  # one size
        ([A, B], [A // 2, A // 2, B // 2], 0),  # more copies than weights
        ([A, A, B, B], [A // 2, B // 2], 2),  # half of the weights
        ([A, A, B, B, B], [A // 2, B // 2], 0),
        ([LARGE_BYTES, B], [LARGE_BYTES // 2, B // 2], 2),
        ([LARGE_BYTES - 512, B], [LARGE_BYTES // 2 - 256, B // 2], 0),
    ],
)
def test_copies_of_half_of_the_large_weights_count_as_autocast_copies(
    tmp_path: Path, weights: list[int], made: list[int], copies: int
) -> None:
    assert len(weight_copies(history(tmp_path, autocast(*made), weights))) == copies


def modelled(sizes: Sequence[int], sets: Sequence[tuple[str, float]], *, before: bool = False) -> Do:
    """Return a step with gradients of these sizes, and sets of tensors made by these functions, of scaled sizes."""

    def do(allocator: CachingAllocator) -> None:
        if not before:
            for size in sizes:
                allocator.alloc(size, SETUP)
        for number, (function, times) in enumerate(sets):
            for size in sizes:
                allocator.alloc(int(size * times), (frame(function, "copy.py"), frame(f"make_{number}"), *MAIN))
        for _ in range(2):
            kept = [allocator.alloc(MIB, FORWARD) for _ in range(3)]
            gradients = [allocator.alloc(size, BACKWARD) for size in sizes]
            for address in kept:
                allocator.free(address, BACKWARD)
            for address in gradients:
                allocator.free(address, (frame("zero_grad", "site-packages/torch/optim/optimizer.py"), *MAIN))

    return do


EIGHT = [A, A, A, A, B, B, B, B]


@pytest.mark.parametrize(
    ("sizes", "sets", "lines"),
    [
        (EIGHT, [("deepcopy", 1.0)], ["make_0"]),
        (EIGHT, [("deepcopy", 0.5)], ["make_0"]),
        (EIGHT, [("deepcopy", 2.0)], ["make_0"]),
        (EIGHT, [("deepcopy", 4.0)], None),
        (EIGHT, [("from_pretrained", 1.0), ("zeros_like", 1.0), ("to", 1.0)], ["make_0", "make_2"]),
        (EIGHT[1:], [("deepcopy", 1.0)], None),  # seven tensors
        ([A] * 8, [("deepcopy", 1.0)], None),  # of one size
        ([LARGE_BYTES] * 4 + [B] * 4, [("deepcopy", 1.0)], ["make_0"]),
        ([LARGE_BYTES - 512] * 4 + [B] * 4, [("deepcopy", 1.0)], None),
    ],
)
def test_copies_of_a_model_have_the_sizes_of_eight_gradients(
    tmp_path: Path, sizes: list[int], sets: list[tuple[str, float]], lines: list[str] | None
) -> None:
    found = model_copies(history(tmp_path, modelled(sizes, sets)))
    assert (found and [*found.lines]) == (lines and [f"train.py:1 {name}" for name in lines])
    if found and lines:
        assert (found.count, len(found.allocations)) == (len(lines), len(lines) * len(sizes))


def test_first_set_of_weights_is_a_copy_if_the_weights_are_older_than_the_recording(tmp_path: Path) -> None:
    do = modelled(EIGHT, [("deepcopy", 1.0)], before=True)
    assert model_copies(history(tmp_path, do)) is None
    found = model_copies(history(tmp_path, do, EIGHT))
    assert found is not None
    assert found.count == 1


# gradients of an earlier step


@pytest.mark.parametrize(("cleared", "earlier"), [("before backward", 2), ("after the update", 0)])
def test_gradients_of_the_last_step_are_alive_in_the_next_forward(tmp_path: Path, cleared: str, earlier: int) -> None:
    zero = (frame("zero_grad", "site-packages/torch/optim/optimizer.py"), *MAIN)

    def do(allocator: CachingAllocator) -> None:
        gradients: list[int] = []
        for step in range(3):
            kept = [allocator.alloc(32 * MIB, FORWARD) for _ in range(3 + step)]
            if cleared == "before backward":
                for address in gradients:
                    allocator.free(address, zero)
            gradients = [allocator.alloc(4 * MIB, BACKWARD) for _ in range(2)]
            for address in kept:
                allocator.free(address, BACKWARD)
            allocator.free(allocator.alloc(512, OPTIMIZER), OPTIMIZER)
            if cleared == "after the update":
                for address in gradients:
                    allocator.free(address, zero)

    found = history(tmp_path, do)
    of = groups(found, ())
    alive = [one for one in of[EARLIER_GRADIENTS] if one.allocation.bytes == 4 * MIB]
    assert len(alive) == earlier
    assert len(of[GRADIENTS]) == 6


def test_peak_without_some_allocations_is_found_over_all_events(tmp_path: Path) -> None:
    """2 MiB are there before the events; forward has 4 more MiB, and backward 3."""

    def do(allocator: CachingAllocator) -> None:
        first = allocator.alloc(4 * MIB, FORWARD)
        allocator.free(first, FORWARD)
        allocator.free(allocator.alloc(3 * MIB, BACKWARD), BACKWARD)

    found = history(tmp_path, do, [2 * MIB])
    old, forward, backward = found.allocations
    assert peak_without(found, []) == 6 * MIB
    assert peak_without(found, [forward]) == 5 * MIB
    assert peak_without(found, [old]) == 4 * MIB
    assert peak_without(found, [forward, backward]) == 2 * MIB
    assert peak_without(found, [old], ["forward"]) == 5 * MIB
    assert peak_without(found, [old, forward, backward], ["forward", "backward"]) == 2 * MIB


# passes and logits


def test_activations_without_a_layer_are_all_in_blocks(tmp_path: Path) -> None:
    def do(allocator: CachingAllocator) -> None:
        held = [allocator.alloc(size * MIB, line(size)) for size in (4, 8)]
        allocator.alloc(MIB, BACKWARD)
        for address in held:
            allocator.free(address, BACKWARD)

    assert [one.allocation.bytes for one in groups(history(tmp_path, do), ())[IN_BLOCKS]] == [4 * MIB, 8 * MIB]


@pytest.mark.parametrize(("sizes", "twins"), [(5, 5), (4, 0)])
def test_earlier_pass_has_the_sizes_of_five_tensors(tmp_path: Path, sizes: int, twins: int) -> None:
    passed = [size * MIB for size in range(2, 2 + sizes)]

    def do(allocator: CachingAllocator) -> None:
        for size in passed:
            allocator.alloc(size, FORWARD)

    found = history(tmp_path, do, [*passed, 20 * MIB])
    assert sorted(one.allocation.bytes for one in earlier_pass(found)) == passed[:twins]
    assert not earlier_pass(history(tmp_path, do, passed[1:])), "one is missing"


def one(size: int, phase: str, layer: str | None = None, category: str = "activations", start: int = 0) -> Attributed:
    return Attributed(Allocation(start, 9, start, size, size, 0), category, phase, layer)


@pytest.mark.parametrize(
    ("phases", "blocks", "ends"),
    [
        (("forward",), 2, True), (("forward", "loss"), 2, True), (("forward",), 1, False), (("backward",), 2, False),
        (("forward", None), 2, True), ((None,), 2, False),
    ],
)  # fmt: skip
def test_recording_ends_with_a_graph_of_two_blocks(
    tmp_path: Path, phases: Sequence[str | None], blocks: int, ends: bool
) -> None:
    found = history(tmp_path, training(1, lambda *_: None))
    places = tuple(Place(phase, None) for phase in phases)
    own = [one(8, "forward", f"block {number}") for number in range(blocks)]
    others = [one(8, "forward", "head"), one(8, "forward", "block 7", "temporaries")]
    assert _ends_with_graph(replace(found, places=places), [*own, *others]) is ends


@pytest.mark.parametrize(
    ("others", "logits"),
    [
        ([], []),
        ([one(4, "forward", start=1)], [4]),  # in 16 bits
        ([one(4, "forward", start=1), one(2, "forward", start=2)], [4]),  # the last large one counts
        ([one(4, "forward", start=1), one(3, "forward", start=2)], []),
        ([one(4, "forward", "lm_head", start=1)], [4]),
        ([one(4, "forward", category="temporaries", start=1)], []),
        ([one(8, "forward", start=1)], [8]),
        ([one(8, "forward", "block 3", start=1)], []),
        ([one(8, "backward", category="temporaries", start=6)], [8]),
        ([one(8, "backward", category="gradients", start=6)], []),
        ([one(8, "optimizer", category="temporaries", start=6)], []),
        ([one(6, "forward", start=1)], []),
    ],
)
def test_logits_are_as_large_as_the_loss_or_half(others: list[Attributed], logits: list[int]) -> None:
    loss = [one(8, "loss", start=4), one(1, "loss", start=5)]
    assert sorted(each.allocation.bytes for each in _logits([*others, *loss])) == sorted([*logits, 1, 8])


@pytest.mark.parametrize(
    ("phases", "may_come"),
    [
        (("forward",), True), (("forward", "backward"), True), (("forward", "forward", "backward"), True),
        (("forward", "optimizer"), False), (("forward", "optimizer", "forward", "backward"), False),
        (("loss", "optimizer", "backward"), True), (("optimizer", "forward"), False),
    ],
)  # fmt: skip
def test_backward_may_come_unless_an_update_and_a_forward_come_first(
    tmp_path: Path, phases: Sequence[str], may_come: bool
) -> None:
    found = history(tmp_path, lambda allocator: allocator.free(allocator.alloc(MIB, FORWARD), FORWARD))
    places = tuple(Place(phase, None) for phase in phases)
    assert _has_backward(replace(found, places=places, replay=replace(found.replay, peak_event=-1))) is may_come


def test_temporaries_of_a_foreach_update_are_found(tmp_path: Path) -> None:
    foreach = (frame("_multi_tensor_adam", "site-packages/torch/optim/adam.py"), *OPTIMIZER)

    def do(allocator: CachingAllocator) -> None:
        kept = allocator.alloc(4 * MIB, foreach)
        for size, stack in ((2 * MIB, foreach), (8 * MIB, OPTIMIZER), (16 * MIB, foreach)):
            allocator.free(allocator.alloc(size, stack), stack)
        allocator.free(allocator.alloc(MIB, FORWARD), FORWARD)
        allocator.free(kept, MAIN)

    found = history(tmp_path, do)
    assert [each.allocation.bytes for each in _of_foreach(found, found.allocations)] == [2 * MIB, 16 * MIB]
