"""Activations that a program writes as a formula of several operators, where torch has one operator, such as GELU.

The graph below a backward pass shows them: a multiplication whose factors come from one tensor through elementwise
operators alone. Some elements of its result, which autograd's kept tensors give, are compared with those of torch's
operators. Nothing is read in a step that packs the tensors that autograd keeps: unpacking one may run forward again.

The formula and the operator are timed after the last step, on numbers of the same shape. Only loops on a CPU are
observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import ACTIVATION_FORMULAS, ActivationFormulaRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, first_nodes, nodes_below
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

FEWEST_ELEMENTS = 1 << 12  # of the tensor
MOST_OPERATORS = 12  # of a formula
CORNER, COMPARED = 8, 64  # elements along a dimension, and in all; some must differ from 0 by LEAST
FEWEST_VALUES = 5  # different ones
LEAST, TOLERANCE = 1e-2, 2e-5  # tolerance as a share of the input, so that small inputs tell functions apart, too
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Activation] = {
    "F.gelu(x, approximate='tanh')": partial(functional.gelu, approximate="tanh"),
    "F.gelu(x)": functional.gelu,
    "F.silu(x)": functional.silu,
    "F.mish(x)": functional.mish,
}
_BY_NODE = {  # functions with that operator in their formulas
    "Tanh": ("F.gelu(x, approximate='tanh')", "F.mish(x)"),
    "Erf": ("F.gelu(x)",),
    "Sigmoid": ("F.silu(x)",),
}
_OF_TWO: Mapping[str, Callable[[Any, Any], Tensor]] = {"Mul": torch.mul, "Add": torch.add, "Div": torch.div}
_OF_ONE: Mapping[str, Activation] = {
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Softplus": functional.softplus,
}
Edge = tuple[Any, int]  # a node of the graph, and which of its results


class Operator(NamedTuple):
    """Operator of a formula.

    operands: the numbers of the values that it uses, 0 for the input and n for the result of the n-th operator; None
    for a number. number: that number, or the exponent of a power; 1 where autograd does not keep it.
    """

    name: str
    operands: tuple[int | None, ...]
    number: float


class Formula(NamedTuple):
    """Operators that compute a function of torch from a tensor of this shape."""

    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operators: tuple[Operator, ...]

    def result(self, x: Tensor) -> Tensor:
        """Return the result of all operators; autograd records them."""
        values = [x]
        for each in self.operators:
            operands: list[Any] = [each.number if one is None else values[one] for one in each.operands]
            if each.name == "Pow":
                values.append(torch.pow(operands[0], each.number))
            elif each.name in _OF_ONE:
                values.append(_OF_ONE[each.name](operands[0]))
            else:
                values.append(_OF_TWO[each.name](*operands))
        return values[-1]


class ActivationFormulas(WarmupGraphs[Formula]):
    """Observer of the elementwise operators below the backward passes of a few warm-up steps."""

    def _start(self) -> None:
        super()._start()
        self._roots: set[int] = set()  # numbers of the roots of this step; a graph may have several passes

    def _look(self, roots: Any) -> None:
        numbers = {node._sequence_nr() for node in first_nodes(roots)}
        if not numbers <= self._roots and self._may_read():
            self._roots |= numbers
            self._here.update(formulas(roots))

    def end(self) -> None:
        self.keep(ACTIVATION_FORMULAS, [self._row(each) for each in self._in_each_step()])
        self._steps.clear()

    def _row(self, formula: Formula) -> ActivationFormulaRow:
        count = min(step[formula] for step in self._steps)
        x = torch.linspace(-3, 3, math.prod(formula.shape), dtype=formula.dtype).reshape(formula.shape)
        x.requires_grad_()
        one = ACTIVATIONS[formula.function]
        time_s, one_s = compared_s(lambda: [formula.result(x)], lambda: [one(x)], [x])
        return {
            "activation": formula.function,
            "operators": len(formula.operators),
            "elements": math.prod(formula.shape),
            "calls": count,
            "steps": len(self._steps),
            "time_s": count * time_s,
            "one_s": count * one_s,
        }


def formulas(roots: Any) -> Iterator[Formula]:
    """Yield the activations below the roots that are written as formulas."""
    nodes = nodes_below(roots)
    if len(nodes) >= MOST_NODES:
        return
    for node in nodes:
        if _name(node) == "Mul" and math.prod(_shape(node)) >= FEWEST_ELEMENTS:
            try:
                found = _formula(node)
            except RuntimeError:  # a kept tensor was changed in place, or is freed already
                continue
            if found is not None:
                yield found


def _formula(node: Any) -> Formula | None:
    """Return the formula that ends with a multiplication; None if it is no function that torch has."""
    near = _near(node)
    functions = [each for name, many in _BY_NODE.items() if name in map(_name, near) for each in many]
    dtype = node._input_metadata[0].dtype
    if not functions or dtype not in (torch.float32, torch.float64):
        return None
    factors = node._saved_self, node._saved_other
    if any(each is None or tuple(each.shape) != _shape(node) for each in factors):
        return None
    results = [one * other for one, other in zip(*map(_values, factors), strict=True)]
    for edge, inputs in _inputs(near):
        function = _function(inputs, results, functions)
        operators = _operators(node, edge) if function else None
        if function and operators:
            return Formula(function, _shape(node), dtype, operators)
    return None


def _function(inputs: Sequence[float], results: Sequence[float], functions: Sequence[str]) -> str | None:
    """Return the function that has these results; None without any."""
    if len({*inputs}) < FEWEST_VALUES or max(map(abs, inputs)) < LEAST:
        return None
    x = torch.tensor(inputs, dtype=torch.float64)
    found = torch.tensor(results, dtype=torch.float64)
    for each in functions:
        if bool(((ACTIVATIONS[each](x) - found).abs() <= TOLERANCE * x.abs()).all()):
            return each
    return None


def _near(node: Any) -> list[Any]:
    """Return elementwise nodes with one shape that a node's factors come from, and the node itself, first."""
    found, shape = [node], _shape(node)
    for each in found:
        for below, _ in each.next_functions:
            is_one = below is not None and _is_elementwise(below) and _shape(below) == shape
            if is_one and below not in found and len(found) < MOST_OPERATORS:
                found.append(below)
    return found


