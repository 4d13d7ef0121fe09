"""Communication against computation: interval arithmetic that adds up in any order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.analysis.attribution.overlap import (
    NOTHING,
    Intervals,
    Streams,
    intersection,
    median_row,
    of_kernels,
    picture,
    reconcile,
    skew_rows,
    streams,
    union,
    waiting,
)
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers._kineto import read
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import PRODUCT, Made

# Whole numbers: sums of them are exact.
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


def arrays(found: list[tuple[int, int]]) -> tuple[Any, Any]:
    start = np.array([s for s, _ in found], float)
    return start, start + np.array([d for _, d in found], float)


def seconds(found: list[tuple[int, int]]) -> set[int]:
    """Return the whole seconds that any interval covers, found one by one."""
    return {t for s, d in found for t in range(s, s + d)}


@given(spans)
def test_union_covers_each_interval(found: list[tuple[int, int]]) -> None:
    merged = union(*arrays(found))
    assert merged.length_s == len(seconds(found))
    assert (merged.start_s[1:] > merged.end_s[:-1]).all()


@given(spans, spans)
def test_intersection_covers_common_time(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    both = intersection(union(*arrays(a)), union(*arrays(b)))
    assert both.length_s == len(seconds(a) & seconds(b))


def test_intervals_that_touch_are_one_and_those_of_no_time_none() -> None:
    merged = union(np.array([4.0, 0.0, 1.0, 6.0]), np.array([5.0, 1.0, 2.0, 6.0]))
    assert [column.tolist() for column in merged] == [[0.0, 4.0], [2.0, 5.0]]
    assert [len(column) for column in NOTHING] == [0, 0]
    without = Streams(Step("step", 0.0, 1.0), NOTHING, (), NOTHING)
    assert (len(without.sent), len(without.computed)) == (0, 0)


def test_copies_of_a_device_are_its_computation() -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 1.0)
    made.copy("DtoH", 2.0, 4.0)
    steps = [Step("step", 0.0, 5.0)]
    made.kernel(PRODUCT, 1.0, 1.5, device=1)
    assert [of_kernels(made.trace(), steps, device)[0].computing.length_s for device in (0, 1, None)] == [3.0, 0.5, 3.5]


def test_work_of_the_host_in_a_step_begins_in_it() -> None:
    """A trace without kernels: phases of the host are drawn."""
    made = Made()
    for name, begin, end in (("step", 1.0, 3.0), ("forward", 0.0, 1.0), ("forward", 1.0, 2.0), ("backward", 2.0, 3.0),
                             ("gloo:all_reduce", 2.5, 3.0)):  # fmt: skip
        made.range(name, begin, end)
    trace = made.trace()
    (step,) = streams(trace, "step")
    found = [(one["phase"], one["start_s"], round(one["end_s"], 9)) for one in picture(trace, step)]
    assert found == [(None, 1.5, 2.0), ("forward", 0.0, 1.0), ("backward", 1.0, 2.0)]


def test_waiting_of_a_single_step_is_told_whole() -> None:
    collectives = [Intervals(np.array([0.0]), np.array([end])) for end in (1.0, 3.0)]
    ranks = [[Streams(Step("step", 0.0, 4.0), one, ("all_reduce",), NOTHING)] for one in collectives]
    assert skew_rows(ranks) == [
        {"rank": 0, "transfer_s": 1.0, "waiting_s": 0.0}, {"rank": 1, "transfer_s": 1.0, "waiting_s": 2.0},
    ]  # fmt: skip


def test_rounding_is_neither_hidden_nor_exposed() -> None:
    """A collective begins as a kernel ends; sums of such times differ in their last digit."""
    computing = union(np.array([0.1, 0.3 - 1e-16]), np.array([0.1 + 0.2, 0.7]))
    collectives = Intervals(np.array([0.7 - 1e-16]), np.array([0.7 - 1e-16 + 0.2]))
    row = Streams(Step("step", 0.1, 0.9), collectives, ("all_reduce",), computing).row()
    assert row["hidden_s"] == 0
    assert row["exposed_s"] == row["communication_s"]
    assert row["idle_s"] == 0
    inside = Streams(Step("step", 0.1, 0.7), Intervals(np.array([0.2]), np.array([0.6])), ("all_reduce",), computing)
    assert inside.row()["exposed_s"] == 0


@given(spans, spans, st.randoms())
def test_hidden_and_exposed_add_up_in_any_order(
    communication: list[tuple[int, int]], computing: list[tuple[int, int]], random: Any
) -> None:
    row = streams_of(communication, computing).row()
    assert row["hidden_s"] + row["exposed_s"] == row["communication_s"]
    assert min(row["hidden_s"], row["exposed_s"], row["idle_s"]) >= 0
    assert row["compute_s"] + row["exposed_s"] + row["idle_s"] == row["step_s"]
    random.shuffle(communication)
    random.shuffle(computing)
    assert streams_of(communication, computing).row() == row


def streams_of(communication: list[tuple[int, int]], computing: list[tuple[int, int]]) -> Streams:
    start, end = arrays(communication)
    return Streams(
        Step("step", 0.0, 100.0), Intervals(start, end), ("nccl",) * len(communication), union(*arrays(computing))
    )


@given(st.integers(1, 4), st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_waiting_recovers_planted_delays(count: int, transfers: list[int], data: Any) -> None:
    """Ranks arrive with random delays, which the durations alone must reproduce."""
    late = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=count, max_size=count), min_size=1, max_size=1))[0]
    ranks = [np.array([t + max(late) - own for t in transfers], float) for own in late]
    found = waiting(ranks)
    assert found.transfer_s.tolist() == transfers
    assert found.wait_s.tolist() == [[max(late) - own] * len(transfers) for own in late]


def test_different_numbers_of_collectives_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"different numbers of collectives: 2, 3; profile once more"):
        waiting([np.ones(2), np.ones(3)])


def test_reconciled_terms_add_up_to_the_traced_difference() -> None:
    alone = streams_of([], [(0, 60)]).row() | {"step_s": 60.0, "idle_s": 0.0}
    several = streams_of([(50, 40)], [(0, 70)]).row() | {"step_s": 95.0, "idle_s": 5.0}
    row = reconcile(several, alone, 93.0, 59.0)
    assert row == {
        "difference_s": 34.0,
        "traced_difference_s": 35.0,
        "exposed_s": 20.0,
        "slower_compute_s": 10.0,
        "waits_longer_s": 5.0,
    }


def event(cat: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def kernel(name: str, start: float, duration: float, correlation: int, stream: int) -> list[dict[str, Any]]:
    """Return a kernel and its launch, 5 µs before."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", start - 5, 1, correlation=correlation),
        event("kernel", name, start, duration, tid=stream, device=0, stream=stream, correlation=correlation),
    ]


