"""Columns of a trace: arrays with one entry per row, numbered texts, ranges, and timelines of open ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cs_systems.core.statistics import ROUNDING_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
T = TypeVar("T")
N = TypeVar("N", np.float64, np.int64)
UNKNOWN = -1
_none, _never = np.empty(0, np.int64), np.empty(0)


class Categorical(Sequence[T]):
    """Long column with few distinct values: entry i is `values[codes[i]]`."""

    def __init__(self, values: Sequence[T], codes: Ints) -> None:
        self.values, self.codes = values, codes

    @classmethod
    def of(cls, entries: Iterable[T]) -> Categorical[T]:
        numbers: dict[T, int] = {}
        codes = [numbers.setdefault(entry, len(numbers)) for entry in entries]
        return cls(list(numbers), np.array(codes, np.int64))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, i: Any) -> Any:
        return self.take(i) if isinstance(i, slice) else self.values[self.codes[i]]

    def __iter__(self) -> Iterator[T]:
        return map(self.values.__getitem__, self.codes.tolist())

    def take(self, which: Ints | Bools | slice) -> Categorical[T]:
        return Categorical(self.values, self.codes[which])

    def codes_where(self, wanted: Callable[[T], object]) -> Bools:
        """Return for each entry whether `wanted` accepts its value; `wanted` is called once per distinct value."""
        return np.array([bool(wanted(value)) for value in self.values], bool)[self.codes]

    def in_order_of_use(self) -> Categorical[T]:
        """Return the same entries with the values in order of their first use; unused values are dropped."""
        numbers: dict[T, int] = {}
        codes = np.array([numbers.setdefault(value, len(numbers)) for value in self.values], np.int64)[self.codes]
        used, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number, values = np.empty(len(used), np.int64), list(numbers)
        number[order] = np.arange(len(used))
        return Categorical([values[code] for code in used[order].tolist()], number[codes])


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Return (first, codes) of the distinct rows of a table given by its columns.

    `first[k]` is the index of the first row equal to the k-th distinct row; row i equals the `codes[i]`-th distinct
    row.
    """
    table = np.stack(columns)
    # One sort by a hash is faster than one by every column; the check below detects rows that share a hash.
    multipliers = np.random.default_rng(0).integers(1, 2**62, len(table), dtype=np.int64) * 2 + 1
    hashed = (table * multipliers[:, None]).sum(axis=0)  # wraps around on overflow
    _, first, codes = np.unique(hashed, return_index=True, return_inverse=True)
    if not all((column[first][codes] == column).all() for column in columns):
        _, first, codes = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, codes.reshape(-1)


def taken(column: NDArray[N], which: Ints, missing: float) -> NDArray[N]:
    """Return the entries of a column at the given indices, `missing` where an index is UNKNOWN."""
    if not len(column):
        return np.full(len(which), missing, column.dtype)
    return np.where(which == UNKNOWN, np.array(missing, column.dtype), column[which])


def latest(key: Ints, time_s: Floats, of_key: Ints, of_time_s: Floats) -> Ints:
    """Return for each key and time the index of the latest entry of the key at that time.

    If all entries of the key are later, return the first; UNKNOWN if the key has none.

    Args:
        key: Wanted keys.
        time_s: Wanted times.
        of_key: Key of each entry, sorted.
        of_time_s: Time of each entry, sorted within a key.
    """
    first, end = of_key.searchsorted(key, "left"), of_key.searchsorted(key, "right")
    found = np.where(first < end, first, UNKNOWN)
    several = np.flatnonzero(end - first > 1)
    if len(several):
        times = np.unique(of_time_s)
        # Key and time as one number that sorts in the same way.
        entries = of_key.searchsorted(of_key, "left") * len(times) + times.searchsorted(of_time_s)
        wanted = first[several] * len(times) + times.searchsorted(time_s[several], "right") - 1
        found[several] = np.maximum(entries.searchsorted(wanted, "right") - 1, first[several])
    return found


def outermost(group: Ints, start_s: Floats, end_s: Floats) -> Ints:
    """Return for each interval the index of the outermost interval around it in its group, or its own index."""
    count = len(group)
    order = np.lexsort((start_s, group))
    if not ((np.diff(group[order]) == 0) & (start_s[order[1:]] < end_s[order[:-1]] - ROUNDING_S)).any():
        return np.arange(count)
    # of intervals with the same start the longer one is outer; an empty one precedes them and is in none
    order = np.lexsort((-end_s, end_s > start_s, start_s, group))
    group, start_s, end_s = group[order], start_s[order], end_s[order]
    number = np.cumsum(np.diff(group, prepend=group[:1]) != 0)
    by_end = np.argsort(end_s, kind="stable")
    rank = np.empty(count, np.int64)
    rank[by_end] = np.arange(count)
    # one running maximum for all groups: the latest end so far, preceded by the group's number
    reached = np.maximum.accumulate(number * count + rank)
    inside = np.zeros(count, bool)
    before = end_s[by_end[reached[:-1] % max(count, 1)]]
    inside[1:] = (number[1:] == number[:-1]) & (start_s[1:] < before - ROUNDING_S) & (end_s[1:] <= before + ROUNDING_S)
    around = np.empty(count, np.int64)
    around[order] = order[np.maximum.accumulate(np.where(inside, 0, np.arange(count)))]
    return around


