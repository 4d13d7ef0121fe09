"""Stages of a recording: timed steps, steps under a profiler, and steps with a sampled stack."""

from __future__ import annotations

from typing import NamedTuple

from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.measure.profilers import Profiler
from cs_systems.measure.recorder.inputs import StepInputs
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.watch import LEAST_SAMPLED

AUTO, KINETO = "auto", "kineto"  # auto: kineto on a GPU, where a step's kernels decide; on a CPU none
PROFILES = (AUTO, KINETO, "nsys", RunConfig.profiler)
STACKS = "stacks"  # last stage, in which the stack is sampled; it has no record of its own


class Stage(NamedTuple):
    """Part of a recording: `steps` steps under the profiler `name`, timed without one, or with the stack sampled.

    warmup: warm-up steps of its record.
    """

    name: str
    steps: int
    profiler: Profiler
    warmup: int = 0

    @classmethod
    def of(cls, name: str, steps: int, warmup: int = 0) -> Stage:
        return cls(name, steps, plugins.get("profilers", name), warmup)

    @property
    def is_timed(self) -> bool:
        return self.name == RunConfig.profiler

    @property
    def is_recorded(self) -> bool:
        return self.name != STACKS

    @property
    def words(self) -> str:
        return self.profiler.result or f"profile by {self.name}"

    def period(self, warm: int) -> Period:
        """Return the period of the next step.

        warm: the number of finished warm-up steps.
        """
        if not self.is_timed:
            profiled = Period.HISTORY if self.profiler.measures == "memory" else Period.PROFILED
            return profiled if self.is_recorded else Period.SAMPLED
        if warm >= self.warmup:
            return Period.TIMED
        if warm == 0:
            return Period.FIRST
        return Period.WARMUP if warm < max(2, self.warmup - 1) else Period.LAST


def stages_of(
    profile: str, *, on_gpu: bool, warmup: int, steps: int, profile_steps: int, snapshot: bool, stacks: bool
) -> list[Stage]:
    """Return the stages that the options of a recorder ask for."""
    if profile == AUTO:
        profile = KINETO if on_gpu else RunConfig.profiler
    profiles = [*([profile] if profile != RunConfig.profiler else []), *(["memory_snapshot"] if snapshot else [])]
    sampled = [Stage(STACKS, LEAST_SAMPLED, Profiler(on_each_rank=True))] if stacks else []
    timed = Stage.of(RunConfig.profiler, steps, warmup)
    return [timed, *(Stage.of(each, profile_steps, warmup) for each in profiles), *sampled]


class Taken(NamedTuple):
    """Recorded step, and the number of compilations in this process up to its end."""

    timeline: Timeline
    compilations: int
    compile_s: float
    size: StepInputs