def gpu_trace(path: Path, allreduce_us: float) -> Path:
    """Write two steps of 100 µs: compute at 10 to 50 and 60 to 80, an all-reduce from 40 on."""
    events = []
    for n, begin in enumerate((0.0, 200.0)):
        events.append(event("user_annotation", "step", begin, 100))
        events += kernel("sm90_gemm", begin + 10, 40, 10 * n + 1, 7)
        events += kernel("sm90_gemm", begin + 60, 20, 10 * n + 2, 7)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        events += kernel(name, begin + 40, allreduce_us, 10 * n + 3, 20)
    return write(path, events)


def test_gpu_trace_gives_compute_and_communication_streams(tmp_path: Path) -> None:
    found = streams(read(gpu_trace(tmp_path / "t.json", 30)))
    assert len(found) == 2
    assert found[0].names[0].startswith("ncclDevKernel_AllReduce")
    row = {name: round(value * 1e6, 6) for name, value in median_row(found).items() if name.endswith("_s")}
    assert row == {
        "step_s": 100,
        "compute_s": 60,
        "communication_s": 30,
        "hidden_s": 20,
        "exposed_s": 10,
        "idle_s": 30,
    }


def test_analyze_prints_overlap_of_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(gpu_trace(tmp_path / "t.json", 30))]) == 0
    output = capsys.readouterr().out
    assert "communication during computation (hidden) and alone (exposed), per step" in output
    assert re.search(r"^ +1 +30\.0 +20\.0 +10\.0 +66\.7 +10\.0$", output, re.MULTILINE)


def test_skew_of_two_ranks_is_measured(tmp_path: Path) -> None:
    ranks = [streams(read(gpu_trace(tmp_path / f"{us}.json", us))) for us in (30, 45)]
    rows = [{name: round(value * 1e6, 6) for name, value in row.items() if name != "rank"} for row in skew_rows(ranks)]
    assert rows == [{"transfer_s": 30, "waiting_s": 0}, {"transfer_s": 30, "waiting_s": 15}]


def test_cpu_trace_gives_compute_and_communication_streams(tmp_path: Path) -> None:
    """gloo's ranges overlap the phases: half of the all-reduce runs during backward."""
    path = write(
        tmp_path / "cpu.json",
        [
            event("user_annotation", "step", 0, 100),
            event("user_annotation", "forward", 0, 20),
            event("user_annotation", "backward", 20, 40),
            event("user_annotation", "gloo:all_reduce", 40, 40, tid=2),
            event("user_annotation", "synchronize", 60, 21),
            event("user_annotation", "optimizer", 81, 19),
        ],
    )
    row = streams(read(path))[0].row()
    assert {name: round(row[name] * 1e6, 6) for name in ("hidden_s", "exposed_s", "compute_s")} == {
        "hidden_s": 20,
        "exposed_s": 20,
        "compute_s": 79,
    }


def test_operators_compute_where_no_backward_is_marked(tmp_path: Path) -> None:
    """DDP on a CPU: autograd's operators are in no range, and those that send are no computation."""
    path = write(
        tmp_path / "cpu.json",
        [
            event("user_annotation", "ProfilerStep#1", 0, 100),
            event("user_annotation", "DistributedDataParallel.forward", 0, 20),
            event("cpu_op", "aten::linear", 1, 19),
            event("cpu_op", "aten::addmm", 2, 10),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 25, 30, tid=2),
            event("cpu_op", "aten::mm", 30, 20, tid=2),
            event("cpu_op", "c10d::allreduce_", 50, 4, tid=2),
            event("user_annotation", "gloo:all_reduce", 40, 40, tid=3),
        ],
    )
    row = streams(read(path))[0].row()
    assert {name: round(row[name] * 1e6, 6) for name in ("hidden_s", "exposed_s", "compute_s")} == {
        "hidden_s": 10,
        "exposed_s": 30,
        "compute_s": 39,  # linear works also before and after addmm
    }


@pytest.mark.parametrize("name", ["synchronize", "communication"])
def test_communication_phase_does_not_count_as_computation_on_a_cpu(tmp_path: Path, name: str) -> None:
    marks = [("step", 0, 100), ("forward", 0, 20), ("backward", 20, 40), (name, 60, 30), ("gloo:all_reduce", 61, 20)]
    path = write(tmp_path / "cpu.json", [event("user_annotation", *mark) for mark in marks])
    assert round(streams(read(path))[0].row()["exposed_s"] * 1e6, 6) == 20
