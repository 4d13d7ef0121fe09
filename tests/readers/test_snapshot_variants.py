"""Snapshots of several devices, of requests that failed, with annotations, and of other versions of PyTorch.

A simulated allocator makes them. An independent reader, which counts without the replay, checks the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.annotations import by_annotation
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.analysis.memory.out_of_memory import out_of_memory
from cs_systems.analysis.memory.tables import devices
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.cli import main
from cs_systems.readers.snapshot import read, read_all
from tests.analysis.memory.caching_allocator import MIB, CachingAllocator

Write = Callable[..., Path]
Data = dict[str, Any]


def attributed(path: Path, device: int | None = None) -> Attribution:
    return attribute(replay(read(path, device)))


def counted_peak(data: Data, device: int) -> int:
    """Return the peak by adding up sizes backwards from the final state."""
    blocks = [b for s in data["segments"] if s["device"] == device for b in s["blocks"]]
    now: int = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    most = now
    sizes = {b["address"]: b["size"] for b in blocks}
    for event in reversed(data["device_traces"][device]):
        size = -(-event.get("size", 0) // 512) * 512
        if event["action"] == "alloc":
            now -= sizes.pop(event["addr"], size)
        elif event["action"] == "free_requested":
            now += size
        most = max(most, now)
    return most


def used(seed: int, frames: bool = True) -> CachingAllocator:
    """Return an allocator after some small allocations and frees, in order of `seed`."""
    allocator = CachingAllocator()
    kept = [allocator.alloc(1000 + seed) for _ in range(2)]
    allocator.start()
    line = ({"filename": "train.py", "line": 3, "name": "forward"},) if frames else ()
    for number in range(6):
        kept.append(allocator.alloc(5000 * (number + seed), line))
        if number % 3 == 1:
            allocator.free(kept.pop(0), line)
    return allocator


def together(*allocators: CachingAllocator) -> Data:
    """Return one snapshot with a device for each allocator."""
    parts = [allocator.snapshot(number) for number, allocator in enumerate(allocators)]
    whole = parts[0]
    whole["segments"] = [segment for part in parts for segment in part["segments"]]
    whole["device_traces"] = [allocator.events for allocator in allocators]
    return whole


def older(data: Data, version: str) -> Data:
    """Return the snapshot as an older PyTorch writes it."""
    data = copy.deepcopy(data)
    events = [event for trace in data["device_traces"] for event in trace]
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    if version in ("2.0", "2.3"):
        data.pop("external_annotations")
    if version == "2.0":
        data.pop("allocator_settings")
        for event in events:
            event.pop("time_us")
        for segment in data["segments"]:
            segment.pop("segment_pool_id")
            segment.pop("is_expandable")
        for block in blocks:
            requested = block.pop("requested_size")
            history = {"addr": block.pop("address"), "real_size": requested, "frames": block.pop("frames")}
            if block["state"] == "active_allocated":
                block["history"] = [history]
    if version == "2.4":  # annotations of every thread are among the events of device 0
        data.pop("external_annotations")
        marks = [{"action": "user_defined", "frames": [], "time_us": 1, "stream": 0} for _ in range(3)]
        data["device_traces"][0][0:0] = marks
    if version == "2.13":
        for event in events:
            event |= {"pool_id": (0, 0), "compile_context": "N/A", "user_metadata": "", "internal_metadata": "x"}
        data["device_traces"][0].append(
            {"action": "annotate", "addr": 5, "user_metadata": "late", "frames": [], "time_us": 2_000_000}
        )
    return data


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.4", "2.9", "2.13"])
@pytest.mark.parametrize("frames", [True, False])
def test_peak_is_the_same_in_every_version(write_snapshot: Write, version: str, frames: bool) -> None:
    data = used(3, frames).snapshot()
    expected = counted_peak(data, 0)
    found = attributed(write_snapshot(older(data, version)))
    assert found.replay.peak_bytes == expected
    missing = " ".join(found.replay.snapshot.missing)
    assert ("no times of events" in missing) == (version == "2.0")
    assert ("no stacks" in missing) == (not frames)


def test_all_devices_are_read_at_once(write_snapshot: Write) -> None:
    data = together(used(3), used(40), used(7))
    peaks = [counted_peak(data, device) for device in range(3)]
    found = [attribute(replay(snapshot)) for snapshot in read_all(write_snapshot(copy.deepcopy(data)))]
    assert [one.replay.peak_bytes for one in found] == peaks
    rows = devices(found)
    assert [row["device"] for row in rows] == ["0", "1", "2", "all"]
    assert [row["peak_bytes"] for row in rows] == [*peaks, sum(peaks)]
    reserved = [sum(s["total_size"] for s in data["segments"] if s["device"] == n) for n in range(3)]
    assert [row["reserved_bytes"] for row in rows] == [*reserved, sum(reserved)]
    assert rows[3]["events"] == sum(map(len, data["device_traces"]))


def test_command_shows_every_device(write_snapshot: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_snapshot(together(used(3), used(40))))
    assert main(["snapshot", path]) == 0
    out = capsys.readouterr().out
    assert f"{path} · 2 devices" in out
    assert out.count("memory at the peak, by category") == 2
    assert "device 0 of 0, 1" in out
    assert "device 1 of 0, 1" in out
    assert max(map(len, out.splitlines())) <= max(80, len(path) + 80)
    assert main(["snapshot", path, "--device", "1", "--table", "composition"]) == 0
    assert capsys.readouterr().out.count("memory at the peak, by category") == 1
    for words in (["--format", "html", "--output", "x.html"], ["--format", "csv", "--table", "top"]):
        assert main(["snapshot", path, *words]) == 2
        assert "shows one device; choose it with --device 0 or 1" in capsys.readouterr().err
    assert main(["snapshot", path, path]) == 2
    assert "holds 2 devices; choose --device 0 or 1" in capsys.readouterr().err


def test_annotations_of_pytorch_2_4_do_not_count_as_a_device(write_snapshot: Write) -> None:
    """Ranks other than 0 wrote their annotations among the events of a device 0 that they do not use."""
    data = together(used(3), used(40))
    data["segments"] = [segment for segment in data["segments"] if segment["device"] == 1]
    data["device_traces"][0] = [{"action": "user_defined", "frames": [], "time_us": 1}]
    assert read(write_snapshot(data)).devices == (1,)


def exhausted(free: int, asked: int, hole: int = 10 * MIB, expandable: bool = False) -> Data:
    """Return a snapshot of a failed request: two free pieces of `hole` bytes between used ones, one pending.

    Other segments come and go before and after it.
    """
    allocator = CachingAllocator(recording=True)
    allocator.free(allocator.alloc(50 * MIB))
    allocator.empty_cache()
    allocator.new_segment(8 * hole, small=False)
    pieces = [allocator.alloc(hole) for _ in range(8)]
    for number in (1, 4):
        allocator.free(pieces[number])
    allocator.request_free(pieces[6])
    frames = [{"filename": "train.py", "line": 9, "name": "forward"}]
    allocator.events.append({"action": "oom", "size": asked, "device_free": free, "frames": frames, "time_us": 2000000})
    allocator.complete_free(pieces[6])  # after the request had failed
    allocator.free(allocator.alloc(30 * hole))
    allocator.empty_cache()
    allocator.alloc(30 * hole)
    data = allocator.snapshot()
    data["allocator_settings"] = {"expandable_segments": expandable}
    return data


@pytest.mark.parametrize(
    ("free", "asked", "expandable", "cause"),
    [
        (5 * MIB, 40 * MIB, False, "too little memory: 15.0 MiB more than was free"),
        (5 * MIB, 25 * MIB, False, "fragmentation: enough memory was free, but in pieces; record with PYTORCH_CUDA_"),
        (5 * MIB, 25 * MIB, True, "fragmentation: enough memory was free, but in pieces"),
        (5 * MIB, 10 * MIB, False, "a free piece is large enough, but belongs to another stream or pool"),
        (50 * MIB, 30 * MIB, False, "the device had enough free memory: a limit of the process"),
    ],
)
def test_cause_of_failed_request_is_named(
    write_snapshot: Write, free: int, asked: int, expandable: bool, cause: str
) -> None:
    found = attributed(write_snapshot(exhausted(free, asked, expandable=expandable)))
    (row,) = out_of_memory(found, tensor_names(found))
    assert row["cause"].startswith(cause)
    assert (row["requested_bytes"], row["device_free_bytes"]) == (asked, free)
    assert (row["reserved_bytes"], row["allocated_bytes"]) == (80 * MIB, 50 * MIB)
    assert (row["cached_bytes"], row["largest_free_bytes"], row["free_pieces"]) == (20 * MIB, 10 * MIB, 2)
    assert row["where"] == "train.py:9 forward"


def test_failed_request_is_shown(write_snapshot: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(write_snapshot(exhausted(5 * MIB, 25 * MIB))), "--table", "out_of_memory"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "requests that failed" in out
    assert "at train.py:9 forward: fragmentation: enough memory was free, but in pieces" in out


def test_expandable_segments_are_recognised_by_their_events(write_snapshot: Write) -> None:
    """PyTorch versions differ in the settings that they write, but events and segments also show it."""
    data = used(3).snapshot()
    assert not read(write_snapshot(copy.deepcopy(data))).settings.expandable_segments
    mapped = copy.deepcopy(data)
    event = {"action": "segment_map", "addr": 1 << 50, "size": 2 * MIB, "time_us": 9, "frames": []}
    mapped["device_traces"][0].append(event)
    assert read(write_snapshot(mapped)).settings.expandable_segments
    data["segments"][0]["is_expandable"] = True
    assert read(write_snapshot(data)).settings.expandable_segments


def test_memory_is_listed_by_annotations_of_the_program(write_snapshot: Write) -> None:
    allocator = CachingAllocator(recording=True)
    kept = [allocator.alloc(1000 * (number + 1)) for number in range(6)]
    allocator.free(kept[1])
    data = allocator.snapshot()
    events = data["device_traces"][0]
    allocs = [event for event in events if event["action"] == "alloc"]
    for event in allocs[:2]:
        event["user_metadata"] = "weights"
    marks = [("epoch", allocs[0], allocs[5]), ("load", allocs[0], allocs[1]), ("load", allocs[4], events[-1])]
    data["external_annotations"] = [
        {"name": name, "stage": stage, "time_us": event["time_us"], "device": 0}
        for name, *ends in marks
        for stage, event in zip(("START", "END"), ends, strict=True)
    ]
    found = attributed(write_snapshot(data))
    rows = {row["annotation"]: row for row in by_annotation(found, tensor_names(found))}
    size = [-(-1000 * (number + 1) // 512) * 512 for number in range(6)]
    peak = sum(size)

    def numbers(name: str) -> tuple[object, ...]:
        row = rows[name]
        return tuple(row[key] for key in ("kind", "occurrences", "allocations", "at_peak_bytes", "highest_bytes"))

    assert numbers("epoch") == (None, 1, 6, peak, peak)
    assert numbers("load") == (None, 2, 4, size[0] + size[1] + size[4] + size[5], peak)
    assert numbers("weights") == ("metadata", None, 2, size[0] + size[1], None)
    assert rows["load"]["change_bytes"] == size[0] + size[1] + size[4] + size[5] - size[1]
    assert rows["weights"]["requested_bytes"] == 3000


def test_many_ranges_without_an_end_take_little_work(write_snapshot: Write) -> None:
    """Each spans all events: a pass over the events for each range would take minutes."""
    allocator = CachingAllocator(recording=True)
    allocator.alloc(1000)
    data = allocator.snapshot()
    (_, event) = data["device_traces"][0]
    data["device_traces"][0] += [event | {"addr": (1 << 45) + 512 * number} for number in range(8_000)]
    marks = [{"name": f"r{number % 500}", "stage": "START", "time_us": 0, "device": 0} for number in range(8_000)]
    data["external_annotations"] = marks
    rows = by_annotation(attributed(write_snapshot(data)), None)  # type: ignore[arg-type]
    assert {row["occurrences"] for row in rows} == {16}
    assert {row["allocations"] for row in rows} == {8_001}
