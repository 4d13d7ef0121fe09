"""PyTorch's FSDP2, `fully_shard` of the same units, for comparison with `fsdp`.

Each rank sends 3 Ψ (N−1)/N bytes less one gathering of the root unit, which it keeps from forward to backward; without
`reshard_after_forward` 2 Ψ (N−1)/N, with all weights whole on every rank from forward to backward. It shards each
parameter by its first dimension, including norms, which then compute in the compute dtype.

By default a parameter must have a gradient on all ranks or on none. With `find_unused_parameters` the parameters of the
root unit take part in every step, with zeros if a rank does not use them. A parameter that no rank used keeps the
gradient of an earlier micro-batch, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from cs_systems.config import ConfigError
from cs_systems.formulas.communication import fully_sharded_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import dtype_of, gather_shards, maximum
from cs_systems.model.parallel._data_parallel import broadcast_from_rank_0, check_same_parameters
from cs_systems.model.parallel.fsdp.units import units_in


class FSDP2(nn.Module):
    """Wrapper of `module` that shards it in place."""

    def __init__(self, module: nn.Module, find_unused_parameters: bool) -> None:
        super().__init__()
        self.module = module
        in_lists = {p for child in units_in(module) for p in child.parameters()}
        self._optional = [
            (owner, name)
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False)
            if find_unused_parameters and p.requires_grad and p not in in_lists
        ]
        self._called: set[nn.Module] = set()
        self._finished = True  # whether no forward has run since the gradients were finished
        self._kept: set[Tensor] = set()  # optional parameters with a gradient from before this forward
        for owner in {owner for owner, _ in self._optional}:
            owner.register_forward_pre_hook(lambda module, inputs: self._called.add(module))
        module.register_state_dict_post_hook(_gather_into)
        module.register_load_state_dict_pre_hook(_take_parts)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = self.module(*inputs, **options)
        if not self._optional:
            return output
        zeros = [0 * getattr(owner, name).view(-1)[0] for owner, name in self._optional]

        def with_zeros(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            for zero in zeros:
                x = x + zero.to(x.dtype)
            return x

        return pytree.tree_map(with_zeros, output)

    def keep_earlier(self) -> None:
        """Record the gradients left by finished micro-batches. Called while the parameters are sharded."""
        if self._finished:
            self._kept = {p for owner, name in self._optional if (p := getattr(owner, name)).grad is not None}
            self._finished = False

    def forget_unused(self) -> None:
        """Remove the gradients of parameters in modules that no rank called."""
        if self._optional:
            device = next(self.parameters()).device
            called = torch.tensor([owner in self._called for owner, _ in self._optional], device=device).byte()
            maximum(called).wait()
            params = [getattr(owner, name) for owner, name in self._optional]
            used = {p for p, once in zip(params, called.tolist(), strict=True) if once}
            for p in params:
                p.grad = p.grad if p in used | self._kept else None
        self._called.clear()
        self._finished = True


def finish_gradients(model: nn.Module) -> None:
    assert isinstance(model, FSDP2)
    model.forget_unused()


def wrap(
    model: nn.Module,
    compute_dtype: str | torch.dtype | None = None,
    reshard_after_forward: bool = True,
    find_unused_parameters: bool = False,
) -> FSDP2:
    """Return the model sharded by FSDP2.

    compute_dtype: as in `fsdp`. reshard_after_forward: torch's option, applied to the modules in lists.
    """
    if scalar := next((name for name, p in model.named_parameters() if not p.ndim), None):
        raise ConfigError(f"torch_fsdp2 cannot shard parameter {scalar}, which has no dimensions; use fsdp")
    check_same_parameters(model)
    broadcast_from_rank_0(model)
    device = next(model.parameters()).device
    dtype = dtype_of("compute_dtype", compute_dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
    }
    wrapped = FSDP2(model, find_unused_parameters)
    for child in units_in(model):
        if any(True for _ in child.parameters()):
            fully_shard(child, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(wrapped, **options)
    # This hook must run before torch's own, which makes the parameters whole.
    wrapped.register_forward_pre_hook(lambda module, inputs: module.keep_earlier(), prepend=True)
    return wrapped


def make_optimizer(
    params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return `cls(params, **options)` that saves and loads a state_dict as in one process.

    All ranks must call these methods.
    """
    optimizer = cls(params, **options)
    optimizer.register_state_dict_post_hook(_gather_state)
    optimizer.register_load_state_dict_pre_hook(_take_parts_of_state)
    return optimizer


def _gather_into(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, value in state_dict.items():
        state_dict[name] = _whole(value)


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module.named_parameters(remove_duplicate=False):
        if prefix + name in state_dict:
            state_dict[prefix + name] = _part_of(p, state_dict[prefix + name])


def _gather_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {i: {name: _whole(value) for name, value in of.items()} for i, of in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _take_parts_of_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if i in state:
            state[i] = {name: _part_of(p, value) for name, value in state[i].items()}
    return {**state_dict, "state": state}


@torch.no_grad()
def _whole(value: Any) -> Any:
    """Return the parts of all ranks as one tensor in host memory; a value that is not sharded is returned unchanged.

    `full_tensor()` would send an `allgather_coalesced`. After a collective, gloo's threads (two per group, up to torch
    2.13) write its name to one std::string without a lock. Names of up to 15 characters are stored inside the string
    object; this one, of 19, is on the heap, so that two threads may free it at once and the process crashes.
    """
    if not isinstance(value, DTensor):
        return value
    assert value.placements == (Shard(0),)
    part, ranks = value.to_local(), value.device_mesh.size()
    padded = part.new_zeros(-(-len(value) // ranks), *value.shape[1:])  # the last ranks may have fewer rows
    padded[: len(part)] = part
    whole = padded.new_empty(ranks * len(padded), *value.shape[1:])
    gather_shards(whole, padded, value.device_mesh.get_group()).wait()
    return whole[: len(value)].to("cpu", copy=True)


def _part_of(p: Tensor, whole: Any) -> Any:
    """Return this rank's part of a value with one number per element of `p`; other values unchanged."""
    if not isinstance(p, DTensor) or not isinstance(whole, Tensor) or not whole.ndim or whole.shape != p.shape:
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements)


STRATEGY = ParallelStrategy(
    splits=frozenset({"batch", "optimizer", "gradients", "parameters"}),
    overlaps=True,
    counted=False,
    wrap=wrap,
    finish_gradients=finish_gradients,
    make_optimizer=make_optimizer,
    sent_bytes=fully_sharded_bytes,
    options={
        "compute_dtype": ("bf16", "fp16"),
        "reshard_after_forward": "flag",
        "find_unused_parameters": "flag",
    },
    one_dtype=True,
    for_unused={"find_unused_parameters": True},
)
