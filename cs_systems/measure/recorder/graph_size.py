"""Number of operators of a forward pass, and an upper bound of their arithmetic, from the graph of autograd."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.instrument.parameters import own_parameters

MOST_NODES = 100_000
_NODE = re.compile(r"(\w+)Backward\d")
MOST_GRAPHS = 6  # that one observer looks through: with thousands of nodes, one takes some milliseconds
# rates that one core of any machine exceeds, so that the bound is not below the real time
ELEMENTS_PER_S, FLOPS_PER_S = 2e8, 5e9
# parts of the names of nodes with an operator that sums over an inner dimension
_PRODUCTS = ("mm", "linear", "conv", "attention")
# parts of the names of nodes: a whole recurrent layer, a cast
_LAYER, _CAST = "MkldnnRnnLayer", "ToCopy"
_NO_OPERATORS = ("AccumulateGrad", "ViewBackward", "TBackward", "squeezeBackward")  # leaves, and views that do no work


class GraphSize(NamedTuple):
    """Operators of a forward pass, and an upper bound in s of their arithmetic.

    Recurrent modules of torch over sequences, and what runs between two of them, are left out: each is one operator for
    the program, with many nodes. One that is called for each time step by itself counts like any other operator.
    has_recurrent: some are left out, so that the operators are not the whole pass.
    """

    operators: int
    arithmetic_s: float
    has_recurrent: bool = False


def graph_size(roots: Any, models: Iterable[nn.Module]) -> GraphSize | None:
    """Return the size of the graph below the roots of a backward pass, without running it; None if it is too large."""
    modules = [module for model in models for module in model.modules()]
    inner = max((math.prod(p.shape[1:]) for module in modules for p in own_parameters(module)), default=1)
    seen = nodes_below(roots)
    if len(seen) >= MOST_NODES:
        return None
    over_sequences = [m for m in modules if isinstance(m, nn.RNNBase) and not _takes_single_steps(m, seen)]
    recurrent = {id(p) for module in over_sequences for p in module.parameters()}
    left_out = _between(seen, recurrent)
    nodes = [node for node in seen if _is_operator(node) and node._sequence_nr() not in left_out]
    arithmetic_s = sum(_arithmetic_s(node, inner) + _gates_s(node, inner) for node in nodes)
    return GraphSize(len(nodes), arithmetic_s, bool(recurrent))


def _takes_single_steps(module: nn.RNNBase, nodes: Iterable[Any]) -> bool:
    """Return whether each call of a recurrent module was of a single time step, as in a loop of the program.

    A call multiplies all its inputs by their weight at once, and the state by its own weight in each time step.
    oneDNN's layer is one node. Under autocast, a cast of the weight stands between it and its products, so that these
    cannot be counted.
    """
    of_inputs, of_states = (id(getattr(module, f"weight_{name}_l0", None)) for name in ("ih", "hh"))
    uses = Counter[int]()
    for node in nodes:
        used = {id(getattr(each, "variable", 0)) for each, _ in node.next_functions} & {of_inputs, of_states}
        is_layer = _LAYER in node.name() and node._input_metadata[0].shape[0] > 1
        if used and (is_layer or _CAST in node.name()):
            return False
        uses.update(used)
    return 0 < uses[of_inputs] == uses[of_states]


def _gates_s(node: Any, inner: int) -> float:
    """Return an upper bound in s of the products in oneDNN's recurrent layer, of four gates with inputs and state."""
    return 16 * math.prod(node._input_metadata[0].shape) * inner / FLOPS_PER_S if _LAYER in node.name() else 0.0


def _between(nodes: Iterable[Any], parameters: Collection[int]) -> range:
    """Return the numbers of the nodes from the first to the last that uses one of these parameters, by their `id`."""
    uses = [node for node in nodes for each, _ in node.next_functions if id(getattr(each, "variable", 0)) in parameters]
    numbers = [node._sequence_nr() for node in uses]
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def first_nodes(roots: Any) -> list[Any]:
    """Return the nodes of the tensors among the roots of a backward pass."""
    tensors = [roots] if isinstance(roots, Tensor) else [each for each in roots if isinstance(each, Tensor)]
    return [each.grad_fn for each in tensors if each.grad_fn is not None]


def costs_by_owners(roots: Any, owners: Mapping[int, int]) -> dict[frozenset[int], float]:
    """Return an upper limit of the operators' computing time in seconds, by the owners of the parameters they use.

    owners: the owner of each parameter, by the parameter's `id`. Operators that use no such parameter are left out.
    """
    below: dict[Any, frozenset[int]] = {}
    costs: dict[frozenset[int], float] = {}
    for node, following in inputs_first(roots):
        leaf = getattr(node, "variable", None)
        of = {owners[id(leaf)]} if id(leaf) in owners else set[int]()
        below[node] = reached = frozenset(of.union(*(below.get(each, frozenset()) for each in following)))
        if reached and _is_operator(node):
            costs[reached] = costs.get(reached, 0.0) + _arithmetic_s(node, _widest(following))
    return costs


