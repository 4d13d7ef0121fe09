"""Distribution of a program over ranks, as far as one rank's trace shows it, by names of operators and ranges.

DistributedDataParallel and FSDP leave their names in the trace of each rank. A pass is one forward of
DistributedDataParallel with the backward that follows; an update is one step of the optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cs_systems.analysis.attribution.collectives import Collective, collectives, computing
from cs_systems.analysis.attribution.overlap import Intervals, intersection, union
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.config import Phase
from cs_systems.core.range_names import meaning
from cs_systems.core.statistics import excess_s
from cs_systems.readers.forms.jobs import PAIRWISE
from cs_systems.readers.forms.trace import steps_of

DDP, FSDP = "DistributedDataParallel", "FSDP"
_FORWARD_OF_DDP = "DistributedDataParallel.forward"
_SIGNS = {
    DDP: ("torch.distributed.ddp.reducer::", "torch::distributed::reducer::", _FORWARD_OF_DDP),
    FSDP: ("FSDP::", "fsdp::", "FullyShardedDataParallel"),
}
SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
_FIND_TENSORS, _PREPARE = ": _find_tensors", "prepare_for_backward"  # the reducer calls _find_tensors to search
_BACKWARD = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer.step#"


@dataclass(frozen=True)
class Distribution:
    """Distribution of a program over ranks, and the collectives of one rank's steps.

    Attributes:
        world_size: the number of ranks; None if unknown.
        wrapper: DDP, FSDP or "", which wraps the model.
        has_backward: the steps have a backward pass.
        steps: the number of steps.
        calls: the collectives of these steps.
        computing: when the rank computed.
        searches: searches for unused parameters, which DistributedDataParallel makes in each pass.
        search_s: their time per step.
        passes: passes of DistributedDataParallel.
        updates: steps of the optimizer.
        early: all-reduces in passes that no update follows before the next pass.
    """

    world_size: int | None
    wrapper: str
    has_backward: bool
    steps: int
    calls: tuple[Collective, ...]
    computing: Intervals
    searches: int
    search_s: float
    passes: int
    updates: int
    early: tuple[Collective, ...]

    def exposed_s(self, calls: Iterable[Collective]) -> float:
        """Return the time per step in which some of the calls run and the rank computes nothing."""
        times = [(call.start_s, call.end_s) for call in calls]
        running = union(*np.array(times).reshape(len(times), 2).T)
        return excess_s(running.length_s, intersection(running, self.computing).length_s) / self.steps

    @property
    def in_pairs(self) -> list[Collective]:
        """Sends and receives between two ranks."""
        return [call for call in self.calls if call.name in PAIRWISE]


def distribution(profile: Profile) -> Distribution | None:
    """Return the distribution of a profile's program over ranks; None for a program on one rank."""
    trace, steps = profile.trace, profile.steps
    calls = tuple(collectives(profile, names_work=False))
    world_size = trace.job.world_size if trace.job else None
    if not calls or world_size == 1:
        return None
    names = {*trace.ranges.name.values}
    operators = trace.operators
    if operators is not None:
        names |= {signature.name for signature in operators.signature.values}
    wrapper = next((each for each, signs in _SIGNS.items() if any(name.startswith(signs) for name in names)), "")
    marked = any(meaning(name).phase == Phase.BACKWARD for name in names)
    inferred = any(place.phase == Phase.BACKWARD for place in profile.places.values)
    has_backward = marked or inferred or any(name.startswith(_BACKWARD) for name in names)
    forwards = [one.start_s for one in trace.ranges.named(lambda name: name.startswith(_FORWARD_OF_DDP))]
    updates = [one.start_s for one in trace.ranges.named(lambda name: name.startswith(_UPDATE))]
    searches = 0
    if operators is not None:
        which = operators.signature.codes_where(lambda one: one.name == SEARCH)
        which &= steps_of(operators.start_s, steps)[1]
        searches = int(which.sum())
        search_s = float((operators.end_s - operators.start_s)[which].sum()) / len(steps)
    if not searches:  # Python's part of the search, where the file has functions in place of the reducer's operator
        runs = trace.functions.named(lambda name: name.endswith(_FIND_TENSORS) or _PREPARE in name)
        inside = steps_of(np.array([run.start_s for run in runs]), steps)[1].tolist()
        runs = [run for run, is_inside in zip(runs, inside, strict=True) if is_inside]
        searches = sum(run.name.endswith(_FIND_TENSORS) for run in runs)
        search_s = searches and sum(run.end_s - run.start_s for run in runs) / len(steps)
    return Distribution(
        world_size,
        wrapper,
        has_backward,
        len(steps),
        calls,
        computing(profile),
        searches,
        search_s,
        len(forwards),
        len(updates),
        tuple(_early(calls, forwards, updates)) if updates else (),
    )


def _early(calls: Sequence[Collective], forwards: Sequence[float], updates: Sequence[float]) -> list[Collective]:
    """Return the all-reduces launched in a pass after which another pass begins before any update."""
    found = []
    for call in calls:
        number = bisect_right(forwards, call.launched_s)
        if call.name != "all_reduce" or not 0 < number < len(forwards):
            continue
        if bisect_right(updates, forwards[number - 1]) == bisect_right(updates, forwards[number]):
            found.append(call)
    return found
