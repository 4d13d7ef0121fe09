"""Experiments: small measurements after the last recorded step, from which diagnoses take their expectations.

An experiment is a file of `measure/experiments/`. It runs the step again, changed in one way, or a part of the step
alone. It is made only if its question arises, and only while there is time left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from cs_systems.core import plugins
from cs_systems.core.experiments import ExperimentRow, skipped
from cs_systems.core.units import human
from cs_systems.machine import device as devices
from cs_systems.machine.device import Device
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import Workload
from cs_systems.record import Measurement

STEPS = 5  # measured steps of an experiment, after one warm-up step

Phases = Iterable[tuple[str, Callable[[], Any]]]


class Skipped(Exception):
    """Error for an experiment that cannot be made here; the message is the reason."""


@dataclass(frozen=True)
class Spread:
    """Median of some times, with the smallest and largest after dropping one extreme on each side."""

    value: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Spread:
        ordered = sorted(times_s)
        inner = ordered[1:-1] if len(ordered) >= STEPS else ordered
        return cls(median(ordered), inner[0], inner[-1], len(ordered))


@dataclass(frozen=True)
class Step:
    """Recorded step for experiments.

    Attributes:
        device: its device.
        clean: its samples without a profiler; all are timed.
        phases: returns the phases of a step to run again; None if no step can be called.
        prepare: the untimed work before each step.
        reason: why no step can be called.
        is_eager: PyTorch dispatches each operator of the step, so that a TorchDispatchMode sees it.
        precision: the precision of its matrix products, a value of Precision; None if unknown.
        waits: the device is synchronised after each recorded step.
    """

    device: Device
    clean: Measurement
    phases: Callable[[], Phases] | None
    prepare: Callable[[], object] = lambda: None
    reason: str = ""
    is_eager: bool = True
    precision: str | None = None
    waits: bool = True

    @property
    def step_s(self) -> float:
        return self.clean.median_s() or 0.0

    def phase_s(self, name: str) -> float:
        return (self.clean.median_s(name) or 0.0) if name in self.clean.phase_names() else 0.0

    def again(self, without: Collection[str] = ()) -> Phases:
        """Yield the phases of a step to run, except `without`."""
        assert self.phases is not None
        return ((name, run) for name, run in self.phases() if name not in without)

    def run(self, without: Collection[str] = ()) -> None:
        """Run one step, except the phases in `without`."""
        self.prepare()
        for _, phase in self.again(without):
            phase()

    def times_s(self, without: Collection[str] = (), steps: int = STEPS) -> list[float]:
        """Return the durations of some steps without some phases, measured in the same way as the recorded steps."""
        if self.waits:
            samples = measure(_Part(self, without), self.device, warmup=1, steps=steps)
            return [sample.wall_s for sample in samples if not sample.warmup]
        self.run(without)
        return [self._together_s(without, steps) for _ in range(ROUNDS_TOGETHER)]

    def _together_s(self, without: Collection[str], steps: int) -> float:
        """Return the mean duration of consecutive steps without waiting for the device in between."""
        self.device.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.run(without)
        self.device.synchronize()
        return (time.perf_counter() - begin) / steps


ROUNDS_TOGETHER = 3


class _Part(Workload):
    """Workload of a step without some of its phases."""

    def __init__(self, step: Step, without: Collection[str]) -> None:
        self._step, self._without = step, without

    def prepare(self) -> None:
        self._step.prepare()

    def step(self) -> Phases:
        return self._step.again(self._without)

    def describe(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Experiment:
    """Experiment: the constant of each file in `measure/experiments/`.

    Attributes:
        concerns: whether the question arises for this step.
        cost_s: returns about how long it takes, in s.
        run: makes the experiment, and returns its rows. Raises Skipped.
    """

    concerns: Callable[[Step], bool]
    cost_s: Callable[[Step], float]
    run: Callable[[Step], list[ExperimentRow]]


class Made(NamedTuple):
    """Rows of the experiments of a step; `is_usable`: the device still works."""

    rows: list[ExperimentRow]
    is_usable: bool = True


def row(instead: str, of: str, then: Spread, baseline_s: float | None, stands_for: str) -> ExperimentRow:
    """Return the row of an experiment that was made; `run_all` adds its name and its cost."""
    return {
        "experiment": "",
        "instead": instead,
        "of": of,
        "time_s": then.value,
        "low_s": then.low,
        "high_s": then.high,
        "baseline_s": baseline_s,
        "rounds": then.rounds,
        "spent_s": None,
        "stands_for": stands_for,
        "skipped": None,
    }


def concerning(step: Step) -> dict[str, Experiment]:
    """Return the experiments with a question that arises for a step."""
    known = {name: plugins.get("experiments", name) for name in plugins.names("experiments")}
    return {name: each for name, each in known.items() if each.concerns(step)}


def run_all(step: Step, limit_s: float, announce: Callable[[int, float], object] = lambda count, cost_s: None) -> Made:
    """Make the experiments for a step, the cheapest first.

    limit_s: time for all of them. Experiments that would take longer than the time left are skipped, with a row that
    says so. announce: called before the first, with their number and approximate total time in s.
    """
    planned = concerning(step)
    if step.phases is None:
        return Made([skipped(_dashed(name), step.reason) for name in planned])
    costs = {name: each.cost_s(step) for name, each in planned.items()}
    ordered = sorted(planned, key=costs.__getitem__)
    left_s, chosen = limit_s, list[str]()
    for name in ordered:
        if costs[name] <= left_s:
            chosen.append(name)
            left_s -= costs[name]
    if chosen:
        announce(len(chosen), sum(costs[name] for name in chosen))
    rows, began_s = list[ExperimentRow](), time.perf_counter()
    for name in ordered:
        left_s = limit_s - (time.perf_counter() - began_s)
        if costs[name] > left_s:
            lasts = f"it takes about {human(costs[name], 's')}, and {human(max(0.0, left_s), 's')} are left"
            rows.append(skipped(_dashed(name), f"{lasts} of the time for experiments"))
            continue
        try:
            rows += _rows(name, planned[name], step)
        except Exception as error:  # an error affects only this experiment
            text = (str(error).strip().splitlines() or [""])[0]
            rows.append(skipped(_dashed(name), f"{type(error).__name__}: {text:.200}"))
            if devices.is_poisoned(error):
                return Made(rows, is_usable=False)
    return Made(rows)


def _rows(name: str, experiment: Experiment, step: Step) -> list[ExperimentRow]:
    """Make one experiment."""
    began_s = time.perf_counter()
    try:
        made = experiment.run(step)
    except Skipped as reason:
        return [skipped(_dashed(name), str(reason))]
    spent_s = (time.perf_counter() - began_s) / max(1, len(made))
    return [{**each, "experiment": _dashed(name), "spent_s": spent_s} for each in made]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
