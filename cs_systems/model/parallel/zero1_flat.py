"""ZeRO stage 1 with flat shards: each rank sends 2 Ψ (N−1)/N bytes, like plain averaging.

Source: Rajbhandari et al. 2020, P_os, section 7.2.1. Parameters lie side by side in buckets, and each rank has the
N-th part of every bucket, as `_flat_layout` cuts it.

1. Backward's gradients are reduce-scattered bucket by bucket as they become ready, Ψ (N−1)/N, then freed. So a rank
   holds its part of them and a few buckets, as in stage 2.
2. Each rank steps its part, and keeps only this part's state, 1/N of the whole.
3. All-gathers make the parameters whole again, Ψ (N−1)/N; gathering of stepped buckets overlaps the steps of others.

Supports element-wise optimizers (SGD, Adam, AdamW; not LBFGS, Muon, Adafactor). After finish_gradient_synchronization()
a rank has only the averaged gradients of its part, and `.grad` of the model's parameters is None: in fp16
`_scaler.PartsScaler` finds the parts' gradients. The next backward adds to them, until zero_grad() of the model or of
the optimizer clears them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cs_systems.config import ConfigError
from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import average_shard, gather_shards
from cs_systems.model.parallel._data_parallel import Bucket, DataParallel, by_size, finish_gradients
from cs_systems.model.parallel._flat_layout import FlatLayout
from cs_systems.model.parallel.zero1 import ShardedOptimizer

ROUNDS = 8  # most rounds into which an optimizer step is divided, to overlap it with gathering the stepped buckets
IN_FLIGHT = 8  # buckets that a rank holds in addition to its part of the gradients


@dataclass
class Part:
    """Part of a parameter on one rank: elements `start` to `stop`, at offset `in_shard` in its shard of the bucket."""

    start: int
    stop: int
    in_shard: int
    flat: FlatBucket
    values: nn.Parameter  # (stop − start,), a view of the bucket; () for a parameter without dimensions, whole


class FlatBucket:
    """Bucket of parameters, which from now on are views of its one tensor."""

    def __init__(self, params: Bucket) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        layout = FlatLayout.of([p.numel() for p in params], world_size, params[0].dtype)
        self._layout = layout
        self.values = layout.lined_up([p.detach() for p in params])
        self.shard = self.values[rank * layout.part : (rank + 1) * layout.part]
        self.parts = []
        for p, at, (start, stop, in_shard) in zip(params, layout.starts, layout.held(rank), strict=True):
            p.data = self.values[at : at + p.numel()].view(p.shape)
            values = p.data.view(-1)[start:stop] if p.ndim or start == stop else p.data
            part = _parts[p] = Part(start, stop, in_shard, self, nn.Parameter(values))
            self.parts.append(part)

    def lined_up(self, grads: list[Tensor]) -> Tensor:
        """Return the gradients as one tensor.

        A gradient that fills its bucket is sent without a copy, as most gradients of a large model are.
        """
        if len(grads) == 1 and grads[0].numel() == self.values.numel():
            return grads[0].view(-1)
        return self._layout.lined_up(grads)


_parts: Any = WeakTensorKeyDictionary()  # parameter → its Part, for the optimizer, which has no modules


class FlatShards(DataParallel):
    """DataParallel that reduce-scatters its buckets instead of averaging them everywhere."""

    def __init__(self, module: nn.Module, bucket_size_mb: float, send_thread: bool) -> None:
        buckets = partial(by_size, size_bytes=bucket_size_mb * 2**20)
        super().__init__(module, buckets, overlap=True, send_thread=send_thread)
        with torch.no_grad():
            self._flat = [FlatBucket(bucket) for bucket in self._buckets]
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []  # gradients of finished micro-batches

    def _start(self, index: int, grads: list[Tensor]) -> tuple[Any, Tensor]:
        own = self._flat[index]
        flat, shard = own.lined_up(grads), torch.empty_like(own.shard)
        for p, part in zip(self._buckets[index], own.parts, strict=True):
            p.grad = None
            if part.values.grad is not None:
                self._earlier.append((part.values, part.values.grad))
            grad = shard[part.in_shard : part.in_shard + part.stop - part.start]
            part.values.grad = grad if part.values.ndim else grad.view(())
        return average_shard(flat, shard), flat

    def _send(self, index: int) -> None:
        """Send a bucket, then wait for one sent some buckets earlier, to reuse its memory for the next one.

        On a GPU the stream waits, not the host.
        """
        super()._send(index)
        if len(self._in_flight) > IN_FLIGHT:
            handle, _ = self._in_flight.pop(0)
            handle.wait()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait for this rank's parts of the mean gradients, and add them to earlier gradients."""
        super().finish_gradient_synchronization()
        for values, grad in self._earlier:
            values.grad = grad if values.grad is None else values.grad.add_(grad)
        self._earlier = []

    def _drop(self, p: nn.Parameter) -> None:
        _parts[p].values.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module and of this rank's parts.

        The parts are not parameters of the module, so their gradients would otherwise live until the next backward.
        """
        super().zero_grad(set_to_none)
        for p in self._params:
            self._drop(p)


Round = tuple[list[FlatBucket], list[list[Tensor]]]  # buckets, and this rank's parts of them by parameter group


class FlatShardedOptimizer(ShardedOptimizer):
    """ShardedOptimizer of this rank's part of each bucket of a model that this strategy has wrapped."""

    def _assign(self, params: list[nn.Parameter]) -> None:
        unknown = next((p for p in params if p.requires_grad and p not in _parts), None)
        if unknown is not None:
            raise ConfigError(
                f"the optimizer has a parameter of shape {tuple(unknown.shape)} that is in no wrapped model, or was "
                "frozen when its model was wrapped; make it a trainable parameter of the model, then wrap the model"
            )

    def _part(self, p: nn.Parameter) -> Tensor | None:
        part = _parts.get(p)
        return None if part is None or part.start == part.stop else part.values

    def _part_of_state(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        part = _parts[p]
        return {
            key: value.flatten()[part.start : part.stop] if _is_element_wise(value, p.numel()) else value
            for key, value in state.items()
        }

    @property
    def of_parts(self) -> torch.optim.Optimizer:
        """Optimizer of this rank's parts: a gradient scaler finds the gradients here, not in `param_groups`."""
        assert self._local is not None
        return self._local

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._rounds: list[Round] = []  # the next step makes the rounds again

    def _step_and_share(self, local: torch.optim.Optimizer) -> None:
        """Step in rounds: gather the buckets of one round while stepping the buckets of the next."""
        whole, handles = [group["params"] for group in local.param_groups], []
        # an optimizer that counts a group's steps would count each round as a step
        rounds = 1 if getattr(local, "counts_by_group", False) else ROUNDS
        self._rounds = self._rounds or self._made_rounds(whole, rounds)
        try:
            for flats, params_of_groups in self._rounds:
                for group, params in zip(local.param_groups, params_of_groups, strict=True):
                    group["params"] = params
                local.step()
                handles += [gather_shards(flat.values, flat.shard) for flat in flats]
        finally:
            for group, params in zip(local.param_groups, whole, strict=True):
                group["params"] = params
        for handle in handles:
            handle.wait()

    def _made_rounds(self, whole: list[list[Tensor]], most: int) -> list[Round]:
        """Divide the buckets into at most `most` rounds, each with this rank's parts by parameter group."""
        parts = [part for p in self._all() if (part := _parts.get(p)) is not None]
        flat_of = {id(part.values): id(part.flat) for part in parts}
        flats = list({id(part.flat): part.flat for part in parts}.values())
        size = max(1, -(-len(flats) // most))
        rounds = []
        for some in (flats[i : i + size] for i in range(0, len(flats), size)):
            wanted = {id(flat) for flat in some}
            rounds.append((some, [[v for v in params if flat_of[id(v)] in wanted] for params in whole]))
        return rounds

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for p in self._all():
            if (values := self._part(p)) is not None:
                values.grad = None

    def _whole_state(self, params: list[nn.Parameter]) -> dict[int, dict[str, Any]]:
        own = {}
        for i, p in enumerate(params):
            values = self._part(p)
            if values is not None and values in self.state:
                own[i] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.state[values].items()}
        ranks: list[dict[int, dict[str, Any]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, own)
        state: dict[int, dict[str, Any]] = {}
        for i, p in enumerate(params):
            found = [theirs[i] for theirs in ranks if i in theirs]  # in the order of the ranks, and so of the elements
            for key, value in (found[0] if found else {}).items():
                whole = value
                if _is_element_wise(value, _length(found[0])):
                    whole = torch.cat([theirs[key] for theirs in found]).view(p.shape)
                state.setdefault(i, {})[key] = whole
        return state

    def _all(self) -> Iterable[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])


def _length(state: dict[str, Any]) -> int:
    return max((value.numel() for value in state.values() if isinstance(value, Tensor)), default=0)


def _is_element_wise(value: Any, length: int) -> bool:
    """Return whether a value has one number per element, as moments have; a step count does not."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() == length


def wrap(model: nn.Module, bucket_size_mb: float = 25.0, send_thread: bool = True) -> FlatShards:
    """Return the model wrapped in FlatShards.

    bucket_size_mb: the size that closes a bucket, in 2²⁰ bytes. send_thread: as in `DataParallel`.
    """
    return FlatShards(model, bucket_size_mb, send_thread)


STRATEGY = ParallelStrategy(
    splits=frozenset({"batch", "gradients", "optimizer"}),
    overlaps=True,
    wrap=wrap,
    finish_gradients=finish_gradients,
    make_optimizer=FlatShardedOptimizer,
    sent_bytes=averaging_bytes,
    options={"bucket_size_mb": "size", "send_thread": "flag"},
)
