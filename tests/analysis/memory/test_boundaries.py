"""Memory at boundaries: what ends with the recording, has no stack or no event, touches, or is one more than shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.analysis.memory import out_of_memory as failed
from cs_systems.analysis.memory.allocations import Allocation
from cs_systems.analysis.memory.categories import (
    BEFORE_RECORDING,
    GRADIENTS,
    Attributed,
    _before_by_size,
    _gradient_sizes,
    attribute,
)
from cs_systems.analysis.memory.tables import at_end, composition, devices
from cs_systems.analysis.memory.timeline import MOST_FRAMES, view
from tests.analysis.memory.test_limits import (
    FORWARD,
    MIB,
    UNNAMED,
    A,
    B,
    event,
    replayed,
    segment,
)

SETUP = [{"filename": "model.py", "line": 1, "name": "__init__"}]
OPTIMIZER = [{"filename": "lib/torch/optim/adam.py", "line": 1, "name": "step"}]
LOSS = [{"filename": "model.py", "line": 2, "name": "loss_fn"}]


@pytest.mark.parametrize(("last", "left"), [(("free_requested", A), 1), (("alloc", B + 4096), 3)])
def test_block_that_the_last_event_frees_is_not_there_at_the_end(
    tmp_path: Path, last: tuple[str, int], left: int
) -> None:
    events = [event("alloc", A, 512, 1), event("alloc", B, 512, 2), event(*last, 512, 3)]
    rows = at_end(attribute(replayed(tmp_path, events)), UNNAMED)
    assert sum(row["allocations"] for row in rows) == left


@pytest.mark.parametrize(
    ("stack", "freed_in", "category"),
    [
        (SETUP, SETUP, "temporaries"), (SETUP, FORWARD, "parameters"), (SETUP, None, "parameters"),
        (OPTIMIZER, OPTIMIZER, "temporaries"), (OPTIMIZER, FORWARD, "optimizer state"),
        (OPTIMIZER, None, "optimizer state"),
    ],
)  # fmt: skip
def test_block_of_setup_or_optimizer_that_is_freed_there_is_temporary(
    tmp_path: Path, stack: list[dict[str, object]], freed_in: list[dict[str, object]] | None, category: str
) -> None:
    there, after = (event("alloc", B + n * 512, 512, 2 + 2 * n, frames=of) for n, of in enumerate((stack, FORWARD)))
    free = event("free_requested", A, 4096, 3, frames=freed_in or [])
    events = [event("alloc", A, 4096, 1, frames=stack), there, after]
    events.insert(2 if freed_in == stack else 3, free)
    found = attribute(replayed(tmp_path, events if freed_in else [events[0], there, after]))
    assert found.allocations[0].category == category


def made(start: int, end: int, category: str, size: int = 512) -> Attributed:
    return Attributed(Allocation(start, end, A + max(start, 0) * 4096, size, size, 0), category, None, None)


def test_most_gradients_at_once_count_those_that_follow_others() -> None:
    gradients = [made(0, 1, GRADIENTS), made(2, 9, GRADIENTS), made(1, 9, GRADIENTS), made(3, 4, GRADIENTS, 1024)]
    assert _gradient_sizes([*gradients, made(5, 9, "temporaries")]) == {512: 2, 1024: 1}


@pytest.mark.parametrize(
    ("there", "parameters", "state"), [(1, 0, 0), (2, 2, 0), (3, 2, 0), (4, 2, 2), (5, 2, 2), (6, 2, 4)]
)
def test_blocks_before_recording_are_parameters_and_whole_multiples_of_them(
    there: int, parameters: int, state: int
) -> None:
    gradients = [made(0, 9, GRADIENTS), made(1, 9, GRADIENTS)]
    found, notes = _before_by_size([*gradients, *(made(-1, 9, BEFORE_RECORDING) for _ in range(there))])
    names = [one.category for one in found]
    assert (names.count("parameters"), names.count("optimizer state")) == (parameters, state)
    assert names.count(BEFORE_RECORDING) == there - parameters - state
    assert bool(notes) is (parameters > 0)


@pytest.mark.parametrize(("requests", "unexamined"), [(10, 0), (11, 1), (12, 2)])
def test_free_pieces_of_the_last_ten_failed_requests_are_found(tmp_path: Path, requests: int, unexamined: int) -> None:
    events = [event("alloc", A, MIB, 0)]
    events += [event("oom", 0, 30 * MIB, 1 + n, device_free=MIB) for n in range(requests)]
    found = attribute(replayed(tmp_path, events, [segment(A, 20 * MIB, (A, MIB))]))
    rows = failed.out_of_memory(found, UNNAMED)
    assert [row["cached_bytes"] for row in rows] == [None] * unexamined + [19 * MIB] * 10
    assert [row["cause"].startswith("unknown") for row in rows] == [True] * unexamined + [False] * 10


def test_used_pieces_that_touch_or_overlap_are_one() -> None:
    pieces = [(0, 4), (10, 12), (4, 6), (12, 20), (13, 14), (20, 21), (22, 23)]
    assert failed._joined(pieces) == [(0, 6), (10, 21), (22, 23)]
    assert failed._joined([]) == []


@pytest.mark.parametrize(
    ("is_freed", "is_completed", "largest"),
    [(False, False, 14), (True, False, 14), (True, True, 18)],
)
def test_block_whose_free_is_pending_is_in_use(
    tmp_path: Path, is_freed: bool, is_completed: bool, largest: int
) -> None:
    """A block of 4 MiB after one of 2 MiB, of which the rest of the segment of 20 MiB is free."""
    events = [event("alloc", A, 2 * MIB, 0), event("alloc", A + 2 * MIB, 4 * MIB, 1)]
    events += [event("free_requested", A + 2 * MIB, 4 * MIB, 2)] * is_freed
    events += [event("free_completed", A + 2 * MIB, 4 * MIB, 3)] * is_completed
    events += [event("oom", 0, 30 * MIB, 4, device_free=0)]
    used = [(A, 2 * MIB)] + [(A + 2 * MIB, 4 * MIB)] * (not is_freed)
    found = attribute(replayed(tmp_path, events, [segment(A, 20 * MIB, *used)]))
    (row,) = failed.out_of_memory(found, UNNAMED)
    assert (row["largest_free_bytes"], row["free_pieces"]) == (largest * MIB, 1)


@pytest.mark.parametrize(("of_free", "phase"), [([], "forward"), (LOSS, "backward")])
def test_free_without_stack_is_in_the_place_before_if_no_free_has_one(
    tmp_path: Path, of_free: list[dict[str, object]], phase: str
) -> None:
    events = [
        event("alloc", A, 512, 1, frames=FORWARD), event("alloc", B, 512, 2, frames=FORWARD),
        event("free_requested", A, 512, 3, frames=[]), event("free_requested", B, 512, 4, frames=of_free),
    ]  # fmt: skip
    assert attribute(replayed(tmp_path, events)).places[2].phase == phase


@pytest.mark.parametrize(("other", "phase"), [([], None), (FORWARD, "backward")])
def test_allocation_without_stack_is_of_backward_if_others_have_one(
    tmp_path: Path, other: list[dict[str, object]], phase: str | None
) -> None:
    events = [event("alloc", A, 512, 1, frames=[]), event("alloc", B, 512, 2, frames=other)]
    assert attribute(replayed(tmp_path, events)).places[0].phase == phase


def test_phases_of_a_category_come_the_largest_first(tmp_path: Path) -> None:
    for sizes in ((512, 2048), (2048, 512)):
        events = [event("alloc", A + n * 4096, size, n, frames=(FORWARD, LOSS)[n]) for n, size in enumerate(sizes)]
        rows = composition(attribute(replayed(tmp_path, events)), UNNAMED)
        assert [row["bytes"] for row in rows if row["category"] == "activations"] == [2048, 512]


@pytest.mark.parametrize(("more", "peak_time_s"), [(0, None), (4096, pytest.approx(20e-6))])
def test_peak_before_the_first_event_has_no_time(tmp_path: Path, more: int, peak_time_s: float | None) -> None:
    """A block that was there is freed, and one is allocated that is smaller or larger."""
    events = [event("free_requested", A, 2048, 10), event("free_completed", A, 2048, 20),
              event("alloc", B, 512 + more, 30)]  # fmt: skip
    (row, _) = devices([attribute(replayed(tmp_path, events))])
    assert (row["peak_bytes"], row["peak_time_s"]) == (max(2048, 512 + more), peak_time_s)


def test_stacks_of_a_page_are_numbered_from_the_empty_one(tmp_path: Path) -> None:
    deep = [{"filename": "deep.py", "line": n, "name": "down"} for n in range(MOST_FRAMES + 1)]
    events = [event("alloc", A + n * 512, 512, n, frames=of) for n, of in enumerate((FORWARD, [], deep, FORWARD))]
    page = view(attribute(replayed(tmp_path, events)), UNNAMED)
    assert page["allocations"]["stack"] == [1, 0, 2, 1]
    empty, forward, down = page["stacks"]
    assert (empty, [page["frames"][n] for n in forward]) == ([], ["model.py:7 forward"])
    assert [page["frames"][n] for n in down] == [f"deep.py:{n} down" for n in range(MOST_FRAMES)]
