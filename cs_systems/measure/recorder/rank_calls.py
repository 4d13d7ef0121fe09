"""Calls by which ranks exchange data: their sizes, and where DistributedDataParallel's backward pass ends."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.workloads._batches import tensors_in

TIMES_MARKED = 3
# argument that turns off the broadcast of buffers; since torch 2.13 the first one, and the other one is deprecated
_OPTIONS = "forward_sync_buffers", "broadcast_buffers"
BUFFERS_OPTION = next(name for name in _OPTIONS if name in inspect.signature(DistributedDataParallel).parameters)
Span = tuple[Any, Any]  # two marks of the device


class Begun(NamedTuple):
    """Start of a span, or its end: the device's mark, and how long the loop's thread had waited for a core."""

    mark: Any
    queued_s: float
    since_s: float  # waiting time since the last span ended


class Exchanged(NamedTuple):
    """Bytes of a call, and the elements that this rank receives."""

    size_bytes: int
    received: int


class Backward:
    """Backward pass, with the mark at the end of its computation, before it waits for the all-reduces.

    A hook at the root of the graph queues a callback of autograd's engine, which comes before the one that
    DistributedDataParallel queues later in the pass.
    """

    def __init__(self, models: list[DistributedDataParallel], span_begins: Callable[[], Begun]) -> None:
        self.models, self._span_begins = models, span_begins
        self.computed: Begun | None = None
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


def marking_s(parameters: int) -> float:
    """Return how long DistributedDataParallel takes to mark this many parameters as used, with one operator each."""
    used = torch.zeros(parameters, dtype=torch.int32)
    lasted_s = []
    with hidden_from_modes(), torch.inference_mode():
        for _ in range(TIMES_MARKED):
            began_s = time.thread_time()
            for number in range(parameters):
                used.select(0, number).fill_(1)
            lasted_s.append(time.thread_time() - began_s)
    return min(lasted_s)


def exchanged(args: Any, kwargs: Any) -> Exchanged:
    """Return the size of a call from its arguments: bytes of the largest buffer, elements of the first (the output)."""
    buffers = [[*tensors_in(each)] for each in (*args, *kwargs.values()) if isinstance(each, Tensor | list | tuple)]
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in buffers]
    received = sum(t.numel() for t in buffers[0]) if buffers else 0
    return Exchanged(max(sizes, default=0), received)


class Buffers:
    """Buffers that DistributedDataParallel sends in a step, to tell which of them have changed since the step before.

    A buffer is known by its identity and its version, which the broadcast itself does not raise. Writes to
    `.data` do not raise it either, nor does `torch.nn.functional.batch_norm` for the running means.
    """

    def __init__(self) -> None:
        self._known: dict[int, set[tuple[int, int]]] = {}  # by model

    def changed_bytes(self, model: DistributedDataParallel) -> int | None:
        """Return the bytes of the buffers that have changed; None the first time."""
        before = self._known.get(id(model))
        now = {(id(each), each._version): each.numel() * each.element_size() for each in model.modules_buffers}
        self._known[id(model)] = {*now}
        return None if before is None else sum(size for each, size in now.items() if each not in before)


def bucket_bytes(model: DistributedDataParallel) -> Iterator[int]:
    """Yield the sizes of the buckets in which a model's gradients are reduced."""
    data: dict[str, Any] = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") if data.get("has_rebuilt_buckets") else None
    yield from (int(size) for size in str(sizes or data.get("bucket_sizes") or "").split(",") if size.strip())


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP, of either version, wraps the model."""
    return any(type(each).__name__ == "FullyShardedDataParallel" or _is_fsdp2(each) for each in model.modules())


def _is_fsdp2(module: nn.Module) -> bool:
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def trained(models: Sequence[nn.Module]) -> set[nn.Parameter]:
    return {p for model in models for p in model.parameters() if p.requires_grad}
