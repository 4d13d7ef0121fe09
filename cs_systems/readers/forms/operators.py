"""Operators of a trace, such as `aten::mm`, as columns, with the tree in which they nest.

A long trace has millions of operators with few distinct names and shapes, so each is stored in some 40 bytes.
"""

from __future__ import annotations

import functools
import itertools
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cs_systems.readers.forms.columns import UNKNOWN, Bools, Categorical, Floats, Ints, Ranges

MOST_TENSORS = 2  # most tensors of a list that a text shows
# Name of an operator's range under emit_nvtx: `aten::mm, op_id = 3, sizes = [[2, 4], [4, 8]]`.
_NVTX = re.compile(
    r"(?P<name>[^,]+)(?:, (?:seq|op_id) = \d+)+(?:, sizes = (?P<sizes>\[.*?\]))?(?:, input_op_ids = .*)?"
)


class Signature(NamedTuple):
    """Operator with the shape of each input: () for an input that is not a tensor, a tuple of shapes for a list.

    `shapes` is None where it was not recorded. `arguments` are the values of the other inputs as texts, for the
    operators with FLOPs that depend on them.
    """

    name: str
    shapes: tuple[Any, ...] | None = None
    arguments: tuple[str, ...] = ()


def shapes_text(shapes: Sequence[Any]) -> str:
    """Return the shapes of the tensors as `64×64, 64×192`."""
    return ", ".join(filter(None, map(_text, shapes)))


def _text(shape: Sequence[Any]) -> str:
    if all(isinstance(size, int) for size in shape):
        return "×".join(map(str, shape))
    shown = ", ".join(map(_text, shape[:MOST_TENSORS]))
    return f"[{shown}]" if len(shape) <= MOST_TENSORS else f"[{shown}, … {len(shape)} tensors]"


class Operators:
    """All operators of a process by thread and start, an operator before those inside it.

    `parent` is the index of the operator around each, UNKNOWN for none; `depth` is the number of those around it.
    """

    def __init__(self, signature: Categorical[Signature], start_s: Floats, end_s: Floats, thread: Ints) -> None:
        order = np.lexsort((-end_s, start_s, thread))
        self.signature = signature.take(order)
        self.start_s, self.end_s, self.thread = start_s[order], end_s[order], thread[order]
        self.parent, self.depth = nested(self.start_s, self.end_s, self.thread)

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def innermost(self) -> Bools:
        """Mask of the operators with no other operator inside."""
        found = np.ones(len(self), bool)
        found[self.parent[self.parent != UNKNOWN]] = False
        return found

    def ranges(self) -> Ranges:
        """Return the operators as ranges, so that a timeline can show them."""
        numbers: dict[str, int] = {}
        of_signature = [numbers.setdefault(one.name, len(numbers)) for one in self.signature.values]
        codes = np.array(of_signature, np.int64)[self.signature.codes]
        return Ranges(Categorical(list(numbers), codes), self.start_s, self.end_s, self.thread)

    def at(self, thread: Ints, time_s: Floats) -> Ints:
        """Return for each pair of thread and time the innermost open operator, UNKNOWN for none."""
        found = np.full(len(thread), UNKNOWN)
        for number in np.unique(thread).tolist():
            first, last = np.searchsorted(self.thread, [number, number + 1])
            mine = np.flatnonzero(thread == number)
            at = first + np.searchsorted(self.start_s[first:last], time_s[mine], "right") - 1
            found[mine] = np.where(at < first, UNKNOWN, at)
        while (ended := (found != UNKNOWN) & (self.end_s[found] < time_s)).any():
            found[ended] = self.parent[found[ended]]
        return found

    def inclusive(self, own: Floats) -> Floats:
        """Return for each operator the sum of a quantity over it and all operators inside it."""
        total, order = own.copy(), np.argsort(self.depth, kind="stable")
        starts = np.searchsorted(self.depth[order], np.arange(1, self.depth.max(initial=0) + 2))
        for first, last in reversed([*itertools.pairwise(starts)]):
            children = order[first:last]
            np.add.at(total, self.parent[children], total[children])
        return total

    def exclusive(self, total: Floats) -> Floats:
        """Return for each operator a quantity minus the amount inside its nested operators; never below 0."""
        inside = self.parent != UNKNOWN
        return np.maximum(total - np.bincount(self.parent[inside], total[inside], len(self)), 0.0)

    def within(self, marked: Bools) -> Bools:
        """Return for each operator whether a marked operator encloses it."""
        return self._enclosed(lambda around, inner: marked[around])

    def within_equal(self, code: Ints) -> Bools:
        """Return for each operator whether an operator with the same code encloses it."""
        return self._enclosed(lambda around, inner: code[around] == code[inner])

    def _enclosed(self, matches: Callable[[Ints, Ints], Bools]) -> Bools:
        """Return for each operator whether one around it matches it, given the indices of both."""
        found, above = np.zeros(len(self), bool), self.parent.copy()
        while (left := np.flatnonzero(above != UNKNOWN)).size:
            found[left] |= matches(above[left], left)
            above[left] = np.where(found[left], UNKNOWN, self.parent[above[left]])
        return found


