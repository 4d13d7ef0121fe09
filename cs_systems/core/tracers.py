"""Tools that record traces, and facts about them that code without torch needs.

Their names are those in a `Trace` and, if `measure/profilers` has a profiler of that name, in a record. Under such a
tool a step runs once, with the kernels that it has without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

US = 1e-6


class Inflation(NamedTuple):
    """Usual slowdown of the host by a tool: of each launch, at most by a ratio of the host's time for it."""

    per_launch_s: float
    ratio: float


@dataclass(frozen=True)
class Tracer:
    """Facts about a tool that records traces.

    Attributes:
        inflation: medians of launch-bound steps on H200; of Kineto 16 to 32 µs from the 10th to the 90th percentile.
        slower: smallest and largest factor by which it slows down a launching host: of twelve model families on one
            H100 under Kineto, and of ten sizes on one H200 under nsys.
        starts_program: whether it starts the program, so that every recording includes the program's start-up.
        for_kernels: how to record kernels, for an export that lacks a device's kernels.
    """

    inflation: Inflation | None = None
    slower: tuple[float, float] | None = None
    starts_program: bool = False
    for_kernels: str | None = None


TRACERS = {
    "kineto": Tracer(Inflation(20 * US, 2.13), slower=(1.5, 3.6)),
    "nsys": Tracer(
        Inflation(10.6 * US, 1.46),
        slower=(1.2, 1.6),
        starts_program=True,
        for_kernels="record with nsys profile --trace=cuda,nvtx",
    ),
    "rocprofv3": Tracer(starts_program=True),
}


def tracer(name: str) -> Tracer:
    """Return the facts about a tool; none are known of a tool that is not in TRACERS."""
    return TRACERS.get(name, Tracer())
