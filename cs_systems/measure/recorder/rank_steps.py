"""Observer of a rank's exchange with other ranks, in some untimed steps of a loop.

It times where the rank waits: in the collectives, sends and receives that Python calls, in `Work.wait`, and in
DistributedDataParallel between the end of backward's computation and the end of its all-reduces. On a GPU, the times
are of the loop's stream. The observation adds no exchange and changes no result.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cs_systems.analysis.attribution.distribution import DDP, FSDP
from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.comparison.loop_ranks import CallRow, RankReport, StepReport, tables_of
from cs_systems.core.tables import Tables
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced
from cs_systems.measure.recorder._ranks import Meeting
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import UNTIMED, Observer, Period, Timing
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER, Moment, Timeline
from cs_systems.measure.recorder.rank_calls import (
    BUFFERS_OPTION,
    Backward,
    Begun,
    Buffers,
    Exchanged,
    Span,
    bucket_bytes,
    exchanged,
    is_sharded,
    marking_s,
    trained,
)
from cs_systems.measure.recorder.replicas import Replicas
from cs_systems.measure.recorder.stacks import CoreQueue, Line, callee_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.readers.forms.jobs import kind

MOST_STEPS = 20
# time that rank 0 waits at the end for the observations of other ranks, which end at about the same time
AT_END_S = 5.0
LOOP = "loop"  # key of a rank's text about the whole loop, in the job's store
# Steps that are left out at the start of an observation. The first steps of a loop build its buckets and buffers; in
# the step after the timing, the ranks wait for rank 0, which writes a record.
FIRST_STEPS, FIRST_STEP = 2, 1
MOST_CALLS = 5000  # most calls per step; more are not matched across the ranks
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"),
)


@dataclass
class _Call:
    """Call of a collective, with the spans in which the loop waits for it."""

    name: str
    group: str
    ranks: int
    exchanged: Exchanged
    moment: Moment
    backward: int  # number of backward passes that had begun in this step
    line: Line | None  # the program's own
    is_gradients: bool = False
    option: str | None = None
    changed_bytes: int | None = None
    queued_s: float = 0.0
    spans: list[Span] = field(default_factory=list)


class _Searched(NamedTuple):
    """Searches for unused parameters in a step: the host's time, and the number of parameters."""

    time_s: float = 0.0
    parameters: int = 0


@dataclass
class _Step:
    """Observed step: the timeline at its end, its collective calls, its backward passes and its searches."""

    timeline: Timeline
    calls: list[_Call]
    passes: list[int]  # for each backward pass, the number of the timeline's boundaries at its end
    searched: _Searched
    queued_s: float


