"""Learning rates of optimizers, such as one that a scheduler shrinks in each step although it counts epochs.

Factors of a LambdaLR are kept where they say that its function returns no factor: it began with the loop, has stepped
in most steps, and the rate neither grows as in a warm-up nor falls as at the end of a schedule. In a script the rates
are read until its end, where a schedule shows its length.
"""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from cs_systems.analysis.comparison.loop_findings import (
    LEARNING_RATES,
    RATE_FACTORS,
    RATE_SCHEDULES,
    LearningRateRow,
    RateFactorRow,
    RateScheduleRow,
)
from cs_systems.core.tables import Tables
from cs_systems.measure.recorder.observers import FewSteps, Period, Timing
from cs_systems.measure.recorder.phases import Timeline

FEWEST_AFTER = 3  # observed steps after the timed ones
STEADY = 0.8  # least ratio of the last of their rates to the first one
PLANS = ("total_steps", "T_max", "total_iters")  # attributes of schedulers that have a length


class _Rate(NamedTuple):
    """Largest rate of an optimizer, with the rate of its group that a scheduler multiplies; 0.0 without a scheduler."""

    now: float
    initial: float
    largest_factor: float  # of all groups


class _Course:
    """Rates of an optimizer after the recording, with its only scheduler."""

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler | None, earlier: Sequence[_Rate], steps: int
    ) -> None:
        self._optimizer, self._earlier, self._steps = type(optimizer).__name__, earlier, steps
        self.rates = array("d")
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._name = None if scheduler is None else type(scheduler).__name__
        self._planned, self._scheduled = _planned(scheduler), None if scheduler is None else _scheduled(scheduler)
        self._best, self._is_better = _best(scheduler), False

    def add(self, optimizer: Optimizer) -> None:
        """Note the rate in a further step."""
        self.rates.append(max(float(each["lr"]) for each in optimizer.param_groups))
        scheduler = self._scheduler() if self._scheduler is not None else None
        if scheduler is not None:
            self._scheduled = _scheduled(scheduler)
            self._is_better |= _best(scheduler) != self._best

    def row(self) -> RateScheduleRow:
        known, last = [*(each.now for each in self._earlier), *self.rates], self.rates[-1]
        constant = next((n for n, rate in enumerate(reversed(self.rates)) if rate != last), len(self.rates))
        return {
            "optimizer": self._optimizer,
            "steps": self._steps + len(self.rates),
            "largest": max(known),
            "last": last,
            "constant": constant,
            "levels": len({*known}),
            "is_better": self._is_better,
            "scheduler": self._name,
            "planned": self._planned,
            "scheduled": self._scheduled,
        }


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
        self._rates: weakref.WeakKeyDictionary[Optimizer, tuple[list[_Rate], list[_Rate]]] = weakref.WeakKeyDictionary()
        self._courses: dict[int, _Course] = {}  # by the id of an optimizer, which may be gone at the end of the script

    def begins(self, period: Period) -> None:
        super().begins(period)
        self._period = period

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._steps += 1

    def look_before_update(self, optimizer: Optimizer) -> None:
        groups = [each for each in optimizer.param_groups if _is_known(each.get("lr"))]
        if groups:
            before, after = self._rates.setdefault(optimizer, ([], []))
            (after if self._period is Period.SAMPLED else before).append(_rate(groups))

    def end(self) -> None:
        schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        observed = [
            (optimizer, *rates, _only_one_of(optimizer, schedulers))
            for optimizer, rates in self._rates.items()
            if all(rates)
        ]
        self.keep(LEARNING_RATES, [self._row(*each) for each in observed])
        self.keep(RATE_FACTORS, [row for each in observed if (row := self._factor(*each))])
        self._courses = {
            id(optimizer): _Course(optimizer, scheduler, [*before, *after], self._steps)
            for optimizer, before, after, scheduler in observed
        }

    def step_later(self, optimizer: Optimizer) -> None:
        course = self._courses.get(id(optimizer))
        if course is not None and all(_is_known(each.get("lr")) for each in optimizer.param_groups):
            course.add(optimizer)

    def tables(self, timing: Timing, others: Tables) -> Tables:
        rows = [course.row() for course in self._courses.values() if course.rates]
        return self.kept | (RATE_SCHEDULES.filled(rows) if rows else {})

    def _row(
        self, optimizer: Optimizer, before: list[_Rate], after: list[_Rate], scheduler: LRScheduler | None
    ) -> LearningRateRow:
        return {
            "optimizer": type(optimizer).__name__,
            "steps": self._steps,
            "largest": max(each.now for each in before),
            "largest_after": max(each.now for each in after),
            "last": after[-1].now,
            "observed_after": len(after),
            "scheduler": type(scheduler).__name__ if scheduler is not None else None,
            "scheduled": _scheduled(scheduler) if scheduler is not None else None,
        }

    def _factor(
        self, optimizer: Optimizer, before: list[_Rate], after: list[_Rate], scheduler: LRScheduler | None
    ) -> RateFactorRow | None:
        """Return the row of a LambdaLR that began with the loop, if the rate hardly changes after the timed steps."""
        if not isinstance(scheduler, LambdaLR) or len(after) < FEWEST_AFTER:
            return None
        scheduled, rates = _scheduled(scheduler), [each.now for each in after]
        if 2 * scheduled < self._steps or scheduler.last_epoch > scheduled or max(rates) > rates[0]:
            return None
        if not 0.0 < STEADY * rates[0] <= rates[-1] or not (initial := after[-1].initial) > 0.0:
            return None
        return {
            "optimizer": type(optimizer).__name__,
            "initial": initial,
            "factor": rates[-1] / initial,
            "largest_factor": max(each.largest_factor for each in (*before, *after)),
            "rate": rates[-1],
            "scheduled": scheduled,
        }


def _rate(groups: Sequence[dict[str, Any]]) -> _Rate:
    """Return the largest rate of an optimizer's groups."""
    largest = max(groups, key=lambda each: float(each["lr"]))
    factors = [float(each["lr"]) / initial for each in groups if (initial := _initial(each))]
    return _Rate(float(largest["lr"]), _initial(largest), max(factors, default=0.0))


def _initial(group: dict[str, Any]) -> float:
    rate: Any = group.get("initial_lr")
    return float(rate) if _is_known(rate) else 0.0


def _only_one_of(optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> LRScheduler | None:
    """Return the only scheduler of an optimizer; of several, which one changes the rate is not known."""
    found = [each for each in schedulers if getattr(each, "optimizer", None) is optimizer]
    return found[0] if len(found) == 1 else None


def _planned(scheduler: LRScheduler | None) -> int | None:
    """Return the number of steps for which a scheduler is laid out, if it says so."""
    lengths = (getattr(scheduler, name, None) for name in PLANS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _best(scheduler: LRScheduler | None) -> float | None:
    """Return the best number that a ReduceLROnPlateau has got so far."""
    return float(scheduler.best) if isinstance(scheduler, ReduceLROnPlateau) else None


def _scheduled(scheduler: LRScheduler) -> int:
    return int(getattr(scheduler, "_step_count", 1)) - 1


def _is_known(rate: Any) -> bool:
    return rate is not None and not _is_on_device(rate)


def _is_on_device(rate: Any) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"
