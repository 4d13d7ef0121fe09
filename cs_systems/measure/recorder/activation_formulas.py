"""Activations that a program writes as a formula of several operators, where torch has one operator, such as GELU.

The graph below a backward pass shows them: a multiplication whose factors come from one tensor through elementwise
operators alone. The formula must equal torch's function between −3 and 3, and elements of its result, which autograd's
kept tensors give, those of torch's function, because autograd keeps no addend. Nothing is read in a step that packs the
tensors that autograd keeps, since unpacking one may run forward again, and nothing is told of second derivatives, where
torch's operator may be slower.

The formula and the operator are timed after the last step, on numbers of the same shape. Only loops on a CPU are
observed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import ACTIVATION_FORMULAS, ActivationFormulaRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, nodes_below, operator_of, shape_of
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

FEWEST_ELEMENTS = 1 << 12  # of the tensor
MOST_OPERATORS = 12  # of a formula
COMPARED = 64  # elements of a tensor, at equal distances; some must differ from 0 by LEAST
FEWEST_VALUES = 5  # different ones
MOST_LOOKS = 512  # multiplications of a pass that are looked at, the largest first
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
_TWICE = "BackwardBackward"  # in the name of a node of a second derivative


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
        return _computed(self.operators, x)


class ActivationFormulas(WarmupGraphs[Formula]):
    """Observer of the elementwise operators below the backward passes of a few warm-up steps."""

    def _start(self) -> None:
        super()._start()
        self._seen: set[int] = set()  # numbers of the multiplications of this step; a graph may have several passes
        self._is_twice = False  # a pass of this step has second derivatives

    def _look(self, roots: Any) -> None:
        nodes = nodes_below(roots)
        self._is_twice = self._is_twice or any(_TWICE in node.name() for node in nodes)
        if len(nodes) >= MOST_NODES or self._is_twice or not self._may_read():
            return
        new = [each for each in nodes if _name(each) == "Mul" and each._sequence_nr() not in self._seen]
        self._seen |= {each._sequence_nr() for each in new}
        largest = sorted(new, key=lambda each: -math.prod(shape_of(each)))
        self._here.update(formulas(largest[:MOST_LOOKS]))

    def _step_ends(self) -> None:
        if self._is_twice:
            self._here.clear()
        super()._step_ends()

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


def formulas(nodes: Iterable[Any]) -> Iterator[Formula]:
    """Yield the activations written as formulas that end with one of these multiplications."""
    for node in nodes:
        if math.prod(shape_of(node)) >= FEWEST_ELEMENTS:
            try:
                found = _formula(node)
            except RuntimeError:  # a kept tensor was changed in place, or is freed already
                continue
            if found is not None:
                yield found


def _formula(node: Any) -> Formula | None:
    """Return the formula that ends with a multiplication; None if it is no function that torch has."""
    if node._input_metadata[0].dtype not in (torch.float32, torch.float64):
        return None
    return next((found for source in _read_twice(node) if (found := _from(source, node)) is not None), None)


def _from(source: Edge, node: Any) -> Formula | None:
    """Return the formula from a tensor to a multiplication; None if it is no function that torch has."""
    if (between := _operators(node, source)) is None:
        return None
    operators, nodes = between
    if (function := _function(operators)) is None:
        return None
    factors = node._saved_self, node._saved_other
    if any(each is None or tuple(each.shape) != shape_of(node) for each in factors):
        return None
    results = [one * other for one, other in zip(*map(_values, factors), strict=True)]
    inputs = next(_inputs(nodes, source), None)
    if inputs is None or not _has_results(function, inputs, results):
        return None
    return Formula(function, shape_of(node), node._input_metadata[0].dtype, operators)


@functools.lru_cache(maxsize=256)
def _function(operators: tuple[Operator, ...]) -> str | None:
    """Return the function of torch that operators compute between -3 and 3; None if there is none."""
    names = {each.name for each in operators}
    candidates = [each for name, many in _BY_NODE.items() if name in names for each in many]
    if not candidates:
        return None
    x = torch.linspace(-3, 3, 2 * COMPARED, dtype=torch.float64)
    written = _computed(operators, x)
    return next((each for each in candidates if _is_same(ACTIVATIONS[each](x), written, x)), None)


def _computed(operators: Sequence[Operator], x: Tensor) -> Tensor:
    """Return the result of the last operator for x."""
    values = [x]
    for each in operators:
        operands: list[Any] = [each.number if one is None else values[one] for one in each.operands]
        if each.name == "Pow":
            values.append(torch.pow(operands[0], each.number))
        elif each.name in _OF_ONE:
            values.append(_OF_ONE[each.name](operands[0]))
        else:
            values.append(_OF_TWO[each.name](*operands))
    return values[-1]


def _is_same(one: Tensor, other: Tensor, x: Tensor) -> bool:
    """Return whether results for x are the same but for rounding."""
    return bool(((one - other).abs() <= TOLERANCE * x.abs()).all())


def _has_results(function: str, inputs: Sequence[float], results: Sequence[float]) -> bool:
    """Return whether a function of torch gives these results for enough different inputs."""
    if len({*inputs}) < FEWEST_VALUES or max(map(abs, inputs)) < LEAST:
        return False
    x, found = (torch.tensor(each, dtype=torch.float64) for each in (inputs, results))
    return _is_same(ACTIVATIONS[function](x), found, x)


def _inputs(nodes: Sequence[Any], source: Edge) -> Iterator[tuple[float, ...]]:
    """Yield some elements of the tensor at an edge: kept by autograd, or of one that is it times a number."""
    for node in nodes:
        name = _name(node)
        kept = [node._saved_self] if name in ("Mul", "Pow", "Erf", "Softplus") else []
        kept += [node._saved_other] if name == "Mul" else []
        for edge, tensor in zip(node.next_functions, kept, strict=False):
            if edge[0] is None or tensor is None or tuple(tensor.shape) != shape_of(node):
                continue
            divisor = 1.0
            while edge != source and (factor := _factor(edge[0])) is not None:
                edge, divisor = edge[0].next_functions[0], divisor * factor
            if edge == source:
                yield tuple(each / divisor for each in _values(tensor))


def _factor(node: Any) -> float | None:
    """Return the number by which an operator multiplies a tensor; None for others."""
    if _name(node) not in ("Mul", "Div") or node.next_functions[0][0] is None or node.next_functions[1][0] is not None:
        return None
    number = _number_of(node._saved_other)
    return (number if _name(node) == "Mul" else 1 / number) if number else None


def _read_twice(last: Any) -> list[Edge]:
    """Return the tensors that several of the elementwise nodes near a node read, as a factor and as an input."""
    near, shape, edges = [last], shape_of(last), Counter[Edge]()
    for node in near:
        for edge in node.next_functions:
            if edge[0] is None:
                continue
            edges[edge] += 1
            is_new = edge[0] not in near and len(near) < MOST_OPERATORS
            if is_new and _is_elementwise(edge[0]) and shape_of(edge[0]) == shape:
                near.append(edge[0])
    return [edge for edge, count in edges.items() if count > 1]


def _operators(last: Any, source: Edge) -> tuple[tuple[Operator, ...], list[Any]] | None:
    """Return the operators from a tensor to a node in their order, and their nodes.

    None if other tensors lead to the node, too, or another operator than an elementwise one of the node's shape.
    """
    order, waiting = list[Any](), [(last, False)]
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            order.append(node)
        elif node not in order:
            if len(order) + len(waiting) > 2 * MOST_OPERATORS:
                return None
            waiting.append((node, True))
            for edge in node.next_functions:
                if edge[0] is None or edge == source:
                    continue
                if not _is_elementwise(edge[0]) or shape_of(edge[0]) != shape_of(last):
                    return None
                waiting.append((edge[0], False))
    order = [*dict.fromkeys(order)]
    if len(order) > MOST_OPERATORS:
        return None
    numbers: dict[Edge, int] = {source: 0} | {(node, 0): number for number, node in enumerate(order, 1)}
    found = []
    for node in order:
        operands = tuple(None if edge[0] is None else numbers[edge] for edge in node.next_functions)
        if (number := _number(node)) is None:
            return None
        found.append(Operator(_name(node) or "", operands, number))
    return tuple(found), order


def _number(node: Any) -> float | None:
    """Return the number that an operator uses; 1 where autograd does not keep it, and None if it is a tensor."""
    name, edges = _name(node), node.next_functions
    if name == "Pow":
        return float(node._saved_exponent)
    if name not in ("Mul", "Div") or all(edge[0] is not None for edge in edges):
        return 1.0
    if edges[0][0] is None and name == "Div":  # the dividend is not kept
        return None
    return _number_of(node._saved_self if edges[0][0] is None else node._saved_other)


def _number_of(kept: Any) -> float | None:
    """Return a kept operand that is one number; None for a tensor."""
    return None if kept is None or kept.dim() else float(kept)


def _values(tensor: Tensor) -> tuple[float, ...]:
    """Return elements at equal distances of each other, at the same places of tensors of one shape."""
    flat = torch.linspace(0, tensor.numel() - 1, COMPARED, dtype=torch.float64).long()
    return tuple(tensor.detach()[torch.unravel_index(flat, tensor.shape)].tolist())


def _is_elementwise(node: Any) -> bool:
    name = _name(node)
    return name in _OF_TWO or name in _OF_ONE or (name == "Pow" and isinstance(node._saved_exponent, (int, float)))


def _name(node: Any) -> str | None:
    """Return the name of an operator of torch that is no other form of it, such as `MulBackward1`."""
    return operator_of(node) if node.name().endswith("0") else None