class RankSteps(Observer):
    """Observer of a rank's collectives in the thread of a loop, in its warm-up and in the steps after the timing.

    subject: the loop. meeting: exchange with the other ranks, which waits for at most patience_s. replicas: observer of
    models that this rank may train alone.
    """

    runs_operators = False

    def __init__(
        self, subject: Subject, tracker: Tracker, meeting: Meeting, patience_s: float, replicas: Replicas
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._subject, self._meeting, self._patience_s = subject, meeting, patience_s
        self._device, self._tracker = subject.device, tracker
        self._report: RankReport | None = None
        self._installed: Observation | None = None
        self._thread, self._queue = threading.get_ident(), CoreQueue()
        self._stream = torch.cuda.current_stream(self._device.torch) if self._device.is_cuda else None
        self._models: list[DistributedDataParallel] = []  # models with a forward pass but no backward pass since
        self._unused: int | None = None
        self._clear()

    def restart(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._sent = Buffers()
        self._left_out = 0
        self._buckets: list[int] = []
        self._start()

    def step_failed(self) -> None:
        self._start()

    def _start(self) -> None:
        self._calls: list[_Call] = []
        self._works: dict[int, _Call] = {}
        self._passes: list[int] = []
        self._searched = _Searched()
        self._models.clear()
        self._queued_before_s = self._queued_last_s = self._queue.total_s()
        self._queued_in_calls_s = 0.0

    def begins(self, period: Period) -> None:
        if period is Period.FIRST:
            self._install(FIRST_STEPS)
        elif period is Period.SAMPLED:
            self._install(FIRST_STEP)
        elif period not in UNTIMED:
            self._remove()

    def _install(self, left_out: int) -> None:
        """Begin to observe, after `left_out` steps."""
        self._left_out = left_out
        self._start()
        if self._installed is not None:
            return
        self._installed = Observation()
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                self._installed.add(functools.partial(self._observe_call, name), is_guarded=True)
        self._installed.add(self._observe_waits, is_guarded=True)
        self._installed.add(self._observe_forward, is_guarded=True)
        self._installed.add(self._observe_buffers, is_guarded=True)
        self._installed.add(self._observe_backward, is_guarded=True)

    def end(self) -> None:
        self._remove()
        self._report = self._reported()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._remove()

    def _remove(self) -> None:
        if self._installed is not None:
            self._installed.close()
        self._installed = None
        self._start()

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        if self._installed is None:
            return
        if self._left_out:
            self._left_out -= 1
        elif len(self._steps) < MOST_STEPS and len(self._calls) <= MOST_CALLS:
            queued_s = self._queue.total_s() - self._queued_before_s - self._queued_in_calls_s
            self._steps[number] = _Step(timeline, self._calls, self._passes, self._searched, queued_s)
        self._start()

    def tables(self, timing: Timing, others: Tables) -> Tables:
        """Send this rank's observations to rank 0; there, return the tables of all ranks if all have sent theirs."""
        if self._report is None:
            return {}
        report: RankReport = {**self._report, "elements": timing.elements, "own_python": OWN_PYTHON.of(others)}
        if self._meeting.rank:
            self._meeting.leave_if_open(LOOP, json.dumps(report))
            return {}
        texts = self._meeting.collect(LOOP, min(AT_END_S, self._patience_s))
        reports = [report, *map(json.loads, texts.values())]
        return tables_of(reports) if len(reports) == self._subject.world_size else {}

    def _reported(self) -> RankReport:
        """Return the observations that do not need the whole loop."""
        models = self._subject.models
        marked = max((step.searched.parameters for step in self._steps.values()), default=0)
        wrapper = FSDP if any(map(is_sharded, models)) else DDP if self._buckets else ""
        return {
            "rank": self._meeting.rank,
            "steps": {str(number): self._step(step) for number, step in self._steps.items()},
            "wrapper": wrapper,
            "parameter_bytes": sum(p.numel() * p.element_size() for p in trained(models)),
            "bucket_bytes": self._buckets,
            "marked": marked,
            "marking_s": marking_s(marked) if marked else 0.0,
            "unused": self._unused,
            "own_python": [],
            "elements": None,
            "replicas": self._replicas.reports(),
        }

    def _step(self, step: _Step) -> StepReport:
        sample = step.timeline.sample(warmup=True)
        names = step.timeline.resolved()
        ends = [*step.passes, len(names)]
        updated = [OPTIMIZER in names[begin:end] for begin, end in pairwise(ends)]
        calls = [self._row(call, updated) for call in step.calls]
        return {"wall_s": sample.wall_s, "phases_s": sample.phases_s, "calls": calls, "passes": len(step.passes),
                "search_s": step.searched.time_s, "queued_s": step.queued_s}  # fmt: skip

    def _row(self, call: _Call, updated: Sequence[bool]) -> CallRow:
        """Return the row of a call; it is early if another pass follows its own without an update in between."""
        passed = call.backward
        return {
            "name": call.name,
            "group": call.group,
            "ranks": call.ranks,
            "size_bytes": call.exchanged.size_bytes,
            "received": call.exchanged.received,
            "phase": BACKWARD if call.is_gradients else call.moment.phase(),
            "time_s": sum(self._device.between_s(begin, end) for begin, end in call.spans),
            # on a GPU the host runs ahead, so waiting for a core delays nothing
            "queued_s": 0.0 if self._device.is_cuda else call.queued_s,
            "is_gradients": call.is_gradients,
            "is_early": 0 < passed < len(updated) and not updated[passed - 1],
            "place": None if call.line is None else place_of(call.line),
            "callee": None if call.line is None else callee_of(call.line),
            "option": call.option,
            "changed_bytes": call.changed_bytes,
        }

    def _observes(self) -> bool:
        """Return whether calls in this thread belong to the loop; during a backward pass, autograd's threads do too."""
        if self._tracker.captures() or self._tracker.failure is not None:
            return False
        return threading.get_ident() == self._thread or self._tracker.is_open(BACKWARD)

    def _span_begins(self) -> Begun:
        queued_s = self._queue.total_s()
        return Begun(self._device.mark(), queued_s, queued_s - self._queued_last_s)

    def _span_ends(self, call: _Call, begun: Begun, ended: Begun | None = None) -> None:
        """Add a span to a call; `ended` is its end, marked before the call is looked at."""
        mark, self._queued_last_s, _ = ended or self._span_begins()
        call.spans.append((begun.mark, mark))
        call.queued_s += begun.since_s
        self._queued_in_calls_s += self._queued_last_s - begun.queued_s

    def _is_on_stream(self) -> bool:
        return self._stream is None or torch.cuda.current_stream(self._device.torch) == self._stream

    def _observe_call(self, name: str) -> Undo:
        """Time one method of process groups."""
        function = getattr(dist.ProcessGroup, name)
        what = kind(name)

        @passed_through
        def called(group: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begun(what, group, args, kwargs)
            work = function(group, *args, **kwargs)
            if begun is not None:
                self._called(*begun, work)
            return work

        return replaced(dist.ProcessGroup, name, called)

    @as_guest
    def _begun(self, name: str, group: Any, args: Any, kwargs: Any) -> tuple[_Call, Begun] | None:
        if not self._observes():
            return None
        call = self._new_call(name, group, exchanged(args, kwargs))
        return call, self._span_begins()

    @as_guest
    def _called(self, call: _Call, begun: Begun, work: Any) -> None:
        if self._is_on_stream():
            self._span_ends(call, begun)
        self._works[id(work)] = call
        self._calls.append(call)

    def _new_call(self, name: str, group: Any, exchanged: Exchanged) -> _Call:
        tracker = self._tracker
        passes = len(self._passes) + tracker.is_open(BACKWARD)
        line = own_lines(sys._getframe(1))[1]
        return _Call(name, str(group.group_name), group.size(), exchanged, tracker.moment(), passes, line)

    def _observe_waits(self) -> Undo:
        wait = dist.Work.wait

        @passed_through
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._works.get(id(work))
            begun = self._span_begins() if call is not None and self._is_on_stream() else None
            result = wait(work, *args, **kwargs)
            if call is not None and begun is not None:
                self._span_ends(call, begun)
            return result

        return replaced(dist.Work, "wait", waited)

    def _observe_forward(self) -> Undo:
        """Time the work of DistributedDataParallel after its forward pass, such as a search for unused parameters."""
        function = DistributedDataParallel._post_forward

        @passed_through
        def prepared(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            result = function(model, *args, **kwargs)
            self._prepared(model, time.thread_time() - began_s)
            return result

        return replaced(DistributedDataParallel, "_post_forward", prepared)

    @as_guest
    def _prepared(self, model: DistributedDataParallel, lasted_s: float) -> None:
        if not (self._observes() and torch.is_grad_enabled()):
            return
        self._replicas.called(model)
        if not model.require_backward_grad_sync:
            return
        self._models.append(model)
        if model.find_unused_parameters and not model.static_graph:
            parameters = sum(p.requires_grad for p in model.parameters())
            self._searched = _Searched(self._searched.time_s + lasted_s, self._searched.parameters + parameters)

    def _observe_buffers(self) -> Undo:
        """Time the broadcast of buffers before a forward pass."""
        function = DistributedDataParallel._sync_buffers

        @passed_through
        def sent(model: DistributedDataParallel) -> Any:
            begun = self._span_begins()
            result = function(model)
            self._sent_buffers(model, begun)
            return result

        return replaced(DistributedDataParallel, "_sync_buffers", sent)

    @as_guest
    def _sent_buffers(self, model: DistributedDataParallel, begun: Begun) -> None:
        ended = self._span_begins()  # looking at the stack and at each buffer takes time
        if self._observes() and self._is_on_stream() and model.modules_buffers:
            call = self._new_call("broadcast", model.process_group, exchanged(model.modules_buffers, {}))
            call.option, call.changed_bytes = BUFFERS_OPTION, self._sent.changed_bytes(model)
            self._span_ends(call, begun, ended)
            self._calls.append(call)

    def _observe_backward(self) -> Undo:
        """Time the end of each backward pass in which DistributedDataParallel reduces gradients."""
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward

        @passed_through
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._backward_begins(roots)
            result = engine(roots, *args, **kwargs)
            if begun is not None:
                self._backward_ended(begun)
            return result

        return replaced(autograd, "_engine_run_backward", run)

    @as_guest
    def _backward_begins(self, roots: Any) -> Backward | None:
        if not self._observes() or self._tracker.is_open(BACKWARD):
            return None
        backward = Backward(list(dict.fromkeys(self._models)), self._span_begins)
        self._models.clear()
        if backward.models:
            backward.watch(roots)
        return backward

    @as_guest
    def _backward_ended(self, backward: Backward) -> None:
        ended = self._span_begins()
        self._passes.append(self._tracker.timeline.boundaries())
        backward.close()
        if backward.computed is None:
            return
        self._look_at(backward)
        (model, *_), buckets = backward.models, self._buckets
        call = self._new_call("all_reduce", model.process_group, Exchanged(sum(buckets), 0))
        call.is_gradients = True  # so it belongs to the backward pass, which has ended
        self._span_ends(call, backward.computed, ended)
        self._calls.append(call)

    def _look_at(self, backward: Backward) -> None:
        """Note the buckets of the models that a pass has reduced, and the number of parameters that it did not use."""
        if not (self._buckets or self._left_out):  # the buckets are rebuilt after the first pass
            self._buckets = [size for model in backward.models for size in bucket_bytes(model)]
        if backward.unused is not None:
            self._unused = max(self._unused or 0, backward.unused)
