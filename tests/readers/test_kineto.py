"""Chrome traces of torch.profiler: a real one, damaged ones, and the window through which the file is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.config import ConfigError
from cs_systems.readers import _chrome_trace as chrome_trace
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Trace

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]


def test_real_trace_is_read_completely(kineto_trace: Trace) -> None:
    r = kineto_trace
    assert (len(r.kernels), len(r.copies), r.devices, r.limitations) == (714, 24, {0: "NVIDIA H200"}, ())
    assert all(kernel.launch_start_s is not None and kernel.launch_start_s < kernel.start_s for kernel in r.kernels)
    assert r.ops is not None
    assert {op.forward_thread for op in r.ops} == {0, 1}


def test_driver_launches_are_matched_with_kernels(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    """Triton, and here cuBLAS, launch with cuLaunchKernel only."""
    without = [e for e in kineto_events if e.get("cat") != "cuda_driver"]
    assert sum(kernel.thread is None for kernel in read(write_trace(without)).kernels) == 51


@pytest.mark.parametrize("window", [64, 1000, 1 << 22])
def test_parsed_trace_does_not_depend_on_window_size(
    kineto_path: Path, kineto_trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, window: int
) -> None:
    path = tmp_path / "part.json"
    events = json.loads(gzip.decompress(kineto_path.read_bytes()))["traceEvents"]
    kept = [e for e in events if e.get("cat") in ("kernel", "cuda_runtime", "cuda_driver", "user_annotation")]
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": kept, "traceName": "x"}))
    monkeypatch.setattr(chrome_trace, "WINDOW", window)
    assert [k.function for k in read(path).kernels] == [k.function for k in kineto_trace.kernels]


def test_array_of_events_is_accepted(kineto_events: list[Event], tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text(json.dumps(kineto_events, indent=1))
    assert len(read(path).kernels) == 714


@pytest.mark.parametrize("compressed", [False, True])
def test_byte_order_mark_is_skipped(kineto_path: Path, kineto_trace: Trace, tmp_path: Path, compressed: bool) -> None:
    content = b"\xef\xbb\xbf" + gzip.decompress(kineto_path.read_bytes())
    (path := tmp_path / "trace.json").write_bytes(gzip.compress(content) if compressed else content)
    assert columns(read(path)) == columns(kineto_trace)


def test_further_arrays_of_events_are_read_and_named(
    kineto_events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = json.dumps(kineto_events[:5000]), json.dumps(kineto_events[5000:])
    path = tmp_path / "twice.json"
    path.write_text(f'{{"traceEvents": {first}, "of": {{"traceEvents": [1]}}, "traceEvents": {second}, "x": 1}}')
    for window in (chrome_trace.WINDOW, 1000):
        monkeypatch.setattr(chrome_trace, "WINDOW", window)
        trace = read(path)
        assert len(trace.kernels) == 714
        assert trace.limitations == ("it has traceEvents 2 times; the events of all are read",)


def columns(trace: Trace) -> list[Any]:
    """Return the contents of a trace as plain values."""
    assert trace.operators is not None
    tree = (trace.operators.start_s, trace.operators.end_s, trace.operators.thread, trace.operators.parent)
    rows = list(trace.kernels), list(trace.ranges), list(trace.ops or ()), list(trace.operators.signature)
    return [*rows, list(trace.copies), list(trace.calls), *(column.tolist() for column in tree)]


@pytest.mark.parametrize(
    "odd",
    [
        '{"cat": "x", "args": {"of": NaN}}',
        '{"cat": "x", "name": "\\ud800"}',
        "5",
        '{"cat": "x", "args": [1]}',
        '{"cat": ["x"]}',
        '{"cat": "x", "args": {"a": [{"b": 1}, {"c": 2}]}}',
        '{"cat": "x", "name": "a}, {b},{"}',
        '{"ph": "X", "cat": "cpu_op", "name": "lambda#1", "pid": 1, "tid": 1, "ts": 1, "dur": -1, "args": {}}',
        '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1e30, "ts": 4315368497928, "dur": 1}',
    ],
)
def test_irregular_events_do_not_change_other_events(
    kineto_events: list[Event], kineto_trace: Trace, tmp_path: Path, odd: str
) -> None:
    """They make the reader decode and keep the neighbouring events one by one."""
    among = [json.dumps(event) for event in kineto_events]
    for place in range(len(among) - 10, 10, -50):
        among.insert(place, odd)
    (path := tmp_path / "odd.json").write_text(f'{{"traceEvents": [{", ".join(among)}]}}')
    assert columns(read(path)) == columns(kineto_trace)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_trace_is_refused(kineto_path: Path, tmp_path: Path, share: float, compressed: bool) -> None:
    content = kineto_path.read_bytes() if compressed else gzip.decompress(kineto_path.read_bytes())
    path = tmp_path / "half.json"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"is truncated"):
        read(path)


def test_damaged_gzip_is_refused_as_truncated_or_damaged(kineto_path: Path, tmp_path: Path) -> None:
    content = bytearray(kineto_path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 200] = b"\xff" * 200
    path = tmp_path / "damaged.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is truncated or damaged \(Error .*\); copy it again, or record it again"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{}",
            "is not a trace, because it has no traceEvents; give a file that torch.profiler's export_chrome",
        ),
        (
            '{"traceEvents": []}',
            "holds no kernel and no range; record with activities=.*ProfilerActivity.CUDA.*, and mark",
        ),
        ('{"traceEvents": [{"ph": "X", ]}', "is damaged: event 1 is not valid JSON; record again without"),
        ('{"a" 1, "traceEvents": []}', "does not begin as a Chrome trace"),
        ('{"\xff', "has bytes that are not text"),
    ],
)
def test_invalid_trace_is_refused_with_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_invalid_event_far_from_the_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quotation mark in a name is followed by more text than an event may have."""
    monkeypatch.setattr(chrome_trace, "WINDOW", 1 << 10)
    monkeypatch.setattr(chrome_trace, "LONGEST_EVENT", 1 << 12)
    events = ['{"name": "a "b" c", "ph": "X"}', *['{"name": "later", "ph": "i"}'] * 1000]
    (path := tmp_path / "trace.json").write_text(f'{{"traceEvents": [{",".join(events)}]}}')
    with pytest.raises(
        ConfigError, match="is damaged: event 1 is not valid JSON; record again without quotation marks"
    ):
        read(path)


