"""Total time for the experiments of a sweep, and the cells that can have experiments."""

from __future__ import annotations

from collections.abc import Iterable

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.experiments import EXPERIMENTS
from cs_systems.core.fields import Subject
from cs_systems.core.tracers import TRACERS
from cs_systems.core.validation import is_number, shown
from cs_systems.record import RunRecord

SUBJECTS = (Subject.STEP, Subject.OWN)


def refusal(config: RunConfig) -> str | None:
    """Return why a cell can have no experiment; None if it can."""
    if config.subject not in SUBJECTS:
        return f"workload {config.workload} is no training step"
    if config.is_distributed:
        return "the step of one rank cannot run alone"
    if config.is_profiled and config.profiler not in TRACERS:  # it runs kernels several times, or records memory
        return f"profiler {config.profiler} changes the step"
    return None


def check(experiments_s: float, configs: Iterable[RunConfig]) -> None:
    """Raise ConfigError for an invalid time, and for a time that has no effect on any of the cells."""
    if not is_number(experiments_s) or not experiments_s >= 0:
        raise ConfigError(f"experiments_s is {shown(experiments_s)}; give a number of seconds, at least 0")
    reasons = [refusal(config) for config in configs]
    if experiments_s and reasons and None not in reasons:
        raise ConfigError(f"experiments_s has no effect, because {reasons[0]}; leave out experiments_s")


class Allowance:
    """Time left for experiments; the first cells may use all of it."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    def of(self, configs: Iterable[RunConfig]) -> float:
        """Return the time for these cells, which are measured together."""
        return self._left_s if any(refusal(config) is None for config in configs) else 0.0

    def spend(self, record: RunRecord) -> None:
        """Subtract the time that the experiments of a record took."""
        spent_s = sum(row["spent_s"] or 0.0 for row in EXPERIMENTS.of(record.results))
        self._left_s = max(0.0, self._left_s - spent_s)