def weight_costs(roots: Any, owners: Mapping[int, int]) -> tuple[dict[tuple[int, frozenset[int]], float], float]:
    """Return estimates of backward's computing time in seconds: of gradients of weights on the way to others, and all.

    The former is by the owner of the weight, and the owners of the parameters below the product's other operands.

    owners: the owner of each parameter, by the parameter's `id`.
    """
    below: dict[Any, frozenset[int]] = {}
    costs: dict[tuple[int, frozenset[int]], float] = {}
    total_s = 0.0
    for node, following in inputs_first(roots):
        leaf = getattr(node, "variable", None)
        of = {owners[id(leaf)]} if id(leaf) in owners else set[int]()
        below[node] = frozenset(of.union(*(below.get(each, frozenset()) for each in following)))
        if not _is_operator(node):
            continue
        cost_s = _arithmetic_s(node, _widest(following))
        operands = [each for each in following if not _is_vector(each)] if is_product(node) else []
        total_s += cost_s * max(1, len(operands))
        for each in operands:
            weight = getattr(through_views(each), "variable", None)
            others = frozenset[int]().union(*(below.get(other, frozenset()) for other in operands if other is not each))
            if id(weight) in owners and others:
                key = owners[id(weight)], others
                costs[key] = costs.get(key, 0.0) + cost_s
    return costs, total_s


def leaves_below(roots: Any) -> list[Tensor]:
    """Return the parameters and other leaves below the roots of a backward pass."""
    return [node.variable for node in nodes_below(roots) if hasattr(node, "variable")]


def nodes_below(roots: Any) -> set[Any]:
    """Return the nodes below the roots of a backward pass, these included; some of them if there are very many."""
    waiting = first_nodes(roots)
    seen = {*waiting}
    while waiting and len(seen) < MOST_NODES:
        below = dict.fromkeys(each for each, _ in waiting.pop().next_functions if each is not None)
        new = [each for each in below if each not in seen]
        seen.update(new)
        waiting += new
    return seen


def costs_by_operator(roots: Any, leaves: Iterable[Tensor]) -> dict[int, float]:
    """Return an upper limit of the computing time in seconds of each operator above some leaves, by its number.

    It is the number in its thread's sequence, so that no part of the graph is kept.
    """
    costs: dict[int, float] = {}
    for node, following in leading_to(roots, leaves):
        if _is_operator(node):
            costs[node._sequence_nr()] = _arithmetic_s(node, _widest(following))
    return costs


def costs_of_gradients(roots: Any, leaves: Iterable[Tensor]) -> dict[tuple[Any, int], float]:
    """Return the same limit of each gradient that leads to the leaves, by the operator's node and the operand's place.

    A product computes the gradient of each operand by itself; other operators are counted once, at place 0.
    """
    costs: dict[tuple[Any, int], float] = {}
    leads = set[Any]()
    for node, following in leading_to(roots, leaves):
        leads.add(node)
        if _is_operator(node):
            places = [place for place, each in enumerate(following) if each in leads and not _is_vector(each)]
            for place in places if is_product(node) and places else [0]:
                costs[node, place] = _arithmetic_s(node, _widest(following))
    return costs


