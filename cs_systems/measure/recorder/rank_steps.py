"""Observation of what a rank exchanges with the others, in some steps of a loop that are not timed.

It times where the rank waits: in the collectives, sends and receives that Python calls, in `Work.wait`, and in
DistributedDataParallel between the end of backward's computation and the end of its all-reduces. On a GPU these times
are of the loop's stream. Nothing is exchanged for it, and the results stay as they are.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cs_systems.analysis.attribution.distribution import DDP, FSDP
from cs_systems.analysis.comparison.loop_ranks import CallRow, RankReport, StepReport
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced
from cs_systems.machine.device import Device
from cs_systems.measure.recorder.hooks import as_guest
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER, Moment, Timeline, Tracker
from cs_systems.measure.recorder.stacks import CoreQueue
from cs_systems.measure.workloads._batches import tensors_in
from cs_systems.readers.forms.jobs import kind

MOST_STEPS = 20
# Steps at the begin of an observation that are left out: the first ones of a loop build their buckets and buffers, and
# in the one after the timing the ranks wait for rank 0, which wrote a record.
FIRST_STEPS, FIRST_STEP = 2, 1
TIMES_MARKED = 3
MOST_CALLS = 5000  # of a step; more are not matched across the ranks
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"),
)
Span = tuple[Any, Any]  # two marks of the device


class _Begun(NamedTuple):
    """Begin of a span: the device's mark, and for how long the loop's thread had waited for a core."""

    mark: Any
    queued_s: float
    since_s: float  # of it, since the last span ended


class _Exchanged(NamedTuple):
    """Bytes of a call, and the elements that it brings to this rank."""

    size_bytes: int
    received: int


@dataclass
class _Call:
    """Call of a collective, with the spans in which the loop waits for it."""

    name: str
    group: str
    ranks: int
    exchanged: _Exchanged
    moment: Moment
    backward: int  # number of backward passes of this step that had begun
    is_gradients: bool = False
    queued_s: float = 0.0
    spans: list[Span] = field(default_factory=list)


class _Searched(NamedTuple):
    """Searches for unused parameters in a step: the host's time, and the number of parameters."""

    time_s: float = 0.0
    parameters: int = 0


@dataclass
class _Step:
    """Step that was observed, with its last timeline."""

    timeline: Timeline
    calls: list[_Call]
    passes: list[int]  # for each backward pass, the number of the timeline's boundaries at its end
    searched: _Searched
    queued_s: float


