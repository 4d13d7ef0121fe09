"""Observer of calls of autograd.grad that differentiate outputs again, where one call gives all derivatives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from cs_systems.analysis.comparison.loop_findings import SAME_DERIVATIVES
from cs_systems.measure.recorder.graph_size import costs_by_operator, costs_of_nodes, leaves_below
from cs_systems.measure.recorder.observers import EnginePass, FewSteps
from cs_systems.measure.recorder.stacks import own_lines, place_of

MOST_STEPS = 2  # of each period
MOST_CALLS = 200  # in a step that is observed
MOST_BYTES = 8 << 20  # of a call's results that are kept until the next update
SHARED = 0.5  # least share of a call's work in operators that an earlier call went through


class _Call(NamedTuple):
    """Call of autograd.grad: its arguments and results, and the costs of the operators that it went through.

    Large and sparse results are left out.
    """

    roots: Sequence[Tensor]
    weights: Sequence[Tensor | None]
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    costs: dict[int, float]


class SameDerivatives(FewSteps):
    """Observer of the derivatives that a step computes again, before the next update."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = self._repeating = self._calls = self._again = 0
        self._again_s = self._total_s = 0.0
        self._place: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._known: list[_Call] = []
        self._made: dict[Any, float] = {}  # nodes of repeated derivatives' own graphs, with the share that is repeated
        self._calls_here = self._again_here = 0
        self._again_here_s = self._total_here_s = 0.0

    def look_at_pass(self, each: EnginePass) -> None:
        given = (*each.roots, *each.inputs, *(weight for weight in each.weights if weight is not None))
        if any(type(tensor) not in (Tensor, Parameter) or _is_wrapped(tensor) for tensor in given):
            return
        inputs = each.inputs or leaves_below(each.roots)
        nodes_s = costs_of_nodes(each.roots, inputs)
        total_s = sum(nodes_s.values())
        # of derivatives that were made again, their own backward is repeated too
        again_s = sum(cost_s * self._made[node] for node, cost_s in nodes_s.items() if node in self._made)
        if each.gradients:
            made = [gradient for gradient in each.gradients if gradient is not None]
            is_dense = all(gradient.layout is torch.strided for gradient in made)
            kept = each.gradients if is_dense and sum(one.nbytes for one in made) <= MOST_BYTES else ()
            call = _Call(each.roots, each.weights, each.inputs, kept, costs_by_operator(each.roots, inputs))
            self._calls_here += 1
            shared = max((_shared(earlier, call) for earlier in self._known), default=0.0)
            if shared >= SHARED:
                again_s = max(again_s, shared * total_s)
                self._again_here += 1
                self._made |= dict.fromkeys(costs_of_nodes(made, each.inputs).keys() - nodes_s.keys(), shared)
                line = own_lines(sys._getframe(1))[1]
                self._place = place_of(line) if line else self._place
            else:
                self._known.append(call)
            if self._calls_here > MOST_CALLS:
                self.stop_looking()
        self._again_here_s += again_s
        self._total_here_s += total_s

    def look_after_update(self, optimizer: Any) -> None:
        self._known, self._made = [], {}

    def look_after_step(self) -> None:
        self._steps += 1
        self._total_s += self._total_here_s
        if self._again_here:
            self._repeating += 1
            self._calls += self._calls_here
            self._again += self._again_here
            self._again_s += self._again_here_s
        self._forget()
        super().look_after_step()
        if self._steps % MOST_STEPS == 0:
            self.stop_looking()

    def stop_looking(self) -> None:
        super().stop_looking()
        self._forget()

    def end(self) -> None:
        if self._again:
            row = {
                "steps": self._repeating,
                "of_steps": self._steps,
                "calls": self._calls / self._repeating,
                "again": self._again / self._repeating,
                "share": self._again_s / self._total_s,
                "place": self._place,
            }
            self.keep(SAME_DERIVATIVES, [row])


def _is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transformation of torch.func or vmap holds the tensor."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def _shared(earlier: _Call, call: _Call) -> float:
    """Return the share of a call's work that an earlier one did for the same derivatives, or of the same outputs."""
    total_s = sum(call.costs.values())
    again_s = sum(call.costs[operator] for operator in call.costs.keys() & earlier.costs.keys())
    if not again_s or not (_is_of_same_outputs(earlier, call) or _has_same_results(earlier, call)):
        return 0.0
    return again_s / total_s


def _is_of_same_outputs(earlier: _Call, call: _Call) -> bool:
    """Return whether both differentiate the same tensors, with the same weights."""
    if len(earlier.roots) != len(call.roots):
        return False
    is_same = all(a is b for a, b in zip(earlier.roots, call.roots, strict=True))
    return is_same and all(_are_equal(a, b) for a, b in zip(earlier.weights, call.weights, strict=True))


def _has_same_results(earlier: _Call, call: _Call) -> bool:
    """Return whether both give the same derivatives by the same inputs, of which one is not constant."""
    if not (earlier.gradients and call.gradients) or len(earlier.inputs) != len(call.inputs):
        return False
    if any(a is not b for a, b in zip(earlier.inputs, call.inputs, strict=True)):
        return False
    if not all(_are_equal(a, b) for a, b in zip(earlier.gradients, call.gradients, strict=True)):
        return False
    return any(bool((each != each.flatten()[:1]).any()) for each in call.gradients if each is not None)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
