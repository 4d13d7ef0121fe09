"""Limits of the memory's replay: sizes of blocks, moments of ranges, free pieces and causes of a failed request."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import OutOfMemory, Replay, replay, rounded
from cs_systems.analysis.memory.annotations import BLOCK, _Highest, _joined, by_annotation
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.out_of_memory import _cause, _without, out_of_memory
from cs_systems.analysis.memory.tensor_names import TensorNames
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


# ranges


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_highest_between_two_places_is_that_of_the_values(count: int) -> None:
    values = [(n * 7919) % 1000 for n in range(count)]
    highest = _Highest(values)
    for first in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        for end in (first + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, count):
            if first < end <= count:
                assert highest.between(first, end) == max(values[first:end])


def test_nested_and_touching_spans_are_one() -> None:
    assert _joined([(5, 9), (0, 4), (4, 5), (11, 20), (12, 13)]) == [(0, 9), (11, 20)]
    assert _joined([]) == []


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
def test_request_of_ten_bytes_failed_for_a_cause(
    free: int | None, pieces: list[tuple[int, int]] | None, expandable: bool, cause: str
) -> None:
    found = _cause(OutOfMemory(0, 10, free, 0, 0), pieces, expandable)
    assert found.startswith(cause)
    assert ("expandable_segments" in found) is (cause.endswith("record with"))


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
    assert _without([(0, 10), (20, 30)], holes) == left


def test_free_memory_of_a_failed_request_is_that_of_its_moment(tmp_path: Path) -> None:
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
