"""Time that a fused update would take, tried on copies of the parameters after the last step, on a CPU.

A few untimed steps show which of torch's optimizers update which parameters, and how often. Those that are fused
already are left out, and those that cannot be fused: with sparse or complex gradients, with own subclasses, or with a
gradient whose elements lie in another order than the parameter's, which torch's fused updates on a CPU mix up. The
copies begin with the state of the optimizer. The program's parameters, states and hooks are not used. Of large models
some parameters are copied, evenly by size, and none where those are not like the whole. The copies are in the caches
more often than the loop's parameters, so the trial may take less time than the loop's own update.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cs_systems.analysis.comparison.loop_findings import FUSED_UPDATES, FusedUpdateRow
from cs_systems.measure.recorder.copied_updates import CopiedUpdate
from cs_systems.measure.recorder.observers import FewSteps, Period
from cs_systems.measure.recorder.phases import OPTIMIZER, Timeline
from cs_systems.measure.recorder.subject import Subject

OPTIMIZERS = (Adam, AdamW, SGD, Adagrad)  # that torch can fuse on a CPU
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LEAST_SHARE = 0.05  # share of the step; a shorter phase is not worth the trial
MOST_BYTES = 1 << 27  # of both copies of an optimizer: parameters, gradients and states
FEWEST_ROUNDS, ENOUGH_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 7, 31, 0.4  # of an optimizer; both updates take turns
MOST_S = 1.0  # of all optimizers, with the copying; rounds stop at it, and too few of them give no row
LIKE = 1.5  # times as large or small, at most, are the copies on average compared with all parameters
SMALL_BYTES = 1 << 16  # parameters of fewer bytes take a time each, larger ones a time per byte
GRADIENT = 1e-3  # of the copies; the time of an update does not depend on it
FUSED = {"fused": True, "foreach": None}


class _Place(NamedTuple):
    """Parameter of an optimizer, by its group and place there, with its size and that of both its copies."""

    group: int
    at: int
    size: int
    cost: int


class _Seen:
    """Optimizer with its steps so far, and the places of its parameters with a gradient, by group."""

    def __init__(self) -> None:
        self.steps = 0
        self.parameters: list[list[int]] | None = None
        self.is_fit = True


class FusedUpdates(FewSteps):
    """Observer of the optimizers that step in untimed steps on a CPU."""

    def __init__(self, subject: Subject, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._subject = subject
        self._clock = clock
        self._period: Period | None = None
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._seen = weakref.WeakKeyDictionary[Optimizer, _Seen]()
        self._steps = 0
        self._timed = deque[Timeline](maxlen=9)

    def begins(self, period: Period) -> None:
        super().begins(period)
        self._period = period
        if self._subject.device.is_cuda:
            self.is_looking = False

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        if self._period is Period.TIMED and not self._subject.device.is_cuda:
            self._timed.append(timeline)

    def look_before_update(self, optimizer: Optimizer) -> None:
        seen = self._seen.setdefault(optimizer, _Seen())
        seen.steps += 1
        seen.is_fit = seen.is_fit and _is_fit(optimizer)
        if seen.is_fit:
            seen.parameters = [
                [at for at, parameter in enumerate(group["params"]) if parameter.grad is not None]
                for group in optimizer.param_groups
            ]

    def look_after_step(self) -> None:
        super().look_after_step()
        self._steps += 1

    def end(self) -> None:
        """Try fused updates, after the last observed step, so that what stays in memory looks like no growth."""
        if self._steps and self._share() >= LEAST_SHARE:
            self.keep(FUSED_UPDATES, self._rows())
        self._timed.clear()

    def _share(self) -> float:
        """Return the median share of the optimizers' phase in the last timed steps."""
        samples = [timeline.sample(warmup=False) for timeline in self._timed]
        shares = [sample.phases_s.get(OPTIMIZER, 0.0) / sample.wall_s for sample in samples if sample.wall_s]
        return median(shares) if shares else 0.0

    def _rows(self) -> list[FusedUpdateRow]:
        end_s = self._clock() + MOST_S
        rows = list[FusedUpdateRow]()
        for optimizer, seen in [*self._seen.items()]:
            if seen.is_fit and self._clock() < end_s:
                try:
                    row = self._row(optimizer, seen, end_s)
                except (RuntimeError, TypeError, ValueError):  # such as a version of torch that cannot fuse it
                    continue
                if row is not None:
                    rows.append(row)
        return [{**row, "others": len(self._seen) - len(rows)} for row in rows]

    def _row(self, optimizer: Optimizer, seen: _Seen, end_s: float) -> FusedUpdateRow | None:
        chosen = seen.parameters or []
        if len(chosen) != len(optimizer.param_groups) or not _is_fit(optimizer):
            return None
        places = _places(optimizer, chosen)
        tried = _sample(places)
        if not tried:
            return None
        parameters = [optimizer.param_groups[each.group]["params"][each.at] for each in tried]
        now, fused = (CopiedUpdate(optimizer, parameters, _gradient, form=form) for form in ({}, FUSED))
        now_s, fused_s = _in_turns(now.update, fused.update, self._clock, end_s)
        if len(now_s) < FEWEST_ROUNDS:
            return None
        ratios = sorted(after_s / before_s for before_s, after_s in zip(now_s, fused_s, strict=True))
        return {
            "optimizer": type(optimizer).__name__,
            "parameters": len(places),
            "tried": len(tried),
            "updates": seen.steps / self._steps,
            "time_s": median(now_s) * _scale(places, tried),
            "fused_share": median(ratios),
            "low_share": ratios[len(ratios) // 4],
            "high_share": ratios[-1 - len(ratios) // 4],
            "rounds": len(ratios),
            "is_foreach": any(group.get("foreach") is True for group in optimizer.param_groups),
        }


def _places(optimizer: Optimizer, chosen: Sequence[Sequence[int]]) -> list[_Place]:
    """Return the places of chosen parameters of all groups, from the smallest parameter to the largest."""
    places = list[_Place]()
    for i, (group, within) in enumerate(zip(optimizer.param_groups, chosen, strict=True)):
        for at in within:
            parameter = group["params"][at]
            states = (each for each in optimizer.state.get(parameter, {}).values() if isinstance(each, Tensor))
            size = parameter.nbytes
            places.append(_Place(i, at, size, 2 * (2 * size + sum(state.nbytes for state in states))))
    return sorted(places, key=lambda each: each.size)


def _sample(places: Sequence[_Place]) -> Sequence[_Place]:
    """Return parameters that lie evenly among all, by size, with copies of at most `MOST_BYTES`.

    It is empty if none like all of them fit, such as where one parameter has most of the bytes.
    """
    fit = [each for each in places if each.cost <= MOST_BYTES]
    number = len(fit)
    while number:
        tried = [fit[(2 * i + 1) * len(fit) // (2 * number)] for i in range(number)]
        if sum(each.cost for each in tried) <= MOST_BYTES and 1 / LIKE <= _mean(tried) / _mean(places) <= LIKE:
            return tried
        number -= max(1, number // 16)
    return []


def _mean(places: Sequence[_Place]) -> float:
    """Return the mean size of parameters; at least 1, for those without elements."""
    return max(1.0, sum(each.size for each in places) / len(places))


def _scale(places: Sequence[_Place], tried: Sequence[_Place]) -> float:
    """Return how many times as long the update of all parameters takes as that of the tried ones."""
    number = len(places) / len(tried)
    return number * _mean(places) / _mean(tried) if _mean(places) >= SMALL_BYTES else number


def _is_fit(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, and could be fused without another result."""
    if type(optimizer) not in OPTIMIZERS:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("differentiable") or group.get("capturable"):
            return False
        if not all(map(_is_plain, group["params"])):
            return False
    return True


def _is_plain(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.layout is not torch.strided:
        return False
    if parameter.device.type != "cpu" or parameter.dtype not in DTYPES or not _is_dense(parameter):
        return False
    return gradient is None or (
        gradient.layout is torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
    )


def _gradient(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, GRADIENT)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _in_turns(
    now: Callable[[], object], fused: Callable[[], object], clock: Callable[[], float], end_s: float
) -> tuple[list[float], list[float]]:
    """Return the times of two updates that take turns, after one of each.

    No round begins that may pass `end_s`, and none at all where the fewest would.
    """

    def lasted_s(update: Callable[[], object]) -> float:
        begin_s = clock()
        update()
        return clock() - begin_s

    now_s, fused_s = list[float](), list[float]()
    round_s = lasted_s(now) + lasted_s(fused)
    if clock() + FEWEST_ROUNDS * round_s > end_s:
        return now_s, fused_s
    while clock() + round_s < end_s and (
        len(now_s) < ENOUGH_ROUNDS or (len(now_s) < MOST_ROUNDS and sum(now_s) + sum(fused_s) < ROUNDS_S)
    ):
        now_s.append(lasted_s(now))
        fused_s.append(lasted_s(fused))
        round_s = now_s[-1] + fused_s[-1]
    return now_s, fused_s
