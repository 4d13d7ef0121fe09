"""Energy of the timed steps of a loop, where the device has a counter."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.formulas.energy import ENERGY, EnergyRow, of_steps
from cs_systems.machine.energy import Meter
from cs_systems.measure.recorder.inputs import StepInputs
from cs_systems.measure.recorder.observers import Found, Observer, Period
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.subject import Subject


class Energy(Observer):
    """Reader of the counter at both ends of the timed steps, without waiting for the device."""

    runs_operators = False

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._meter = Meter(subject.device, alone=subject.world_size == 1)
        self._is_timed, self._steps = False, list[Timeline]()
        self._rows: list[EnergyRow] = []

    def begins(self, period: Period) -> None:
        self._is_timed = period is Period.TIMED
        if self._is_timed:
            self.restart()

    def restart(self) -> None:
        self._steps = []
        self._meter.begin()

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        if self._is_timed:
            self._steps.append(timeline)

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._rows, self._is_timed = self._meter.end(len(self._steps)), False

    def results(self, inputs: Sequence[StepInputs], is_timed: bool) -> Found | None:
        if not is_timed or not self._rows:
            return None
        durations_s = [step.sample(warmup=False).wall_s for step in self._steps]
        return Found(ENERGY.filled(of_steps(self._rows, durations_s)))
