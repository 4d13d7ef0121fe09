"""Collectives of this package's strategies, all started in this file, so that the bytes sent can be counted.

The bytes that a rank sends are counted for ring collectives, as `formulas.communication` describes. `group`: the ranks
that take part, all by default; a source is given by its rank in the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cs_systems.config import ConfigError, one_of
from cs_systems.formulas.communication import all_reduce_bytes, shard_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(option: str, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a strategy's option, which may be a name in DTYPES. Raises ConfigError for another name."""
    return DTYPES[one_of(option, dtype, DTYPES)] if isinstance(dtype, str) else dtype


@dataclass(frozen=True)
class Call:
    """Record of one collective: its name, the bytes of the whole tensor over all ranks, and the number of ranks."""

    collective: str
    whole_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        volume = all_reduce_bytes if self.collective == "all_reduce" else shard_bytes
        return volume(self.whole_bytes, self.ranks)


# torch 2.13 has new names and warns about the old ones; torch 2.11 has only the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_listeners: list[list[Call]] = []


@contextmanager
def counting() -> Iterator[list[Call]]:
    """Record the collectives that this rank starts inside, in order."""
    calls: list[Call] = []
    _listeners.append(calls)
    try:
        yield calls
    finally:
        _listeners.remove(calls)


def _note(collective: str, group: ProcessGroup | None, *whole: Tensor) -> None:
    if _listeners:
        _tell(Call(collective, sum(x.nbytes for x in whole), dist.get_world_size(group)))


def _tell(call: Call) -> None:
    for calls in _listeners:
        calls.append(call)


class Averaging:
    """Averaging of tensors on `device` over the ranks of `group`, in place.

    In a CPU-bound step with a collective for each parameter, the time to start one decides the step's length. Therefore
    the state shared by all calls is made once, here, and the group's backend is called directly: torch.distributed's
    checks and dispatcher take about as long per call as all other Python code.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        backend: Any = group._get_backend(device)
        self._ranks = group.size()
        self._start, self._start_several = backend.allreduce, backend.allreduce_coalesced
        # NCCL divides while summing. Otherwise divide before the sum: in fp16, a sum that is divided afterwards could
        # overflow.
        self._divides = backend.name() == "nccl"
        operation = dist.ReduceOp.AVG if self._divides else dist.ReduceOp.SUM
        self._options = _options(dist.AllreduceOptions(), operation)
        self._options_of_several = _options(dist.AllreduceCoalescedOptions(), operation)

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Start averaging `tensors` (contiguous, of one dtype) in one collective; the handle's `wait()` ends it.

        NCCL takes several tensors in place in one launch, without a copy; gloo copies them into one.
        """
        if _listeners:
            _tell(Call("all_reduce", sum([x.nbytes for x in tensors]), self._ranks))
        if tensors[0].is_complex():
            tensors = [torch.view_as_real(x) for x in tensors]
        if not self._divides:
            torch._foreach_div_(tensors, self._ranks)
        if len(tensors) == 1:
            return self._start(tensors, self._options)
        return self._start_several(tensors, self._options_of_several)


def _options(options: Any, operation: Any) -> Any:
    options.reduceOp, options.asyncOp = operation, True
    return options


def communicator(group: ProcessGroup | None, max_ctas: int | None, high_priority: bool) -> ProcessGroup | None:
    """Return a group of the ranks of `group` with these NCCL options; `group` itself if none is set.

    max_ctas: the maximum number of thread blocks that NCCL uses, each of which takes a multiprocessor. high_priority:
    NCCL's blocks run before waiting blocks of other kernels.

    Raises ConfigError if the backend is not NCCL.
    """
    if max_ctas is None and not high_priority:
        return group
    if "nccl" not in (backend := dist.get_backend_config(group)):
        raise ConfigError(
            f"max_ctas and high_priority require NCCL, but the process group uses {backend}; leave them out, or "
            "initialize the process group with nccl on GPUs"
        )
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    made: ProcessGroup = dist.new_group(ranks, backend="nccl", pg_options=options, use_local_synchronization=True)
    return made


def average_shard(flat: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start averaging `flat` over the ranks; this rank gets its N-th part in `shard`. Overwrites `flat`."""
    _note("reduce_scatter", group, flat)
    return _reduce_scatter(shard, flat, _divided(flat, group), group, async_op=True)


def gather_shards(flat: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start filling `flat` with the shards of all ranks, in rank order; `shard` may be this rank's part of it."""
    _note("all_gather", group, flat)
    return _all_gather(_sendable(flat), _sendable(shard), group, async_op=True)


def _sendable(x: Tensor) -> Tensor:
    """Return the same bits in a dtype that gloo and NCCL support; neither has int16."""
    return x.view(torch.float16) if x.dtype is torch.int16 else x


def _divided(flat: Tensor, group: ProcessGroup | None) -> Any:
    """Return the reduction for a mean: AVG on NCCL, otherwise SUM, after dividing `flat` by the world size."""
    if dist.get_backend(group) == "nccl":
        return dist.ReduceOp.AVG
    flat.div_(dist.get_world_size(group))
    return dist.ReduceOp.SUM


def total(tensor: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start summing `tensor` over the ranks, in place."""
    _note("all_reduce", group, tensor)
    return dist.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op=True)


def maximum(flat: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start the element-wise maximum of `flat` over the ranks, in place."""
    _note("all_reduce", group, flat)
    return dist.all_reduce(flat, dist.ReduceOp.MAX, group, async_op=True)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup | None = None) -> Any:
    """Start overwriting `tensor` (contiguous) with the tensor of rank `source`."""
    _note("broadcast", group, tensor)
    return dist.broadcast(_sendable(tensor), group=group, group_src=source, async_op=True)