def test_unfinished_ranges_are_reported_and_left_out(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    def endless(event: Event) -> Event:
        without = {name: value for name, value in event.items() if name != "dur"}
        return without if event.get("cat") == "user_annotation" and event["name"] == "forward" else event

    made = profile(read(write_trace([endless(e) for e in kineto_events])), "backward")
    assert "left out: 3 events without an end ('forward' …)" in made.notes[0]
    with pytest.raises(ConfigError, match=r"no range is named 'step' \(.* without an end .*\); choose among"):
        profile(made.trace, "step")


def of_another_process(events: Sequence[Event], correlations: int) -> list[Event]:
    """Return copies of the host's and the device's events for process 999, with other correlation ids."""
    again = []
    for event in events:
        args = event.get("args", {})
        host = event.get("cat") in ("cuda_runtime", "cuda_driver", "user_annotation", "cpu_op")
        if host or event.get("cat") in ("kernel", "gpu_memcpy"):
            moved = {"correlation": args["correlation"] + correlations} if "correlation" in args else {}
            again.append(event | ({"pid": 999} if host else {}) | {"args": args | moved})
    return again


def test_processes_with_equal_launch_numbers_are_refused(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    path = write_trace([*kineto_events, *of_another_process(kineto_events, 0)])
    with pytest.raises(
        ConfigError,
        match=r"the processes 482, 999 with the same correlation ids, .* is unknown; analyze a separate trace",
    ):
        read(path)


def test_process_option_selects_one_of_two(
    kineto_events: list[Event], kineto_profile: Profile, write_trace: WriteTrace
) -> None:
    backward = [e for e in kineto_events if e.get("cat") == "user_annotation" and e["name"] == "backward"]
    path = write_trace([*kineto_events, *of_another_process([e for e in kineto_events if e not in backward], 100_000)])
    assert read(path).limitations[0] == (
        "the file holds several processes: 482 (714 kernels), 999 (714 kernels); process 482 is read, because it "
        "has the most kernels; --process reads another"
    )
    with pytest.raises(ConfigError, match=r"no kernel of process 7; choose the process among 482"):
        read(path, 7)
    own, other = profile(read(path, 482)), profile(read(path, 999))
    assert (own.groups, own.places.codes.tolist()) == (kineto_profile.groups, kineto_profile.places.codes.tolist())
    assert len(own.trace.copies) == len(kineto_profile.trace.copies)
    assert len(other.trace.kernels) == 714
    assert {place.phase for place in other.places} == {"forward", "optimizer", "unattributed"}


def test_graph_kernels_have_the_phase_of_the_graph_launch(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    """One call launches ten kernels of forward."""
    forward = next(e for e in kineto_events if e.get("cat") == "user_annotation" and e["name"] == "forward")
    call = next(e for e in kineto_events if e.get("cat") == "cuda_runtime" and forward["ts"] < e["ts"])
    inside = [e for e in kineto_events if e.get("cat") == "kernel"][:10]
    shared = {"correlation": call["args"]["correlation"], "graph node id": 5}
    graph = [e | {"args": e["args"] | shared} for e in inside]
    made = profile(read(write_trace([*(e for e in kineto_events if e not in inside), *graph])))
    assert [k.in_graph for k in made.trace.kernels].count(True) == 10
    assert "10 kernels ran in CUDA graphs" in made.notes[-1]


def test_damaged_events_are_counted(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    kernel = next(e for e in kineto_events if e.get("cat") == "kernel")
    changes = (
        {"args": {"device": "a"}},
        {"args": 3},
        {"ts": "late"},
        {"ts": 1e300},
        {"dur": -1},
        {"dur": float("nan")},
    )
    trace = read(write_trace([*kineto_events, *(kernel | change for change in changes), kernel | {"cat": []}]))
    assert len(trace.kernels) == 714
    assert "left out: 6 events without a valid time or number" in trace.limitations[0]
    with pytest.raises(ConfigError, match="is damaged: the number of a thread, device or stream is out of range"):
        read(write_trace([*kineto_events, kernel | {"args": kernel["args"] | {"device": 10**30}}]))


def test_steps_without_step_range_last_from_forward_to_forward(kineto_trace: Trace) -> None:
    made = profile(kineto_trace)
    assert [kernels.calls for kernels in made.by_step.values()] == [238, 238, 238]
    assert "no range is named step: each step is assumed to begin with its forward" in made.notes[0]
