"""Number of operators of a forward pass, and an upper bound of their arithmetic, from the graph of autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST_NODES = 100_000
# rates that one core of any machine exceeds, so that the bound is not below the real time
ELEMENTS_PER_S, FLOPS_PER_S = 2e8, 5e9
# parts of the names of nodes whose operator sums over an inner dimension
_PRODUCTS = ("mm", "linear", "conv", "attention")
_NO_OPERATORS = ("AccumulateGrad", "ViewBackward", "TBackward", "squeezeBackward")  # leaves, and views that do no work


class GraphSize(NamedTuple):
    """Operators of a forward pass, and an upper bound in s of their arithmetic."""

    operators: int
    arithmetic_s: float


def graph_size(roots: Any, models: Iterable[nn.Module]) -> GraphSize | None:
    """Return the size of the graph below the roots of a backward pass, without running it.

    None for models with a recurrent module of torch, which is one operator with many nodes, and for too large graphs.
    """
    modules = [module for model in models for module in model.modules()]
    if any(isinstance(module, nn.RNNBase) for module in modules):
        return None
    inner = max((math.prod(p.shape[1:]) for module in modules for p in module.parameters(recurse=False)), default=1)
    tensors = [roots] if isinstance(roots, Tensor) else [each for each in roots if isinstance(each, Tensor)]
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen = {*waiting}
    operators, arithmetic_s = 0, 0.0
    while waiting:
        node = waiting.pop()
        if not any(word in node.name() for word in _NO_OPERATORS):
            operators += 1
            arithmetic_s += _arithmetic_s(node, inner)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        if len(seen) > MOST_NODES:
            return None
    return GraphSize(operators, arithmetic_s)


def _arithmetic_s(node: torch.autograd.graph.Node, inner: int) -> float:
    """Return an upper bound in s for a node's operator.

    inner: the largest inner dimension of the models' products.
    """
    elements: int = sum(math.prod(each.shape) for each in node._input_metadata)
    is_product = any(word in node.name().lower() for word in _PRODUCTS)
    return elements / ELEMENTS_PER_S + (2 * elements * inner / FLOPS_PER_S if is_product else 0.0)
