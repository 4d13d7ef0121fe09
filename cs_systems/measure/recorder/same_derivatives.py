"""Observer of calls of autograd.grad that differentiate outputs again, where one call gives all derivatives."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cs_systems.analysis.comparison.loop_findings import SAME_DERIVATIVES
from cs_systems.measure.recorder.graph_size import costs_of_gradients, leaves_below
from cs_systems.measure.recorder.observers import EnginePass, FewSteps
from cs_systems.measure.recorder.stacks import own_lines, place_of

MOST_STEPS = 2  # of each period
MOST_CALLS = 200  # in a step that is observed
MOST_BYTES = 32 << 20  # of the copies that are kept until the next update
OPERATOR_S = 10e-6  # of each operator's backward, however small it is
SHARED = 0.2  # least share of a call's work that an earlier call did
# entries in the metadata of nodes, so that no graph is kept that the program drops: the node's identity, and the share
# of its work that is repeated
_IDENTITY, _SHARE = "cs_systems.identity", "cs_systems.share"
_MOST_LINEAR = 20  # linear operators at the end of a graph that are compared
# linear operators of one tensor: their other arguments tell all that they do
_LINEAR = re.compile(
    r"(Sum|Mean|Select|Slice|Unbind|Split|View|UnsafeView|ReshapeAlias|Expand|Squeeze|Unsqueeze|Permute|Transpose|T|"
    r"Neg)Backward\d+"
)


class _Call(NamedTuple):
    """Call of autograd.grad: its outputs, its arguments and results, and the costs by the operators' numbers.

    outputs: a description of each root, equal for equal roots. weights, gradients: copies, the latter None if they are
    large or sparse.
    """

    outputs: tuple[Any, ...]
    weights: Sequence[Tensor | None]
    inputs: Sequence[ref[Tensor]]
    gradients: Sequence[Tensor | None] | None
    costs: dict[tuple[int, int], float]


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
        self._forget_calls()
        self._calls_here = self._again_here = 0
        self._again_here_s = self._total_here_s = 0.0

    def _forget_calls(self) -> None:
        self._known: list[_Call] = []
        self._left = MOST_BYTES
        self._has_marks = False  # whether nodes of repeated derivatives' own graphs are marked

    def look_at_pass(self, each: EnginePass) -> None:
        given = (*each.roots, *each.inputs, *(weight for weight in each.weights if weight is not None))
        if any(type(tensor) not in (Tensor, Parameter) or _is_wrapped(tensor) for tensor in given):
            return
        inputs = each.inputs or leaves_below(each.roots)
        costs = {key: OPERATOR_S + cost_s for key, cost_s in costs_of_gradients(each.roots, inputs).items()}
        total_s = sum(costs.values())
        # of derivatives that were made again, their own backward is repeated too
        again_s = sum(cost_s * _marked(node) for (node, _), cost_s in costs.items()) if self._has_marks else 0.0
        if each.gradients:
            self._calls_here += 1
            shared = self._share_again(
                each, {(node._sequence_nr(), place): costs[node, place] for node, place in costs}
            )
            if shared >= SHARED:
                again_s = max(again_s, shared * total_s)
                self._again_here += 1
                self._has_marks = True
                made = [gradient for gradient in each.gradients if gradient is not None]
                for node, _ in costs_of_gradients(made, each.inputs).keys() - costs.keys():
                    node.metadata[_SHARE] = shared
                line = own_lines(sys._getframe(1))[1]
                self._place = place_of(line) if line else self._place
            if self._calls_here > MOST_CALLS:
                self.stop_looking()
        self._again_here_s += again_s
        self._total_here_s += total_s

    def _share_again(self, each: EnginePass, costs: dict[tuple[int, int], float]) -> float:
        """Return the share of a call's work that an earlier one did for the same outputs, and remember the call."""
        outputs = tuple(map(_description, each.roots))
        weights = None if None in outputs else self._copies(each.weights)
        if weights is None:
            return 0.0
        call = _Call(outputs, weights, [ref(one) for one in each.inputs], self._copies(each.gradients), costs)
        earlier = [one for one in self._known if one.outputs == outputs and _are_equal(one.weights, weights)]
        self._known.append(call)
        if any(_differ(one, call) for one in earlier):
            return 0.0
        return max((_shared(one, call) for one in earlier), default=0.0)

    def _copies(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Return copies of the tensors; None if one is sparse, or if too much is kept already."""
        given = [one for one in tensors if one is not None]
        if any(one.layout is not torch.strided for one in given):
            return None
        size = sum(one.numel() * one.element_size() for one in given)
        if size > self._left:
            return None
        self._left -= size
        return [None if one is None else one.detach().clone() for one in tensors]

    def look_after_update(self, optimizer: Any) -> None:
        self._forget_calls()

    def step_failed(self) -> None:
        self._forget()

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


def _description(root: Tensor) -> tuple[Any, ...] | None:
    """Return a description of a root that only equal functions of the same tensor have; None if it cannot be told.

    It is the identity of the last node that is not one of the linear operators, with those that follow.
    """
    node, number = root.grad_fn, root.output_nr
    if node is None or root._backward_hooks:  # a hook may change the derivatives between two calls
        return None
    operators: list[Any] = [(root.shape, root.dtype)]
    while len(operators) <= _MOST_LINEAR and _LINEAR.fullmatch(node.name()) and len(node.next_functions) == 1:
        below, below_number = node.next_functions[0]
        saved = [(name, getattr(node, name)) for name in dir(node) if name.startswith("_saved_")]
        if below is None or hasattr(below, "variable") or not all(_is_plain(value) for _, value in saved):
            break
        results = [(tuple(one.shape), one.dtype) for one in node._input_metadata]
        operators.append((node.name(), number, saved, results))
        node, number = below, below_number
    metadata: Any = node.metadata
    return (metadata.setdefault(_IDENTITY, object()), number, operators)


def _is_plain(value: object) -> bool:
    return all(one is None or type(one) in (int, bool, float) for one in (value if type(value) is tuple else (value,)))


def _marked(node: Any) -> float:
    """Return the share of a node's work that is repeated."""
    return float(node.metadata.get(_SHARE, 0.0))


def _shared(earlier: _Call, call: _Call) -> float:
    """Return the share of a call's work in operators that an earlier one went through."""
    again_s = sum(call.costs[operator] for operator in call.costs.keys() & earlier.costs.keys())
    return again_s / sum(call.costs.values()) if again_s else 0.0


def _differ(earlier: _Call, call: _Call) -> bool:
    """Return whether the derivatives by an input of both differ, e.g. because of hooks, or are not known."""
    positions = {id(one): position for position, each in enumerate(earlier.inputs) if (one := each()) is not None}
    both = [(positions[id(each())], position) for position, each in enumerate(call.inputs) if id(each()) in positions]
    if not both:
        return False
    if earlier.gradients is None or call.gradients is None:
        return True
    return not _are_equal([earlier.gradients[one] for one, _ in both], [call.gradients[other] for _, other in both])


def _are_equal(some: Iterable[Tensor | None], others: Iterable[Tensor | None]) -> bool:
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif (one.dtype, one.device) != (other.dtype, other.device) or not torch.equal(one, other):
            return False
    return True
