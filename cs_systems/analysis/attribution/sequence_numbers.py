"""Layers of backward kernels by autograd's sequence numbers, which need no range in backward.

A forward operator that makes a node of the graph has a sequence number, and so has the backward operator that runs the
node; Kineto records both. Numbers count separately on each thread of the forward pass. `Fwd thread id` identifies that
thread by a number of autograd's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from cs_systems.readers.forms.trace import Kernel, Op, Trace, timelines


class SequenceRoute:
    """Path from a kernel over its backward operator to the forward operator and the ranges open around that.

    `lines` are the timelines of the operators by thread.
    """

    def __init__(self, trace: Trace) -> None:
        ops = trace.ops or []
        thread, start_s, end_s = (
            np.array([getattr(op, field) for op in ops]) for field in ("thread", "start_s", "end_s")
        )
        self.lines = timelines(thread, start_s, end_s, ops)
        self._ranges = trace.ranges.timelines
        # Of the operators that share a number, the last is the innermost, which made the node.
        self._forward: dict[tuple[int, int], Op] = {}
        for op in sorted(ops, key=lambda op: op.start_s):
            if not op.forward_thread:
                self._forward[op.thread, op.sequence] = op
        self._threads = self._forward_threads(ops)

    def _forward_threads(self, ops: list[Op]) -> dict[int, int]:
        """Return a map from autograd's number of a thread to the thread itself.

        It is the thread whose forward operators have the most of the sequence numbers.
        """
        threads = {thread for thread, _ in self._forward}
        votes: dict[int, Counter[int]] = defaultdict(Counter)
        for op in ops:
            for thread in threads:
                made = self._forward.get((thread, op.sequence))
                if op.forward_thread and made and made.start_s < op.start_s:
                    votes[op.forward_thread][thread] += 1
        return {number: counts.most_common(1)[0][0] for number, counts in votes.items()}

    def forward_ranges(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the ranges, outermost first, in which the forward operator of the kernel's backward operator ran."""
        backward = [op for op in self._ops(kernel) if op.forward_thread]
        if not backward:
            return ()
        thread = self._threads.get(backward[-1].forward_thread)
        made = self._forward.get((thread, backward[-1].sequence)) if thread is not None else None
        if made is None or made.start_s > backward[-1].start_s or made.thread not in self._ranges:
            return ()
        return self._ranges[made.thread].at(made.start_s)

    def forward_number(self, kernel: Kernel) -> tuple[int, int] | None:
        """Return (thread, sequence number) of the forward operator that launched the kernel, or made its backward."""
        ops = self._ops(kernel)
        if not ops:
            return None
        backward = [op for op in ops if op.forward_thread]
        if not backward:
            return ops[-1].thread, ops[-1].sequence
        thread = self._threads.get(backward[-1].forward_thread)
        return None if thread is None else (thread, backward[-1].sequence)

    def _ops(self, kernel: Kernel) -> tuple[Op, ...]:
        if kernel.thread is None or kernel.launch_start_s is None or kernel.thread not in self.lines:
            return ()
        return self.lines[kernel.thread].at(kernel.launch_start_s)
