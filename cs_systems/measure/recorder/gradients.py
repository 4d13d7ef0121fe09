"""Path of gradients in a few untimed steps: from a backward pass to an optimizer, to the next step, or to nothing.

A few elements of a few gradients are read around each backward pass and each optimizer step. Their values show more
than counters: a gradient that is zero again was cleared, no matter how.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MOST_PARAMETERS = 8  # most observed parameters of an optimizer
MOST_VALUES = 32  # most elements read of a tensor
PROPORTIONAL = 0.02  # largest relative error between proportional gradients: those of clipped gradients in bf16


class Reading(NamedTuple):
    """Elements of a nonzero gradient, and its memory address."""

    place: int
    values: tuple[float, ...]


Readings = dict[int, Reading]  # by parameter position; missing and zero gradients are left out


def some_values(tensor: Tensor, most: int = MOST_VALUES) -> tuple[float, ...]:
    """Return evenly spaced elements of a tensor on this rank; empty if it is sparse, or has gaps in memory."""
    local = getattr(tensor, "_local_tensor", tensor)  # for a DTensor, its local tensor
    if local.layout is not torch.strided or not (count := local.numel()):
        return ()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    if extent != count:
        return ()
    return tuple(local.detach().as_strided((-(-count // (step := -(-count // most))),), (step,)).tolist())


def evenly(items: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return at most `most` evenly spaced items."""
    return [*items[:: max(1, -(-len(items) // most))]]


class Updates:
    """Steps of one optimizer, counted in observed steps of the loop.

    Attributes:
        steps: optimizer steps.
        again: of these, steps after another observed step.
        stale: of these, steps with gradients that an earlier step has used already.
        cleared: steps before which gradients were cleared after their backward pass.
        missing: steps in which no parameter had a gradient.
        zero: steps in which all gradients were zero, and no backward pass had computed others.
        is_own: the program computes its own gradients from the gradients of backward passes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._looked_at: list[weakref.ref[Tensor]] = []
        self._is_chosen = False
        self.steps = self.again = self.stale = self.cleared = self.missing = self.zero = 0
        self.is_own = False
        self.forget()

    def forget(self) -> None:
        """Forget the gradients so far, because the next steps are not observed."""
        self.passes: list[int] = []  # passes with gradients that no step has used yet
        self.is_stepping = False
        self._used: Readings | None = None  # gradients of the last step that still exist; None if unknown
        self._accumulated: set[int] = set()  # of these, gradients to which a backward pass has added
        self._before: Readings = {}
        self._left: Readings = {}  # gradients after the last backward pass
        self._weights: list[tuple[float, ...]] = []

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the optimizer."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    def _sample(self) -> list[weakref.ref[Tensor]]:
        """Return the observed parameters: some of those with a gradient, once there are any."""
        if not self._is_chosen:
            parameters = self.parameters()
            with_gradient = [p for p in parameters if p.grad is not None]
            self._looked_at = [weakref.ref(p) for p in evenly(with_gradient or parameters, MOST_PARAMETERS)]
            self._is_chosen = bool(with_gradient)
        return self._looked_at

    def _readings(self) -> Readings:
        found = {}
        for position, reference in enumerate(self._sample()):
            gradient = None if (parameter := reference()) is None else parameter.grad
            values = () if gradient is None else some_values(gradient)
            if gradient is not None and any(values):
                found[position] = Reading(getattr(gradient, "_local_tensor", gradient).data_ptr(), values)
        return found

    def _weights_now(self) -> list[tuple[float, ...]]:
        return [some_values(p) for reference in self._looked_at if (p := reference()) is not None]

    def _keep_used(self, now: Readings, *, unchanged: bool) -> None:
        """Keep those gradients of the last step that still exist."""
        for position, used in [*(self._used or {}).items()]:
            kept = now.get(position)
            if kept is None or kept.place != used.place or (unchanged and kept != used):
                del self._used[position]  # type: ignore[union-attr]

    def backward_begins(self) -> list[int]:
        """Return the earlier passes with gradients that were cleared before a step used them."""
        now = self._readings()
        # changes that the program makes to gradients between a step and the next backward pass are intended
        self._keep_used(now, unchanged=not (self._left or self._accumulated))
        self._before = now
        return self._cleared(now)

    def _cleared(self, now: Readings) -> list[int]:
        if not self.passes or not self._left or not now.keys().isdisjoint(self._left) or self.is_stepping:
            return []
        passes, self.passes = self.passes, []
        changed = self._weights != self._weights_now()  # the program itself updated the weights
        return [] if changed else passes

    def backward_ends(self, number: int) -> bool:
        """Return whether this pass has computed gradients of the optimizer's parameters."""
        now = self._readings()
        added = {position for position, reading in now.items() if reading != self._before.get(position)}
        self._keep_used(now, unchanged=False)
        self._accumulated |= added & (self._used or {}).keys()
        if added:
            self._left = now
            self.passes.append(number)
            self._weights = self._weights_now()
        return bool(added)

    def step_begins(self) -> list[int]:
        """Return the passes with gradients that were cleared before this step."""
        now = self._readings()
        self.steps += 1
        self.again += self._used is not None
        cleared: list[int] = []
        if self.passes:
            cleared = self._cleared(now)
            self.cleared += bool(cleared)
            self.is_own |= bool(now) and not _proportional(now, self._left)
        elif not now:
            has_gradient = any(p.grad is not None for p in self.parameters())
            self.zero += has_gradient
            self.missing += not has_gradient
        self._keep_used(now, unchanged=False)
        self._count_stale()
        self.is_stepping = True
        return cleared

    def _count_stale(self) -> None:
        if self._used and self._accumulated & self._used.keys():
            self.stale += 1
            self._accumulated = set()

    def step_ends(self) -> list[int]:
        """Return the passes with gradients that this step has used."""
        self._count_stale()  # in a closure called by the step
        passes, self.passes = self.passes, []
        self._used = self._readings()
        self._accumulated, self._left, self.is_stepping = set(), {}, False
        return passes


class Gradients:
    """Observer of the gradients of all optimizers, and of parameters that none of them holds.

    Attributes:
        updates: the optimizers that stepped or got gradients.
        used, unused: numbers of the backward passes with gradients that an optimizer used, or that were cleared first.
        held_by_none: passes in which a parameter that no optimizer holds got a gradient, by the parameter's identity.
        fates: by pass, whether an optimizer used its gradients (True), or they were cleared before its step (False).
    """

    def __init__(self) -> None:
        self.updates: weakref.WeakKeyDictionary[Optimizer, Updates] = weakref.WeakKeyDictionary()
        self.held_by_none = Counter[int]()
        self.passes = self.used = self.unused = 0
        self.fates: dict[int, dict[int, bool]] = {}
        self._open: dict[int, set[int]] = {}  # pass → the optimizers that may still use its gradients
        self._others: dict[int, tuple[Tensor, tuple[int, int] | None]] = {}

    def forget(self) -> None:
        """Forget the gradients so far, because the next steps are not observed."""
        self._open.clear()
        self._others.clear()
        for each in self.updates.values():
            each.forget()

    def of(self, optimizer: Optimizer) -> Updates:
        if optimizer not in self.updates:
            self.updates[optimizer] = Updates(optimizer)
        return self.updates[optimizer]

    def backward_begins(self, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
        """Read gradients before a backward pass.

        parameters: the parameters of the models, whether an optimizer holds them or not.
        """
        held: set[int] = set()
        for optimizer in optimizers:
            of = self.of(optimizer)
            held |= {id(p) for p in of.parameters()}
            self._clear(id(of), of.backward_begins())
        others = (p for p in parameters if id(p) not in held and p.requires_grad and p.is_leaf)
        self._others = {id(p): (p, gradient_state(p)) for p in others}

    def backward_ends(self, *, is_for_inputs: bool) -> None:
        """Read gradients after a backward pass.

        is_for_inputs: whether it also computes gradients of a model's inputs.
        """
        number, self.passes = self.passes, self.passes + 1
        for_whom = {id(each) for each in self.updates.values() if each.backward_ends(number)}
        if for_whom and not is_for_inputs:
            self._open[number] = for_whom
            for each in self.updates.values():
                if each.is_stepping and id(each) in for_whom:
                    self._use(id(each), [number])
        for which, (parameter, before) in self._others.items():
            now = gradient_state(parameter)
            self.held_by_none[which] += now is not None and now != before
        self._others = {}

    def step_begins(self, optimizer: Optimizer) -> None:
        """Read gradients before an optimizer's step."""
        of = self.of(optimizer)
        self._clear(id(of), of.step_begins())

    def step_ends(self, optimizer: Optimizer) -> None:
        """Read gradients after an optimizer's step."""
        of = self.of(optimizer)
        self._use(id(of), of.step_ends())

    def step_was_skipped(self, optimizer: Optimizer) -> None:
        """Count the gradients as used, because a GradScaler skipped the step on purpose."""
        of = self.of(optimizer)
        passes, of.passes = of.passes, []
        self._use(id(of), passes)

    def _use(self, which: int, passes: Iterable[int]) -> None:
        for number in passes:
            self.fates.setdefault(number, {})[which] = True
            self.used += self._open.pop(number, None) is not None

    def _clear(self, which: int, passes: Iterable[int]) -> None:
        for number in passes:
            self.fates.setdefault(number, {})[which] = False
            if number in self._open:
                self._open[number].discard(which)
                if not self._open[number]:
                    del self._open[number]
                    self.unused += 1


def gradient_state(parameter: Tensor) -> tuple[int, int] | None:
    """Return a value that changes when a backward pass computes a gradient; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    local = getattr(gradient, "_local_tensor", gradient)  # for a DTensor, its local tensor
    return (local.data_ptr() if local.layout is torch.strided else id(gradient)), local._version


def _proportional(now: Readings, before: Readings) -> bool:
    """Return whether gradients are equal up to one factor each, as after clipping or unscaling."""
    for position, reading in islice(now.items(), MOST_PARAMETERS):
        left = before.get(position)
        if left is None or left.place != reading.place:
            return False
        at = max(range(len(left.values)), key=lambda n: abs(left.values[n]))
        factor = reading.values[at] / left.values[at] if left.values[at] else 0.0
        largest = abs(reading.values[at])
        pairs = zip(reading.values, left.values, strict=True)
        if any(abs(value - factor * other) > PROPORTIONAL * largest for value, other in pairs):
            return False
    return True
