"""Layers of backward kernels by autograd's sequence numbers, which need no range in backward.

A forward operator that makes a node of the graph has a sequence number, and so has the backward operator that runs the
node; Kineto records both. Numbers count separately on each thread of the forward pass. `Fwd thread id` identifies that
thread by a number of autograd's own.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import repeat

import numpy as np

from cs_systems.readers.forms.columns import UNKNOWN, Bools, Ints
from cs_systems.readers.forms.operators import nested
from cs_systems.readers.forms.trace import Ops, Trace


class SequenceRoute:
    """Path from a kernel through its backward operator to the forward operator, and the ranges open around it.

    `innermost` is the index of the innermost operator that launched each kernel, `backward` the index of the innermost
    backward operator; each is UNKNOWN where there is none.
    """

    def __init__(self, trace: Trace, ops: Ops) -> None:
        self._trace, self._ops = trace, ops
        self.innermost = self._open(np.ones(len(ops), bool))
        self.backward = self._open(ops.forward_thread != 0)
        # of operators with the same number, the last is the innermost, which created the node
        forward = np.flatnonzero(ops.forward_thread == 0)
        forward = forward[np.argsort(ops.start_s[forward], kind="stable")]
        self._forward: dict[int, dict[int, int]] = {}  # thread → sequence number → index
        for thread in dict.fromkeys(ops.thread[forward].tolist()):
            mine = forward[ops.thread[forward] == thread]
            self._forward[thread] = dict(zip(ops.sequence[mine].tolist(), mine.tolist(), strict=True))
        self._threads = self._forward_threads()

    def under(self, wanted: Bools) -> Bools:
        """Return for each kernel whether one of the wanted operators launched it."""
        return np.asarray(self._open(wanted) != UNKNOWN)

    def forward_ranges(self, kernels: Ints) -> list[tuple[str, ...]]:
        """Return for each kernel the ranges, outermost first, around the forward operator of its backward operator."""
        ops, backward = self._ops, self.backward[kernels]
        numbers = self._numbers_of(backward)
        known = (None if n is None else self._forward[n[0]].get(n[1]) for n in numbers)
        made = np.array([UNKNOWN if index is None else index for index in known], np.int64)
        made[ops.start_s[made] > ops.start_s[backward]] = UNKNOWN
        found: list[tuple[str, ...]] = [()] * len(kernels)
        for thread, line in self._trace.ranges.timelines.items():
            mine = np.flatnonzero((made != UNKNOWN) & (ops.thread[made] == thread))
            for i, stack in zip(mine.tolist(), line.index(ops.start_s[made[mine]]).tolist(), strict=True):
                found[i] = line.stacks[stack]
        return found

    def forward_numbers(self, kernels: Ints) -> list[tuple[int, int] | None]:
        """Return (thread, sequence number) of each kernel's forward operator, directly or through its backward."""
        innermost, backward = self.innermost[kernels], self.backward[kernels]
        direct = zip(self._ops.thread[innermost].tolist(), self._ops.sequence[innermost].tolist(), strict=True)
        return [
            of_backward if operator != UNKNOWN else own if is_known else None
            for operator, of_backward, own, is_known in zip(
                backward.tolist(), self._numbers_of(backward), direct, (innermost != UNKNOWN).tolist(), strict=True
            )
        ]

    def _numbers_of(self, backward: Ints) -> list[tuple[int, int] | None]:
        """Return (thread, sequence number) of the forward operator of each backward operator, None if unknown."""
        threads = map(self._threads.get, self._ops.forward_thread[backward].tolist())
        found = zip(backward.tolist(), threads, self._ops.sequence[backward].tolist(), strict=True)
        return [None if i == UNKNOWN or thread is None else (thread, number) for i, thread, number in found]

    def _forward_threads(self) -> dict[int, int]:
        """Return a map from autograd's number of a thread to the thread itself.

        It is the thread with the most of these sequence numbers in its forward operators; the first of equal ones.
        """
        ops, which = self._ops, np.flatnonzero(self._ops.forward_thread != 0)
        votes: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        numbers = ops.sequence[which].tolist()
        for place, thread in enumerate({*self._forward}):
            made = np.array([*map(self._forward[thread].get, numbers, repeat(UNKNOWN))], np.int64)
            voted = np.flatnonzero((made != UNKNOWN) & (ops.start_s[made] < ops.start_s[which]))
            found = np.unique(ops.forward_thread[which[voted]], return_index=True, return_counts=True)
            for number, first, count in zip(*(column.tolist() for column in found), strict=True):
                votes[number].append((-count, int(voted[first]), place, thread))
        return {number: min(given)[-1] for number, given in votes.items()}

    def _open(self, wanted: Bools) -> Ints:
        """Return for each kernel the innermost wanted operator that was open when the kernel was launched."""
        ops, kernels = self._ops, self._trace.kernels
        which = np.flatnonzero(wanted & (ops.end_s > ops.start_s))
        which = which[np.lexsort((-ops.end_s[which], ops.start_s[which], ops.thread[which]))]
        start_s, end_s, thread = ops.start_s[which], ops.end_s[which], ops.thread[which]
        parent, _ = nested(start_s, end_s, thread)
        found = np.full(len(kernels), UNKNOWN)
        if not len(which):
            return found
        launched = ~np.isnan(kernels.launch_start_s)
        for number in np.unique(thread).tolist():
            first, last = np.searchsorted(thread, [number, number + 1])
            mine = np.flatnonzero(launched & (kernels.thread == number))
            at = first + np.searchsorted(start_s[first:last], kernels.launch_start_s[mine], "right") - 1
            found[mine] = np.where(at < first, UNKNOWN, at)
        while (ended := (found != UNKNOWN) & (end_s[found] <= kernels.launch_start_s)).any():
            found[ended] = parent[found[ended]]
        return np.where(found == UNKNOWN, UNKNOWN, which[found])


def route_of(trace: Trace) -> SequenceRoute | None:
    """Return the route of a trace's kernels; None where its operators have no sequence numbers."""
    return SequenceRoute(trace, trace.ops) if trace.ops else None