def leading_to(roots: Any, leaves: Iterable[Tensor]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the nodes below the roots that lead to some leaves, each with those that follow it in backward."""
    wanted, leads = {id(each) for each in leaves}, dict[Any, bool]()
    for node, following in inputs_first(roots):
        leads[node] = id(getattr(node, "variable", None)) in wanted or any(leads.get(each, False) for each in following)
        if leads[node]:
            yield node, following


def backward_costs(roots: Any, leaves: Iterable[Tensor]) -> tuple[float, float]:
    """Return an estimate of the computing time in seconds of backward that serves some leaves alone, and of all of it.

    A product costs as much again for each operand with a gradient.
    """
    wanted, serves = {id(each) for each in leaves}, dict[Any, bool]()
    alone_s = total_s = 0.0
    for node, following in inputs_first(roots):
        is_wanted = id(getattr(node, "variable", None)) in wanted
        serves[node] = is_wanted or (bool(following) and all(serves.get(each, False) for each in following))
        if not _is_operator(node):
            continue
        cost_s, operands = _arithmetic_s(node, _widest(following)), following
        if is_product(node):
            operands = [each for each in following if not _is_vector(each)]
            cost_s *= len(operands)
        elif "Norm" not in node.name():
            operands = []
        total_s += cost_s
        for_them = sum(serves.get(each, False) for each in operands)
        alone_s += cost_s if serves[node] else cost_s * for_them / max(1, len(operands))
    return alone_s, total_s


def _is_vector(node: Any) -> bool:
    return hasattr(node, "variable") and node.variable.dim() == 1


def inputs_first(roots: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each node below the roots after the nodes that follow it in backward, and these."""
    done = set[Any]()
    waiting = [(node, False) for node in first_nodes(roots)]
    while waiting and len(done) < MOST_NODES:
        node, is_left = waiting.pop()
        if node in done:
            continue
        following = [each for each, _ in node.next_functions if each is not None]
        if is_left:
            done.add(node)
            yield node, following
        else:
            waiting += [(node, True), *((each, False) for each in following if each not in done)]


def _is_operator(node: Any) -> bool:
    return not any(word in node.name() for word in _NO_OPERATORS)


def is_product(node: Any) -> bool:
    """Return whether a node's operator sums over an inner dimension."""
    return any(word in node.name().lower() for word in _PRODUCTS)


def _widest(following: Iterable[Any]) -> int:
    """Return the largest inner dimension of a product with one of these operands."""
    return max(map(_inner, following), default=1)


def _inner(weight: Any) -> int:
    """Return the inner dimension of a product with this operand, a parameter or its transpose; else 1."""
    if hasattr(weight, "variable"):
        return math.prod(weight.variable.shape[1:])
    return weight._input_metadata[0].shape[0] if weight.name().startswith("TBackward") else 1


_WHOLE = ("TBackward", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "ToCopy")  # hand on all elements


def multiplied(roots: Any) -> set[int]:
    """Return the leaves below the roots, by `id`, of which all rows are used, because they are operands of products."""
    found = set[int]()
    for node, following in inputs_first(roots):
        waiting = following if is_product(node) else []
        while waiting:
            found |= {id(each.variable) for each in waiting if hasattr(each, "variable")}
            handing_on = (each for each in waiting if any(word in each.name() for word in _WHOLE))
            waiting = [below for each in handing_on for below, _ in each.next_functions if below is not None]
    return found


def through_views(node: Any) -> Any:
    """Return the first node, from this one on, that does more than to hand on all elements; None without one."""
    while node is not None and any(word in node.name() for word in _WHOLE):
        node = node.next_functions[0][0]
    return node


def operator_of(node: Any) -> str | None:
    """Return the name of torch's operator of a node with one result, such as `Mul`; None for other nodes.

    A node's name ends with `Backward` and a digit, which that of a function of the program lacks.
    """
    found = _NODE.fullmatch(node.name())
    return found[1] if found and len(node._input_metadata) == 1 else None


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the result of a node with one result."""
    return tuple(node._input_metadata[0].shape)


def is_weight_of_a_layer(node: Any) -> bool:
    """Return whether a factor is the transpose of a parameter, as in a linear layer."""
    return node.name().startswith("TBackward") and hasattr(through_views(node), "variable")


def uses_of_leaves(roots: Any) -> Counter[int]:
    """Return how often operators below the roots of a backward pass use each leaf, by its `id`."""
    following = (each for node in nodes_below(roots) for each, _ in node.next_functions if each is not None)
    leaves = (getattr(each, "variable", None) for each in following)
    return Counter(id(leaf) for leaf in leaves if leaf is not None)


SUMS = ("SumBackward", "MeanBackward", "NormBackward")
ELEMENTWISE = ("SubBackward", "AddBackward", "MulBackward", "DivBackward")  # of two operands
LARGER, LARGE = 8, 1 << 18  # ratio of a broadcast's elements to those before and after it, and its least elements


def largest_broadcast(roots: Any) -> tuple[tuple[int, ...], int, int] | None:
    """Return the largest tensor that is made from smaller ones by broadcasting and then summed up, below the roots.

    Returns its shape, the elements of the tensors that it is made from, and the elements of the sum. Between the two,
    elementwise operators keep its shape.
    """
    waiting: list[tuple[Any, int]] = [(node, 0) for node in first_nodes(roots)]
    seen, found = set[Any](), None
    while waiting and len(seen) < MOST_NODES:
        node, left = waiting.pop()  # left: the elements of the sum over it; 0 if it is not summed up
        if node in seen:
            continue
        seen.add(node)
        shape = tuple(node._input_metadata[0].shape) if node._input_metadata else ()
        elements, below = math.prod(shape), [each for each, _ in node.next_functions if each is not None]
        sizes = [sum(math.prod(m.shape) for m in each._input_metadata) for each in below]
        is_sum = any(word in node.name() for word in SUMS)
        is_elementwise = len(below) == 2 and any(word in node.name() for word in ELEMENTWISE)
        is_made = left and is_elementwise and elements >= LARGE and LARGER * max(left, sum(sizes)) <= elements
        if is_made and (found is None or elements > math.prod(found[0])):
            found = shape, sum(sizes), left
        for each, size in zip(below, sizes, strict=True):
            carries = elements if is_sum else left if left and size == elements else 0
            waiting.append((each, carries))
    return found


def _arithmetic_s(node: torch.autograd.graph.Node, inner: int) -> float:
    """Return an upper bound in s for a node's operator.

    inner: the largest inner dimension of the models' products.
    """
    elements: int = sum(math.prod(each.shape) for each in node._input_metadata)
    return elements / ELEMENTS_PER_S + (2 * elements * inner / FLOPS_PER_S if is_product(node) else 0.0)
