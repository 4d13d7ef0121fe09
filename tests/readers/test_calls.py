"""Calls of the CUDA and HIP interface: what each launched and waits for, in every format that has calls."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.readers import read
from cs_systems.readers._copy_names import copy_name
from cs_systems.readers._stalls import Kind, kind, stalls
from cs_systems.readers.forms.columns import UNKNOWN, Categorical, latest, outermost
from cs_systems.readers.forms.trace import Trace
from tests.readers.test_lost_kernels import WAIT, as_kineto, as_rocm, made
from tests.readers.test_rocprof import as_database, as_json
from tests.readers.test_rocprof import made as of_rocm
from tests.recorded import AUTOGRAD, MAIN, Event

WriteTrace = Callable[[Sequence[Event]], Path]
Export = Callable[..., Path]
ROCM = pytest.mark.parametrize("write", [as_json, as_database])


def assert_calls_hold_their_launches(trace: Trace) -> None:
    """Check what every reader promises of `Trace.calls`."""
    calls, kernels = trace.calls, trace.kernels
    assert calls.start_s.tolist() == sorted(calls.start_s.tolist())
    for number in np.unique(calls.thread).tolist():
        own = calls.take(calls.thread == number)
        assert (own.end_s[1:] > own.end_s[:-1]).all()  # none inside the one before it
    assert ((kernels.call == UNKNOWN) == np.isnan(kernels.launch_start_s)).all()
    known = kernels.call != UNKNOWN
    call = calls.take(kernels.call[known])
    assert (call.start_s <= kernels.launch_start_s[known]).all()
    assert (kernels.launch_end_s[known] <= call.end_s).all()
    assert (call.thread == kernels.thread[known]).all()


def test_calls_of_real_traces_contain_their_launches(kineto_trace: Trace, nsys_trace: Trace) -> None:
    for trace, calls in ((kineto_trace, 796), (nsys_trace, 1195)):
        assert_calls_hold_their_launches(trace)
        assert (trace.kernels.call != UNKNOWN).all()
        assert len(trace.calls) == calls
        launch = trace.calls.name.take(trace.kernels.call)
        assert {kind(name) for name in launch} == {Kind.LAUNCH}
        copied = trace.calls.name.take(trace.copies.call)
        assert {name.removesuffix("_v3020") for name in copied} == {"cudaMemcpyAsync"}
        assert {*trace.copies.name} == {"DtoD"}


@pytest.mark.parametrize("form", ["kineto", "nsys", "rocprofv3, JSON", "rocprofv3, rocpd"])
def test_every_call_is_kept_in_each_format(form: str, tmp_path: Path, export: Export) -> None:
    of, path = made(lost=[(1, 2)]), tmp_path / "made_results.json"
    if form == "nsys":
        ran = [("gemm", one.kernel_start, one.kernel_end, one.number) for one in of.launches if one.kernel_end]
        launches = [(one.start, one.start + 4_000, MAIN, one.number) for one in of.launches]
        path = export(launches=launches, kernels=ran, calls=[(*call, MAIN) for call in of.calls])
    else:
        write = {"kineto": as_kineto, "rocprofv3, JSON": as_rocm(as_json)}.get(form, as_rocm(as_database))
        path = write(path, of)
    trace = read(path)
    assert_calls_hold_their_launches(trace)
    assert (len(trace.kernels), len(trace.calls)) == (19, 24)
    assert [call.name.replace("hip", "cuda") for call in trace.calls.where(stalls)] == [WAIT] * 4
    assert (np.diff(trace.kernels.call) > 0).all()


def call(name: str, start: float, duration: float, number: int, thread: int = 1, **args: Any) -> Event:
    times = {"ts": start, "dur": duration}
    where = {"ph": "X", "cat": "cuda_driver" if name.startswith("cu") and name[2] != "d" else "cuda_runtime"}
    return {**where, "name": name, "pid": 1, "tid": thread, **times, "args": {"correlation": number, **args}}


def kernel(start: float, number: int, stream: int = 7) -> Event:
    place = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": stream}
    args = {"device": 0, "stream": stream, "correlation": number}
    return {**place, "ts": start, "dur": 5.0, "args": args}


def sync(name: str, start: float, number: int, **args: Any) -> Event:
    place = {"ph": "X", "cat": "cuda_sync", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": 1.0}
    return {**place, "args": {"correlation": number, "device": 0, **args}}


def test_call_inside_another_of_its_thread_belongs_to_the_outer_one(write_trace: WriteTrace) -> None:
    events = [
        call("cudaLaunchKernelExC", 0, 10, 1),
        call("cuLaunchKernelEx", 2, 5, 2),  # the kernel has the driver's number
        kernel(20, 2),
        call("cudaMemcpy", 30, 20, 3),
        call("cuStreamSynchronize", 35, 10, 4),
        call("cudaMalloc", 36, 8, 5, thread=2),
        call("cudaLaunchKernel", 50, 10, 6),  # begins where the one before it ends
        kernel(70, 6),
        kernel(80, 99),  # launched before the recording
    ]
    trace = read(write_trace(events))
    assert_calls_hold_their_launches(trace)
    assert list(trace.calls.name) == ["cudaLaunchKernelExC", "cudaMemcpy", "cudaMalloc", "cudaLaunchKernel"]
    assert trace.kernels.call.tolist() == [0, 3, UNKNOWN]
    assert trace.kernels.launch_start_s[0] == pytest.approx(2e-6)  # as the profiler attributes it


def test_reused_correlations_give_the_latest_call(write_trace: WriteTrace) -> None:
    events: list[Event] = []
    for turn in range(3):
        events += [call("hipLaunchKernel", 100.0 * turn, 10, 5), call("hipMemcpyAsync", 100.0 * turn + 40, 10, 6)]
        copy = {"name": "CopyHostToDevice", "cat": "gpu_memcpy"}
        events += [kernel(100.0 * turn + 20, 5), kernel(100.0 * turn + 60, 6) | copy]
    trace = read(write_trace(events))
    assert_calls_hold_their_launches(trace)
    assert trace.kernels.call.tolist() == [0, 2, 4]
    assert trace.copies.call.tolist() == [1, 3, 5]
    assert {*trace.copies.name} == {"HtoD"}


# Record on stream 7, twice with the same event; stream 13 waits for the second; the host waits in three ways.
CALLS = [
    ("cudaLaunchKernel", 0, 1),
    ("cudaEventRecord", 10, 2),
    ("cudaEventRecord", 20, 3),
    ("cudaStreamWaitEvent", 30, 4),
    ("cudaEventSynchronize", 40, 5),
    ("cudaStreamSynchronize", 50, 6),
    ("cudaDeviceSynchronize", 60, 7),
]
WAITS = [(3, 7, 0, 2, 13), (4, 7, 0, 2, UNKNOWN), (5, 13, 0, UNKNOWN, UNKNOWN), (6, UNKNOWN, 0, UNKNOWN, UNKNOWN)]
NO_STREAM = (1 << 32) - 1


def waits_of(trace: Trace) -> list[tuple[int, ...]]:
    waits = trace.waits
    columns = waits.call, waits.stream, waits.device, waits.event_call, waits.waiting_stream
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_waits_of_kineto_name_stream_and_event(write_trace: WriteTrace) -> None:
    event = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3, "wait_on_cuda_event_id": 1}
    none = {"wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1, "wait_on_cuda_event_id": -1}
    events = [
        *(call(name, start, 5, number) for name, start, number in CALLS),
        kernel(10, 1),
        sync("Stream Wait Event", 31, 4, stream=13, **event),
        sync("Event Sync", 41, 5, stream=-1, **event),
        sync("Stream Sync", 51, 6, stream=13, **none),
        sync("Context Sync", 61, 7, stream=-1, **none),
        sync("Context Sync", 71, 8, stream=-1, **none),  # of a call that was not recorded
    ]
    trace = read(write_trace(events))
    assert waits_of(trace) == WAITS
    assert trace.limitations == ()
    assert [kind(name).value for name in trace.calls.name] == [
        "launch", "event record", "event record", "stream wait", "event synchronise", "stream synchronise",
        "device synchronise",
    ]  # fmt: skip


SYNCHRONISATIONS = """
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION
    (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
     syncType INTEGER, eventId INTEGER, eventSyncId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT
    (deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, eventId INTEGER,
     eventSyncId INTEGER);
"""


@pytest.mark.parametrize("form", ["since 2025", "without eventSyncId", "without the table of events"])
def test_waits_of_nsys_name_stream_and_event(export: Export, form: str) -> None:
    path = export(launches=[], calls=[], kernels=[("gemm", 10, 15, 1)])
    with sqlite3.connect(path) as database:
        for name, start, number in CALLS:
            values = start, start + 5, MAIN, number, 100 + number
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", values)
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (100 + number, f"{name}_v7000"))
        database.executescript(SYNCHRONISATIONS)
        for number, sequence in ((2, 21), (3, 22)):
            row = (0, 7, number, 7 << 24, 1, sequence)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_CUDA_EVENT VALUES (?, ?, ?, ?, ?, ?)", row)
        for number, start, kind_of, stream, event, sequence in (
            (4, 31, 2, 13, 1, 22),
            (5, 41, 1, NO_STREAM, 1, 22),
            (6, 51, 3, 13, NO_STREAM, None),
            (7, 61, 4, NO_STREAM, NO_STREAM, None),
        ):
            row = (start, start + 1, 0, stream, number, 7 << 24, kind_of, event, sequence)  # type: ignore[assignment]
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES ({marks})", row)
        if form == "without eventSyncId":
            database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION DROP COLUMN eventSyncId")
        if form == "without the table of events":
            database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT")
    unknown = [(3, UNKNOWN, 0, UNKNOWN, 13), (4, UNKNOWN, 0, UNKNOWN, UNKNOWN)]
    assert waits_of(read(path)) == ([*unknown, *WAITS[2:]] if "table" in form else WAITS)


def test_event_recorded_before_the_recording_has_no_call(export: Export) -> None:
    """The handle of an event is reused: a later record is not what a wait waited for."""
    path = export(launches=[(0, 5, MAIN, 1), (30, 35, AUTOGRAD, 4), (40, 45, MAIN, 3)], kernels=[("gemm", 10, 15, 1)])
    with sqlite3.connect(path) as database:
        database.executescript(SYNCHRONISATIONS)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_CUDA_EVENT VALUES (0, 7, 3, ?, 1, NULL)", (7 << 24,))
        row = 31, 32, 0, 13, 4, 7 << 24, 2, 1
        values = "VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)"
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION {values}", row)
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION DROP COLUMN eventSyncId")
    assert waits_of(read(path)) == [(1, UNKNOWN, 0, UNKNOWN, 13)]


def test_copies_of_nsys_have_direction_memory_and_call(change: Callable[..., Path]) -> None:
    table = "CUPTI_ACTIVITY_KIND_MEMCPY"
    path = change(
        f"UPDATE {table} SET copyKind = 1, srcKind = 0 WHERE rowid = 1",
        f"UPDATE {table} SET copyKind = 2, dstKind = 1 WHERE rowid = 2",
        f"UPDATE {table} SET copyKind = 99, srcKind = NULL, dstKind = NULL, correlationId = NULL WHERE rowid = 3",
    )
    copies = list(read(path).copies)
    assert [copy.name for copy in copies[:4]] == ["HtoD pageable", "DtoH pinned", "", "DtoD"]
    assert [copy.call is None for copy in copies[:4]] == [False, False, True, False]


@ROCM
def test_copies_of_rocm_have_direction_and_call(tmp_path: Path, write: Callable[..., Path]) -> None:
    calls = [("hipMemcpy", 600, 950, 100, 17, 0), ("hipLaunchKernel", 1_050, 1_100, 100, 11, 0)]
    recording = of_rocm(calls=calls, copies=[(700, 900, 0, 4, 64, 1, 17), (960, 970, 4, 0, 64, 1, 99)])
    trace = read(write(tmp_path / "results.json", [recording]))
    assert [(copy.name, copy.call) for copy in trace.copies] == [("HtoD", 0), ("DtoH", None)]
    assert trace.kernels.call.tolist()[:2] == [1, UNKNOWN]


@ROCM
def test_call_of_a_library_holds_the_launch_inside_it(tmp_path: Path, write: Callable[..., Path]) -> None:
    trace = read(write(tmp_path / "results.json", [of_rocm()]))
    assert_calls_hold_their_launches(trace)
    names = [*trace.calls.name.take(trace.kernels.call)]
    assert names == ["hipLaunchKernel", "hipLaunchKernel", "ncclAllReduce", "hipGraphLaunch"]
    assert len(trace.calls) == 5


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD pageable"),
        ("Memcpy DtoH (Device -> Pinned)", "DtoH pinned"),
        ("Memcpy DtoD (Device -> Device)", "DtoD"),
        ("Memcpy PtoP (Device -> Device)", "PtoP"),
        ("CopyDeviceToHost", "DtoH"),
        ("MEMORY_COPY_HOST_TO_DEVICE", "HtoD"),
        ("Memset (Device)", ""),
        ("", ""),
    ],
)
def test_name_of_a_copy_has_direction_and_memory(text: str, name: str) -> None:
    assert copy_name(text) == name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("cudaLaunchKernel_v7000 cuLaunchKernelEx_ptsz hipExtModuleLaunchKernel cudaLaunch_v3020", Kind.LAUNCH),
        ("cudaGraphLaunch_v10000 hipGraphLaunch cuGraphLaunch", Kind.GRAPH_LAUNCH),
        ("cudaEventRecord_v3020 cuEventRecordWithFlags_ptsz hipEventRecord", Kind.EVENT_RECORD),
        ("cudaStreamWaitEvent_v3020_ptsz cuStreamWaitEvent", Kind.STREAM_WAIT),
        ("cudaStreamSynchronize_v3020 hipStreamSynchronize", Kind.STREAM_SYNC),
        ("cudaEventSynchronize_v3020 zeEventHostSynchronize", Kind.EVENT_SYNC),
        ("cudaDeviceSynchronize_v3020 cuCtxSynchronize", Kind.DEVICE_SYNC),
        ("cudaMemcpy_v3020 cuMemcpyDtoH_v2 hipMemcpyWithStream", Kind.BLOCKING_COPY),
        ("cudaMalloc_v3020 cudaFree cuMemAlloc_v2 cudaHostAlloc cuMemSetAccess hipMallocAsync", Kind.ALLOCATION),
        ("cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister cudaHostUnregister", Kind.ALLOCATION),
        ("cudaMemcpyAsync_v3020 cudaMemsetAsync cudaEventQuery cudaLaunchHostFunc cudaStreamCreate", Kind.OTHER),
    ],
)
def test_kind_of_a_call_follows_from_its_name(names: str, expected: Kind) -> None:
    assert {kind(name) for name in names.split()} == {expected}


SPAN = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda span: (min(span), max(span)))


@given(st.lists(st.tuples(st.integers(-2, 2), SPAN).map(lambda one: (one[0], *one[1])), max_size=9))
def test_interval_inside_another_has_an_outermost_one(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 3).T
    found = outermost(table[0], table[1].astype(float), table[2].astype(float)).tolist()
    for own, around in enumerate(found):
        (group, start, end), outer = rows[own], rows[around]
        others = [n for n, (of, begin, stop) in enumerate(rows) if n != own and of == group and start < stop]
        inside = any(rows[n][1] <= start and end <= rows[n][2] and rows[n][1:] != (start, end) for n in others)
        if start == end and not any(rows[n][1] < start for n in others):
            inside = False  # no length, at the begin of the others
        assert outer[0] == group
        assert outer[1] <= start <= end <= outer[2]
        assert found[around] == around  # the outermost is in none
        assert not inside or around != own


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), max_size=9),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 10)), max_size=5),
)
def test_latest_entry_of_a_key_is_found(entries: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    entries.sort()
    (of_key, of_time), (key, time) = (np.array(rows, np.int64).reshape(-1, 2).T for rows in (entries, wanted))
    found = latest(key, time.astype(float), of_key, of_time.astype(float)).tolist()
    for (number, at), index in zip(wanted, found, strict=True):
        own = [n for n, (of, _) in enumerate(entries) if of == number]
        before = [n for n in own if entries[n][1] <= at]
        assert index == (before[-1] if before else own[0] if own else UNKNOWN)


@given(st.lists(st.integers(0, 4), max_size=8))
def test_values_are_numbered_in_order_of_use(codes: list[int]) -> None:
    column = Categorical(["a", "b", "a", "c", "d"], np.array(codes, np.int64))
    found = column.in_order_of_use()
    assert list(found) == list(column)
    assert list(found.values) == list(dict.fromkeys(column))
