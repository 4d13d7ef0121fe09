"""Parameters sharded in a flat layout: gathering of the weights and reduction of their gradients.

Whole parameters are views of one tensor: gathering them takes one cast and one all-gather, averaging their gradients
takes one concatenation and one reduce-scatter.

Streams on CUDA: Every tensor here is allocated and freed in the order of the stream that computes. The cast and the
all-gather run on a second stream, which first waits for the work queued on the first, so that memory freed before is
free on it too. Code that computes with the weights, or frees them, first waits for the all-gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from cs_systems.model.parallel._collectives import average_shard, gather_shards
from cs_systems.model.parallel._flat_layout import FlatLayout


@dataclass(frozen=True)
class Part:
    """Part of a parameter on one rank: elements `start` to `stop`, at offset `in_shard` in its part of the tensor.

    shape: (elements, 1, …, 1), with as many dimensions as the whole parameter.
    """

    flat: FlatShard
    start: int
    stop: int
    in_shard: int
    whole_shape: torch.Size
    shape: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of `shard` (this rank's part of the whole tensor) that belongs to the parameter."""
        return shard.as_strided(self.shape, (1,) * len(self.shape), self.in_shard)


parts: Any = WeakTensorKeyDictionary()  # parameter → its Part, for the optimizer, which has no modules


class FlatShard:
    """Parameters of one dtype, device and `requires_grad`, which from now on hold this rank's part of their elements.

    A part keeps the number of dimensions, because users choose groups of parameters by `ndim`; a rank may have none of
    the elements. With a compute dtype, parts are in fp32, else in the parameters' own dtype; the weights and their
    gradients are in the compute dtype.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], dtype: torch.dtype | None, group: ProcessGroup | None, stream: Any
    ) -> None:
        self.shapes, self.trained = [p.shape for p in params], params[0].requires_grad
        self._params = [weakref.ref(p) for p in params]  # strong references would keep them in `parts` forever
        self._group, self._stream = group, stream
        master, dtype = (torch.float32, dtype) if dtype else (params[0].dtype, params[0].dtype)
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._layout = FlatLayout.of([p.numel() for p in params], world_size, dtype)
        self._starts, size = self._layout.starts, self._layout.part
        self.shard = torch.zeros(size, dtype=master, device=params[0].device)
        self._whole = torch.empty(size * world_size, dtype=dtype, device=params[0].device)
        self._whole_bytes = self._whole.nbytes
        # Without a cast, the shard itself is sent.
        self._sent = self.shard if master is dtype else self._whole[rank * size : (rank + 1) * size]
        alias = self._whole.data  # separate for autograd: gathering does not change saved tensors
        self.weights = [alias[s : s + p.numel()].view(p.shape) for p, s in zip(params, self._starts, strict=True)]
        self.parts = []
        for p, (start, stop, in_shard) in zip(params, self._layout.held(rank), strict=True):
            part = Part(self, start, stop, in_shard, p.shape, (stop - start, *[1] * (p.ndim - 1)))
            part.of(self.shard).copy_(p.detach().reshape(-1)[start:stop].view(part.shape))
            p.data, p.grad = part.of(self.shard), None
            parts[p] = part
            self.parts.append(part)
        self._gathering: Any = None
        self._is_current = False  # whether the weights match the shards, or will match after the current gathering
        self.free()

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for ref in self._params if (p := ref()) is not None]

    def gathered_bytes(self) -> int:
        """Return the bytes of the whole tensor's memory now."""
        return self._whole.untyped_storage().nbytes()

    def start(self) -> None:
        """Start gathering the weights, unless they are current."""
        if self._is_current:
            return
        self._is_current = True
        if not self.gathered_bytes():
            self._whole.untyped_storage().resize_(self._whole_bytes)
        if self._stream is None:
            self._gather()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.shard.device))
            with torch.cuda.stream(self._stream):
                self._gather()

    def _gather(self) -> None:
        if self._sent is not self.shard:
            self._sent.copy_(self.shard)
        self._gathering = gather_shards(self._whole, self._sent, self._group)

    def wait(self) -> None:
        """Make later computation wait for the weights."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def expire(self) -> None:
        """Mark the weights as outdated, because the shards may have changed, so that they are gathered again."""
        self.wait()
        self._is_current = False

    def free(self) -> None:
        if self.gathered_bytes():
            self.expire()
            self._whole.untyped_storage().resize_(0)

    def reduce(self, grads: Sequence[Tensor | None]) -> Reduction:
        """Start averaging the weights' gradients over the ranks; None counts as zeros."""
        tensors = [
            torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if grad is None else grad
            for grad, weight in zip(grads, self.weights, strict=True)
        ]
        flat = self._layout.lined_up(tensors)
        mean = torch.empty_like(self.shard, dtype=flat.dtype)
        return Reduction(self, average_shard(flat, mean, self._group), flat, mean, [g is not None for g in grads])

    def whole_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors with the shapes of parts from every rank into whole tensors with the parameters' shapes."""
        mine = torch.zeros_like(self.shard, dtype=tensors[0].dtype)
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.of(mine).copy_(tensor)
        whole = mine.new_empty(len(self._whole))
        gather_shards(whole, mine, self._group).wait()
        return [whole[s : s + x.numel()].view(x).clone() for s, x in zip(self._starts, self.shapes, strict=True)]


@dataclass(frozen=True)
class Reduction:
    """Reduction of gradients in progress.

    `flat` must live until their mean is in `mean`. used: whether each parameter had a gradient.
    """

    of: FlatShard
    handle: Any
    flat: Tensor
    mean: Tensor
    used: list[bool]

    def settle(self, absent: set[nn.Parameter]) -> None:
        """Wait, and add the mean to the parameters' gradients.

        absent: parameters without a gradient on this rank.
        """
        self.handle.wait()
        mean = self.mean.to(self.of.shard.dtype)
        before, added = [], []
        for p, part, used in zip(self.of.params, self.of.parts, self.used, strict=True):
            if not p.requires_grad:  # frozen after the model was wrapped
                continue
            if used:
                absent.discard(p)
            elif p.grad is None:
                absent.add(p)
            if p.grad is None:
                p.grad = part.of(mean)
            else:
                before.append(p.grad)
                added.append(part.of(mean))
        if before:
            torch._foreach_add_(before, added)
