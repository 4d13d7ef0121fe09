"""Calls of the CUDA, HIP or XPU interface while a trace is read: rows as columns, and what each call launched."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from cs_systems.readers.forms.columns import UNKNOWN, Bools, Floats, Ints, latest, outermost, taken
from cs_systems.readers.forms.trace import Calls


class NumberRows:
    """Rows of numbers, which take a fifth of the memory as columns."""

    def __init__(self, types: str) -> None:
        """Start without rows.

        types: the type of each column as a letter of `array`: q for whole numbers, d for others.
        """
        self._columns = [array(one) for one in types]
        self._rows: list[tuple[float, ...]] = []
        self.add = self._rows.append

    def __len__(self) -> int:
        return len(self._columns[0]) + len(self._rows)

    def settle(self) -> None:
        """Move the rows added last into the columns. Raises OverflowError if a number has over 64 bits."""
        if self._rows:
            for column, values in zip(self._columns, zip(*self._rows, strict=True), strict=True):
                column.extend(values)
            self._rows.clear()

    def columns(self) -> list[Any]:
        """Return the columns as arrays of numpy; no row can be added afterwards."""
        self.settle()
        return [
            np.frombuffer(column, column.typecode) if column else np.empty(0, column.typecode)
            for column in self._columns
        ]


class Launches:
    """Calls of one process, and the work that they launched, by correlation id.

    Overlapping calls with the same correlation are one launch: the first in the file, the outermost, counts. Otherwise
    ROCm has reused the number: a kernel was launched by the latest such call before it, and by the outermost of nested
    calls.
    """

    def __init__(self, calls: Calls, correlation: Ints) -> None:
        self.calls, self.correlation = calls, correlation
        known = np.flatnonzero(correlation != UNKNOWN)
        known = known[np.argsort(correlation[known], kind="stable")]
        self.numbers = correlation[known]
        self.first = known
        first = np.flatnonzero(np.diff(self.numbers, prepend=UNKNOWN))
        if len(first) < len(known):
            self.first = known[first]  # first call in the file with each correlation
            self.numbers = correlation[self.first]  # the distinct correlations, sorted
            starts, ends = calls.start_s, calls.end_s
            leader = np.repeat(self.first, np.diff(first, append=len(known)))
            known = known[(known == leader) | (starts[known] >= ends[leader]) | (ends[known] <= starts[leader])]
            around = outermost(correlation[known], starts[known], ends[known])
            known = known[around == np.arange(len(known))]
            known = known[np.lexsort((starts[known], correlation[known]))]
        self._launch = known

    def __bool__(self) -> bool:
        return len(self.numbers) > 0

    def named(self, wanted: Callable[[str], object]) -> Bools:
        """Return, for each of the numbers, whether a call with a wanted name has it."""
        return self.among(self.correlation[self.calls.name.codes_where(wanted)])

    def among(self, correlation: Ints) -> Bools:
        """Return for each of the numbers whether it is among the correlations."""
        found = np.zeros(len(self.numbers), bool)
        found[np.searchsorted(self.numbers, correlation[self.has(correlation)])] = True
        return found

    def has(self, correlation: Ints) -> Bools:
        """Return for each correlation whether a call has it."""
        at = np.searchsorted(self.numbers, correlation)
        return at < np.searchsorted(self.numbers, correlation, "right")

    def of(self, correlation: Ints, time_s: Floats) -> Ints:
        """Return the index of the call that launched each kernel, by its correlation and start; UNKNOWN if none did."""
        entries = self.correlation[self._launch], self.calls.start_s[self._launch]
        return taken(self._launch, latest(correlation, time_s, *entries), UNKNOWN)
