"""Single made histories of memory: where steps end, what is kept, which sizes a model has, and what a file names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import BEFORE, Allocation
from cs_systems.analysis.memory.annotations import by_annotation
from cs_systems.analysis.memory.categories import (
    BEFORE_RECORDING,
    PARAMETERS,
    Attributed,
    Attribution,
    Counter,
    _by_tensor,
    _notes,
    _wider_state,
    attribute,
)
from cs_systems.analysis.memory.graphs import _is_module, _is_released, kept_output
from cs_systems.analysis.memory.groups import _begin_of_pass, _earlier_gradients, _logits, earlier_pass, groups
from cs_systems.analysis.memory.leaks import _passes, _step_ends
from cs_systems.analysis.memory.out_of_memory import _free_pieces, between_blocks, last_failure, out_of_memory, returned
from cs_systems.analysis.memory.phases import Place
from cs_systems.config import Phase
from cs_systems.readers.snapshot import Tensor
from tests.analysis.memory.test_boundaries import OPTIMIZER, SETUP
from tests.analysis.memory.test_groups import one
from tests.analysis.memory.test_limits import BACKWARD, FORWARD, MIB, UNNAMED, A, B, Data, event, replayed, segment

MAIN = [{"filename": "train.py", "line": 30, "name": "main"}]
ZERO_GRAD = [{"filename": "lib/torch/optim/optimizer.py", "line": 9, "name": "zero_grad"}]


def forward(line: int) -> list[Data]:
    return [{"filename": "model.py", "line": line, "name": "forward"}]


def found_in(folder: Path, *stacks: list[Data]) -> Attribution:
    """Return a history with an allocation by each of these stacks."""
    made = [event("alloc", A + 4096 * n, 512, n, frames=frames) for n, frames in enumerate(stacks)]
    return attribute(replayed(folder, made))


# allocations


def test_allocation_alive_at_the_end_is_in_a_block_if_blocks_are_known(tmp_path: Path) -> None:
    made = [event("alloc", A, 512)]
    assert replayed(tmp_path, made).doubts == ()
    assert replayed(tmp_path, made, [segment(A, 4096, (A, 512))]).doubts == ()
    (doubt,) = replayed(tmp_path, made, [segment(B, 4096)]).doubts
    assert doubt == "counted as alive: 1 allocation neither freed nor in a block at the end"


def test_annotations_without_memory_at_the_peak_are_ordered_by_their_highest(tmp_path: Path) -> None:
    events = [
        event("alloc", A, 512, 10), event("free_completed", A, 512, 20), event("alloc", A, 1024, 30),
        event("free_completed", A, 1024, 40), event("alloc", B, 4096, 50),
    ]  # fmt: skip
    marks = [("START", "low", 10), ("END", "low", 20), ("START", "high", 30), ("END", "high", 40)]
    annotations = [{"stage": stage, "name": name, "device": 0, "time_us": time_us} for stage, name, time_us in marks]
    rows = by_annotation(attribute(replayed(tmp_path, events, annotations=annotations)), UNNAMED)
    assert [(row["annotation"], row["at_peak_bytes"]) for row in rows] == [("high", 0), ("low", 0)]


# categories


@pytest.mark.parametrize(
    ("before", "state"),
    [
        ({100: 2, 300: 1, 200: 4, 600: 2}, {100: (2, 0), 300: (1, 0), 200: (0, 4), 600: (0, 2)}),
        ({100: 2, 300: 1, 200: 4, 600: 1}, {100: (2, 0), 300: (1, 0), 200: (0, 2), 600: (0, 1)}),
        ({100: 4, 300: 1, 200: 4, 600: 2}, {100: (2, 0), 300: (1, 0), 200: (0, 4), 600: (0, 2)}),
        ({100: 4, 300: 2, 200: 4, 600: 2}, None),  # there is a set as wide as the weights
        ({100: 2, 300: 1, 200: 2}, None),  # not a whole set
    ],
)
def test_state_twice_as_wide_as_the_weights_has_whole_sets(before: dict[int, int], state: Any) -> None:
    assert _wider_state(Counter({100: 2, 300: 1}), Counter(before)) == state


def test_weights_of_twice_a_size_are_no_state_of_others() -> None:
    assert _wider_state(Counter({100: 1, 200: 1}), Counter({100: 1, 200: 1, 400: 1})) is None


def test_tensor_of_the_file_is_in_the_block_around_its_address(tmp_path: Path) -> None:
    replay = replayed(tmp_path, [event("alloc", A, 512, frames=FORWARD), event("alloc", A + 1024, 512, frames=FORWARD)])
    tensors = [Tensor("gradient", name, A + at, 8, (2,), "float32") for name, at in
               (("before", -1), ("behind", 512), ("first", 511), ("again", 0), ("second", 1024))]  # fmt: skip
    made = _by_tensor(replay, tensors, attribute(replay).allocations)
    assert [each.tensor and each.tensor.name for each in made] == ["first", "second"]


def test_backward_without_stacks_is_noted_whatever_was_there_before() -> None:
    before = Attributed(Allocation(BEFORE, 9, A, 512, 512, 1), BEFORE_RECORDING, Phase.BACKWARD, None)
    backward = Attributed(Allocation(0, 9, B, 512, 512, 0), "gradients", Phase.BACKWARD, None)
    (note,) = _notes([before, backward], [])
    assert note.startswith("backward: allocations with no Python frame")
    assert not [*_notes([replace_stack(backward, 1)], [])]


def replace_stack(of: Attributed, stack: int) -> Attributed:
    return of._replace(allocation=of.allocation._replace(stack=stack))


def test_three_blocks_of_cublas_size_that_forward_makes_are_workspaces(tmp_path: Path) -> None:
    events = [event("alloc", A + (n << 30), 8_519_680, n, frames=FORWARD) for n in range(3)]
    for n in range(2):
        events += [event("alloc", B + 4096 * n, 512, 3 + n, frames=stack) for stack in (FORWARD, BACKWARD)]
    found = attribute(replayed(tmp_path, events))
    assert [each.category for each in found.allocations[:3]] == ["workspaces"] * 3


def test_block_of_setup_that_the_first_event_of_forward_frees_is_a_parameter(tmp_path: Path) -> None:
    events = [event("alloc", A, 4096, 1, frames=SETUP), event("free_requested", A, 4096, 2, frames=FORWARD)]
    assert [each.category for each in attribute(replayed(tmp_path, events)).allocations] == [PARAMETERS]


# graphs and groups


@pytest.mark.parametrize(
    ("file", "is_module"),
    [("lib/torch/nn/modules/module.py", True), ("mine/module.py", False), ("lib/torch/nn/functional.py", False)],
)
def test_modules_of_torch_are_known_by_their_file(file: str, is_module: bool) -> None:
    assert _is_module(file) is is_module


@pytest.mark.parametrize(("frames", "is_released"), [(MAIN, True), ([], False), (BACKWARD, False)])
def test_program_releases_what_its_own_lines_free(tmp_path: Path, frames: list[Data], is_released: bool) -> None:
    events = [event("alloc", A, 512, 1, frames=FORWARD), event("free_requested", A, 512, 2, frames=frames)]
    found = attribute(replayed(tmp_path, events))
    assert _is_released(found, found.allocations[0]) is is_released


@pytest.mark.parametrize(
    ("frames", "kept"), [((forward(1), forward(2)), 4096), ((forward(2), MAIN), 4096), ((MAIN, forward(2)), 512)]
)
def test_largest_output_of_forward_that_the_next_pass_finds_is_kept(
    tmp_path: Path, frames: tuple[list[Data], list[Data]], kept: int
) -> None:
    large, small = frames
    events = []
    for n in range(2):
        events += [event("alloc", A + 8192 * n, 4096, frames=large), event("alloc", B + 8192 * n, 512, frames=small)]
    events += [event("free_requested", at + 8192 * n, 0, frames=MAIN) for n in range(2) for at in (A, B)]
    output = kept_output(attribute(replayed(tmp_path, events)))
    assert output is not None
    assert output.bytes == kept


def test_logits_in_16_bits_are_found_before_a_loss_of_one_tensor() -> None:
    tensors = [one(4, "forward", start=1), one(8, "loss", start=4)]
    assert [each.allocation.bytes for each in _logits(tensors)] == [4, 8]


def test_parameters_of_a_group_are_those_alone(tmp_path: Path) -> None:
    found = found_in(tmp_path, SETUP, FORWARD, BACKWARD, OPTIMIZER)
    assert [each.category for each in groups(found, ())[PARAMETERS]] == [PARAMETERS]


def test_twins_of_a_pass_are_as_many_as_its_tensors() -> None:
    def made(size: int, start: int, phase: str | None, category: str) -> Attributed:
        return Attributed(Allocation(start, 9, A + size, size, size, 0), category, phase, None)

    sizes = (1, 2, 3, 4, 5)
    passing = [made(size, 0, Phase.FORWARD, "activations") for size in sizes]
    before = [made(size, BEFORE, None, BEFORE_RECORDING) for size in (*sizes, *sizes)]
    older = [made(size, BEFORE, Phase.FORWARD, "activations") for size in (7, 8)]  # of a stack that is known
    found = Attribution(None, (*older, *before, *passing), (Place(None, None),) * 9, (), ())  # type: ignore[arg-type]
    assert sorted(each.allocation.bytes for each in earlier_pass(found)) == [*sizes]


@pytest.mark.parametrize(
    ("phases", "peak", "begins"),
    [
        (("backward", "forward", "forward", "loss"), 3, 1),
        (("forward", "forward", "backward"), 2, 0),
        (("backward", "forward", "backward", "forward"), 3, 3),
        (("optimizer", "backward"), 1, None),
        (("forward",), 0, 0),
        (("backward", "forward", "optimizer"), 2, None),
    ],
)
def test_pass_at_the_peak_begins_with_its_first_forward(
    tmp_path: Path, phases: tuple[str, ...], peak: int, begins: int | None
) -> None:
    found = found_in(tmp_path, FORWARD)
    places = tuple(Place(phase, None) for phase in phases)
    found = replace(found, places=places, replay=replace(found.replay, peak_event=peak))
    assert _begin_of_pass(found) == begins


def test_gradients_without_a_pass_after_them_are_not_of_an_earlier_one(tmp_path: Path) -> None:
    found = found_in(tmp_path, BACKWARD, BACKWARD)
    assert not [*_earlier_gradients(found, [one(8, "backward", category="gradients")])]


# leaks


def test_passes_begin_with_the_rarest_stack_that_recurs(tmp_path: Path) -> None:
    each = (forward(2), forward(3), forward(3))
    assert _passes(found_in(tmp_path, forward(1), *each, *each)) == [3, 6]
    assert _passes(found_in(tmp_path, forward(1), forward(2), forward(3))) == []


def test_zero_grad_in_a_step_does_not_end_it(tmp_path: Path) -> None:
    found = found_in(tmp_path, FORWARD, OPTIMIZER, FORWARD, ZERO_GRAD, FORWARD, OPTIMIZER)
    assert next(_step_ends(found)) == [1, 5]


# failed requests


def test_time_of_a_failed_request_is_since_the_first_event(tmp_path: Path) -> None:
    events = [event("alloc", A, 512, 1_000_000), event("oom", 0, MIB, 3_500_000, device_free=0)]
    (row,) = out_of_memory(attribute(replayed(tmp_path, events)), UNNAMED)
    assert row["time_s"] == 2.5


def test_temporaries_of_a_forward_that_fails_are_activations(tmp_path: Path) -> None:
    found = attribute(replayed(tmp_path, [event("oom", 0, MIB, device_free=0)]))
    held = [
        Attributed(Allocation(BEFORE, 9, A, size, size, 0), category, phase, None)
        for size, category, phase in (
            (1, "temporaries", Phase.FORWARD), (2, "temporaries", Phase.LOSS), (4, "temporaries", Phase.OPTIMIZER),
            (8, "parameters", Phase.FORWARD), (16, "unknown", None),
        )
    ]  # fmt: skip
    failure = last_failure(replace(found, allocations=tuple(held)))
    assert failure is not None
    assert failure.held == {
        ("activations", Phase.FORWARD): 1, ("activations", Phase.LOSS): 2, ("temporaries", Phase.OPTIMIZER): 4,
        ("parameters", Phase.FORWARD): 8, ("unknown", ""): 16,
    }  # fmt: skip


def test_segments_that_go_back_before_others_come_are_returned(tmp_path: Path) -> None:
    events = [
        event("segment_free", A, 2 * MIB), event("segment_free", A << 1, 4 * MIB), event("segment_alloc", B << 2, MIB),
        event("segment_free", A << 2, 8 * MIB),
    ]  # fmt: skip
    found = returned(attribute(replayed(tmp_path, events)))
    assert found is not None
    assert (found.segments, found.bytes, found.by_program) == (2, 6 * MIB, False)
    assert returned(attribute(replayed(tmp_path, events[:2]))) is None


def test_memory_between_blocks_counts_segments_that_go_back_later(tmp_path: Path) -> None:
    """The last two events give back two of three segments of 20 MiB."""
    places = (A, A << 1, A << 2)
    events = [event("alloc", at, 2 * MIB * n) for n, at in enumerate(places, 1)]
    events += [event("free_completed", at, 0) for at in places[1:]]
    events += [event("segment_free", at, 20 * MIB) for at in places[1:]]
    made = [segment(A, 20 * MIB, (A, 2 * MIB))]
    found = attribute(replayed(tmp_path, events, made))
    assert between_blocks(found, 2) == (18 + 16 + 14) * MIB
    assert between_blocks(found, len(events) - 1) == 18 * MIB
    assert between_blocks(attribute(replayed(tmp_path, events, made, expandable_segments=True)), 2) == 0


def test_segments_that_only_others_use_do_not_count_as_between_blocks(tmp_path: Path) -> None:
    """Two segments of 20 MiB next to each other."""
    following = A + 20 * MIB
    events = [event("alloc", A, 2 * MIB), event("alloc", following, 4 * MIB)]
    made = [segment(A, 20 * MIB, (A, 2 * MIB)), segment(following, 20 * MIB, (following, 4 * MIB))]
    found = attribute(replayed(tmp_path, events, made))
    first, second = found.allocations
    assert between_blocks(found, 1) == (18 + 16) * MIB
    assert between_blocks(found, 1, [second]) == 18 * MIB
    assert between_blocks(found, 1, [first]) == 16 * MIB


def test_block_is_in_use_from_the_request_of_its_free_on(tmp_path: Path) -> None:
    at = A + 2 * MIB
    events = [
        event("alloc", A, 2 * MIB), event("alloc", at, 4 * MIB), event("free_requested", at, 0),
        event("free_completed", at, 0),
    ]  # fmt: skip
    found = attribute(replayed(tmp_path, events, [segment(A, 20 * MIB, (A, 2 * MIB))]))
    assert _free_pieces(found, [(A, A + 20 * MIB)], 2) == [(A + 6 * MIB, A + 20 * MIB)]
    assert _free_pieces(found, [(A, A + 20 * MIB)], 3) == [(A + 2 * MIB, A + 20 * MIB)]


def test_block_whose_free_is_pending_at_the_end_has_its_whole_size(tmp_path: Path) -> None:
    made = segment(A, 20 * MIB, (A, 4 * MIB))
    made["blocks"][0]["state"] = "active_pending_free"
    found = attribute(replayed(tmp_path, [event("free_requested", A, 1000)], [made]))
    assert _free_pieces(found, [(A, A + 20 * MIB)], 0) == [(A + 4 * MIB, A + 20 * MIB)]
