"""Tests of faults of the profiling interface: launches without their kernels, and kernels that last 0 s.

One small recording is written in each format that has launches and kernels.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.tables import NO_COSTS, TABLES, gaps, steps
from cs_systems.analysis.attribution.timeline import results, view
from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import of_trace
from cs_systems.cli import main
from cs_systems.config import RunConfig
from cs_systems.measure.profilers._tables import tables
from cs_systems.readers import read
from cs_systems.readers._lost_kernels import launches_kernel, lost_launches, zero_kernels
from cs_systems.readers.forms.trace import NO_KERNELS, Call, Calls
from cs_systems.record import RunRecord
from tests.readers.test_rocprof import STEPS as ROCM
from tests.readers.test_rocprof import as_database, as_json
from tests.recorded import MAIN

STEP_NS, COUNT, KERNELS = 1_000_000, 4, 5
Place = tuple[int, int]  # (step, kernel in the step)
WAIT = "cudaDeviceSynchronize"


class Launch(NamedTuple):
    """Launch with its kernel, in ns; a missing kernel has no end."""

    number: int
    start: int
    kernel_start: int
    kernel_end: int | None


class Made(NamedTuple):
    """Recording of several steps: ranges, launches, and other calls of the host (name, start, end)."""

    ranges: list[tuple[str, int, int]]
    launches: list[Launch]
    calls: list[tuple[str, int, int]]


def made(lost: Collection[Place] = (), zero: Collection[Place] = (), waits: bool = True, ranges: bool = True) -> Made:
    """Return steps with consecutive kernels of 100 µs each, and a wait at the end of each step."""
    begins = [1_000_000 + step * STEP_NS for step in range(COUNT)]
    launches = []
    for step, begin in enumerate(begins):
        for n in range(KERNELS):
            start = begin + 200_000 + n * 100_000
            end = start if (step, n) in zero else None if (step, n) in lost else start + 99_500
            launches.append(Launch(1 + step * KERNELS + n, begin + 10_000 + n * 5_000, start, end))
    calls = [(WAIT, begin + 100_000, begin + 800_000) for begin in begins if waits]
    names = [("step", begin, begin + STEP_NS - 1_000) for begin in begins if ranges]
    return Made(names, launches, calls)


def as_kineto(path: Path, of: Made) -> Path:
    def event(category: str, name: str, start: int, end: int, **args: Any) -> dict[str, Any]:
        place = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 1, "tid": 1}
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        return {"ph": "X", "cat": category, "name": name, **place, **times, "args": args}

    events = [event("user_annotation", name, start, end) for name, start, end in of.ranges]
    for one in of.launches:
        call = "cudaLaunchKernel", one.start, one.start + 4_000
        events.append(event("cuda_runtime", *call, correlation=one.number))
        if one.kernel_end is not None:
            where = {"device": 0, "stream": 7, "correlation": one.number}
            events.append(event("kernel", "gemm", one.kernel_start, one.kernel_end, **where))
    events += [event("cuda_runtime", *call, correlation=1000 + n) for n, call in enumerate(of.calls)]
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": events}))
    return path


def as_rocm(write: Callable[[Path, list[Any]], Path]) -> Callable[[Path, Made], Path]:
    def written(path: Path, of: Made) -> Path:
        sides = ((256, 1, 1), (256, 1, 1))
        kernels = [
            ("gemm", one.kernel_start, one.kernel_end, 4, 1, one.number, *sides)
            for one in of.launches
            if one.kernel_end is not None
        ]
        calls = [("hipLaunchKernel", one.start, one.start + 4_000, 100, one.number, 0) for one in of.launches]
        calls += [
            (name.replace("cuda", "hip"), start, end, 100, 1000 + n, 0) for n, (name, start, end) in enumerate(of.calls)
        ]
        ranges = [(name, start, end, 100, 2000 + n) for n, (name, start, end) in enumerate(of.ranges)]
        return write(path, [ROCM | {"kernels": kernels, "calls": calls, "ranges": ranges, "marks": [], "copies": []}])

    return written


Write = Callable[[Made], Path]


@pytest.fixture(params=["kineto", "nsys", "rocprofv3, JSON", "rocprofv3, rocpd"])
def write(request: pytest.FixtureRequest, tmp_path: Path, export: Callable[..., Path]) -> Write:
    """Return a function that writes a recording in one of the formats."""

    def as_nsys(_: Path, of: Made) -> Path:
        return export(
            ranges=[(*one, MAIN) for one in of.ranges],
            launches=[(one.start, one.start + 4_000, MAIN, one.number) for one in of.launches],
            kernels=[
                ("gemm", one.kernel_start, one.kernel_end, one.number)
                for one in of.launches
                if one.kernel_end is not None
            ],
            calls=[(*call, MAIN) for call in of.calls],
        )

    format: Callable[[Path, Made], Path] = {
        "kineto": as_kineto,
        "nsys": as_nsys,
        "rocprofv3, JSON": as_rocm(as_json),
        "rocprofv3, rocpd": as_rocm(as_database),
    }[request.param]
    return lambda of: format(tmp_path / "made_results.json", of)


def test_whole_trace_is_not_called_incomplete(write: Write) -> None:
    found = profile(read(write(made())))
    assert found.incomplete is None
    assert view(found)["incomplete"] is None
    assert len(found.trace.lost_launches) == 0


@pytest.mark.parametrize("places", [[(2, 3)], [(2, n) for n in range(1, KERNELS)], [(2, n) for n in range(KERNELS)]])
def test_step_that_lacks_kernels_is_left_out_and_named(write: Write, places: list[Place]) -> None:
    found = profile(read(write(made(lost=places))))
    share = f"{len(places)} of 20 launched kernels ({len(places) / 20:.1%}) are missing in 1 of 4 steps, step 2"
    assert found.incomplete is not None
    assert found.incomplete.startswith(f"incomplete trace: {share} (launched from 0.00")
    assert found.incomplete.endswith("; left out of all tables")
    assert found.notes[0] == found.incomplete
    rows = steps(found)
    assert [(row["step"], row["kernels"]) for row in rows] == [(0, 5), (1, 5), (3, 5)]
    assert not any("launched no kernel" in note or "are left out" in note for note in found.notes[1:])
    (kernel,) = TABLES["kernels"](found, NO_COSTS)
    assert (kernel["calls_per_step"], kernel["time_s"]) == (5, pytest.approx(5 * 99.5e-6))


def test_step_with_kernels_of_zero_duration_is_left_out(write: Write) -> None:
    found = profile(read(write(made(zero=[(1, 0), (1, 4)]))))
    assert found.incomplete is not None
    assert "2 of 20 kernels (10.0%) last 0 s in 1 of 4 steps, step 1 (launched from" in found.incomplete
    (kernel,) = TABLES["kernels"](found, NO_COSTS)
    assert kernel["mean_s"] == pytest.approx(99.5e-6)


def test_lost_kernels_and_zero_durations_are_counted(write: Write) -> None:
    found = profile(read(write(made(lost=[(0, 1)], zero=[(3, 2)]))))
    assert found.incomplete is not None
    assert "1 of 20 launched kernels (5.0%) are missing and 1 of 19 kernels (5.3%) last 0 s" in found.incomplete
    assert " in 2 of 4 steps, step 0, step 3 (" in found.incomplete


def test_trace_with_missing_kernels_in_every_step_has_no_idle_time(write: Write) -> None:
    found = profile(read(write(made(lost=[(step, step) for step in range(COUNT)]))))
    assert found.incomplete is not None
    assert " are missing in all 4 steps (launched from" in found.incomplete
    assert found.incomplete.endswith("kernel times and counts are too low, and idle time is unknown")
    assert [row["busy_share"] for row in steps(found)] == [None] * COUNT
    assert {row["cause"] for row in gaps(found)} == {"kernels not recorded"}
    of_rules: Any = {name: TABLES[name](found, NO_COSTS) for name in ("steps", "gaps", "phases", "families", "kernels")}
    assert not [one for one in apply_rules(of_trace(of_rules, None)).diagnoses if "launch" in one.cause]


def test_trace_without_steps_reports_missing_kernels(write: Write) -> None:
    of = made(lost=[(2, 0), (2, 1)], ranges=False)
    found = profile(read(write(of)))
    assert found.incomplete is not None
    assert "2 of 20 launched kernels (10.0%) are missing (launched from 0.002 to 0.002005 s)" in found.incomplete


def test_window_without_a_fault_is_complete(write: Write) -> None:
    path = write(made(lost=[(2, 3)]))
    assert profile(read(path), between=(0.0, 0.0018)).incomplete is None
    assert profile(read(path), between=(0.0018, 0.0028)).incomplete is not None


def test_kernels_missing_outside_of_the_steps_are_noted(write: Write) -> None:
    of = made(lost=[(2, 3), (2, 4)])
    found = profile(read(write(of._replace(ranges=of.ranges[:2] + of.ranges[3:]))))
    assert found.incomplete is None
    assert "2 launched kernels outside of the steps are missing" in found.notes


def test_record_of_an_incomplete_trace_has_a_caveat(write: Write) -> None:
    path = write(made(lost=[(2, 3)]))
    record = RunRecord("key", RunConfig(profiler="kineto").to_dict(), "ok")
    (caveat,) = tables(path, record).warnings
    assert caveat.code == "incomplete-trace"
    assert caveat.message.startswith("incomplete trace: 1 of 20 launched kernels (5.0%) are missing in 1 of 4 steps")


@pytest.mark.parametrize("seed", range(5))
def test_every_kernel_removed_from_a_real_trace_is_reported(
    seed: int, kineto_events: list[Any], write_trace: Callable[..., Path], change: Callable[..., Path]
) -> None:
    kernels = [e["args"]["correlation"] for e in kineto_events if e.get("cat") == "kernel"]
    removed = set(np.random.default_rng(seed).choice(kernels, 1 + 40 * seed, replace=False).tolist())
    kept = [e for e in kineto_events if e.get("cat") != "kernel" or e["args"]["correlation"] not in removed]
    assert len(read(write_trace(kept)).lost_launches) == len(removed)
    numbers = "SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY correlationId * 7919 % 10007"
    some = f"{numbers} LIMIT {len(removed)}"
    path = change(f"DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId IN ({some})")
    assert len(read(path).lost_launches) == len(removed)


def test_ranks_and_lists_of_files_name_the_incomplete_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for rank in range(2):
        path = as_kineto(tmp_path / f"rank{rank}.json", made(lost=[(2, 3)] if rank else ()))
        content = json.loads(path.read_text()) | {"distributedInfo": {"rank": rank, "world_size": 2}}
        path.write_text(json.dumps(content))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "rank 1: incomplete trace: 1 of 20 launched kernels" in capsys.readouterr().out
    for path in tmp_path.glob("*.json"):
        path.rename(path.with_name(path.name.replace("rank", "trace")))
    for name in ("trace0", "trace1", "trace2"):
        as_kineto(tmp_path / f"{name}.json", made(lost=[(2, 3)] if name == "trace1" else ()))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "trace1.json: incomplete trace: 1 of 20 launched kernels" in capsys.readouterr().out


@pytest.mark.parametrize("waits", [True, False])
def test_last_launches_without_a_kernel_count_only_if_the_program_waited_for_them(write: Write, waits: bool) -> None:
    found = read(write(made(lost=[(3, 3), (3, 4)], waits=waits)))
    assert len(found.lost_launches) == (2 if waits else 0)


def test_command_begins_with_the_missing_kernels(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = str(write(made(lost=[(2, 3)])))
    begins = "incomplete trace: 1 of 20 launched kernels (5.0%) are missing"
    assert main(["analyze", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(begins)
    assert out.count("incomplete trace") == 1
    assert main(["analyze", path, "--format", "csv", "--table", "steps"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("step,device,")
    assert err.startswith(begins)
    assert main(["analyze", path, "--format", "html", "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.index(begins) < page.index("<h2")
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", path, path, "--table", "families"]) == 0
    assert f"candidate: {begins}" in capsys.readouterr().out.replace("\n", " ")


def test_plain_data_holds_that_kernels_are_missing(write: Write) -> None:
    found = profile(read(write(made(lost=[(2, 3)]))))
    assert view(found)["incomplete"] == found.incomplete
    assert [step["number"] for step in view(found)["steps"]] == [0, 1, 3]
    assert results(found)["notes"][0] == {"table": None, "note": found.incomplete}


@pytest.mark.parametrize(
    ("calls", "lost"),
    [
        ([("cudaStreamBeginCapture_v10000", 2_000_000, 2_001_000), ("cudaStreamEndCapture", 2_050_000, 2_060_000)], 0),
        ([("cudaStreamBeginCapture", 2_012_000, 2_013_000), ("cudaStreamEndCapture", 2_050_000, 2_060_000)], 1),
        ([("cudaStreamBeginCapture", 2_000_000, 2_001_000)], 0),  # ended by the end of the recording
        ([("cudaStreamEndCapture", 2_050_000, 2_060_000)], 0),  # begins before the recording
        ([("cudaGraphInstantiate", 2_900_000, 2_950_000)], 0),
        ([("cudaStreamEndCapture", 1_000_000, 1_001_000)], 5),
    ],
)
def test_launches_that_record_a_graph_have_no_kernel(
    calls: list[tuple[str, int, int]], lost: int, tmp_path: Path
) -> None:
    of = made(lost=[(1, n) for n in range(KERNELS)])
    of.calls.extend(calls)
    found = read(as_kineto(tmp_path / "trace.json", of))
    assert len(found.lost_launches) == lost


def test_call_inside_another_is_one_launch_with_it() -> None:
    """The kernel has the correlation id of one of the two."""
    start, end = np.array([1.0, 1.1, 3.0, 3.1, 5.0, 5.1]), np.array([2.0, 1.9, 4.0, 3.9, 6.0, 5.9])
    ran = np.array([True, False, False, True, False, False])

    def lost(*thread: int) -> list[float]:
        launches = [Call("cudaLaunchKernel", *of) for of in zip(start, end, thread, strict=True)]
        found = lost_launches(NO_KERNELS, Calls.of([*launches, Call(WAIT, 9.0, 9.5, 1)]), np.arange(6), ran)
        return list(found.tolist())

    assert lost(1, 1, 1, 1, 1, 1) == [5.0]
    assert lost(1, 2, 1, 2, 1, 2) == [1.1, 3.0, 5.0, 5.1]


@pytest.mark.parametrize("share", [1, 2])
def test_kernels_without_their_number_are_not_missing(share: int, tmp_path: Path) -> None:
    """A program that shortens traces may drop the correlation ids of launches and kernels."""
    path = as_kineto(tmp_path / "trace.json", made())
    content = json.loads(path.read_text())
    for event in [e for e in content["traceEvents"] if e["cat"] == "kernel"][::share]:
        del event["args"]["correlation"]
    path.write_text(json.dumps(content))
    assert len(read(path).lost_launches) == 0


def test_call_that_failed_launched_nothing(export: Callable[..., Path]) -> None:
    of = made(lost=[(2, 3)])
    path = export(
        launches=[(one.start, one.start + 4_000, MAIN, one.number) for one in of.launches],
        kernels=[("gemm", one.kernel_start, one.kernel_end, one.number) for one in of.launches if one.kernel_end],
        ranges=[(*one, MAIN) for one in of.ranges],
        calls=[(*call, MAIN) for call in of.calls],
    )
    database = sqlite3.connect(path)
    database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME ADD COLUMN returnValue INTEGER")
    database.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET returnValue = 2 * (correlationId = 14)")
    database.commit()
    database.close()
    assert len(read(path).lost_launches) == 0


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cudaLaunchKernel", True),
        ("cudaLaunchKernel_v7000", True),
        ("cudaLaunchKernelExC_v11060", True),
        ("cudaLaunchCooperativeKernel_v9000", True),
        ("cudaLaunch_v3020", True),
        ("cuLaunchKernelEx", True),
        ("cuLaunchKernel_ptsz", True),
        ("hipExtModuleLaunchKernel", True),
        ("hipModuleLaunchKernel", True),
        ("cudaGraphLaunch_v10000", False),
        ("cudaLaunchHostFunc_v10000", False),
        ("hipGraphLaunch", False),
        ("cudaFuncGetAttributes", False),
    ],
)
def test_calls_that_launch_one_kernel(name: str, launches: bool) -> None:
    assert launches_kernel(name) == launches


def test_kernel_rounded_to_whole_microseconds_may_last_zero(tmp_path: Path) -> None:
    """Kineto before 2024 wrote whole µs; a kernel of over 3 µs elsewhere does not last 0 µs."""

    def traced(durations: list[tuple[str, int]]) -> int:
        events = [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 100 * n, "dur": duration}
            | {"args": {"device": 0, "stream": 7, "correlation": n}}
            for n, (name, duration) in enumerate(durations)
        ]
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return int(zero_kernels(read(path).kernels).sum())

    long, short = [("gemm", 50)] * 20, [("fill", 1)] * 20
    assert traced([*long, *short, ("fill", 0), ("other", 0)]) == 0
    assert traced([*long, *short, ("gemm", 0), ("fill", 0)]) == 1
    assert traced([*long, *[("fill", 0)] * 10]) == 0
    assert traced([*long, *[("fill", 0)] * 20]) == 20


def test_real_traces_are_complete(kineto_path: Path, nsys_path: Path) -> None:
    for path in (kineto_path, nsys_path):
        found = profile(read(path))
        assert found.incomplete is None
        assert not zero_kernels(found.trace.kernels).any()
