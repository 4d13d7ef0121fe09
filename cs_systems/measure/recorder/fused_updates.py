"""Time that a fused update would take, tried on copies of the parameters after the last step, on a CPU.

A few untimed steps show which of torch's optimizers update which parameters, and how often. Those that are fused
already are left out, and those that cannot be fused: with sparse or complex gradients, with own subclasses, or with a
gradient whose elements lie in another order than the parameter's, which torch's fused updates on a CPU mix up. The
copies begin with the state of the optimizer. The program's parameters, states and hooks are not used.
"""

from __future__ import annotations

import copy
import inspect
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cs_systems.analysis.comparison.loop_findings import FUSED_UPDATES, FusedUpdateRow
from cs_systems.measure.recorder.observers import FewSteps, Period
from cs_systems.measure.recorder.phases import OPTIMIZER, Timeline
from cs_systems.measure.recorder.subject import Subject

OPTIMIZERS = (Adam, AdamW, SGD, Adagrad)  # that torch can fuse on a CPU
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LEAST_SHARE = 0.05  # share of the step; a shorter phase is not worth the trial
MOST_BYTES = 1 << 25  # of parameters that are copied; of larger models, each second or third one and so on
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 7, 31, 0.4  # of an optimizer; both updates take turns
MOST_S = 2.0  # after which no further optimizer is tried
GRADIENT = 1e-3  # of the copies; the time of an update does not depend on it


class _Seen:
    """Optimizer with its steps so far, and the places of its parameters with a gradient, by group."""

    def __init__(self) -> None:
        self.steps = 0
        self.parameters: list[list[int]] | None = None
        self.is_fit = True


class FusedUpdates(FewSteps):
    """Observer of the optimizers that step in untimed steps on a CPU."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
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
            self.keep(FUSED_UPDATES, [*self._rows()])
        self._timed.clear()

    def _share(self) -> float:
        """Return the median share of the optimizers' phase in the last timed steps."""
        samples = [timeline.sample(warmup=False) for timeline in self._timed]
        shares = [sample.phases_s.get(OPTIMIZER, 0.0) / sample.wall_s for sample in samples if sample.wall_s]
        return median(shares) if shares else 0.0

    def _rows(self) -> Iterator[FusedUpdateRow]:
        begin_s = time.perf_counter()
        for optimizer, seen in [*self._seen.items()]:
            if seen.is_fit and time.perf_counter() - begin_s < MOST_S:
                try:
                    row = self._row(optimizer, seen)
                except (RuntimeError, TypeError, ValueError):  # such as a version of torch that cannot fuse it
                    continue
                if row is not None:
                    yield row

    def _row(self, optimizer: Optimizer, seen: _Seen) -> FusedUpdateRow | None:
        chosen = seen.parameters or []
        total = sum(map(len, chosen))
        if not total or len(chosen) != len(optimizer.param_groups) or not _is_fit(optimizer):
            return None
        size = sum(optimizer.param_groups[i]["params"][at].nbytes for i, places in enumerate(chosen) for at in places)
        every = -(-size // MOST_BYTES)
        chosen = [places[::every] for places in chosen]
        trials = [Trial(optimizer, chosen, fused=fused) for fused in (False, True)]
        now_s, fused_s = _in_turns(*(trial.update for trial in trials))
        ratios = sorted(fused / now for now, fused in zip(now_s, fused_s, strict=True))
        tried = sum(map(len, chosen))
        return {
            "optimizer": type(optimizer).__name__,
            "parameters": total,
            "tried": tried,
            "updates": seen.steps / self._steps,
            "time_s": median(now_s) * total / tried,
            "fused_share": median(ratios),
            "low_share": ratios[len(ratios) // 4],
            "high_share": ratios[-1 - len(ratios) // 4],
            "rounds": len(ratios),
        }


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


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class Trial:
    """Optimizer of copies of some parameters, with copies of their states.

    chosen: the places of the parameters, by group.
    """

    def __init__(self, like: Optimizer, chosen: Sequence[Sequence[int]], *, fused: bool) -> None:
        groups, states = list[dict[str, Any]](), dict[Tensor, dict[str, Any]]()
        for group, places in zip(like.param_groups, chosen, strict=True):
            copies = []
            for parameter in (group["params"][at] for at in places):
                own = nn.Parameter(parameter.detach().clone())
                own.grad = torch.full_like(own, GRADIENT)
                states[own] = {
                    name: value.clone() if isinstance(value, Tensor) else copy.copy(value)
                    for name, value in like.state.get(parameter, {}).items()
                }
                copies.append(own)
            if copies:
                same = {name: value for name, value in group.items() if name not in ("params", "fused", "foreach")}
                form = {"fused": True} if fused else {"foreach": group.get("foreach")}
                groups.append({"params": copies, **same, **form})
        options: dict[str, Any] = {"fused": True} if fused else {}
        self.optimizer = type(like)(groups, **options)
        self.optimizer.state.update({own: state for own, state in states.items() if state})
        self._step = inspect.unwrap(type(like).step)  # without the hooks of the program

    def update(self) -> None:
        self._step(self.optimizer)


def _in_turns(now: Callable[[], object], fused: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Return the times of two updates that take turns, after one of each."""
    now()
    fused()
    now_s, fused_s = list[float](), list[float]()
    while len(now_s) < FEWEST_ROUNDS or (len(now_s) < MOST_ROUNDS and sum(now_s) + sum(fused_s) < ROUNDS_S):
        now_s.append(_lasted_s(now))
        fused_s.append(_lasted_s(fused))
    return now_s, fused_s


def _lasted_s(update: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    update()
    return time.perf_counter() - begin_s