class RankSteps:
    """Observer of a rank's collectives in the thread of a loop, while `begin` has been called and not `end`."""

    def __init__(self, device: Device, tracker: Tracker) -> None:
        self._device, self._tracker = device, tracker
        self._installed: Observation | None = None
        self._thread, self._queue = threading.get_ident(), CoreQueue()
        self._stream = torch.cuda.current_stream(device.torch) if device.is_cuda else None
        self._models: list[DistributedDataParallel] = []  # with a forward pass and no backward pass since
        self._unused: int | None = None
        self._clear()

    def restart(self) -> None:
        """Begin again: the steps so far were not part of the training."""
        self._clear()
        self.begin(FIRST_STEPS)

    def _clear(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._left_out = 0
        self._buckets: list[int] = []
        self._start()

    def step_failed(self) -> None:
        """Forget the calls of the step that ends here."""
        self._start()

    def _start(self) -> None:
        self._calls: list[_Call] = []
        self._works: dict[int, _Call] = {}
        self._passes: list[int] = []
        self._searched = _Searched()
        self._models.clear()
        self._queued_before_s = self._queued_last_s = self._queue.total_s()
        self._queued_in_calls_s = 0.0

    def begin(self, left_out: int) -> None:
        """Begin to observe; the first steps, of that number, are left out."""
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
        """Remove everything."""
        if self._installed is not None:
            self._installed.close()
        self._installed = None
        self._start()

    def step_ended(self, number: int, timeline: Timeline) -> None:
        """Note a step at its end."""
        if self._installed is None:
            return
        if self._left_out:
            self._left_out -= 1
        elif len(self._steps) < MOST_STEPS and len(self._calls) <= MOST_CALLS:
            queued_s = self._queue.total_s() - self._queued_before_s - self._queued_in_calls_s
            self._steps[number] = _Step(timeline, self._calls, self._passes, self._searched, queued_s)
        self._start()

    def report(self, rank: int, models: Sequence[nn.Module], elements: float | None) -> RankReport:
        """Return what was observed; the device must have finished the steps. elements: of the models' inputs."""
        marked = max((step.searched.parameters for step in self._steps.values()), default=0)
        wrapper = FSDP if any(map(_is_sharded, models)) else DDP if self._buckets else ""
        return {
            "rank": rank,
            "steps": {str(number): self._step(step) for number, step in self._steps.items()},
            "wrapper": wrapper,
            "parameter_bytes": sum(p.numel() * p.element_size() for p in _trained(models)),
            "bucket_bytes": self._buckets,
            "marked": marked,
            "marking_s": _marking_s(marked) if marked else 0.0,
            "unused": self._unused,
            "own_python": [],
            "elements": elements,
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
        """Return a call; it is early if another pass follows its own without an update between them."""
        passed = call.backward
        return {
            "name": call.name,
            "group": call.group,
            "ranks": call.ranks,
            "size_bytes": call.exchanged.size_bytes,
            "received": call.exchanged.received,
            "phase": BACKWARD if call.is_gradients else call.moment.phase(),
            "time_s": sum(self._device.between_s(begin, end) for begin, end in call.spans),
            "queued_s": 0.0 if self._device.is_cuda else call.queued_s,  # the host runs ahead of a GPU
            "is_gradients": call.is_gradients,
            "is_early": 0 < passed < len(updated) and not updated[passed - 1],
        }

    def _observes(self) -> bool:
        """Return whether calls in this thread belong to the loop: in a backward pass, those of autograd's threads."""
        if self._tracker.captures() or self._tracker.failure is not None:
            return False
        return threading.get_ident() == self._thread or self._tracker.is_open(BACKWARD)

    def _span_begins(self) -> _Begun:
        queued_s = self._queue.total_s()
        return _Begun(self._device.mark(), queued_s, queued_s - self._queued_last_s)

    def _span_ends(self, call: _Call, begun: _Begun) -> None:
        call.spans.append((begun.mark, self._device.mark()))
        call.queued_s += begun.since_s
        self._queued_last_s = self._queue.total_s()
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
    def _begun(self, name: str, group: Any, args: Any, kwargs: Any) -> tuple[_Call, _Begun] | None:
        if not self._observes():
            return None
        call = self._new_call(name, group, _exchanged(args, kwargs))
        return call, self._span_begins()

    @as_guest
    def _called(self, call: _Call, begun: _Begun, work: Any) -> None:
        if self._is_on_stream():
            self._span_ends(call, begun)
        self._works[id(work)] = call
        self._calls.append(call)

    def _new_call(self, name: str, group: Any, exchanged: _Exchanged) -> _Call:
        tracker = self._tracker
        passes = len(self._passes) + tracker.is_open(BACKWARD)
        return _Call(name, str(group.group_name), group.size(), exchanged, tracker.moment(), passes)

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
        """Time what DistributedDataParallel does after its forward pass, such as a search for unused parameters."""
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
        if not (self._observes() and torch.is_grad_enabled() and model.require_backward_grad_sync):
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
    def _sent_buffers(self, model: DistributedDataParallel, begun: _Begun) -> None:
        if self._observes() and self._is_on_stream() and model.modules_buffers:
            call = self._new_call("broadcast", model.process_group, _exchanged(model.modules_buffers, {}))
            self._span_ends(call, begun)
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
    def _backward_begins(self, roots: Any) -> _Backward | None:
        if not self._observes() or self._tracker.is_open(BACKWARD):
            return None
        backward = _Backward(list(dict.fromkeys(self._models)), self._span_begins)
        self._models.clear()
        if backward.models:
            backward.watch(roots)
        return backward

    @as_guest
    def _backward_ended(self, backward: _Backward) -> None:
        self._passes.append(self._tracker.timeline.boundaries())
        backward.close()
        if backward.computed is None:
            return
        self._look_at(backward)
        (model, *_), buckets = backward.models, self._buckets
        call = self._new_call("all_reduce", model.process_group, _Exchanged(sum(buckets), 0))
        call.is_gradients = True  # and so a part of backward, which has ended
        self._span_ends(call, backward.computed)
        self._calls.append(call)

    def _look_at(self, backward: _Backward) -> None:
        """Note the buckets of the models that a pass has reduced, and how many parameters it has not used."""
        if not (self._buckets or self._left_out):  # the buckets are built anew after the first pass
            self._buckets = [size for model in backward.models for size in _bucket_bytes(model)]
        if backward.unused is not None:
            self._unused = max(self._unused or 0, backward.unused)


class _Backward:
    """Backward pass, with the mark at the end of its computation, before it waits for the all-reduces.

    A hook at the root of the graph queues a callback of autograd's engine, which comes before the one that
    DistributedDataParallel queues later in the pass.
    """

    def __init__(self, models: list[DistributedDataParallel], span_begins: Callable[[], _Begun]) -> None:
        self.models, self._span_begins = models, span_begins
        self.computed: _Begun | None = None
        self.unused: int | None = None
        self._handle: Any = None

    def watch(self, roots: Any) -> None:
        tensors = (roots,) if isinstance(roots, Tensor) else roots
        node = next((root.grad_fn for root in tensors if isinstance(root, Tensor) and root.grad_fn is not None), None)
        if node is not None:
            self._handle = node.register_prehook(self._begins)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    @as_guest
    def _begins(self, _: Any) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._has_computed)

    @as_guest
    def _has_computed(self) -> None:
        self.computed = self._span_begins()
        searching = [model for model in self.models if model.find_unused_parameters and not model.static_graph]
        if searching:
            with hidden_from_modes():
                used = [model.reducer._get_local_used_map() for model in searching]
                self.unused = sum(each.numel() - int(each.count_nonzero()) for each in used)


def _marking_s(parameters: int) -> float:
    """Return how long DistributedDataParallel takes to mark as many parameters as used, one operator for each."""
    used = torch.zeros(parameters, dtype=torch.int32)
    lasted_s = []
    with hidden_from_modes(), torch.inference_mode():
        for _ in range(TIMES_MARKED):
            began_s = time.thread_time()
            for number in range(parameters):
                used.select(0, number).fill_(1)
            lasted_s.append(time.thread_time() - began_s)
    return min(lasted_s)


def _exchanged(args: Any, kwargs: Any) -> _Exchanged:
    """Return the size of a call from its arguments: the largest of its buffers, of which the first is the output."""
    buffers = [[*tensors_in(each)] for each in (*args, *kwargs.values()) if isinstance(each, Tensor | list | tuple)]
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in buffers]
    received = sum(t.numel() for t in buffers[0]) if buffers else 0
    return _Exchanged(max(sizes, default=0), received)


def _bucket_bytes(model: DistributedDataParallel) -> Iterator[int]:
    """Yield the sizes of the buckets in which a model's gradients are reduced."""
    data: dict[str, Any] = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") if data.get("has_rebuilt_buckets") else None
    yield from (int(size) for size in str(sizes or data.get("bucket_sizes") or "").split(",") if size.strip())


def _is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP, of either version, wraps the model."""
    return any(type(each).__name__ == "FullyShardedDataParallel" or _is_fsdp2(each) for each in model.modules())


def _is_fsdp2(module: nn.Module) -> bool:
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def _trained(models: Sequence[nn.Module]) -> set[nn.Parameter]:
    return {p for model in models for p in model.parameters() if p.requires_grad}
