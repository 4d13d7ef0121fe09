"""Limits and exact numbers of rules that speak less often, in a step of 1 s or at a peak of 100 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.usual_steps import Usual
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.memory.graphs import UnusedGraphs
from cs_systems.readers.forms.trace import Step
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import ADD, PRODUCT, Made
from tests.analysis.diagnosis.test_exact_rules import replayed
from tests.analysis.diagnosis.test_loop_rules import TABLE, UNHELD, in_double, own
from tests.analysis.diagnosis.test_rule_limits import at_limit, check_numbers, idle, memory, step


def offloaded(time_s: float, copies_s: float = 0.0, recorded_s: float = 1.0) -> Evidence:
    """Return a step with an update by the CPU of `time_s` in the `recorded_s` that it takes under a profiler."""
    row = {"time_s": time_s, "to_host_s": copies_s, "to_device_s": copies_s}
    return step({"cpu_updates": [row], "steps": [{"step": 0, "device": 0, "wall_s": recorded_s}]})


def dense(*shares: float, update_s: float) -> Evidence:
    tables: Any = [TABLE | {"share": share, "parameter": f"table {n}"} for n, share in enumerate(shares)]
    return step({"dense_gradients": tables}, optimizer=update_s)


def emptied(*calls: str, idle_s: float) -> Evidence:
    """Return a step with own lines that empty the cache for a quarter of it each."""
    rows = [own("train", line, 0.25, call) for line, call in enumerate(calls, 1)]
    return idle({"own_python": rows}, cudaMalloc=idle_s)


def unfused(calls: float, submitted_s: float, finished_s: float = 0.0) -> Evidence:
    """Return a step with so many kernels of 250 ms in all in its update, and so much time until they are submitted."""
    evidence, phases = idle(updated(calls)), {"optimizer": submitted_s}
    sample = Sample(0, False, 1.0, phases, phases, {"optimizer": finished_s})
    return replace(evidence, measurement=Measurement("cuda_event", (sample,), 0.0), device_name=GPU)


def recorded(waits_s: float, profiler: str = "rocprofv3") -> Evidence:
    """Return a recorded step that waits for launches, 500 ms of it for those of the update."""
    made = Made()
    made.kernel(PRODUCT, 0.0, 0.25)
    made.call("cudaEventRecord", 0.25, 0.75)
    made.range("Optimizer.step#AdamW.step", 0.5, 1.0)
    made.kernel(ADD, 0.75, 1.0)
    usual = Usual(replace(made.profile(profiler=profiler), steps=(Step("step", 0.0, 1.0),)), 1.0)
    return replace(idle(updated(200.0), usual, launch_bound=waits_s), device_name=GPU)


def updated(calls: float) -> dict[str, Any]:
    kernel = {"kernel": "multi_tensor_apply", "family": "optimizer", "time_s": 0.25}
    return {"kernels": [kernel], "phases": [
        {"phase": "optimizer", "family": "all", "time_s": 0.25, "calls_per_step": calls}]}  # fmt: skip


GPU = "NVIDIA H100 80GB HBM3"
ALONE, WITH_WAITS = 0.25 * 13 / 20, 0.25 * 13 / 20 + 0.25  # what fusing the update saves
NOT_FUSED = "the optimizer takes 25% of the step, and its kernels are not fused"

# rule: limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "cpu_offload: a twentieth of the step": (offloaded(0.0499), offloaded(0.05)),
    "dense_gradients: half of the optimizer's elements": (dense(0.4999, update_s=1.0), dense(0.5, update_s=1.0)),
    "dense_gradients: a tenth of the step": (dense(0.5, update_s=0.1999), dense(0.5, update_s=0.2)),
    "double_precision: of weights whose rate is known": (
        step({"double_precision": [in_double(flops_per_s=0.0)]}, forward=0.75),
        step({"double_precision": [in_double(flops_per_s=1.0, float32_flops_per_s=2.0, flops=0.5)]}, forward=0.75),
    ),
    "unfused_optimizer: in own Python, in the optimizer's phase": (
        step({"own_python": [own("f", 8, 0.25, phase="optimizer")]}),
        step({"own_python": [own("f", 8, 0.25, phase="optimizer")]}, optimizer=0.25),
    ),
}  # fmt: skip

# rule: case → (evidence, share, least that is left, words of the sentence)
NUMBERS: dict[str, tuple[Evidence, float, float | None, str]] = {
    "cpu_offload: in a step that the profiler lengthens": (
        offloaded(0.5, 0.125, recorded_s=2.0), 0.25, 0.75,
        "25% of the step the CPU updates the weights while the GPU computes nothing, 50% of it in copies",
    ),
    "cpu_offload: no more than the step, nor copies than the update": (
        offloaded(3.0, 2.0, recorded_s=2.0), 1.0, 0.0, "100% of the step the CPU updates the weights while the GPU "
        "computes nothing, 100% of it in copies",
    ),
    "dense_gradients: of all tables, with the name of the largest": (
        dense(0.25, 0.5, update_s=0.5), 0.375, None, "75% of its elements in table 1, of which",
    ),
    "dense_gradients: no more than the step": (dense(0.75, update_s=2.0), 1.0, None, "in table 0"),
    "device_allocation: lines that empty the cache": (
        emptied("torch.cuda.empty_cache", "x.empty_cache", idle_s=0.25), 0.5, 0.5,
        "50% of the step the GPU is idle while the host allocates device memory and gives it back "
        "(torch.cuda.empty_cache at train.py:1): ",
    ),
    "host_synchronisation: no more than the waits, without any for launches": (
        Evidence(
            idle({"waits": [{"call": "a", "within": "item", "time_s": 0.5, "calls_per_step": 1.0}]},
                 synchronisation=0.25).tables,
            known_replay=replayed(1.0, 0.5),
        ), 0.25, 0.75, "25% of the step the GPU is idle because the host synchronises",
    ),
    "unfused_optimizer: with the timed waits for its launches": (
        unfused(100, 0.5), WITH_WAITS, 1 - WITH_WAITS,
        "the optimizer's 100 kernels and the waits for their launches take 50%",
    ),
    "unfused_optimizer: of too few kernels to wait for": (unfused(99, 0.5), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: that the GPU computes for longer": (unfused(100, 0.5, 0.25), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: submitted faster than it is computed": (unfused(100, 0.125), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: with most of the recorded waits": (
        recorded(0.99), ALONE + 0.5, 0.5 - ALONE,
        "the optimizer's 200 kernels and the waits for their launches take 75%",
    ),
    "unfused_optimizer: with half of the recorded waits": (recorded(1.0), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: recorded waits of a twentieth": (recorded(0.05), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: recorded waits of more": (recorded(0.0501), ALONE + 0.5, 0.5 - ALONE, "take 75% of the step"),
    "unfused_optimizer: waits that the profiler explains": (recorded(0.125, "nsys"), ALONE, 1 - ALONE, NOT_FUSED),
    "unfused_optimizer: waits that the profiler lengthens": (
        recorded(0.5, "nsys"), ALONE + 0.5, 0.5 - ALONE, "recorded 1.0 s, 0.62 … 0.83 without the profiler",
    ),
    "unused_gradients: of a backward whose time is unknown": (
        step({"unused_gradients": [UNHELD]}), 0.0, None, "16 parameters that no optimizer holds",
    ),
    "unused_graph: of one pass": (
        memory(100, graphs=UnusedGraphs(1, 50, "a.py:3", (), 50)), 0.5, 50,
        "50% of the peak (released at a.py:3): run these passes under torch.no_grad() or torch.inference_mode();",
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_from_its_limit_on(limit: str) -> None:
    assert at_limit(limit, *LIMITS[limit]) == (None, True)


@pytest.mark.parametrize("case", NUMBERS)
def test_share_and_bound_of_a_rule_are_exact(case: str) -> None:
    check_numbers(case, *NUMBERS[case])