def _inputs(nodes: Sequence[Any]) -> Iterator[tuple[Edge, tuple[float, ...]]]:
    """Yield operands of nodes with some of their elements: kept by autograd, or such a one divided by a number."""
    for node in nodes:
        name = _name(node)
        kept = [node._saved_self] if name in ("Mul", "Pow", "Erf", "Softplus") else []
        kept += [node._saved_other] if name == "Mul" else []
        for edge, tensor in zip(node.next_functions, kept, strict=False):
            if edge[0] is None or tensor is None or tuple(tensor.shape) != _shape(node):
                continue
            values = _values(tensor)
            yield edge, values
            while (factor := _factor(edge[0])) is not None:
                edge, values = edge[0].next_functions[0], tuple(each / factor for each in values)
                yield edge, values


def _factor(node: Any) -> float | None:
    """Return the number by which an operator multiplies a tensor; None for others."""
    name = _name(node)
    if name not in ("Mul", "Div") or node.next_functions[0][0] is None or node.next_functions[1][0] is not None:
        return None
    other = node._saved_other
    number = 0.0 if other is None or other.dim() else float(other)
    return (number if name == "Mul" else 1 / number) if number else None


def _operators(last: Any, source: Edge) -> tuple[Operator, ...] | None:
    """Return the operators from a tensor to a node, in their order; None if they use another tensor, too."""
    found, numbers = list[Operator](), dict[Edge, int]()

    def number_of(edge: Edge) -> int | None:
        """Return the number of a value; raise LookupError for another tensor."""
        if edge == source:
            return 0
        if edge not in numbers:
            node = edge[0]
            if not _is_elementwise(node) or len(found) >= MOST_OPERATORS:
                raise LookupError
            operands = tuple(None if each[0] is None else number_of(each) for each in node.next_functions)
            found.append(Operator(_name(node), operands, _number(node)))
            numbers[edge] = len(found)
        return numbers[edge]

    try:
        number_of((last, 0))
    except LookupError:
        return None
    return tuple(found)


def _number(node: Any) -> float:
    """Return the number that an operator uses; 1 if autograd does not keep it. Raise LookupError for a tensor."""
    name = _name(node)
    if name == "Pow":
        return float(node._saved_exponent)
    if name not in ("Mul", "Div") or node.next_functions[1][0] is not None:
        return 1.0
    other = node._saved_other
    if other is None or other.dim():
        raise LookupError
    return float(other)


def _values(tensor: Tensor) -> tuple[float, ...]:
    """Return elements at the same places of tensors of one shape, whatever their layout in memory."""
    corner = tensor.detach()[tuple(slice(CORNER) for _ in tensor.shape)]
    return tuple(corner.reshape(-1)[:COMPARED].tolist())


def _is_elementwise(node: Any) -> bool:
    name = _name(node)
    return name in _OF_TWO or name in _OF_ONE or (name == "Pow" and isinstance(node._saved_exponent, (int, float)))


def _name(node: Any) -> str:
    name: str = node.name()
    return name.partition("Backward")[0]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape) if len(node._input_metadata) == 1 else ()
