"""Experiment: the step repeated on the same batch, instead of waiting for the next one."""

from __future__ import annotations

from cs_systems.config import Phase
from cs_systems.core.experiments import ExperimentRow
from cs_systems.measure.runtime.experimenting import STEPS, Experiment, Spread, Step, row

LEAST_SHARE = 0.05  # share of the step; a shorter wait is not worth an experiment
STANDS_FOR = "the same batch again, without loading and copying the next one"


def _concerns(step: Step) -> bool:
    return step.phase_s(Phase.INPUT) > LEAST_SHARE * step.step_s


def _run(step: Step) -> list[ExperimentRow]:
    times_s = step.times_s(without=(Phase.INPUT,))
    return [row("", "step", Spread.of(times_s), step.step_s, STANDS_FOR)]


EXPERIMENT = Experiment(_concerns, lambda step: (STEPS + 1) * step.step_s, _run)
