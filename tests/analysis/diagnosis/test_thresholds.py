"""Limits of the rules of diagnosis: each rule is silent on one side of its limit and speaks on the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.diagnosis import Diagnosis, Rule, apply_rules, ranked
from cs_systems.analysis.diagnosis._evidence import Evidence, MemoryUse, of_trace
from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.record import Measurement, Sample
from cs_systems.report import diagnoses
from tests.analysis.diagnosis.test_rules import (
    ELEMENTWISE,
    FOREACH,
    H200,
    OPTIMIZER,
    RANKS,
    measured,
    timed,
    with_tables,
)

GIB = 1 << 30


def found(rule: str, evidence: Evidence) -> Diagnosis | None:
    named: Rule = plugins.get("diagnosis", rule)
    return named.find(evidence)


def in_memory(size: int, of: str = "", peak: int = 0, reserved: int | None = None, phase: str = "backward") -> Evidence:
    return Evidence(memory=MemoryUse(peak, reserved, phase, {of: size}))


def phase_of(time_s: float, *, flops: float, peak_flops_per_s: float, **config: Any) -> Evidence:
    """Return the evidence of a step of one phase, forward, whose least time is flops / peak_flops_per_s."""
    sample = Sample(0, False, time_s, {"forward": time_s}, {"forward": time_s})
    tables: Any = {
        "cost": [{"phase": "forward", "hardware_flops": flops}],
        "ceiling": [{"peak_flops_per_s": peak_flops_per_s}],
    }
    measurement = Measurement("cuda_event", (sample,) * 4, 0.0)
    return Evidence(tables, measurement, RunConfig(**config), H200)


def late(longest_s: float) -> Evidence:
    gaps: Any = [{"device": 0, "cause": "device latency", "time_s": 10.0, "longest_s": longest_s}]
    return of_trace({"gaps": gaps, "steps": [{"step": 0, "device": 0, "wall_s": 100.0}]}, H200)  # type: ignore[typeddict-item]


def clocked(clock_hz: float) -> Evidence:
    return timed(measurement=measured(sm_clock_hz=clock_hz), clock_max_hz=100e6, throttle_reasons=("power cap",))


def of_two_rounds(measurement: Measurement) -> Measurement:
    *before, last = measurement.samples
    return replace(measurement, samples=(*before, replace(last, round=1)))


# rule and limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "below_ceiling: 3 times the least time": (
        phase_of(0.75, flops=256, peak_flops_per_s=1024), phase_of(0.7501, flops=256, peak_flops_per_s=1024),
    ),
    "fragmentation: a tenth of the reserved memory": (
        in_memory(0, peak=18 * GIB + 1, reserved=20 * GIB), in_memory(0, peak=18 * GIB, reserved=20 * GIB),
    ),
    "fragmentation: 1 GiB": (
        in_memory(0, peak=4 * GIB + 1, reserved=5 * GIB), in_memory(0, peak=4 * GIB, reserved=5 * GIB),
    ),
    "kept_activations: 40% of the peak": (
        in_memory(4 * GIB - 1, "activations", peak=10 * GIB), in_memory(4 * GIB, "activations", peak=10 * GIB),
    ),
    "loss_spike: 15% of the peak": (
        in_memory(3 * GIB - 1, "logits", peak=20 * GIB), in_memory(3 * GIB, "logits", peak=20 * GIB),
    ),
    "optimizer_state: 30% of the peak": (
        in_memory(3 * GIB - 1, "optimizer state", peak=10 * GIB), in_memory(3 * GIB, "optimizer state", peak=10 * GIB),
    ),
    "late_kernels: one wait of a tenth of all": (late(0.999), late(1.0)),
    "throttled_clock: 97% of the highest": (clocked(97e6), clocked(96.9e6)),
    "short_warmup: 6 timed steps": (
        timed(measurement=measured([3.0] + [1.0] * 4)), timed(measurement=measured([3.0] + [1.0] * 5)),
    ),
    "short_warmup: 5% above the steady steps": (
        timed(measurement=measured([1.05] + [1.0] * 7)), timed(measurement=measured([1.0501] + [1.0] * 7)),
    ),
    "short_warmup: one round": (
        timed(measurement=of_two_rounds(measured([3.0] + [1.0] * 7))),
        timed(measurement=measured([3.0] + [1.0] * 7)),
    ),
    "unstable_times: 3 timed steps": (
        timed(measurement=measured([1.0, 2.0])), timed(measurement=measured([1.0, 2.0, 3.0])),
    ),
    "unused_tensor_cores: products fill a quarter of the phase": (
        phase_of(4.0, flops=67e12, peak_flops_per_s=67e12), phase_of(4.0, flops=67.1e12, peak_flops_per_s=67e12),
    ),
    "straggler: 2 ranks": (
        timed(tables={"ranks": [{"rank": 0, "wait_s": 0.04}]}),
        timed(tables={"ranks": [{"rank": 0, "wait_s": 0.04}, {"rank": 1, "wait_s": 0.01}]}),
    ),
    "exposed_communication: 2 ranks": (
        timed(replace(RANKS, world_size=1), tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "step_s": 0.2}]}),
        timed(replace(RANKS, world_size=2), tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "step_s": 0.2}]}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_speaks_on_one_side_of_its_limit(limit: str) -> None:
    rule, (silent, speaking) = limit.partition(":")[0], LIMITS[limit]
    assert found(rule, silent) is None
    assert found(rule, speaking) is not None


def test_gain_of_a_twentieth_is_worth_a_change() -> None:
    worth, less = Diagnosis("a", "", 20.0, 19.0), Diagnosis("b", "", 20.0, 19.001)
    assert ranked([less, worth]) == [worth]


def test_three_sentences_are_shown() -> None:
    gaps = [{"device": 0, "cause": cause, "time_s": 0.02} for cause in ("copy", "launch-bound")]
    four = apply_rules(with_tables(gaps=gaps, phases=[*ELEMENTWISE, *OPTIMIZER], kernels=FOREACH)) or []
    assert len(four) == 4
    assert len(diagnoses.text(four, "markdown").strip().splitlines()) == 3
