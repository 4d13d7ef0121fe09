"""Numbers of one moment, and histories that begin in the middle of a program."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import of_snapshot
from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.analysis.memory.tables import devices, file_row
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.analysis.memory.timeline import view
from cs_systems.cli import main
from cs_systems.cli._snapshot_text import heading
from cs_systems.readers.snapshot import read, read_all

GIB = 1 << 30
FRAMES = [{"filename": "train.py", "line": 1, "name": "main"}]
Data = dict[str, Any]
Write = Callable[..., Path]


def event(action: str, address: int, size: int, time_us: int) -> Data:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": FRAMES}


def segment(address: int, size: int, allocated: int, device: int = 0, frames: object = FRAMES) -> Data:
    """Return a segment at the end, with one block that is allocated and the free rest."""
    sizes = [("active_allocated", address, allocated), ("inactive", address + allocated, size - allocated)]
    blocks = [
        {"address": at, "size": of, "requested_size": of, "state": state, "frames": frames}
        for state, at, of in sizes
        if of
    ]
    return {"device": device, "address": address, "total_size": size, "segment_type": "large", "blocks": blocks}


def snapshot(segments: list[Data], *traces: list[Data]) -> Data:
    return {"segments": segments, "device_traces": list(traces), "allocator_settings": {}, "external_annotations": []}


def two_maxima(later: int = 0) -> Data:
    """Return a snapshot with the most reserved memory at the start, and the most allocated memory at the end.

    20 GiB that nothing uses are returned, then 5 GiB are reserved and allocated, `later` µs after the start.
    """
    old, new = 1 << 40, 2 << 40
    events = [event("segment_free", old, 20 * GIB, 1)]
    events += [event("segment_alloc", new, 5 * GIB, 2 + later), event("alloc", new, 5 * GIB, 3 + later)]
    return snapshot([segment(new, 5 * GIB, 5 * GIB)], events)


def fragmented() -> Data:
    """Return a snapshot that has 4 of 10 reserved GiB free at the peak, and 20 GiB reserved after it."""
    a, b = 1 << 40, 2 << 40
    events = [
        event("segment_alloc", a, 10 * GIB, 1),
        event("alloc", a, 6 * GIB, 2),
        event("free_completed", a, 6 * GIB, 3),
    ]
    events += [event("segment_alloc", b, 10 * GIB, 4), event("alloc", b, GIB, 5)]
    return snapshot([segment(a, 10 * GIB, 0), segment(b, 10 * GIB, GIB)], events)


def attributed(path: Path) -> Attribution:
    return attribute(replay(read(path)))


def test_reserved_memory_is_taken_at_the_peak(write_snapshot: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_snapshot(two_maxima())
    found = attributed(path)
    assert found.replay.reserved_at(found.replay.peak_event) == 5 * GIB
    assert found.replay.highest_reserved_bytes == 20 * GIB
    assert apply_rules(of_snapshot(found, tensor_names(found))).diagnoses == ()
    assert file_row(found, "x")["reserved_bytes"] == 5 * GIB
    row = devices([found])[0]
    assert (row["peak_reserved_bytes"], row["highest_reserved_bytes"]) == (5 * GIB, 20 * GIB)
    assert view(found, tensor_names(found))["highest"]["reserved"] == 5 * GIB
    assert main(["snapshot", str(path)]) == 0
    assert "reserved then 5.00 GiB, highest reserved 20.0 GiB" in " ".join(capsys.readouterr().out.split())


def test_fragmentation_is_measured_at_the_peak(write_snapshot: Write) -> None:
    found = attributed(write_snapshot(fragmented()))
    (diagnosis,) = apply_rules(of_snapshot(found, tensor_names(found))).diagnoses
    assert diagnosis.cause == "40% of the reserved memory is in no allocation even at the peak"
    assert (diagnosis.now, diagnosis.at_best) == (10 * GIB, 6 * GIB)


def test_segment_events_that_contradict_the_segments_leave_reserved_memory_unknown(write_snapshot: Write) -> None:
    data = two_maxima()
    data["device_traces"][0][1]["size"] = 9 * GIB  # more than is left
    found = attributed(write_snapshot(data))
    assert found.replay.highest_reserved_bytes is None
    assert file_row(found, "x")["reserved_bytes"] is None
    assert devices([found])[0]["highest_reserved_bytes"] is None
    assert apply_rules(of_snapshot(found, tensor_names(found))).diagnoses == ()


def test_snapshot_without_segments_has_no_reserved_memory(write_snapshot: Write) -> None:
    row = devices([attributed(write_snapshot(snapshot([], two_maxima()["device_traces"][0])))])[0]
    assert (row["reserved_bytes"], row["peak_reserved_bytes"], row["highest_reserved_bytes"]) == (None, None, None)


@pytest.mark.parametrize("later", [0, 10])
def test_sum_of_devices_is_taken_at_one_moment(write_snapshot: Write, later: int) -> None:
    """The first device frees its memory after 8 µs; the other allocates at 3 µs, or at 13."""
    one = 1 << 40
    events = [event("segment_alloc", one, 8 * GIB, 2), event("alloc", one, 7 * GIB, 2)]
    events += [event("free_completed", one, 7 * GIB, 8)]
    other = two_maxima(later)
    data = snapshot(
        [segment(one, 8 * GIB, 0), {**other["segments"][0], "device": 1}], events, other["device_traces"][0]
    )
    found = [attribute(replay(each)) for each in read_all(write_snapshot(copy.deepcopy(data)))]
    *own, total = devices(found)
    assert [row["peak_bytes"] for row in own] == [7 * GIB, 5 * GIB]
    assert total["peak_bytes"] == (12 if later == 0 else 7) * GIB
    assert total["peak_reserved_bytes"] == (13 if later == 0 else 8) * GIB
    assert total["highest_reserved_bytes"] == 20 * GIB  # before the first device reserves any


def test_sum_of_devices_without_a_clock_is_unknown(write_snapshot: Write) -> None:
    data = two_maxima()
    data["segments"].append(copy.deepcopy(data["segments"][0]) | {"device": 1})
    data["device_traces"].append(copy.deepcopy(data["device_traces"][0]))
    for each in data["device_traces"][1]:
        del each["time_us"]
    total = devices([attribute(replay(one)) for one in read_all(write_snapshot(data))])[-1]
    assert (total["peak_bytes"], total["peak_reserved_bytes"], total["highest_reserved_bytes"]) == (None, None, None)
    assert total["end_bytes"] == 10 * GIB


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_history_of_few_events_has_no_peak(
    count: int, snapshot_data: Data, write_snapshot: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy.deepcopy(snapshot_data)
    data["device_traces"] = [trace[-count:] for trace in data["device_traces"]]
    path = write_snapshot(data)
    found = attributed(path)
    row, (of_device, total) = file_row(found, "x"), devices([found])
    assert (row["peak_bytes"], row["reserved_bytes"], row["category"]) == (None, None, None)
    assert (of_device["peak_bytes"], total["peak_bytes"]) == (None, None)
    seen = json.loads(json.dumps(view(found, tensor_names(found))))
    assert seen["peak"] is None
    assert main(["snapshot", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "peak unknown, the history begins at 2026-11-20 11:00:00Z with " in out
    assert "memory where the history is highest, by category" in out
    assert "at the peak" not in out
    assert main(["snapshot", str(path), "--format", "html", "--output", str(path.with_suffix(".html"))]) == 0


def test_history_without_a_clock_begins_at_its_first_event(write_snapshot: Write) -> None:
    one = 1 << 40
    data = snapshot([segment(one, 5 * GIB, 5 * GIB)], [event("alloc", one, 5 * GIB, 1)])
    found = attributed(write_snapshot(data))
    assert "the history begins at its event 0 with 0 allocations" in heading(found, tensor_names(found))[1]


def test_blocks_with_a_stack_and_no_event_show_that_the_history_was_cut(write_snapshot: Write) -> None:
    lost, kept, new = 1 << 40, 2 << 40, 3 << 40
    events = [event("segment_alloc", new, GIB, 1), event("alloc", new, GIB, 2), event("free_completed", new, GIB, 3)]
    segments = [segment(lost, GIB, GIB), segment(kept, GIB, GIB, frames=()), segment(new, GIB, 0)]
    events += [event("alloc", new, GIB, 4)]
    segments[2]["blocks"] = segment(new, GIB, GIB)["blocks"]
    found = attributed(write_snapshot(snapshot(segments, events)))
    assert found.replay.has_peak
    assert found.replay.lost_allocations == 1  # the other was allocated before recording began
    (line,) = [line for line in heading(found, tensor_names(found)) if "history" in line]
    assert line.startswith(
        "history cut (1 block with a stack but no event): the history begins at its event 0 with 2.00"
    )


@pytest.mark.parametrize(("count", "cut"), [(1000, True), (1024, True), (1001, False), (998, False)])
def test_round_number_of_events_shows_that_the_history_was_cut(
    count: int, cut: bool, snapshot_data: Data, write_snapshot: Write
) -> None:
    data = copy.deepcopy(snapshot_data)
    data["device_traces"] = [trace[-count:] for trace in data["device_traces"]]
    found = attributed(write_snapshot(data))
    assert found.replay.is_cut == cut
    lines = [line for line in heading(found, tensor_names(found)) if "an earlier peak is unknown" in line]
    begins = f"history cut (exactly {count:,} events): " if cut else "the history begins at 2026-11-20 11:00:00Z with "
    assert [line[: len(begins)] for line in lines] == [begins]


@pytest.mark.parametrize(("count", "cut"), [(1024, True), (4096, True), (3000, True), (3001, False), (1023, False)])
def test_history_that_begins_with_free_segments_alone_may_be_cut(count: int, cut: bool, write_snapshot: Write) -> None:
    address = 1 << 40
    events = [event("segment_alloc", address, 4 * GIB, 0)]
    for n in range(1, 5001, 2):
        events += [event("alloc", address, GIB, n), event("free_completed", address, GIB, n + 1)]
    found = attributed(write_snapshot(snapshot([segment(address, 4 * GIB, 0)], events[-count:])))
    assert found.replay.is_cut == cut
    whole = attributed(write_snapshot(snapshot([segment(address, 4 * GIB, 0)], events[:1000])))
    assert not whole.replay.is_cut


@pytest.mark.parametrize("form", ["terminal", "html"])
def test_damaged_time_is_refused(form: str, write_snapshot: Write, capsys: pytest.CaptureFixture[str]) -> None:
    data = two_maxima()
    data["device_traces"][0][1]["time_us"] = 1 << 62
    path = write_snapshot(data)
    assert main(["snapshot", str(path), "--format", form, "--output", str(path.with_suffix(".out"))]) == 2
    assert "the times of two events are over 30 years apart" in capsys.readouterr().err


def test_whole_history_is_not_called_cut(snapshot_path: Path) -> None:
    found = attributed(snapshot_path)
    assert found.replay.has_peak
    assert not [line for line in heading(found, tensor_names(found)) if "history" in line]


def test_comparison_says_that_a_peak_is_unknown(
    snapshot_path: Path, snapshot_data: Data, write_snapshot: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy.deepcopy(snapshot_data)
    data["device_traces"] = [trace[-10:] for trace in data["device_traces"]]
    path = write_snapshot(data)
    assert main(["snapshot", str(path), str(snapshot_path), "--table", "category"]) == 0
    out = capsys.readouterr().out
    assert "peak unknown, 118,350,336 bytes where the history is highest" in out
    assert "memory at the peak" not in out


def test_sidecar_with_several_devices_names_no_peak(write_snapshot: Write) -> None:
    data = two_maxima()
    data["segments"].append(copy.deepcopy(data["segments"][0]) | {"device": 1})
    data["device_traces"].append(copy.deepcopy(data["device_traces"][0]))
    path = write_snapshot(data)
    known = {"schema_version": 1, "config": None, "max_allocated_bytes": GIB, "tensors": []}
    Path(f"{path}.json").write_text(json.dumps(known))
    assert [one.sidecar and one.sidecar.max_allocated_bytes for one in read_all(path)] == [None, None]