class Columns:
    """Rows as columns of one length: each field of the dataclass is an array or a `Categorical`."""

    __slots__ = ()

    def _columns(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._columns()[0])

    def take(self, which: Ints | Bools) -> Self:
        """Return the chosen rows."""
        return type(self)(*(c.take(which) if isinstance(c, Categorical) else c[which] for c in self._columns()))


@dataclass(frozen=True)
class Spans(Columns):
    """Named stretches of time on threads, as columns; whole numbers follow."""

    name: Categorical[str]
    start_s: Floats
    end_s: Floats
    thread: Ints

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Self:
        """Return the rows, in their order."""
        name, start, end, *numbers = zip(*rows, strict=True) if (rows := [*rows]) else ((),) * len(fields(cls))
        times = np.array(start, np.float64), np.array(end, np.float64)
        return cls(Categorical.of(name), *times, *(np.array(column, np.int64) for column in numbers))


class Range(NamedTuple):
    """Named part of the program: an NVTX range or a `record_function`."""

    name: str
    start_s: float
    end_s: float
    thread: int


class Ranges(Spans):
    """Fields of `Range` as columns."""

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self.name, self.start_s.tolist(), self.end_s.tolist(), self.thread.tolist())

    @functools.cached_property
    def timelines(self) -> dict[int, Timeline[str]]:
        """Timeline of the open ranges' names, for each thread with a range."""
        return timelines(self.thread, self.start_s, self.end_s, self.name)

    def named(self, wanted: Callable[[str], object]) -> list[Range]:
        """Return the ranges with a wanted name in order of their start, an enclosing range before nested ones."""
        found = self.take(self.name.codes_where(wanted))
        return list(found.take(np.lexsort((-found.end_s, found.start_s))))


def joined(parts: Sequence[Ranges]) -> Ranges:
    """Return all ranges as one, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    numbers: dict[str, int] = {}
    codes = [
        np.array([numbers.setdefault(name, len(numbers)) for name in each.name.values], np.int64)[each.name.codes]
        for each in parts
    ]
    rest = (np.concatenate([getattr(each, name) for each in parts]) for name in ("start_s", "end_s", "thread"))
    return Ranges(Categorical([*numbers], np.concatenate(codes)), *rest)


NO_RANGES = Ranges(Categorical([], _none), _never, _never, _none)


class Timeline(Generic[T]):
    """Stack of open intervals over time, on one thread.

    `stacks[stack[i]]` (outermost first) is open from `times[i]` to `times[i + 1]`; the first and the last time are
    infinite. Equal stacks are stored once.

    Intervals need not nest: an NVTX start/end range may end before one that it encloses.
    """

    def __init__(self, start_s: Floats, end_s: Floats, values: Sequence[T]) -> None:
        lasting = np.flatnonzero(end_s > start_s)
        start_s, end_s, count = start_s[lasting], end_s[lasting], len(lasting)
        # at equal times, ends come before starts, and the interval that ends last starts first
        edges, begins = np.concatenate([start_s, end_s]), np.arange(2 * count) < count
        order = np.lexsort((np.tile(-end_s, 2), begins, edges))
        times, stack = [-math.inf], [0]
        known: dict[tuple[T, ...], int] = {(): 0}
        active: list[int] = []
        opened: list[T] = []
        items = lasting.tolist()
        for time, edge in zip(edges[order].tolist(), order.tolist(), strict=True):
            if edge < count:
                active.append(edge)
                opened.append(values[items[edge]])
            else:  # the fast path: nearly always, the innermost interval ends
                at = -1 if active[-1] == edge - count else active.index(edge - count)
                del active[at], opened[at]
            number = known.setdefault(tuple(opened), len(known))
            if time == times[-1]:
                stack[-1] = number
            else:
                times.append(time)
                stack.append(number)
        self.times: Floats = np.array([*times, math.inf])
        self.stack: Ints = np.array(stack)
        self.stacks = list(known)

    def at(self, time_s: float) -> tuple[T, ...]:
        return self.stacks[int(self.stack[self.times.searchsorted(time_s, "right") - 1])]

    def index(self, time_s: Floats) -> Ints:
        """Return the number of the stack that is open at each time."""
        return self.stack[np.searchsorted(self.times, time_s, "right") - 1]


def timelines(thread: Ints, start_s: Floats, end_s: Floats, values: Sequence[T]) -> dict[int, Timeline[T]]:
    """Return a Timeline for each thread that has an interval."""
    lines, values = {}, list(values)
    for number in np.unique(thread).tolist():
        own = np.flatnonzero(thread == number)
        lines[number] = Timeline(start_s[own], end_s[own], [values[i] for i in own.tolist()])
    return lines
