"""Learning rates of optimizers, such as one that a scheduler shrinks in each step although it counts epochs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cs_systems.analysis.comparison.loop_findings import LEARNING_RATES, LearningRateRow
from cs_systems.measure.recorder.observers import FewSteps, Period
from cs_systems.measure.recorder.phases import Timeline


class LearningRates(FewSteps):
    """Observer of the largest learning rate of each optimizer, in a few steps before and after the timed ones."""

    runs_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps, self._period = 0, Period.FIRST
        # by optimizer: its rates before and after the timed steps
        self._rates: weakref.WeakKeyDictionary[Optimizer, tuple[list[float], list[float]]] = weakref.WeakKeyDictionary()

    def begins(self, period: Period) -> None:
        super().begins(period)
        self._period = period

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._steps += 1

    def look_before_update(self, optimizer: Optimizer) -> None:
        rates = [group.get("lr") for group in optimizer.param_groups]
        known = [float(rate) for rate in rates if rate is not None and not _is_on_device(rate)]
        if known:
            before, after = self._rates.setdefault(optimizer, ([], []))
            (after if self._period is Period.SAMPLED else before).append(max(known))

    def end(self) -> None:
        rows = [self._row(optimizer, *rates) for optimizer, rates in self._rates.items() if all(rates)]
        self.keep(LEARNING_RATES, rows)

    def _row(self, optimizer: Optimizer, before: list[float], after: list[float]) -> LearningRateRow:
        objects = (each for each in gc.get_objects() if issubclass(type(each), LRScheduler))
        found = [each for each in objects if getattr(each, "optimizer", None) is optimizer]
        scheduler = found[0] if len(found) == 1 else None  # of several, which one shrinks the rate is not known
        return {
            "optimizer": type(optimizer).__name__,
            "steps": self._steps,
            "largest": max(before),
            "largest_after": max(after),
            "last": after[-1],
            "observed_after": len(after),
            "scheduler": type(scheduler).__name__ if scheduler is not None else None,
            "scheduled": getattr(scheduler, "_step_count", 1) - 1 if scheduler is not None else None,
        }


def _is_on_device(rate: Any) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"
