"""Rule for late kernels: the GPU is idle although the next kernel is launched, for long or between short kernels."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import LATENCY
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

# Least share of the longest wait: many short waits are the usual time between two kernels of a stream.
NOTABLE = 0.1
MANY = 0.2  # share of the step for short waits, which shorter kernels than usual make
SHORT_S = 5e-6  # mean time between two kernels of a stream, at most
FEWER = "launch fewer and larger kernels, or capture them in a CUDA graph, which starts them sooner one after another"
REMEDY = (
    "find what the kernel after the gap waits for, in the timeline (--format html): another stream, a first launch "
    "(warm up longer), another process on the GPU"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which a launched kernel did not start: a few long ones, or the usual one after every kernel.

    The kernels of other processes make long ones; a caveat below the table names these processes.
    """
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(LATENCY)
    rows = evidence.gaps_by(LATENCY)
    if step_s is None or not idle_s or not rows:
        return None
    longest_s, waited_s, count = rows[0].get("longest_s"), rows[0]["time_s"], rows[0].get("gaps_per_step")
    if count and waited_s <= SHORT_S * count and idle_s >= MANY * step_s:
        each = human(waited_s / count, "s")
        cause = f"{idle_s / step_s:.0%} of the step is the usual time between two kernels, {each} each"
        return Diagnosis(cause, FEWER, step_s, step_s - idle_s, evidence=rows)
    if longest_s is None or longest_s < NOTABLE * waited_s or evidence.shares_device:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU is idle although the next kernel is launched"
    return Diagnosis(cause, REMEDY, step_s, step_s - idle_s, evidence=rows)


RULE = Rule(find)