def nested(start_s: Floats, end_s: Floats, thread: Ints) -> tuple[Ints, Ints]:
    """Return (parent, depth) of each operator; they are in the order of their starts on each thread."""
    if not len(start_s):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.searchsorted(thread, thread)
    # if operators nest, the depth of one is the number begun before it minus the number ended by then
    parent, depth = np.full(len(start_s), UNKNOWN), np.empty(len(start_s), np.int64)
    for begin, end in itertools.pairwise([*np.unique(first).tolist(), len(start_s)]):
        begun, ends = start_s[begin:end], end_s[begin:end]
        ended = np.searchsorted(np.sort(ends), begun, "right")
        empty = np.concatenate([[0], np.cumsum(ends <= begun)])
        # operators of 0 s with the same start, from this one on: they have ended, but did not begin earlier
        itself = empty[np.searchsorted(begun, begun, "right")] - empty[:-1]
        depth[begin:end] = np.arange(end - begin) - ended + itself
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
    for above, level in itertools.pairwise(levels):
        parent[level] = above[np.searchsorted(above, level) - 1]
    inner = np.flatnonzero(depth)
    around = parent[inner]
    nests = depth.min() == 0 and (depth[around] == depth[inner] - 1).all() and (around >= first[inner]).all()
    if nests and (end_s[around] > start_s[inner]).all() and (end_s[around] >= end_s[inner]).all():
        return parent, depth
    return _overlapping(start_s, end_s, thread)


def _overlapping(start_s: Floats, end_s: Floats, thread: Ints) -> tuple[Ints, Ints]:
    """Return the result of `nested`, one operator at a time; an operator may end after the one around it."""
    parent, depth, around = array("q"), array("q"), array("q")
    before = None
    ends = end_s.tolist()
    for number, (start, own) in enumerate(zip(start_s.tolist(), thread.tolist(), strict=True)):
        if own != before:
            around, before = array("q"), own
        while around and ends[around[-1]] <= start:
            around.pop()
        parent.append(around[-1] if around else UNKNOWN)
        depth.append(len(around))
        around.append(number)
    return np.array(parent, np.int64), np.array(depth, np.int64)


def of_ranges(ranges: Ranges) -> Operators | None:
    """Return the operators that `torch.autograd.profiler.emit_nvtx` wrote as ranges; None if there are none."""
    found = [_of_range(name) for name in ranges.name.values]
    if not any(found):
        return None
    known = np.array([one is not None for one in found])[ranges.name.codes]
    codes, signatures = np.zeros(len(found), np.int64), dict[Signature, int]()
    for number, one in enumerate(found):
        if one:
            codes[number] = signatures.setdefault(one, len(signatures))
    mine = ranges.take(known)
    return Operators(Categorical(list(signatures), codes[mine.name.codes]), mine.start_s, mine.end_s, mine.thread)


@functools.lru_cache(maxsize=65536)
def _of_range(name: str) -> Signature | None:
    if not (found := _NVTX.fullmatch(name)):
        return None
    sizes = found["sizes"]
    if sizes is None:
        return Signature(found["name"])
    each = re.findall(r"\[([\d, ]*)\]", sizes[1:-1])
    return Signature(found["name"], tuple(tuple(map(int, re.findall(r"\d+", one))) for one in each))
