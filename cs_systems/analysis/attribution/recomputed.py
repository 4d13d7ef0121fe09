"""Kernels of forward passes that run again inside backward, because activations were checkpointed.

They are found by operators if torch.profiler or emit_nvtx recorded these. Reentrant checkpoints run forward in a node
of their own, `CheckpointFunctionBackward`. Other checkpoints run it when a node unpacks its saved tensors: only then
does an operator inside a node have its own sequence number. Double backward has such operators too, but their names say
so. Without operators, the share is estimated from kernels that only forward runs, such as fused attention's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.operator_table import operators_of
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.sequence_numbers import route_of
from cs_systems.config import Phase
from cs_systems.readers.forms.columns import UNKNOWN, Bools
from cs_systems.readers.forms.operators import Operators
from cs_systems.readers.forms.trace import Trace, steps_of

CHECKPOINT = re.compile(r"Checkpoint\w*Backward")
NODE = re.compile(r"Backward\d*\b")
FORWARD_ONLY = re.compile(r"fwd|forward", re.IGNORECASE)  # marks a kernel with a backward of another name
ONCE = ("attention", "softmax", "norm")  # families with forward kernels that never run in a backward


class Recomputed(NamedTuple):
    """Time of recomputed kernels in a mean step.

    `estimated` if only kernel names show their share of forward's time.
    """

    time_s: float
    is_estimated: bool = False


def recomputed(profile: Profile) -> Recomputed:
    """Return the recomputed kernels in a mean step."""
    kernels = profile.trace.kernels
    if not len(kernels):
        return Recomputed(0.0)
    inside, lasted = steps_of(kernels.launched_s, profile.steps)[1], kernels.end_s - kernels.start_s
    ops = operators_of(profile.trace)
    if ops is not None:
        found = _in_checkpoints(profile.trace, ops) | _in_nodes(profile.trace)
        return Recomputed(float(lasted[inside & found].sum()) / len(profile.steps))
    phase = {
        name: np.array([place.phase == name for place in profile.places.values], bool)[profile.places.codes] & inside
        for name in (Phase.FORWARD, Phase.BACKWARD)
    }
    once = kernels.function.codes_where(lambda one: family(one.name) in ONCE and FORWARD_ONLY.search(one.name))
    first_s, again_s = (float(lasted[phase[name] & once].sum()) for name in (Phase.FORWARD, Phase.BACKWARD))
    share = min(1.0, again_s / first_s) if first_s else 0.0
    return Recomputed(share * float(lasted[phase[Phase.FORWARD]].sum()) / len(profile.steps), is_estimated=True)


def _in_checkpoints(trace: Trace, ops: Operators) -> Bools:
    """Return for each kernel whether a checkpoint is the innermost node of the graph around its launch."""
    if not any(CHECKPOINT.search(one.name) for one in ops.signature.values):
        return np.zeros(len(trace.kernels), bool)
    is_node = ops.signature.codes_where(lambda one: NODE.search(one.name))
    node = np.where(is_node, np.arange(len(ops)), UNKNOWN)
    for depth in range(1, int(ops.depth.max(initial=0)) + 1):
        level = np.flatnonzero((ops.depth == depth) & ~is_node)
        node[level] = node[ops.parent[level]]
    by = ops.at(trace.kernels.thread, trace.kernels.launch_start_s)
    around = np.where(by == UNKNOWN, UNKNOWN, node[by])
    of_checkpoint = ops.signature.codes_where(lambda one: CHECKPOINT.search(one.name))
    return np.asarray((around != UNKNOWN) & of_checkpoint[around])


def _in_nodes(trace: Trace) -> Bools:
    """Return for each kernel whether an operator with its own sequence number ran it inside a node of the graph."""
    ops, route = trace.ops, route_of(trace)
    if ops is None or route is None:
        return np.zeros(len(trace.kernels), bool)
    innermost, backward = route.innermost, route.backward
    found = (innermost != UNKNOWN) & (backward != UNKNOWN)
    found &= (ops.forward_thread[innermost] == 0) & (ops.start_s[innermost] >= ops.start_s[backward])
    names = {ops.name.values[code] for code in np.unique(ops.name.codes[innermost[found]]).tolist()}
    return np.asarray(found & (not any("backward" in name.lower() for name in names)))
