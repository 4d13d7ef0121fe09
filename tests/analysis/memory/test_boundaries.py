"""Memory at boundaries: what ends with the recording, has no stack or no event, touches, or is one more than shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.analysis.memory import out_of_memory as failed
from cs_systems.analysis.memory.allocations import Allocation
from cs_systems.analysis.memory.annotations import by_annotation
from cs_systems.analysis.memory.categories import (
    BEFORE_RECORDING,
    GRADIENTS,
    Attributed,
    _before_by_size,
    attribute,
    gradient_sizes,
)
from cs_systems.analysis.memory.phases import _ranges
from cs_systems.analysis.memory.sites import outside_forward
from cs_systems.analysis.memory.tables import _span, at_end, composition, devices, timeline
from cs_systems.analysis.memory.tensor_names import _by_size
from cs_systems.analysis.memory.timeline import _bands, _most_seen, view
from cs_systems.readers.snapshot import Annotation, Frame
from tests.analysis.memory.test_limits import (
    BACKWARD,
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
def test_block_freed_by_the_last_event_is_not_alive_at_the_end(
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


def test_number_of_gradients_is_the_most_alive_at_once() -> None:
    gradients = [made(0, 1, GRADIENTS), made(2, 9, GRADIENTS), made(1, 9, GRADIENTS), made(3, 4, GRADIENTS, 1024)]
    assert gradient_sizes([*gradients, made(5, 9, "temporaries")]) == {512: 2, 1024: 1}


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


@pytest.mark.parametrize(("sets", "others", "state"), [(0, 1, 0), (1, 0, 3), (2, 1, 6), (5, 0, 12)])
def test_state_before_recording_may_be_twice_as_wide_as_the_weights(sets: int, others: int, state: int) -> None:
    sizes = (512, 512, 4096)
    gradients = [made(n, 9, GRADIENTS, size) for n, size in enumerate(sizes)]
    wide = [2 * size for size in sizes] * sets + [1024] * others
    before = [made(-1, 9, BEFORE_RECORDING, size) for size in (*sizes, *wide)]
    names = [one.category for one in _before_by_size([*gradients, *before])[0]]
    assert (names.count("parameters"), names.count("optimizer state")) == (3, state)


def test_weight_twice_as_large_as_another_does_not_count_as_state() -> None:
    gradients = [made(0, 9, GRADIENTS), made(1, 9, GRADIENTS, 1024)]
    before = [made(-1, 9, BEFORE_RECORDING), made(-1, 9, BEFORE_RECORDING, 1024)]
    names = [one.category for one in _before_by_size([*gradients, *before])[0]]
    assert names.count("optimizer state") == 0


@pytest.mark.parametrize(("requests", "unexamined"), [(10, 0), (11, 1), (12, 2)])
def test_free_pieces_of_the_last_ten_failed_requests_are_found(tmp_path: Path, requests: int, unexamined: int) -> None:
    events = [event("alloc", A, MIB, 0)]
    events += [event("oom", 0, 30 * MIB, 1 + n, device_free=MIB) for n in range(requests)]
    found = attribute(replayed(tmp_path, events, [segment(A, 20 * MIB, (A, MIB))]))
    rows = failed.out_of_memory(found, UNNAMED)
    assert [row["cached_bytes"] for row in rows] == [None] * unexamined + [19 * MIB] * 10
    assert [row["cause"].startswith("unknown") for row in rows] == [True] * unexamined + [False] * 10


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


def test_phases_of_a_category_are_sorted_largest_first(tmp_path: Path) -> None:
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
    deep = [{"filename": "deep.py", "line": n, "name": "down"} for n in range(41)]
    events = [event("alloc", A + n * 512, 512, n, frames=of) for n, of in enumerate((FORWARD, [], deep, FORWARD))]
    page = view(attribute(replayed(tmp_path, events)), UNNAMED)
    assert page["allocations"]["stack"] == [1, 0, 2, 1]
    empty, forward, down = page["stacks"]
    assert (empty, [page["frames"][n] for n in forward]) == ([], ["model.py:7 forward"])
    assert [page["frames"][n] for n in down] == [f"deep.py:{n} down" for n in range(40)]


def test_blocks_from_before_recording_with_another_size_keep_their_category() -> None:
    found, _ = _before_by_size([made(0, 9, GRADIENTS), made(-1, 9, BEFORE_RECORDING, 1024),
                                made(-1, 9, BEFORE_RECORDING)])  # fmt: skip
    assert sorted((one.allocation.bytes, one.category) for one in found if one.allocation.start == -1) == [
        (512, "parameters"), (1024, BEFORE_RECORDING),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("later", "category"),
    [([], "activations"), ([BACKWARD], "activations"), ([BACKWARD, FORWARD], "workspaces")],
)
def test_block_of_cublas_size_is_a_workspace_if_it_outlives_backward_and_forward(
    tmp_path: Path, later: list[list[dict[str, object]]], category: str
) -> None:
    events = [event("alloc", A, 8_519_680, 1, frames=FORWARD)]
    events += [event("alloc", B + 512 * n, 512, 2 + n, frames=stack) for n, stack in enumerate(later)]
    assert attribute(replayed(tmp_path, events)).allocations[0].category == category


@pytest.mark.parametrize(("of_backward", "noted"), [([BACKWARD], False), ([[]], True), ([[], BACKWARD], False)])
def test_backward_without_any_stack_is_noted(
    tmp_path: Path, of_backward: list[list[dict[str, object]]], noted: bool
) -> None:
    events = [event("alloc", A, 512, 1, frames=FORWARD)]
    events += [event("alloc", B + 512 * n, 512, 2 + n, frames=stack) for n, stack in enumerate(of_backward)]
    found = attribute(replayed(tmp_path, events))
    assert found.allocations[1].phase == "backward"
    assert any(note.startswith("backward: allocations with no Python frame") for note in found.notes) is noted


def test_freed_block_does_not_count_as_a_neighbour(tmp_path: Path) -> None:
    """Less than a mebibyte is left of the segment, which the block gets."""
    for is_freed, given in ((True, 4 * MIB), (False, 3 * MIB + 512 * 1024)):
        events = [event("segment_alloc", A, 4 * MIB), event("alloc", A, 2 * MIB, 1),
                  event("alloc", A + 2 * MIB, 2 * MIB, 2), event("free_completed", A, 2 * MIB, 3)]  # fmt: skip
        events += [event("free_completed", A + 2 * MIB, 2 * MIB, 4)] * is_freed
        events += [event("alloc", A, 3 * MIB + 512 * 1024, 5)]
        last = replayed(tmp_path, events, [segment(A, 4 * MIB)]).allocations[-1]
        assert (last.requested_bytes, last.bytes) == (3 * MIB + 512 * 1024, given)


def test_block_from_before_recording_has_no_stack(tmp_path: Path) -> None:
    events = [event("free_requested", A, 512, 1), event("free_completed", A, 512, 2), event("alloc", B, 512, 3)]
    found = attribute(replayed(tmp_path, events))
    before, later = found.allocations
    assert (before.allocation.start, found.sites[before.allocation.stack]) == (-1, None)
    assert str(found.sites[later.allocation.stack]).startswith("train.py:1")


@pytest.mark.parametrize(("lost", "is_cut"), [(0, False), (1, True), (2, True)])
def test_history_is_cut_if_a_block_at_the_end_has_a_stack_and_no_event(tmp_path: Path, lost: int, is_cut: bool) -> None:
    used = [(A + n * MIB, MIB) for n in range(lost)]
    found = replayed(tmp_path, [event("alloc", B, 512, 1)], [segment(A, 20 * MIB, *used), segment(B, 1024, (B, 512))])
    assert found.lost_allocations == lost
    assert found.is_cut is is_cut


def test_annotation_ends_before_the_next_event(tmp_path: Path) -> None:
    events = [event("alloc", A + n * 4096, 512 * size, 10 * n) for n, size in enumerate((1, 2, 4, 8))]
    marks = [("START", "load", 5), ("END", "load", 25)]
    annotations = [{"stage": stage, "name": name, "device": 0, "time_us": time_us} for stage, name, time_us in marks]
    found = attribute(replayed(tmp_path, events, annotations=annotations))
    (row,) = by_annotation(found, UNNAMED)
    assert (row["allocations"], row["highest_bytes"], row["change_bytes"]) == (2, 512 * 7, 512 * 6)


@pytest.mark.parametrize(("used", "largest", "pieces"), [(20, 0, 0), (19, 1, 1)])
def test_full_memory_has_no_free_piece(tmp_path: Path, used: int, largest: int, pieces: int) -> None:
    events = [event("alloc", A, used * MIB, 0), event("oom", 0, 30 * MIB, 1, device_free=0)]
    found = attribute(replayed(tmp_path, events, [segment(A, 20 * MIB, (A, used * MIB))]))
    (row,) = failed.out_of_memory(found, UNNAMED)
    assert (row["largest_free_bytes"], row["free_pieces"]) == (largest * MIB, pieces)
    assert row["time_s"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([None], None), (["block 0", None], "block 0"), (["block 0", "block 1"], "block 0 … 1"),
        (["block 0", "block 1", "block 0", "block 3"], "block 0 … 3"), (["embedding", "head"], "embedding … head"),
    ],
)  # fmt: skip
def test_span_of_layers_is_the_first_and_the_last(layers: list[str | None], text: str | None) -> None:
    assert _span(layers) == text


def test_page_without_events_lasts_a_microsecond(tmp_path: Path) -> None:
    page = view(attribute(replayed(tmp_path, [], [segment(A, 8192, (A, 512))])), UNNAMED)
    assert (page["end_ns"], page["events"], page["peak"]) == (1000, 0, None)
    (shown,) = page["segments"]
    assert (shown["size"], shown["name"], shown["layer"], shown["stack"][1]) == ([512, 7680], [0, 0], [0, 0], 0)


@pytest.mark.parametrize(("blocks", "hidden"), [(49_999, 0), (50_000, 1)])
def test_segments_of_fifty_thousand_blocks_are_drawn(tmp_path: Path, blocks: int, hidden: int) -> None:
    found = attribute(replayed(tmp_path, [], [segment(A, 8192), segment(B, 4096)]))
    large, small = found.replay.snapshot.segments
    many = [large._replace(blocks=large.blocks * blocks), small]
    shown = replace(found, replay=replace(found.replay, snapshot=replace(found.replay.snapshot, segments=many)))
    page = view(shown, UNNAMED)
    assert (page["hidden_segments"], len(page["segments"])) == (hidden, 2 - hidden)


def test_metadata_row_has_its_memory_at_the_peak(tmp_path: Path) -> None:
    """The second of three allocations is freed as the peak is reached by the third."""
    events = [
        event("alloc", A, 512, 1, user_metadata="a"), event("alloc", A + 4096, 1024, 2, user_metadata="a"),
        event("free_requested", A + 4096, 1024, 3), event("alloc", A + 8192, 2048, 4, user_metadata="a"),
        event("free_requested", A + 8192, 2048, 5), event("alloc", A + 16384, 1024, 6, user_metadata="b"),
        event("alloc", B, 512, 7),
    ]  # fmt: skip
    rows = by_annotation(attribute(replayed(tmp_path, events)), UNNAMED)
    assert [(row["annotation"], row["allocations"], row["requested_bytes"], row["at_peak_bytes"]) for row in rows] == [
        ("a", 3, 3584, 2560),
        ("b", 1, 1024, 0),
    ]


@pytest.mark.parametrize(("last", "reserved"), [("segment_alloc", 30), ("segment_free", 20)])
def test_segment_that_came_or_went_just_before_the_failed_request_counts(
    tmp_path: Path, last: str, reserved: int
) -> None:
    first = [event("segment_alloc", B, 10 * MIB, 1)] * (last == "segment_free")
    events = [event("alloc", A, MIB, 0), *first, event(last, B, 10 * MIB, 2)]
    events += [event("oom", 0, 30 * MIB, 3, device_free=0), event("alloc", A + MIB, MIB, 4)]
    there = [segment(A, 20 * MIB, (A, MIB)), *[segment(B, 10 * MIB)] * (last == "segment_alloc")]
    (row,) = failed.out_of_memory(attribute(replayed(tmp_path, events, there)), UNNAMED)
    assert row["reserved_bytes"] == reserved * MIB


@pytest.mark.parametrize(("sizes", "peaks"), [((512, 1024), [False, True]), ((512, 0), [True, False])])
def test_interval_that_begins_or_ends_with_the_peak_contains_it(
    tmp_path: Path, sizes: tuple[int, int], peaks: list[bool]
) -> None:
    events = [event("alloc", A, sizes[0], 1, frames=FORWARD)]
    events += [event("alloc", B, sizes[1], 2, frames=BACKWARD)] if sizes[1] else []
    events += [event("free_requested", A, sizes[0], 3, frames=BACKWARD)]
    rows = timeline(attribute(replayed(tmp_path, events)), UNNAMED)
    assert [row["is_peak"] for row in rows] == peaks


def test_of_a_page_300_000_allocations_are_drawn_and_bands_of_2_000_stretches() -> None:
    short, long = made(0, 1, GRADIENTS), made(0, 3, GRADIENTS)
    drawn, rest = _most_seen([short, *[long] * 300_000], lambda _: 0, lambda a: a.allocation.end)
    assert (len(drawn), rest) == (300_000, [short])
    ((_, *band),) = _bands([made(0, 1, GRADIENTS)], lambda _: 3, lambda _: 5, 2001)
    assert band == [2, 6, 512], "a stretch takes 2 ns"


@pytest.mark.parametrize(
    ("asked", "by_program"), [((True, True, False), True), ((True, False), False), ((False, False), False)]
)
def test_segments_that_go_back_are_counted_until_the_last_one_comes(
    tmp_path: Path, asked: tuple[bool, ...], by_program: bool
) -> None:
    empty = [{"filename": "memory.py", "line": 1, "name": "empty_cache"}]
    events = [event("segment_alloc", A, MIB, 0)]
    for n, is_asked in enumerate(asked):
        events += [event("segment_free", A, MIB, 2 * n + 1, frames=empty if is_asked else FORWARD)]
        events += [event("segment_alloc", A, MIB, 2 * n + 2)]
    last = event("segment_free", A, MIB, 99, frames=empty)
    found = failed.returned(attribute(replayed(tmp_path, [*events, last])))
    assert found == failed.Returned(len(asked), len(asked) * MIB, by_program)
    assert failed.returned(attribute(replayed(tmp_path, [events[0], last]))) is None


@pytest.mark.parametrize(("value", "text"), [(9_999, "9999"), (10_000, "10,000")])
def test_number_of_a_shape_has_commas_from_ten_thousand_on(value: int, text: str) -> None:
    assert _by_size({"w": (value, 2)}, [4]) == {8 * value: f"w, {text} × 2 × 4"}


def test_tensors_of_one_size_share_a_name_and_the_first_element_counts() -> None:
    shapes = {"a": (8, 2), "b": (2, 8), "c": (4, 4), "d": (8,)}
    assert _by_size(shapes, [4, 2]) == {64: "a, b or c, 8 × 2 × 4", 32: "d, 8 × 4", 16: "d, 8 × 2"}


def test_free_that_completes_after_the_failed_request_was_pending_in_it(tmp_path: Path) -> None:
    events = [event("alloc", A, 4 * MIB, 0), event("free_requested", A, 4 * MIB, 1),
              event("oom", 0, 30 * MIB, 2, device_free=0), event("free_completed", A, 4 * MIB, 3)]  # fmt: skip
    (row,) = failed.out_of_memory(attribute(replayed(tmp_path, events, [segment(A, 20 * MIB)])), UNNAMED)
    assert (row["largest_free_bytes"], row["free_pieces"]) == (16 * MIB, 1)


def test_groups_of_equal_allocations_are_sorted_by_their_sum(tmp_path: Path) -> None:
    stacks = (FORWARD, BACKWARD, BACKWARD, BACKWARD)
    events = [event("alloc", A + 4096 * n, 512, n, frames=frames) for n, frames in enumerate(stacks)]
    rows = at_end(attribute(replayed(tmp_path, events)), UNNAMED)
    assert [row["allocations"] for row in rows] == [3, 1]


@pytest.mark.parametrize(
    ("closed", "phases"),
    [
        (("forward",), ["forward", "backward", "backward"]), (("backward",), ["forward", "backward", "forward"]),
        (("forward", "backward"), ["forward", "backward", "backward", None]),
    ],
)  # fmt: skip
def test_range_that_ends_is_the_innermost_of_its_name(closed: tuple[str, ...], phases: list[str | None]) -> None:
    marks = [Annotation(0, True, "forward"), Annotation(10, True, "backward")]
    marks += [Annotation(20 + n, False, name) for n, name in enumerate(closed)]
    assert [place.phase for _, place in _ranges(marks)] == phases
    again = [Annotation(0, True, "forward"), Annotation(1, True, "backward"), Annotation(2, True, "forward")]
    assert [place.phase for _, place in _ranges([*again, Annotation(9, False, "forward")])][-1] == "backward"


def test_line_that_calls_forward_is_the_innermost_outside_if_nothing_is_named_forward() -> None:
    stack = (
        Frame("site-packages/torch/nn/functional.py", 1, "linear"),
        Frame("model.py", 2, "run"),
        Frame("train.py", 3, "main"),
    )
    assert outside_forward(stack) == "model.py:2 run"
    assert outside_forward((Frame("model.py", 1, "forward"), *stack)) == "model.py:2 run"
