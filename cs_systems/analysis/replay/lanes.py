"""One replayed step as rows for a picture: threads and streams as recorded, as replayed, and launched at no cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cs_systems.analysis.replay import LaunchesFree, Part, Refusal, Replay
from cs_systems.analysis.replay.changes import Subject
from cs_systems.analysis.replay.recorded import Recorded
from cs_systems.analysis.replay.run import Times, replay, step_times
from cs_systems.readers.forms.columns import Floats, Ints

RECORDED, REPLAYED, FREE = "recorded", "replayed", "launches free"
WORK, WAITS, COPY = "host", "waits", "copy"  # kinds of boxes besides the families of kernels


class Box(NamedTuple):
    """Time in which a lane does one kind of work, in s from the begin of the step."""

    start_s: float
    end_s: float
    kind: str


class Lane(NamedTuple):
    """Thread or stream with its boxes, in order of their start."""

    name: str
    boxes: list[Box]


class Version(NamedTuple):
    """One version of the step: its duration and its lanes."""

    name: str
    step_s: float
    lanes: list[Lane]


class StepLanes(NamedTuple):
    """Versions of one step; `number` is its index in the trace."""

    number: int
    versions: list[Version]


def lanes(replayed: Replay, number: int | None = None) -> StepLanes | None:
    """Return the versions of a step, by default of the first; None if nothing was replayed.

    A version with launches that cost nothing is the last one, where the replay is fit for predictions.
    """
    found = [(part, index) for part in replayed.parts for index in range(len(part.steps))]
    if not found:
        return None
    part, index = next(((p, i) for p, i in found if p.steps[i].number == number), found[0])
    graph = part.graph
    versions = [
        _version(RECORDED, part, index, Times.recorded(graph.recorded), graph.costs.work, has_host=True),
        _version(REPLAYED, part, index, part.times, graph.costs.work, has_host=True),
    ]
    if replayed.why_not is None:
        free = LaunchesFree().apply(Subject(replayed.trace, graph, graph.costs, part.steps[0].start_s))
        if not isinstance(free, Refusal):
            times = replay(free.graph, free.costs)
            versions.append(_version(FREE, part, index, times, free.costs.work, has_host=False))
    return StepLanes(part.steps[index].number, versions)


def _version(name: str, part: Part, index: int, times: Times, work: Floats, has_host: bool) -> Version:
    r, (begins, ends) = part.graph.recorded, part.graph.recorded.marks[index].tolist()
    begin_s = float(times.start_s[begins])
    calls = np.arange(begins, ends + 1)
    threads = [r.main, *sorted({*r.thread[calls].tolist()} - {r.main})]
    found = [
        Lane(_name(r, thread), _host(part, times, work, calls[r.thread[calls] == thread], begin_s))
        for thread in (threads if has_host else ())
    ]
    first, last = part.graph.first[[begins, ends]].tolist()
    own = np.arange(first, last)
    if not has_host and len(own):
        begin_s = float(times.begin_s[own].min())  # the host would be ahead by the work of earlier steps
    for stream in np.unique(r.stream[own]).tolist():
        found.append(Lane(f"stream {r.of_stream[stream][1]}", _device(r, times, own[r.stream[own] == stream], begin_s)))
    return Version(name, float(step_times(part.graph, times)[index].max()), found)


def _name(r: Recorded, thread: int) -> str:
    return "host" if thread == r.main else "autograd" if thread in (r.autograd or ()) else "other thread"


def _host(part: Part, times: Times, work: Floats, calls: Ints, begin_s: float) -> list[Box]:
    """Return the host's own work since the previous event, and the rest of the call as a wait."""
    graph = part.graph
    after = np.maximum(
        np.where(graph.previous[calls] >= 0, times.end_s[graph.previous[calls]], -np.inf),
        np.where(graph.over[calls] >= 0, times.end_s[graph.over[calls]], -np.inf),
    )
    boxes: list[Box] = []
    columns = (np.maximum(after, begin_s), times.start_s[calls], work[calls], times.end_s[calls])
    for since, start, own, end in zip(*(column.tolist() for column in columns), strict=True):
        done = min(end, start + own)
        boxes.append(Box(min(since, start) - begin_s, done - begin_s, WORK))
        if end > done:
            boxes.append(Box(done - begin_s, end - begin_s, WAITS))
    return boxes


def _device(r: Recorded, times: Times, own: Ints, begin_s: float) -> list[Box]:
    families, of = r.families
    columns = times.begin_s[own] - begin_s, times.done_s[own] - begin_s, of[own]
    return [
        Box(start, end, families[family] if family >= 0 else COPY)
        for start, end, family in zip(*(column.tolist() for column in columns), strict=True)
    ]
