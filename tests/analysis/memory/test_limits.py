"""Limits of the memory's replay: sizes of blocks, moments of ranges, free pieces and causes of a failed request."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory import timeline as memory_timeline
from cs_systems.analysis.memory.allocations import OutOfMemory, Replay, replay, rounded
from cs_systems.analysis.memory.annotations import by_annotation
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.intervals import joined, without
from cs_systems.analysis.memory.out_of_memory import (
    FRAGMENTED,
    LIMIT,
    NOT_KNOWN,
    OTHER_POOL,
    TOO_LITTLE,
    _cause,
    out_of_memory,
    why,
)
from cs_systems.analysis.memory.tables import (
    at_peak,
    composition,
    devices,
    differences,
    file_row,
    fragmentation,
    segments,
    timeline,
)
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.analysis.memory.timeline import view
from cs_systems.readers.snapshot import Settings, read

MIB = 1 << 20
UNNAMED = TensorNames({}, {}, "")
FRAMES = [{"filename": "train.py", "line": 1, "name": "main"}]
Data = dict[str, Any]


def event(action: str, address: int, size: int, time_us: int = 0, **known: Any) -> Data:
    given = {"stream": 0, "time_us": time_us, "frames": FRAMES}
    return {"action": action, "addr": address, "size": size, **given, **known}


def replayed(folder: Path, events: Sequence[Data], segments: Sequence[Data] = (), annotations: Sequence[Data] = (),
             **settings: Any) -> Replay:  # fmt: skip
    path = folder / "made.pickle"
    made = {"segments": [*segments], "device_traces": [[*events]], "allocator_settings": settings,
            "external_annotations": [*annotations]}  # fmt: skip
    path.write_bytes(pickle.dumps(made))
    return replay(read(path))


def segment(address: int, size: int, *used: tuple[int, int]) -> Data:
    """Return a segment at the end with these allocated blocks; the rest is free."""
    blocks, at = [], address
    for start, length in used:
        if start > at:
            blocks.append((at, start - at, "inactive"))
        blocks.append((start, length, "active_allocated"))
        at = start + length
    if at < address + size:
        blocks.append((at, address + size - at, "inactive"))
    return {
        "device": 0, "address": address, "total_size": size, "segment_type": "large",
        "blocks": [{"address": at, "size": length, "requested_size": length, "state": state, "frames": FRAMES}
                   for at, length, state in blocks],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "divisions", "given"),
    [
        (1, {}, 512), (512, {}, 512), (513, {}, 1024), (3 * MIB + 1, {}, 3 * MIB + 512),
        (0, {1 * MIB: 4}, 512), (511, {1 * MIB: 4}, 512),
        (512 * 4, {1 * MIB: 4}, 2048),  # no more than a division of 512 bytes
        (512 * 4 + 1, {1 * MIB: 4}, 2048 + 512),
        (5 * MIB, {4 * MIB: 4}, 5 * MIB), (5 * MIB + 1, {4 * MIB: 4}, 6 * MIB),
        (5 * MIB + 1, {4 * MIB: 1}, 5 * MIB + 512), (5 * MIB + 1, {8 * MIB: 4}, 5 * MIB + 512),
        (2**36 + 1, {2**35: 2}, 2**36 + 2**35),  # the largest division counts for all above it
    ],
)  # fmt: skip
def test_request_is_rounded_as_the_allocator_rounds_it(size: int, divisions: dict[int, int], given: int) -> None:
    assert rounded(size, Settings(divisions, None, False)) == given


@pytest.mark.parametrize(
    ("asked", "segment_bytes", "given"),
    [
        (2 * MIB, 3 * MIB + 512, 2 * MIB),  # more than 1 MiB would be left: the block is split
        (2 * MIB, 3 * MIB, 3 * MIB),
        (2 * MIB, 2 * MIB, 2 * MIB),
        (MIB, 8 * MIB, MIB),  # of the small pool
    ],
)
def test_block_takes_the_rest_of_its_segment_unless_a_mebibyte_is_left(
    tmp_path: Path, asked: int, segment_bytes: int, given: int
) -> None:
    at = 1 << 40
    found = replayed(tmp_path, [event("segment_alloc", at, segment_bytes), event("alloc", at, asked, 1),
                                event("free_requested", at, asked, 2), event("free_completed", at, asked, 3)],
                     [segment(at, segment_bytes)])  # fmt: skip
    (one,) = found.allocations
    assert (one.bytes, one.requested_bytes, one.start, one.end) == (given, asked, 1, 2)
    assert (found.peak_bytes, found.peak_event, found.end_bytes) == (given, 1, 0)
    assert found.highest_reserved_bytes == segment_bytes


def test_peak_is_the_first_moment_of_the_highest_sum(tmp_path: Path) -> None:
    at = 1 << 40
    twice = [event(action, at, MIB) for action in ("alloc", "free_requested", "free_completed") * 2]
    found = replayed(tmp_path, [event("segment_alloc", at, 8 * MIB), *twice], [segment(at, 8 * MIB)])
    assert (found.peak_event, found.peak_bytes) == (1, MIB)


def test_block_ends_where_the_next_begins(tmp_path: Path) -> None:
    at = 1 << 40
    events = [
        event("segment_alloc", at, 20 * MIB), event("alloc", at, 2 * MIB, 1),
        event("alloc", at + 4 * MIB, 2 * MIB, 2), event("free_completed", at, 2 * MIB, 3),
        event("alloc", at, 3 * MIB, 4), event("free_completed", at, 3 * MIB, 5),
    ]  # fmt: skip
    found = replayed(tmp_path, events, [segment(at, 20 * MIB, (at + 4 * MIB, 2 * MIB))])
    sizes = [(one.start, one.bytes) for one in found.allocations]
    assert sizes == [(1, 2 * MIB), (2, 2 * MIB), (4, 4 * MIB)]
    assert (found.peak_event, found.peak_bytes) == (4, 6 * MIB)
    expandable = replayed(tmp_path, events, [segment(at, 20 * MIB, (at + 4 * MIB, 2 * MIB))], expandable_segments=True)
    assert [one.bytes for one in expandable.allocations] == [2 * MIB, 2 * MIB, 3 * MIB]


@pytest.mark.parametrize(("asked", "given"), [(4 * MIB, 20 * MIB), (4 * MIB - 512, 4 * MIB - 512)])
def test_block_of_the_largest_size_to_split_is_not_split(tmp_path: Path, asked: int, given: int) -> None:
    events = [event("segment_alloc", 1 << 40, 20 * MIB), event("alloc", 1 << 40, asked, 1)]
    (one,) = replayed(tmp_path, events, max_split_size=4 * MIB).allocations
    assert one.bytes == given


def test_first_of_equal_maxima_is_the_peak(tmp_path: Path) -> None:
    events = [event("alloc", 512, 512), event("free_completed", 512, 512, 1), event("alloc", 1024, 512, 2)]
    found = replayed(tmp_path, events)
    assert (found.peak_event, found.peak_bytes) == (0, 512)
    assert found.has_peak
    assert not replayed(tmp_path, events[:1]).has_peak, "one event shows a moment"


@pytest.mark.parametrize(("events", "is_cut"), [(999, False), (1000, True), (1001, False), (1024, True), (512, False)])
def test_history_of_a_round_number_of_events_was_cut(tmp_path: Path, events: int, is_cut: bool) -> None:
    made = [event("free_completed", 512, 512)] + [event("alloc", 512 * (2 + n), 512, n) for n in range(events - 1)]
    assert replayed(tmp_path, made).is_cut is is_cut
    assert not replayed(tmp_path, [event("alloc", 512 * (2 + n), 512, n) for n in range(events)]).is_cut


def test_snapshot_without_a_history_was_not_cut(tmp_path: Path) -> None:
    found = replayed(tmp_path, [], [segment(1 << 40, MIB, (1 << 40, 512))])
    assert (found.lost_allocations, found.is_cut) == (1, False)


# ranges


def test_nested_and_adjacent_intervals_are_joined() -> None:
    assert joined([(5, 9), (0, 4), (4, 5), (11, 20), (12, 13), (21, 22)]) == [(0, 9), (11, 20), (21, 22)]
    assert joined([]) == []


def test_annotation_has_what_was_allocated_under_it(tmp_path: Path) -> None:
    events = [
        event("alloc", 512, 1000, 10), event("alloc", 2048, 512, 20), event("alloc", 4096, 600, 30),
        event("free_completed", 4096, 600, 40), event("free_completed", 512, 1000, 50), event("alloc", 8192, 512, 60),
    ]  # fmt: skip
    marks = [
        ("START", "load", 20),
        ("END", "load", 30),
        ("START", "load", 60),
        ("START", "step", 15),
        ("END", "step", 45),
    ]
    annotations = [{"stage": stage, "name": name, "device": 0, "time_us": time_us} for stage, name, time_us in marks]
    found = attribute(replayed(tmp_path, events, annotations=annotations))
    rows = {row["annotation"]: row for row in by_annotation(found, UNNAMED)}
    assert {*rows} == {"load", "step"}
    load, step = rows["load"], rows["step"]
    assert (load["occurrences"], load["allocations"], load["requested_bytes"]) == (2, 3, 1624)
    assert (load["at_peak_bytes"], load["highest_bytes"], load["change_bytes"]) == (512 + 1024, 2560, 1536 + 512)
    assert (step["occurrences"], step["allocations"], step["requested_bytes"]) == (1, 2, 1112)
    assert (step["at_peak_bytes"], step["highest_bytes"], step["change_bytes"]) == (1536, 2560, 512)


# failed requests


@pytest.mark.parametrize(
    ("free", "pieces", "expandable", "cause"),
    [
        (0, [(0, 10)], False, "a free piece is large enough, but belongs to another stream or pool"),
        (0, [(0, 9), (20, 21)], False, "fragmentation: enough memory was free, but in pieces; record with"),
        (0, [(0, 9), (20, 21)], True, "fragmentation: enough memory was free, but in pieces"),
        (1, [(0, 9)], True, "fragmentation: enough memory was free, but in pieces"),
        (10, [(0, 9)], False, "the device had enough free memory: a limit of the process"),
        (9, [], False, "too little memory: 1 B more than was free"),
        (5, [(0, 2), (4, 6)], False, "too little memory: 1 B more than was free"),
        (None, [(0, 9)], False, "unknown: the snapshot lacks what was free"),
        (0, None, False, "unknown: the snapshot lacks what was free"),
    ],
)
def test_failed_request_of_ten_bytes_has_a_cause(
    free: int | None, pieces: list[tuple[int, int]] | None, expandable: bool, cause: str
) -> None:
    found = _cause(OutOfMemory(0, 10, free, 0, 0), pieces, expandable)
    assert found.startswith(cause)
    assert ("expandable_segments" in found) is (cause.endswith("record with"))


@pytest.mark.parametrize(
    ("free", "pieces", "expected"),
    [
        (0, [(0, 10)], (OTHER_POOL, 0)), (0, [(0, 1), (4, 14), (20, 21)], (OTHER_POOL, 0)),
        (10, [(0, 9)], (LIMIT, 0)), (None, [(0, 9)], (NOT_KNOWN, 0)),
        (0, None, (NOT_KNOWN, 0)), (1, [(0, 9)], (FRAGMENTED, 0)), (5, [(0, 2), (4, 6)], (TOO_LITTLE, 1)),
        (2, [], (TOO_LITTLE, 8)),
    ],
)  # fmt: skip
def test_failed_request_of_ten_bytes_lacks_memory_only_if_too_little_was_free(
    free: int | None, pieces: list[tuple[int, int]] | None, expected: tuple[str, int]
) -> None:
    assert why(OutOfMemory(0, 10, free, 0, 0), pieces) == expected


@pytest.mark.parametrize(
    ("before", "made", "has_peak"), [(2, 2, True), (3, 2, False), (0, 1, False), (0, 2, True), (1, 1, False)]
)
def test_history_that_makes_as_many_allocations_as_there_were_has_a_peak(
    tmp_path: Path, before: int, made: int, has_peak: bool
) -> None:
    used = [(A + 4096 * n, 512) for n in range(before)]
    events = [event("alloc", B + 4096 * n, 512, n) for n in range(made)]
    segments = [segment(A, MIB, *used), segment(B, MIB, *((B + 4096 * n, 512) for n in range(made)))]
    found = replayed(tmp_path, events, segments)
    assert (found.before_allocations, found.has_peak) == (before, has_peak)


@pytest.mark.parametrize(
    ("holes", "left"),
    [
        ([], [(0, 10), (20, 30)]),
        ([(0, 10)], [(20, 30)]),
        ([(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10), (20, 30)]),
        ([(8, 22)], [(0, 8), (22, 30)]),
        ([(10, 20), (30, 40)], [(0, 10), (20, 30)]),
        ([(0, 1), (25, 40)], [(1, 10), (20, 25)]),
    ],
)
def test_holes_are_cut_out_of_intervals(holes: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert without([(0, 10), (20, 30)], holes) == left


def test_free_memory_of_a_failed_request_is_taken_when_it_failed(tmp_path: Path) -> None:
    """At the request 30 MiB are reserved and 12 in use; before and after it segments come and go."""
    a, b, c = (n << 40 for n in (1, 2, 3))
    events = [
        event("segment_alloc", c, 40 * MIB, 1), event("segment_free", c, 40 * MIB, 2),
        event("alloc", a, 8 * MIB, 3), event("alloc", a + 10 * MIB, 4 * MIB, 4),
        event("oom", 0, 25 * MIB, 2_000_003, device_free=5 * MIB),
        event("segment_alloc", c, 40 * MIB, 6), event("segment_free", b, 10 * MIB, 7),
    ]  # fmt: skip
    used = ((a, 8 * MIB), (a + 10 * MIB, 4 * MIB))
    found = attribute(replayed(tmp_path, events, [segment(a, 20 * MIB, *used), segment(c, 40 * MIB)]))
    (row,) = out_of_memory(found, UNNAMED)
    assert (row["event"], row["time_s"]) == (4, pytest.approx(2.000002))
    assert (row["requested_bytes"], row["device_free_bytes"]) == (25 * MIB, 5 * MIB)
    assert (row["reserved_bytes"], row["allocated_bytes"], row["cached_bytes"]) == (30 * MIB, 12 * MIB, 18 * MIB)
    assert (row["largest_free_bytes"], row["free_pieces"]) == (10 * MIB, 3)
    assert row["cause"].startswith("too little memory: 2.00 MiB more than was free")
    assert row["where"] is not None
    assert "train.py:1" in row["where"]


# categories and tables

FORWARD = [{"filename": "model.py", "line": 7, "name": "forward"}]
BACKWARD = [{"filename": "graph.py", "line": 1, "name": "_engine_run_backward"}]
A, B = 1 << 40, 2 << 40


@pytest.mark.parametrize(
    ("size", "category"), [(8_519_680, "workspaces"), (33_554_432, "workspaces"), (8_519_168, "activations")]
)
def test_block_of_cublas_size_that_outlives_a_step_is_a_workspace(tmp_path: Path, size: int, category: str) -> None:
    events = [event("alloc", A, size, 1, frames=FORWARD)]
    for n in range(2):
        events += [event("alloc", B + 4096 * n, 512, 2 + n, frames=stack) for stack in (FORWARD, BACKWARD)]
    found = attribute(replayed(tmp_path, events))
    assert found.allocations[0].category == category


@pytest.mark.parametrize(
    ("freed_after", "category"),
    [(0, "temporaries"), (1, "activations"), (2, "activations")],  # events from the first backward on
)
def test_block_of_forward_that_backward_needs_is_an_activation(tmp_path: Path, freed_after: int, category: str) -> None:
    events = [event("alloc", A, 4096, 1, frames=FORWARD), event("alloc", B, 512, 3, frames=BACKWARD),
              event("alloc", B + 512, 512, 4, frames=BACKWARD)]  # fmt: skip
    stack = FORWARD if freed_after == 0 else BACKWARD
    events.insert(1 + freed_after, event("free_completed", A, 4096, 1 + freed_after, frames=stack))
    found = attribute(replayed(tmp_path, events))
    assert next(one.category for one in found.allocations if one.allocation.address == A) == category


def stretches() -> list[Data]:
    return [
        event("alloc", A, 1024, 10, frames=FORWARD), event("alloc", A + 1024, 2048, 20, frames=FORWARD),
        event("free_completed", A + 1024, 2048, 30, frames=FORWARD),
        event("alloc", A + 4096, 512, 1_000_030, frames=BACKWARD),
        event("free_completed", A, 1024, 1_000_050, frames=BACKWARD),
    ]  # fmt: skip


def test_intervals_have_bytes_before_maximum_and_after(tmp_path: Path) -> None:
    found = attribute(replayed(tmp_path, stretches(), [segment(A, 8192, (A + 4096, 512))]))
    forward, backward = timeline(found, UNNAMED)
    assert (forward["phase"], forward["first_event"], forward["events"]) == ("forward", 0, 3)
    assert (forward["start_s"], forward["duration_s"]) == (0.0, pytest.approx(20e-6))
    assert (forward["before_bytes"], forward["peak_bytes"], forward["after_bytes"]) == (0, 3072, 1024)
    assert (backward["phase"], backward["first_event"], backward["events"]) == ("backward", 3, 2)
    assert (backward["start_s"], backward["duration_s"]) == (pytest.approx(1.00002), pytest.approx(20e-6))
    assert (backward["before_bytes"], backward["peak_bytes"], backward["after_bytes"]) == (1024, 1536, 512)
    assert [forward["is_peak"], backward["is_peak"]] == [True, False]


def test_reserved_memory_at_the_end_is_free_in_segments_or_between_blocks(tmp_path: Path) -> None:
    made = [segment(A, 20 * MIB, (A + 2 * MIB, 8 * MIB)), segment(B, 30 * MIB), segment(B << 1, 4 * MIB, (B << 1, MIB))]
    found = attribute(replayed(tmp_path, [], made))
    (pool,) = fragmentation(found, UNNAMED)
    assert (pool["segments"], pool["reserved_bytes"], pool["allocated_bytes"]) == (3, 54 * MIB, 9 * MIB)
    assert (pool["free_segments_bytes"], pool["inactive_split_bytes"]) == (30 * MIB, 15 * MIB)
    assert (pool["inactive_splits"], pool["largest_split_bytes"]) == (3, 10 * MIB)
    rows = [
        (row["address"], row["allocated_bytes"], row["inactive_split_bytes"], row["inactive_splits"],
         row["largest_split_bytes"])
        for row in segments(found, UNNAMED)
    ]  # fmt: skip
    assert rows == [
        (f"{A:#x}", 8 * MIB, 12 * MIB, 2, 10 * MIB), (f"{B << 1:#x}", MIB, 3 * MIB, 1, 3 * MIB),
        (f"{B:#x}", 0, 0, 0, 0),
    ]  # fmt: skip


def test_row_of_a_file_has_the_largest_category_at_its_peak(tmp_path: Path) -> None:
    found = attribute(replayed(tmp_path, stretches(), [segment(A, 8192, (A + 4096, 512))]))
    row = file_row(found, "a.pickle")
    assert (row["duration_s"], row["peak_bytes"], row["reserved_bytes"]) == (pytest.approx(1.00004), 3072, 8192)
    assert (row["category"], row["category_share"]) == ("temporaries", pytest.approx(2 / 3))
    assert file_row(attribute(replayed(tmp_path, [], [segment(A, 8192)])), "b.pickle")["category"] is None


def test_allocations_are_grouped_the_largest_first(tmp_path: Path) -> None:
    events = [event("alloc", A + n * 4096, size, n) for n, size in enumerate((512, 1024, 512, 512, 1024, 2048))]
    rows = at_peak(attribute(replayed(tmp_path, events)), UNNAMED)
    assert [(row["bytes"], row["allocations"], row["total_bytes"]) for row in rows] == [
        (2048, 1, 2048), (1024, 2, 2048), (512, 3, 1536),
    ]  # fmt: skip
    (row,) = composition(attribute(replayed(tmp_path, [event("alloc", A, 300, 1), event("alloc", B, 700, 2)])), UNNAMED)
    assert (row["allocations"], row["bytes"], row["rounding_bytes"], row["share"]) == (2, 1536, 536, 1.0)


def test_peaks_of_two_snapshots_differ_most_first(tmp_path: Path) -> None:
    a, b = (
        attribute(replayed(tmp_path, [event("alloc", A + n * 4096, size, n, frames=stack)
                                      for n, (size, stack) in enumerate(made)]))
        for made in (((512, FORWARD), (512, BACKWARD), (512, BACKWARD)), ((1024, FORWARD), (512, FORWARD), (1024, [])))
    )  # fmt: skip
    rows = differences(a, b, lambda found, each: each.phase)
    assert [(row["what"], row["a_bytes"], row["b_bytes"], row["difference_bytes"]) for row in rows] == [
        ("forward", 512, 1536, 1024), ("backward", 1024, 1024, 0),
    ]  # fmt: skip
    assert sum(row["b_allocations"] for row in rows) == 3


def test_sum_of_devices_peaks_when_both_devices_peak(tmp_path: Path) -> None:
    """Device 0 has 1,024 and then 512 bytes more, of which 1,024 are freed before device 1 has 2,048."""
    first = [event("alloc", A, 1024, 10), event("alloc", A + 4096, 512, 20), event("free_completed", A, 1024, 30)]
    second = [event("alloc", B, 512, 15), event("alloc", B + 4096, 2048, 40)]
    one, two = (attribute(replayed(tmp_path, events)) for events in (first, second))
    row, other, whole = devices([one, two])
    assert (row["peak_bytes"], row["peak_time_s"], row["end_bytes"]) == (1536, pytest.approx(10e-6), 512)
    assert (other["peak_bytes"], other["peak_time_s"]) == (2560, pytest.approx(30e-6))
    assert (whole["peak_bytes"], whole["peak_time_s"]) == (3072, pytest.approx(30e-6))
    assert (whole["end_bytes"], whole["events"], whole["reserved_bytes"]) == (3072, 5, None)


def test_page_has_a_column_for_each_number_of_an_allocation(tmp_path: Path) -> None:
    there = segment(A, 8192, (A + 4096, 512), (A + 5120, 1024))  # the second block is older than the history
    made = view(attribute(replayed(tmp_path, stretches(), [there])), UNNAMED)
    columns = made["allocations"]
    assert columns["later_ns"] == [0, 0, 10_000, 1_000_010_000]
    assert columns["duration_ns"] == [1_000_041_000, 1_000_040_000, 10_000, 21_000]
    assert columns["bytes"] == [1024, 1024, 2048, 512]
    assert columns["before"] == [0]
    assert columns["made"] == [None, 0, 1, 3]
    assert columns["freed"] == [None, 4, 2, None]
    assert (made["end_ns"], made["events"], made["timed"]) == (1_000_041_000, 5, True)
    assert (made["highest"]["at_ns"], made["highest"]["bytes"], made["highest"]["reserved"]) == (10_000, 4096, 8192)
    assert made["reserved"] == [[0, 8192]]
    (shown,) = made["segments"]
    assert shown["size"] == [4096, 512, 512, 1024, 2048]
    assert shown["pending"] == []
    assert [category < 0 for category in shown["category"]] == [True, False, True, False, True]


def test_bands_hold_the_maximum_of_allocations_not_drawn_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_timeline, "MOST_ALLOCATIONS", 0)
    monkeypatch.setattr(memory_timeline, "BINS", 10)
    events = [event("alloc", A, 1024, 0), event("alloc", A + 4096, 512, 45), event("free_completed", A, 1024, 60),
              event("alloc", A + 8192, 512, 99)]  # fmt: skip
    made = view(attribute(replayed(tmp_path, events)), UNNAMED)
    assert made["end_ns"] == 100_000
    assert made["rest"]["allocations"] == 3
    (category,) = {band[0] for band in made["rest"]["bands"]}
    assert made["rest"]["bands"] == [
        [category, 0, 40_000, 1024], [category, 40_000, 70_000, 1536], [category, 70_000, 90_000, 512],
        [category, 90_000, 100_000, 1024],
    ]  # fmt: skip
