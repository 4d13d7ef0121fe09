"""Running totals over the elements of a tensor, one after the other, in the graph below a backward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from cs_systems.measure.recorder.graph_size import MOST_NODES, is_product, nodes_below

FEWEST = 100  # additions of one total; losses of tasks, layers or levels are fewer
MOST_ELEMENTS = 64  # of any result on the way; arithmetic on more of them takes longer than the call
MOST_BEFORE = 20  # operators between an element and its addition
MOST_SOURCES = 4  # tensors with elements that are added; a list of results from as many calls is not a tensor
_ADDITION, _LISTS = "AddBackward", ("Unbind", "Split", "Chunk")


class ElementSum(NamedTuple):
    """One running total: the numbers of its operators in the thread's sequence, and how many there are."""

    first: int
    last: int
    operators: int


def element_sums(roots: Any) -> list[ElementSum]:
    """Return the totals of many elements below the roots, if nothing but the next addition uses a total."""
    nodes = nodes_below(roots)
    if len(nodes) >= MOST_NODES:
        return []
    additions = {node for node in nodes if _ADDITION in node.name() and _is_small(node)}
    if len(additions) < FEWEST:
        return []
    uses = Counter(each for node in nodes for each in _following(node) if each in additions)
    found, done = list[ElementSum](), set[Any]()
    for node in sorted(additions, key=lambda each: -each._sequence_nr()):
        if node in done:
            continue
        chain = _chain(node, additions)
        done.update(chain)
        if len(chain) >= FEWEST and (operators := _operators(chain, uses)):
            found.append(ElementSum(chain[-1]._sequence_nr(), node._sequence_nr(), operators))
    return found


def _chain(last: Any, additions: Collection[Any]) -> list[Any]:
    """Return the additions of a total, the last one first; of two operands, the total is the older one."""
    chain = [last]
    while before := [each for each in _following(chain[-1]) if each in additions]:
        chain.append(min(before, key=lambda each: each._sequence_nr()))
    return chain


def _operators(chain: list[Any], uses: Mapping[Any, int]) -> int:
    """Return the number of operators that compute a total and its elements; 0 if it is another computation."""
    if any(uses[total] > 1 for total in chain[1:]):
        return 0  # such as the states of a recurrence
    start, totals = chain[-1]._sequence_nr(), {*chain}
    operators, sources = len(chain), set[Any]()
    for addition, total in pairwise(chain):
        waiting, seen = [each for each in _following(addition) if each is not total], set[Any]()
        if not waiting:
            return 0  # it adds a constant
        while waiting:
            node = waiting.pop()
            if node in totals:
                return 0  # a recurrence
            if hasattr(node, "variable") or node._sequence_nr() < start:
                if any(word in node.name() for word in _LISTS) and not _is_small(node):
                    return 0
                sources.add(node)
            elif node not in seen:
                if not _is_small(node) or is_product(node) or len(seen) >= MOST_BEFORE:
                    return 0
                seen.add(node)
                waiting += _following(node)
        operators += len(seen)
        if len(sources) > MOST_SOURCES:
            return 0
    return operators


def _following(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _is_small(node: Any) -> bool:
    """Return whether each result of a node's operator has few elements."""
    return all(math.prod(each.shape) <= MOST_ELEMENTS for each in node._input_metadata)
