"""Host time of a recorded step without the profiler, which slows the host down: measured, or by what is usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np

from cs_systems.analysis.attribution.gaps import SILENT_S
from cs_systems.analysis.replay.changes import Subject, host_in, less, within
from cs_systems.analysis.replay.graph import Costs
from cs_systems.core.range_names import meaning
from cs_systems.core.tracers import Inflation
from cs_systems.readers.forms.columns import Categorical, Ranges
from cs_systems.record import Measurement

STEP = "step"  # in place of a phase: the whole step
LEAST_FACTOR = 0.05


@dataclass(frozen=True)
class Clean:
    """Step of the same program that ran without a profiler, in s.

    step_s: its duration. host_s, device_s: time that the host took to submit each phase, and that the device took for
        it; the key `step` means the whole step.
    """

    step_s: float
    host_s: Mapping[str, float] = field(default_factory=dict)
    device_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, measurement: Measurement) -> Clean | None:
        """Return the step of a measurement without a profiler, the medians; None if it has no timed step."""
        step_s, timed = measurement.median_s(), measurement.timed
        if step_s is None:
            return None
        host = {phase for sample in timed for phase in sample.submit_s}
        host_s = {phase: median(one.submit_s[phase] for one in timed if phase in one.submit_s) for phase in host}
        device = {phase for sample in timed for phase in sample.phases_s}
        device_s = {phase: median(one.phases_s[phase] for one in timed if phase in one.phases_s) for phase in device}
        return cls(step_s, host_s, device_s)


def by_usual(subject: Subject, inflation: Inflation) -> Costs:
    """Return the costs without the time that the profiler took by the trace, and the usual slowdown of each launch."""
    graph, overheads = subject.graph, subject.trace.overheads
    start_s, end_s = np.array(overheads).reshape(len(overheads), 2).T
    unnamed = Categorical([""], np.zeros(len(overheads), np.int64))
    main = np.full(len(overheads), graph.recorded.main)
    costs = less(subject.costs, 0.0, *host_in(subject, Ranges(unnamed, start_s, end_s, main)))
    launches = np.diff(graph.first) > 0
    own = np.where(launches, np.maximum(costs.segment, 0.0) + costs.work, 0.0)
    inflated = np.minimum(inflation.per_launch_s, (1 - 1 / inflation.ratio) * own)
    kept = 1 - np.divide(inflated, own, out=np.zeros(len(own)), where=own > 0)
    # a call that began before the one before had ended has a segment below 0, which stays
    return replace(costs, segment=np.minimum(costs.segment, costs.segment * kept), work=costs.work * kept)


def by_clean(subject: Subject, clean: Clean) -> Costs:
    """Return the costs with the host's time of each phase, and the device's, as in a step without a profiler."""
    costs, r = subject.costs, subject.graph.recorded
    count, ranges = len(r.marks), subject.trace.ranges
    in_step = np.zeros(len(r.start_s), bool)
    for begins, ends in r.marks.tolist():
        in_step[begins + 1 : ends + 1] = True
    lasted = r.end_s - r.start_s
    waited = np.zeros(len(lasted))
    awaited = list(subject.graph.waits.awaited)
    waited[awaited] = np.maximum(lasted - subject.graph.costs.work, 0.0)[awaited]
    segment, work, duration = costs.segment.copy(), costs.work.copy(), costs.duration.copy()
    for phase in {**clean.host_s, **clean.device_s}:
        if phase == STEP:
            inside, host = (
                in_step,
                (np.where(in_step, np.maximum(costs.segment, 0.0), 0.0), np.where(in_step, costs.work, 0.0)),
            )
        else:
            chosen = ranges.take(ranges.name.codes_where(partial(_means, phase)))
            inside, host = within(subject, chosen), host_in(subject, chosen)
        # A profiler slows down launching; the program's own long work takes as long without a profiler.
        launching = np.where(costs.segment > SILENT_S, 0.0, host[0])
        if phase in clean.host_s and (launching_s := float(launching.sum() + host[1].sum())) > 0:
            alone_s = float(host[0].sum() - launching.sum())
            left_s = clean.host_s[phase] * count - float(waited[inside].sum()) - alone_s
            factor = max(LEAST_FACTOR, left_s / launching_s)
            segment, work = segment - (1 - factor) * launching, work - (1 - factor) * host[1]
        if phase in clean.device_s:
            of = inside[r.call] & subject.graph.launched
            # a device that was busy for less waited, and its kernels take as long as recorded
            if busy_s := float(duration[of].sum()):
                duration[of] *= min(1.0, clean.device_s[phase] * count / busy_s)
    return replace(costs, segment=segment, work=work, duration=duration)


def _means(phase: str, name: str) -> bool:
    return meaning(name).phase == phase
