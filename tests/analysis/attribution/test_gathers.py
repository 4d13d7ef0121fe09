"""Gathers of sharded parameters: late where nothing was computed just before they ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cs_systems import run
from cs_systems.analysis.attribution.gathers import GATHERS, gathers
from cs_systems.analysis.attribution.overlap import picture, streams
from cs_systems.config import RunConfig, preset
from cs_systems.readers._kineto import read
from tests.analysis.attribution.made import PRODUCT, Made
from tests.analysis.attribution.test_overlap import event, kernel, write

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gather(start: float, duration: float, number: int, elements: int = 1024) -> list[dict[str, Any]]:
    described = {"Collective name": "_allgather_base", "In msg nelems": elements, "Group size": 2, "dtype": "Float"}
    launch, made = kernel(GATHER, start, duration, number, 20)
    made["args"] |= described
    return [launch, made]


def trace(path: Path) -> Path:
    """Write a step: forward computes at 30 to 60 and 60 to 90, backward at 100 to 130 and 140 to 170."""
    events = [event("user_annotation", "step", 0, 200), event("user_annotation", "forward", 1, 80)]
    events.append(event("user_annotation", "backward", 90, 100))
    for number, start in enumerate((30, 60, 100, 140)):
        events += kernel("sm90_gemm", start, 30, number + 1, 7)
    events += gather(10, 20, 11)  # nothing to compute until it ends
    events += gather(35, 20, 12)  # while block 0 computes
    events += gather(95, 5, 13)
    events += gather(120, 20, 14)  # 10 µs during block 1, 10 µs alone
    return write(path, events)


def test_gathers_are_late_by_the_idle_time_before_their_end(tmp_path: Path) -> None:
    found = read(trace(tmp_path / "t.json"))
    rows = gathers(found, streams(found)[0], layers=2)
    assert [(row["phase"], row["layer"], row["in_time"]) for row in rows] == [
        ("forward", "block 0", False), ("forward", "block 1", True),
        ("backward", "block 1", False), ("backward", "block 0", False),
    ]  # fmt: skip
    assert [round(row["late_s"] * 1e6, 6) for row in rows] == [20, 0, 5, 10]
    assert {row["gathered_bytes"] for row in rows} == {8192}


def test_layers_are_unknown_if_gathers_and_blocks_differ_in_number(tmp_path: Path) -> None:
    found = read(trace(tmp_path / "t.json"))
    assert {row["layer"] for row in gathers(found, streams(found)[0], layers=3)} == {None}


@pytest.mark.parametrize("number", [0, 1])
def test_work_of_a_step_may_end_after_the_next_step_launched(number: int) -> None:
    """The host runs ahead: the second step launches a kernel and a gather before the first one's gather has ended."""
    made = Made()
    for begin_s in (1.0, 2.0):
        made.range("step", begin_s, begin_s + 1)
        made.range("forward", begin_s, begin_s + 1)
        made.kernel(PRODUCT, begin_s + 0.5, begin_s + 1.25, begin_s + 0.125)
        made.kernel(GATHER, begin_s + 1.0, begin_s + 1.5, begin_s + 0.25, stream=20)
    trace = made.trace()
    step = streams(trace)[number]
    (row,) = gathers(trace, step, layers=None)
    assert (row["start_s"], row["duration_s"], row["late_s"], row["in_time"]) == (1.0, 0.5, 0.25, False)
    assert (step.sent.tolist(), step.computed.tolist()) == ([2 * number + 1], [2 * number])
    assert [(one["stream"], one["start_s"], one["end_s"]) for one in picture(trace, step)] == [
        ("communication", 1.0, pytest.approx(1.5)), ("compute", 0.5, pytest.approx(1.25)),
    ]  # fmt: skip


@pytest.mark.parametrize(("late_s", "in_time"), [(0.25, True), (0.375, False)])
def test_gather_may_be_late_by_a_twentieth_of_its_duration(late_s: float, in_time: bool) -> None:
    made = Made()
    made.range("step", 0.0, 10.0)
    made.kernel(PRODUCT, 0.0, 6.0 - late_s)
    made.kernel(GATHER, 1.0, 6.0, stream=20)
    trace = made.trace()
    (row,) = gathers(trace, streams(trace)[0], layers=1)
    assert (row["rank"], row["late_s"], row["in_time"], row["layer"]) == (0, late_s, in_time, None)


def test_gather_launched_as_forward_ends_is_of_backward() -> None:
    made = Made()
    for name, begin_s in (("step", 0.0), ("forward", 0.0), ("backward", 1.0)):
        made.range(name, begin_s, 2.0 if name == "step" else begin_s + 1)
    made.kernel(PRODUCT, 0.0, 1.0)
    made.kernel(GATHER, 1.25, 1.5, 1.0, stream=20)
    trace = made.trace()
    assert [row["phase"] for row in gathers(trace, streams(trace)[0], layers=None)] == ["backward"]


def test_gathers_of_each_phase_have_their_own_usual_size(tmp_path: Path) -> None:
    events = [event("user_annotation", name, start, 90) for name, start in (("forward", 5), ("backward", 100))]
    events += [event("user_annotation", "step", 0, 200), *kernel("sm90_gemm", 10, 180, 1, 7)]
    for number, (start, elements) in enumerate([(10, 64), (20, 64), (110, 32), (120, 32), (130, 64)], 11):
        events += gather(start, 5, number, elements)
    found = read(write(tmp_path / "t.json", events))
    rows = gathers(found, streams(found)[0], layers=2)
    assert [row["layer"] for row in rows] == ["block 0", "block 1", "block 1", "block 0", None]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp2"])
def test_gathers_of_each_block_are_found_on_two_gpus(strategy: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = preset("small", num_layers=4)
    record = run(RunConfig(model=model, strategy=strategy, world_size=2, profiler="overlap", warmup=3, steps=3))
    assert record.status == "ok", record.reason
    rows = GATHERS.of(record.results)
    forward = [row["layer"] for row in rows if row["phase"] == "forward" and row["layer"]]
    assert forward == [f"block {number}" for number in range(4)], rows
    assert any(row["phase"] == "backward" for row in rows)
    assert all(0 <= row["late_s"] <= row["duration_s"] for row in rows)
