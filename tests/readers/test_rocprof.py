"""Results of AMD's rocprofv3, as JSON and as rocpd, written here after the published schemas of both.

One recording is written in both forms; the numbers are checked by adding up what was written.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs_systems.analysis.attribution.gaps import LOST
from cs_systems.analysis.attribution.profile import profile
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import _rocpd as rocpd
from cs_systems.readers import _rocprof as rocprof
from cs_systems.readers import read
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.jobs import Job
from cs_systems.readers.forms.trace import Trace

Recording = dict[str, Any]
Write = Callable[[Path, list[Recording]], Path]
KINDS = {
    "MARKER_CORE_RANGE_API": ["roctxMarkA", "roctxThreadRangeA", "roctxProcessRangeA", "roctxGetThreadId"],
    "HIP_RUNTIME_API": ["hipLaunchKernel", "hipMemcpy", "hipDeviceSynchronize", "hipGraphLaunch"],
    "RCCL_API": ["ncclAllReduce"],
    "MEMORY_COPY": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"],
    "KERNEL_DISPATCH": ["KERNEL_DISPATCH_COMPLETE"],
}
# What both forms hold. Times in ns. A kernel: name, begin, end, agent, stream, correlation, grid, workgroup in threads.
STEPS: Recording = {
    "pid": 7,
    "kernels": [
        ("gemm", 1_200, 3_200, 4, 1, 11, (512, 6, 1), (256, 4, 1)),
        ("norm", 3_400, 3_500, 4, 1, 12, (64, 1, 1), (64, 1, 1)),
        ("ncclDevKernel_Generic_1", 4_000, 4_900, 4, 2, 14, (512, 1, 1), (512, 1, 1)),
        ("gemm", 5_000, 6_000, 4, 1, 15, (512, 6, 1), (256, 4, 1)),
    ],
    # Name, begin, end, thread, correlation, ancestor.
    "calls": [
        ("hipLaunchKernel", 1_050, 1_100, 100, 11, 0),
        ("hipLaunchKernel", 1_150, 1_180, 100, 12, 0),
        ("ncclAllReduce", 3_100, 3_600, 100, 13, 0),
        ("hipLaunchKernel", 3_200, 3_300, 100, 14, 13),
        ("hipGraphLaunch", 4_200, 4_300, 101, 15, 0),
        ("hipDeviceSynchronize", 5_100, 6_100, 100, 16, 0),
    ],
    "ranges": [("step", 1_000, 6_200, 100, 1), ("forward", 1_010, 2_000, 100, 2), ("backward", 3_000, 6_150, 100, 3)],
    "marks": [("epoch", 2_500, 100, 4)],
    "copies": [(700, 900, 0, 4, 4_096, 1, 99)],  # begin, end, source, target, bytes, stream, correlation
}


def as_json(path: Path, recordings: list[Recording]) -> Path:
    kinds = list(KINDS)

    def api(name: str, begin: int, end: int, thread: int, number: int, ancestor: int = 0) -> Recording:
        kind = next(kind for kind, operations in KINDS.items() if name in operations)
        where = {"kind": kinds.index(kind), "operation": KINDS[kind].index(name), "thread_id": thread}
        times = {"start_timestamp": begin, "end_timestamp": end}
        return {**where, **times, "correlation_id": {"internal": number, "external": 0, "ancestor": ancestor}}

    def sides(three: Iterable[int]) -> dict[str, int]:
        return dict(zip("xyz", three, strict=True))

    tools = []
    for of in recordings:
        names = sorted({row[0] for row in of["kernels"]})
        calls = [api(*row) for row in of["calls"]]
        rccl = kinds.index("RCCL_API")
        tool = {
            "metadata": {"pid": of["pid"], "node": {"hostname": "host"}},
            "agents": [
                {"id": {"handle": 900}, "type": 1, "logical_node_type_id": 0, "name": "EPYC", "product_name": "EPYC"},
                {
                    "id": {"handle": 904},
                    "type": 2,
                    "logical_node_type_id": 3,
                    "name": "gfx942",
                    "product_name": "MI300X",
                },
            ],
            "strings": {
                "buffer_records": [{"kind": kind, "operations": operations} for kind, operations in KINDS.items()],
                "marker_api": [{"key": number, "value": name} for name, *_, number in [*of["ranges"], *of["marks"]]],
            },
            "kernel_symbols": [
                {"kernel_id": number, "kernel_name": f"_Z{name}.kd", "formatted_kernel_name": name}
                for number, name in enumerate(names)
            ],
            "callback_records": {"counter_collection": []},
            "buffer_records": {
                "kernel_dispatch": [
                    {
                        "thread_id": 100,
                        "correlation_id": {"internal": number, "external": 0},
                        "start_timestamp": begin,
                        "end_timestamp": end,
                        "dispatch_info": {
                            "agent_id": {"handle": 900 + agent},
                            "queue_id": {"handle": 70 + stream},
                            "kernel_id": names.index(name),
                            "group_segment_size": 1024,
                            "workgroup_size": sides(group),
                            "grid_size": sides(grid),
                        },
                        "stream_id": {"handle": stream},
                    }
                    for name, begin, end, agent, stream, number, grid, group in of["kernels"]
                ],
                "hip_api": [call for call in calls if call["kind"] != rccl],
                "rccl_api": [call for call in calls if call["kind"] == rccl],
                "marker_api": [
                    *(api("roctxThreadRangeA", begin, end, *rest) for _, begin, end, *rest in of["ranges"]),
                    *(api("roctxMarkA", time, time, *rest) for _, time, *rest in of["marks"]),
                ],
                "memory_copy": [
                    {
                        **api("MEMORY_COPY_HOST_TO_DEVICE", begin, end, 100, number),
                        "src_agent_id": {"handle": 900 + source},
                        "dst_agent_id": {"handle": 900 + target},
                        "bytes": size,
                        "stream_id": {"handle": stream},
                    }
                    for begin, end, source, target, size, stream, number in of["copies"]
                ],
            },
        }
        tools.append(tool)
    path.write_text(json.dumps({rocprof.KEY: tools}))
    return path


TABLES = {
    "metadata": "id, tag, value",
    "string": "id, string",
    "info_node": "id, hostname",
    "info_process": "id, nid, pid",
    "info_agent": "id, pid, type, type_index, name, product_name",
    "info_kernel_symbol": "id, pid, kernel_name, display_name",
    "event": "id, category_id, stack_id, parent_stack_id, extdata",
    "region": "id, pid, tid, start, end, name_id, event_id",
    "kernel_dispatch": "id, pid, agent_id, kernel_id, queue_id, stream_id, start, end, group_segment_size, "
    "workgroup_size_x, workgroup_size_y, workgroup_size_z, grid_size_x, grid_size_y, grid_size_z, event_id",
    "memory_copy": "id, pid, start, end, src_agent_id, dst_agent_id, size, stream_id, event_id",
}


def as_database(path: Path, recordings: list[Recording]) -> Path:
    path = path.with_suffix(".db")
    with closing(sqlite3.connect(path)) as database:
        for of in recordings:
            _write_tables(database, of, f"_0000_{of['pid']}")
        database.commit()
    return path


def _write_tables(database: sqlite3.Connection, of: Recording, end: str) -> None:
    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE rocpd_{table}{end} ({columns})")

    def insert(table: str, *values: Any) -> int:
        marks = ", ".join("?" * (len(values) + 1))
        ((number,),) = database.execute(f"SELECT count(*) FROM rocpd_{table}{end}")
        database.execute(f"INSERT INTO rocpd_{table}{end} VALUES ({marks})", (number + 1, *values))
        return int(number + 1)

    def text(value: str) -> int:
        known = database.execute(f"SELECT id FROM rocpd_string{end} WHERE string = ?", (value,)).fetchone()
        return int(known[0]) if known else insert("string", value)

    def event(kind: str, number: int, ancestor: int = 0, **about: str) -> int:
        return insert("event", text(kind), number, ancestor, json.dumps(about))

    pid = of["pid"]
    insert("metadata", "schema_version", "3")
    insert("info_node", "host")
    process = pid + 1000  # the process number in the tables need not be the pid
    database.execute(f"INSERT INTO rocpd_info_process{end} VALUES (?, 1, ?)", (process, pid))
    for agent, kind, index, name in ((0, "CPU", 0, "EPYC"), (4, "GPU", 3, "MI300X")):
        row = (agent, process, kind, index, f"gfx {agent}", name)
        database.execute(f"INSERT INTO rocpd_info_agent{end} VALUES (?, ?, ?, ?, ?, ?)", row)
    names = sorted({row[0] for row in of["kernels"]})
    symbols = {name: insert("info_kernel_symbol", process, f"_Z{name}.kd", name) for name in names}
    for name, begin, finish, agent, stream, number, grid, group in of["kernels"]:
        about = event("KERNEL_DISPATCH", number, number)
        where = process, agent, symbols[name], 70 + stream, stream, begin, finish, 1024
        insert("kernel_dispatch", *where, *group, *grid, about)
    for name, begin, finish, thread, number, ancestor in of["calls"]:
        kind = "RCCL_API" if name in KINDS["RCCL_API"] else "HIP_RUNTIME_API_EXT"
        insert("region", process, thread, begin, finish, text(name), event(kind, number, ancestor))
    for name, begin, finish, thread, number in of["ranges"]:
        about = event("MARKER_CORE_RANGE_API", number, message=name)
        insert("region", process, thread, begin, finish, text("roctxThreadRangeA"), about)
    for name, time, thread, number in of["marks"]:
        about = event("MARKER_CORE_RANGE_API", number, message=name)
        insert("region", process, thread, time, time, text("roctxMarkA"), about)
    for begin, finish, source, target, size, stream, number in of["copies"]:
        insert("memory_copy", process, begin, finish, source, target, size, stream, event("MEMORY_COPY", number))


FORMS = pytest.mark.parametrize("write", [as_json, as_database])


def made(**changed: Any) -> Recording:
    return copy.deepcopy(STEPS) | changed


def expected_of(recording: Recording) -> dict[str, list[int]]:
    """Return the times of the kernels in ns by their name."""
    found: dict[str, list[int]] = {}
    for name, begin, end, *_ in recording["kernels"]:
        found.setdefault(name, []).append(end - begin)
    return found


def times_of(trace: Trace) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kernel in trace.kernels:
        found.setdefault(kernel.function.name, []).append(round((kernel.end_s - kernel.start_s) * 1e9))
    return found


@FORMS
def test_kernels_copies_calls_and_ranges_are_read(tmp_path: Path, write: Write) -> None:
    trace = read(write(tmp_path / "7_results.json", [STEPS]))
    assert times_of(trace) == expected_of(STEPS)
    assert trace.devices == {3: "MI300X"}
    assert trace.limitations == ()
    assert trace.job == Job(host="host")
    first = trace.kernels[0]
    assert (first.function.grid, first.function.block, first.function.shared_bytes) == ((2, 2, 1), (256, 4, 1), 1024)
    assert (first.device, first.stream, first.thread, first.in_graph) == (3, 1, 100, False)
    assert first.launch_start_s == pytest.approx(1_050e-9)
    assert first.launch_end_s == pytest.approx(1_100e-9)
    assert [(c.kind, c.device, c.stream, c.bytes) for c in trace.copies] == [("memcpy", 3, 1, 4_096)]
    assert [(c.name, c.thread) for c in trace.calls.where(stalls)] == [("hipDeviceSynchronize", 100)]
    assert [(r.name, round(r.start_s * 1e9), r.thread) for r in trace.ranges] == [
        (name, begin, thread) for name, begin, _, thread, _ in STEPS["ranges"]
    ]


@FORMS
def test_a_kernel_has_the_phase_of_the_outermost_call_that_launched_it(tmp_path: Path, write: Write) -> None:
    trace = read(write(tmp_path / "a.json", [STEPS]))
    by_name = {kernel.function.name: kernel for kernel in trace.kernels}
    assert by_name["ncclDevKernel_Generic_1"].launch_start_s == pytest.approx(3_100e-9)  # the call of ncclAllReduce
    assert [kernel.in_graph for kernel in trace.kernels] == [False, False, False, True]
    found = profile(trace)
    assert [step.name for step in found.steps] == ["step"]
    times = {name: round(time_s * 1e9) for name, time_s in found.step_phases[0].items()}
    assert (times["forward"], times["backward"]) == (2_100, 900 + 1_000)


@FORMS
def test_command_prints_a_result(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.json", [STEPS])
    assert main(["analyze", str(path)]) == 0
    shown = capsys.readouterr().out
    assert " · rocprofv3 · MI300X · 1 step of 4 kernels" in shown
    assert main(["analyze", str(path), "--table", "operators"]) == 0
    assert "rocprofv3 records no operators" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "notes.txt").write_text("nothing")
    assert main(["analyze", str(tmp_path)]) == 0
    assert "4 kernels" in capsys.readouterr().out


def test_gzipped_json_of_an_older_rocm_is_read(tmp_path: Path) -> None:
    data = json.loads(as_json(tmp_path / "a.json", [STEPS]).read_text())
    (tool,) = data[rocprof.KEY]
    for row in tool["buffer_records"]["kernel_dispatch"]:  # ROCm 6 records no stream
        del row["stream_id"]
    for row in tool["kernel_symbols"]:
        row["demangled_kernel_name"] = row.pop("formatted_kernel_name")
    del tool["metadata"]["node"]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(data, indent=1).encode()))
    trace = read(tmp_path / "a.json.gz")
    assert {kernel.stream for kernel in trace.kernels} == {71, 72}
    assert times_of(trace).keys() == expected_of(STEPS).keys()


def test_name_with_invalid_utf_8_is_read(tmp_path: Path) -> None:
    path = as_json(tmp_path / "a.json", [STEPS])
    path.write_bytes(
        path.read_bytes().replace(b'"formatted_kernel_name": "norm"', b'"formatted_kernel_name": "n\xff\tm"')
    )
    assert times_of(read(path)).keys() == {"gemm", "n\ufffd\tm", "ncclDevKernel_Generic_1"}


@FORMS
def test_idle_time_has_no_cause_without_recorded_calls(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.json", [made(calls=[], ranges=[], marks=[])])
    found = profile(read(path))
    assert found.notes[0] == f"no HIP call was recorded, so no kernel has a phase; {rocprof.RECORD}"
    assert "4 kernels have no recorded launch and are unattributed" in found.notes
    assert main(["analyze", str(path)]) == 0
    shown = capsys.readouterr().out
    assert LOST in shown
    assert not {"kernel launches", "launch-bound"} & {*re.findall("kernel launches|launch-bound", shown)}


@FORMS
def test_process_option_selects_one_of_several(tmp_path: Path, write: Write) -> None:
    other = made(pid=8, kernels=[(f"other {row[0]}", *row[1:]) for row in STEPS["kernels"][:2]])
    path = write(tmp_path / "a.json", [STEPS, other])
    trace = read(path)
    assert times_of(trace).keys() == expected_of(STEPS).keys()
    assert "the file holds several processes: 7 (4 kernels), 8 (2 kernels); process 7 is read" in trace.limitations[0]
    assert times_of(read(path, 8)).keys() == {"other gemm", "other norm"}
    with pytest.raises(ConfigError, match="holds no kernel of process 9; choose the process among 7"):
        read(path, 9)


@FORMS
def test_damaged_records_are_counted_and_left_out(tmp_path: Path, write: Write) -> None:
    one = (1, 1, 1)
    damaged = [
        ("gemm", 9_000, 8_000, 4, 1, 20, one, one),  # ends before it begins
        ("gemm", 9_000, 9_100, 77, 1, 20, one, one),  # has an unknown agent
        ("gemm", "soon", 9_100, 4, 1, 20, one, one),
        ("gemm", 9_000, 9_100, 4, 1, "x", one, one),
        ("gemm", 9_000, 9_100, 4, 1, 20, one, (0, 1, 1)),  # a workgroup without threads
    ]
    trace = read(write(tmp_path / "a.json", [made(kernels=[*STEPS["kernels"], *damaged])]))
    assert trace.limitations == ("left out: 5 records without a valid time or number",)
    assert len(trace.kernels) == 4


@FORMS
def test_a_result_without_kernels_is_refused_with_the_remedy(tmp_path: Path, write: Write) -> None:
    nothing = made(kernels=[], ranges=[], marks=[], calls=[])
    with pytest.raises(
        ConfigError,
        match=f"holds no kernel; {rocprof.RECORD} while kernels run on the GPU",
    ):
        read(write(tmp_path / "a.json", [nothing]))
    damaged = made(kernels=[("gemm", "soon", 9_100, 4, 1, 20, (1, 1, 1), (1, 1, 1))], ranges=[], marks=[], calls=[])
    with pytest.raises(
        ConfigError, match=r"holds no kernel \(left out: 1 record without a valid time or number\); record"
    ):
        read(write(tmp_path / "c.json", [damaged]))
    host = read(write(tmp_path / "b.json", [made(kernels=[])]))
    assert (len(host.ranges), len(host.kernels)) == (3, 0)


def test_counters_in_place_of_times_are_refused(tmp_path: Path) -> None:
    data = json.loads(as_json(tmp_path / "a.json", [made(kernels=[], ranges=[])]).read_text())
    data[rocprof.KEY][0]["callback_records"]["counter_collection"] = [{}, {}]
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"holds counters of 2 kernels in place of their times; .* without --pmc"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    "text",
    ['{"rocprofiler-sdk-tool": [{"metadata": {"pid"', '{"rocprofiler-sdk-tool": 5}', '{"rocprofiler-sdk-tool": []}'],
)
def test_a_truncated_or_empty_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"truncated or damaged result of rocprofv3|holds no process"):
        read(path)


def test_a_json_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_json(tmp_path / "a.json", [STEPS])
    monkeypatch.setattr(rocprof, "LARGEST_BYTES", 1 << 10)
    with pytest.raises(ConfigError, match="the most that is read; record fewer steps, or with rocprofv3"):
        read(path)


def changed_database(tmp_path: Path, *statements: str) -> Path:
    path = as_database(tmp_path / "a.json", [STEPS])
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE rocpd_metadata_0000_7 SET value = '4.0.0'", "has version 4.0.0 of rocpd's schema, but only version 3"),
        ("ALTER TABLE rocpd_region_0000_7 RENAME COLUMN start TO start_id", "lacks the column start in"),
        ("DROP TABLE rocpd_event_0000_7", "lacks the columns id, category_id"),
        ("ALTER TABLE rocpd_kernel_dispatch_0000_7 RENAME TO rocpd_op", "is a database of rocmProfileData, which cs-"),
        ("DELETE FROM rocpd_info_process_0000_7", "holds no process"),
    ],
)  # fmt: skip
def test_a_database_of_another_form_is_refused(tmp_path: Path, statement: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(changed_database(tmp_path, statement))


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    """SQLite quotes the damaged statement in its error, which need not be UTF-8."""
    path = as_database(tmp_path / "a.json", [STEPS])
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE rocpd_string", b"CREATE \xef\xffBLE rocpd_string"))
    with pytest.raises(ConfigError, match=r"is a damaged database of rocprofv3 .*; record again"):
        read(path)


def test_two_processes_with_one_pid_are_refused(tmp_path: Path) -> None:
    path = changed_database(tmp_path, "INSERT INTO rocpd_info_process_0000_7 VALUES (1, 1, 7)")
    with pytest.raises(ConfigError, match="holds two processes with the same pid, 7"):
        read(path)


def test_a_database_with_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocpd, "MOST_ROWS", 5)
    with pytest.raises(ConfigError, match="holds 15 kernels, copies and regions, but at most 5 are read"):
        read(as_database(tmp_path / "a.json", [STEPS]))


def test_regions_of_other_kinds_are_counted(tmp_path: Path) -> None:
    trace = read(changed_database(tmp_path, "UPDATE rocpd_string_0000_7 SET string = 'host' WHERE string = 'RCCL_API'"))
    assert "left out: 1 region that are neither calls nor roctx ranges" in trace.limitations


def test_text_of_a_range_is_read_from_the_name_of_its_region(tmp_path: Path) -> None:
    path = changed_database(
        tmp_path,
        "INSERT INTO rocpd_string_0000_7 VALUES (500, 'forward')",
        "UPDATE rocpd_region_0000_7 SET name_id = 500 WHERE start = 1010",
        'UPDATE rocpd_event_0000_7 SET extdata = \'{"message": "roctxThreadRangeA"}\' WHERE stack_id = 2',
    )
    assert sorted(read(path).ranges.name) == ["backward", "forward", "step"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 10**14), st.integers(0, 10**9), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_forms_hold_the_kernels_that_were_written(tmp_path: Path, rows: list[tuple[str, int, int, int]]) -> None:
    kernels = [(n, begin, begin + took, 4, stream, 11, (1, 1, 1), (1, 1, 1)) for n, begin, took, stream in rows]
    recording = made(kernels=kernels)
    (tmp_path / "a.db").unlink(missing_ok=True)
    for write in (as_json, as_database):
        trace = read(write(tmp_path / "a.json", [recording]))
        assert len(trace.kernels) == len(rows)
        took = sorted(round(t * 1e9) for t in (trace.kernels.end_s - trace.kernels.start_s).tolist())
        assert np.abs(np.subtract(took, sorted(row[2] for row in rows))).max() <= 1_000  # of 10^14 ns


@given(st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_json_gives_a_trace_or_an_error_with_a_message(tmp_path: Path, data: st.DataObject) -> None:
    tree = json.loads(as_json(tmp_path / "a.json", [STEPS]).read_text())
    node: Any = tree[rocprof.KEY][0]
    for _ in range(data.draw(st.integers(0, 6))):
        inside = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        if not len(inside):
            break
        parent, key = node, data.draw(st.sampled_from(list(inside)))
        node = node[key]
    else:
        parent, key = tree[rocprof.KEY], 0
    parent[key] = data.draw(st.sampled_from([None, -1, 1e300, 2**70, "x", [], {}, [[]], True]))
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(tree))
    with contextlib.suppress(ConfigError):
        trace = read(path)
        assert (trace.kernels.end_s >= trace.kernels.start_s).all()
