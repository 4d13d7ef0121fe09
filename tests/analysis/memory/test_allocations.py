"""Replay of events, compared with the real peak and with a simulated allocator."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_systems.analysis.memory.allocations import BEFORE, replay
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.tables import composition, timeline
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.readers.snapshot import read
from tests.analysis.memory.caching_allocator import MIB, CachingAllocator

MAX_MEMORY_ALLOCATED = 213_795_840  # torch.cuda.max_memory_allocated() beside the real snapshot
UNNAMED = TensorNames({}, {}, "")
Event = dict[str, Any]
Write = Callable[..., Path]


def test_real_peak_matches_to_the_byte(snapshot_path: Path, snapshot_data: Event) -> None:
    found = replay(read(snapshot_path))
    assert found.peak_bytes == MAX_MEMORY_ALLOCATED
    assert found.doubts == ()
    allocated = sum(
        b["size"] for s in snapshot_data["segments"] for b in s["blocks"] if b["state"] == "active_allocated"
    )
    assert found.end_bytes == allocated
    assert found.before_bytes == allocated  # its events are lost
    assert found.reserved_bytes == ((BEFORE, 236_978_176),)


def test_real_events_are_replayed(snapshot_path: Path, snapshot_data: Event) -> None:
    """Requested bytes, compared with a replay that does not model the allocator."""
    found = replay(read(snapshot_path))
    alive, requested = {}, []
    for event in snapshot_data["device_traces"][0]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_requested":
            del alive[event["addr"]]
        requested.append(sum(alive.values()))
    for index in range(0, len(requested), 7):
        made = [a for a in found.alive_at(index) if a.start > BEFORE]
        assert sum(a.requested_bytes for a in made) == requested[index]


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB - 600, 24 * MIB))
STEPS = st.lists(st.tuples(st.sampled_from("aaaarcfes"), SIZES, st.integers(0, 1 << 30)), max_size=60)
FRAMES = (
    (),
    ({"filename": "train.py", "line": 5, "name": "forward"},),
    ({"filename": "site-packages/torch/optim/adam.py", "line": 7, "name": "_init_group"},),
    ({"filename": "train.py", "line": 9, "name": "main"},),
)


def run(steps: list[tuple[str, int, int]]) -> CachingAllocator:
    """Simulate allocations, frees that complete later or at once, and emptied caches; recording begins in between."""
    allocator = CachingAllocator()
    alive: list[int] = []
    pending: list[int] = []
    for action, size, choice in steps:
        frames = FRAMES[choice % len(FRAMES)]
        if action == "a":
            alive.append(allocator.alloc(size, frames))
        elif action == "r" and alive:
            pending.append(alive.pop(choice % len(alive)))
            allocator.request_free(pending[-1], frames)
        elif action == "c" and pending:
            allocator.complete_free(pending.pop(choice % len(pending)), frames)
        elif action == "f" and alive:
            allocator.free(alive.pop(choice % len(alive)), frames)
        elif action == "e":
            allocator.empty_cache()
        elif action == "s" and not allocator.recording:
            start(allocator)
    if not allocator.recording:
        start(allocator)
    return allocator


def start(allocator: CachingAllocator) -> None:
    """Begin recording with one complete allocation: without any free request, requests count as not recorded."""
    allocator.start()
    allocator.free(allocator.alloc(1))


@settings(max_examples=200)
@given(STEPS)
def test_simulated_history_is_replayed_to_the_byte(steps: list[tuple[str, int, int]]) -> None:
    allocator = run(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.pickle"
        path.write_bytes(pickle.dumps(allocator.snapshot()))
        found = attribute(replay(read(path)))
    assert found.replay.end_bytes == allocator.allocated
    assert found.replay.peak_bytes == allocator.peak
    assert found.replay.doubts == ()
    assert sum(row["bytes"] for row in composition(found, UNNAMED)) == allocator.peak
    for event in range(BEFORE, len(allocator.events)):
        assert sum(a.bytes for a in found.replay.alive_at(event)) == sum(
            a.allocation.bytes for a in found.alive_at(event)
        )
    phases = timeline(found, UNNAMED)
    assert max([found.replay.before_bytes, *(row["peak_bytes"] for row in phases)]) == allocator.peak
    assert sum(row["events"] for row in phases) == len(allocator.events)


def event(action: str, address: int, size: int = 1024) -> Event:
    return {"action": action, "addr": address, "size": size, "frames": []}


def test_truncated_history_is_replayed(write_snapshot: Write) -> None:
    """A free without its allocation was allocated before; one without its request was no longer allocated."""
    events = [event("free_requested", 512), event("free_completed", 512), event("free_completed", 8192)]
    found = replay(read(write_snapshot({"segments": [], "device_traces": [events]})))
    assert (found.before_bytes, found.peak_event, found.end_bytes) == (1024, BEFORE, 0)


def test_free_without_request_counts_at_completion(write_snapshot: Write) -> None:
    events = [event("alloc", 512), event("free_completed", 512), event("free", 8192)]
    found = replay(read(write_snapshot({"device_traces": [events]})))
    assert [(a.start, a.end) for a in found.allocations] == [(BEFORE, 2), (0, 1)]


def test_missing_events_are_doubts(write_snapshot: Write) -> None:
    segment = {"address": 0, "total_size": 1024, "blocks": [{"size": 1024, "state": "inactive"}]}
    found = replay(
        read(write_snapshot({"segments": [segment], "device_traces": [[event("alloc", 512), event("alloc", 512)]]}))
    )
    assert found.end_bytes == 1024
    assert found.doubts == (
        "1 allocation at an address in use: events are missing, the earlier counts as freed",
        "counted as alive: 1 allocation neither freed nor in a block at the end",
    )


def test_out_of_memory_event_has_allocated_bytes(write_snapshot: Write) -> None:
    oom = {"action": "oom", "size": 1 << 40, "device_free": 77, "frames": []}
    found = replay(read(write_snapshot({"device_traces": [[event("alloc", 512), oom, event("free_requested", 512)]]})))
    assert found.out_of_memory == ((1, 1 << 40, 77, 1024, 0),)


@pytest.mark.parametrize(
    ("settings", "requested", "given"),
    [
        ({}, 1, 512),
        ({}, 513, 1024),
        ({"roundup_power2_divisions": {"1": 4, "2": 0}}, 1_200_000, 1_310_720),  # quarters of 1 MiB
        ({"roundup_power2_divisions": {"1": 0, "2": 4}}, 1_200_000, 1_200_128),
        ({"roundup_power2_divisions": {"1": 4}}, 2000, 2048),  # 512 × 4 or less is not divided
    ],
)
def test_requests_are_rounded_by_settings(settings: Event, requested: int, given: int, write_snapshot: Write) -> None:
    data = {"device_traces": [[event("alloc", 512, requested)]], "allocator_settings": settings}
    assert replay(read(write_snapshot(data))).peak_bytes == given


@pytest.mark.parametrize(
    ("settings", "given"),
    [({}, 5 * MIB), ({"expandable_segments": True}, 4 * MIB + 512), ({"max_split_size": 4 * MIB}, 20 * MIB)],
)
def test_unsplit_remainder_is_allocated(settings: Event, given: int, write_snapshot: Write) -> None:
    """Request a little over 4 MiB of a free piece of 20 MiB, or of 5 MiB where the next one in use begins."""
    segment = event("segment_alloc", 0, 20 * MIB)
    above = [] if "max_split_size" in settings else [event("alloc", 5 * MIB, 15 * MIB)]
    events = [segment, *above, event("alloc", 0, 4 * MIB + 1)]
    found = replay(read(write_snapshot({"device_traces": [events], "allocator_settings": settings})))
    assert [a.bytes for a in found.allocations if a.address == 0] == [given]
