"""Phases of a trace without ranges of forward and backward, inferred from what every PyTorch program records.

- backward: launched under a backward operator (autograd's sequence numbers, or a name such as `MmBackward0`, which is
  all that PyTorch 1.8 recorded), or in a thread that runs only backward;
- optimizer: launched in a range of `Optimizer.step`, or a kernel of the family optimizer outside of backward;
- communication: a collective outside of these that does not follow a forward kernel, such as one after backward;
- forward: the rest, if there is a backward.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family, is_collective
from cs_systems.analysis.attribution.sequence_numbers import SequenceRoute, route_of
from cs_systems.config import Phase
from cs_systems.core.range_names import COMMUNICATION, meaning
from cs_systems.readers.forms.columns import Bools, Ranges, Timeline
from cs_systems.readers.forms.trace import Ops, Trace

_BACKWARD = re.compile(r"\bautograd::engine::|Backward\d*\b")  # of an operator, also as emit_nvtx names its range


@functools.lru_cache(maxsize=65536)
def _is_backward(name: str) -> bool:
    return _BACKWARD.search(name) is not None


def are_marked(trace: Trace) -> bool:
    """Return whether a range of the trace is named forward or backward."""
    return any(meaning(name).phase in (Phase.FORWARD, Phase.BACKWARD) for name in trace.ranges.name.values)


def infers_backward(trace: Trace) -> bool:
    """Return whether operators or their ranges distinguish backward from the rest."""
    return bool(inferred(trace, route_of(trace)))


def inferred(trace: Trace, route: SequenceRoute | None) -> dict[str, Bools]:
    """Return a map from each phase to a mask of its kernels; {} if nothing distinguishes backward from the rest."""
    kernels = trace.kernels
    launched = ~np.isnan(kernels.launch_start_s)
    backward = _under(trace, trace.ranges.timelines, _is_backward)
    if route is not None and trace.ops is not None:
        backward |= route.under((trace.ops.forward_thread != 0) | trace.ops.name.codes_where(_is_backward))
        backward |= np.isin(kernels.thread, _autograd_threads(trace.ops))
    elif trace.operators is not None:
        backward |= _by_name(trace, trace.operators.ranges())
    backward &= launched
    if not backward.any():
        return {}
    optimizer = launched & ~backward & kernels.function.codes_where(lambda f: family(f.name) == "optimizer")
    rest = launched & ~backward & ~optimizer
    apart = rest & is_collective(kernels) & ~_after(trace, rest)
    return {
        Phase.BACKWARD: backward,
        Phase.OPTIMIZER: optimizer,
        COMMUNICATION: apart,
        Phase.FORWARD: rest & ~apart,
    }


def _after(trace: Trace, which: Bools) -> Bools:
    """Return for each kernel whether the last computing kernel launched before it is in the mask `which`."""
    kernels = trace.kernels
    order = np.argsort(kernels.launch_start_s, kind="stable")  # kernels with unknown launches come last
    computes = ~is_collective(kernels)[order]
    latest = np.maximum.accumulate(np.where(computes, np.arange(len(kernels)), -1))
    found = np.zeros(len(kernels), bool)
    found[order] = which[order][latest] & (latest >= 0)
    return found


def how_inferred(trace: Trace) -> str:
    """Return the note on how the phases of a profile were inferred, with the confidence."""
    if trace.ops:
        return (
            "no range marks forward or backward: phases are inferred, backward from autograd's operators and thread "
            "(confidence: high), optimizer from Optimizer.step and kernel names (medium), forward as the rest (medium)"
        )
    return (
        "no range marks forward or backward: phases are inferred, backward from the names of operators or ranges "
        "(confidence: medium), optimizer from Optimizer.step and kernel names (medium), forward as the rest (low)"
    )


def _under(trace: Trace, lines: Mapping[int, Timeline[Any]], wanted: Callable[[Any], object]) -> Bools:
    """Return for each kernel whether a wanted interval was open on the launching thread."""
    kernels = trace.kernels
    found = np.zeros(len(kernels), bool)
    for thread, line in lines.items():
        mine = np.flatnonzero(kernels.thread == thread)
        if len(mine):
            holds = np.array([any(map(wanted, stack)) for stack in line.stacks])
            found[mine] = holds[line.index(kernels.launch_start_s[mine])]
    return found


def _by_name(trace: Trace, operators: Ranges) -> Bools:
    """Return for each kernel whether an operator with a backward name launched it, or a thread of such operators."""
    named = operators.name.codes_where(_is_backward)
    lines = operators.take(named).timelines
    others = Counter(operators.thread[~named].tolist()).most_common(1)
    threads = [thread for thread in lines if not others or thread != others[0][0]]
    return _under(trace, lines, bool) | np.isin(trace.kernels.thread, threads)


def _autograd_threads(ops: Ops) -> list[int]:
    """Return the threads that ran backward operators, except the one that ran the most forward operators."""
    forward = Counter(ops.thread[ops.forward_thread == 0].tolist())
    main = forward.most_common(1)[0][0] if forward else None
    return sorted({*ops.thread[ops.forward_thread != 0].tolist()} - {main})
