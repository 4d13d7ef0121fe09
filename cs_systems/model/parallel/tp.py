"""Tensor parallelism of attention and feed-forward (Shoeybi et al. 2019, Megatron-LM, section 3).

Every rank takes the same rows. It has a share of the heads and of d_ff of each block: q, k, v, w1 and w3 are divided by
their outputs, output_proj and w2 by their inputs, so that between the two no rank needs another's features. The input
is the same on all ranks, and its gradient is summed over them in backward (the paper's f). The output is summed in
forward (g): 4 all-reduces per block and step, 8 b·s·d (N−1)/N elements in the dtype of compute, all of them exposed.
Under autocast the input is cast before it is shared, so that its gradient is also sent in the low precision.

Embedding, norms and head are whole on every rank, so any loss can use the logits, tied embeddings stay tied, and only
b·s·d is sent. The price is that their memory, and the head's FLOPs, are not divided. Their gradients are the same on
all ranks, because their inputs are, so they are not averaged.

`state_dict()` of the model and of the optimizer is the same as in one process, on every rank; all ranks must call it.
Supports element-wise optimizers (SGD, Adam, AdamW; not LBFGS, Muon, Adafactor).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from cs_systems.config import ConfigError
from cs_systems.formulas.communication import tensor_parallel_bytes
from cs_systems.formulas.rank_layout import check_division, check_tp_degree
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import gather_shards, total
from cs_systems.model.parallel._data_parallel import broadcast_from_rank_0, check_same_parameters, refuse_assigning
from cs_systems.model.parallel._mesh import tensor_group
from cs_systems.model.transformer import Linear, SelfAttention, SwiGLU

BY_OUTPUT, BY_INPUT = 0, 1  # dimensions of a weight (out, in)


@dataclass(frozen=True)
class Cut:
    """Division of a tensor along `dim`, over the ranks of `group`, into parts of `shape`."""

    dim: int
    shape: torch.Size
    group: ProcessGroup | None

    def part(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of a tensor."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return whole.chunk(ranks, self.dim)[rank].clone(memory_format=torch.contiguous_format)

    def part_of(self, value: Any) -> Any:
        """Return this rank's part of a value with one number per element of the whole; other values unchanged."""
        sizes = list(self.shape)
        sizes[self.dim] *= dist.get_world_size(self.group)
        return self.part(value) if isinstance(value, Tensor) and list(value.shape) == sizes else value

    def whole_of(self, value: Any, device: torch.device) -> Any:
        """Return the whole tensor, gathered from all ranks, if `value` is a part; other values unchanged.

        device: a device from which the ranks can send.
        """
        if not isinstance(value, Tensor) or value.shape != self.shape:
            return value
        shard = value.detach().to(device).movedim(self.dim, 0).contiguous()
        flat = shard.new_empty(shard.shape[0] * dist.get_world_size(self.group), *shard.shape[1:])
        gather_shards(flat, shard, self.group).wait()
        return flat.movedim(0, self.dim).contiguous().to(value.device)


# parameter → its Cut, and the divided models, for code that has another wrapper or only the parameters
_cuts: Any = WeakTensorKeyDictionary()
_divided: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Share(torch.autograd.Function):
    """Identity on an input that all ranks share; its backward sums the ranks' gradients (the paper's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group, ctx.dtype = group, x.dtype
        autocasts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
        return x.to(torch.get_autocast_dtype(x.device.type)) if autocasts else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)  # another node may share the incoming gradient
        total(grad, ctx.group).wait()
        return grad.to(ctx.dtype), None


class _Sum(torch.autograd.Function):
    """Sum over the ranks, in place; its backward passes the gradient on unchanged (the paper's g)."""

    @staticmethod
    def forward(ctx: Any, partial_sum: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.mark_dirty(partial_sum)
        total(partial_sum, group).wait()
        return partial_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _share_input(module: nn.Module, inputs: tuple[Any, ...], *, group: ProcessGroup | None) -> tuple[Any, ...]:
    return (_Share.apply(inputs[0], group), *inputs[1:])


def _sum_output(module: nn.Module, inputs: tuple[Any, ...], output: Tensor, *, group: ProcessGroup | None) -> Tensor:
    summed: Tensor = _Sum.apply(output, group)
    return summed


def wrap(model: nn.Module, tp_degree: int | None = None) -> nn.Module:
    """Divide the blocks of the model and return it; every rank must call this with the same model.

    tp_degree: the number of neighbouring ranks that divide the blocks; None: all.
    Raises ConfigError for a model without blocks of BasicTransformerLM, or with heads or d_ff that tp_degree does not
    divide.
    """
    check_same_parameters(model)
    degree = check_tp_degree(dist.get_world_size(), tp_degree)
    blocks = _divisible(model)
    heads = math.gcd(*(block.num_heads for block in blocks if isinstance(block, SelfAttention)))
    d_ff = math.gcd(*(block.w1.weight.shape[0] for block in blocks if isinstance(block, SwiGLU)))
    _check_alone(model, blocks)
    check_division(heads, d_ff, dist.get_world_size(), tp_degree)
    broadcast_from_rank_0(model)
    refuse_assigning(model)
    group = tensor_group(degree)
    for block in blocks:
        _divide(block, group, degree)
    _divided.add(model)
    model.register_load_state_dict_pre_hook(_take_part)
    return model


def _divisible(model: nn.Module) -> list[SelfAttention | SwiGLU]:
    found = [module for module in model.modules() if isinstance(module, SelfAttention | SwiGLU)]
    if not found:
        raise ConfigError(
            f"tp requires the attention or feed-forward blocks of BasicTransformerLM, and {type(model).__name__} has "
            "none; use fsdp or ddp_bucketed"
        )
    return found


def _linears(block: SelfAttention | SwiGLU) -> dict[Linear, int]:
    """Return each linear layer and the dimension along which its weight is divided."""
    if isinstance(block, SelfAttention):
        return dict.fromkeys((block.q_proj, block.k_proj, block.v_proj), BY_OUTPUT) | {block.output_proj: BY_INPUT}
    return {block.w1: BY_OUTPUT, block.w3: BY_OUTPUT, block.w2: BY_INPUT}


def _check_alone(model: nn.Module, blocks: list[SelfAttention | SwiGLU]) -> None:
    """Raise ConfigError unless each weight to divide is whole, without bias, and tied only to weights divided alike."""
    dims: dict[nn.Module, int] = {linear: dim for block in blocks for linear, dim in _linears(block).items()}
    taken: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        for kind, p in module.named_parameters(prefix=name, recurse=False):
            dim = dims.get(module)
            first, dim_of_first = taken.setdefault(p, (kind, dim))
            if dim_of_first != dim:
                raise ConfigError(
                    f"tp cannot divide the weight that {first} and {kind} share, because the two layers need different "
                    "parts of it; give each layer its own weight, or use fsdp"
                )
            if dim is not None and (p.ndim != 2 or p in _cuts):
                why = (
                    "it is divided already; wrap the model once"
                    if p in _cuts
                    else "tp divides only linear layers without a bias; remove the bias, or use fsdp"
                )
                raise ConfigError(f"tp cannot divide {kind}, because {why}")


def _divide(block: SelfAttention | SwiGLU, group: ProcessGroup | None, degree: int) -> None:
    if isinstance(block, SelfAttention):
        block.num_heads //= degree
    for linear, dim in _linears(block).items():
        if (weight := linear.weight) not in _cuts:  # divide a tied weight only once
            shape = list(weight.shape)
            shape[dim] //= degree
            _cuts[weight] = cut = Cut(dim, torch.Size(shape), group)
            weight.data = cut.part(weight.data)
    block.register_forward_pre_hook(partial(_share_input, group=group))
    block.register_forward_hook(partial(_sum_output, group=group))


def save_whole(model: nn.Module) -> None:
    """Make the state_dict of the divided model gather its parts, after another wrapper's gathering."""
    for module in model.modules():
        if module in _divided:
            module.register_state_dict_post_hook(_gather)


def _gather(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, p in _divided_in(model, prefix):
        state[key] = _cuts[p].whole_of(state[key], p.device)


def _take_part(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, p in _divided_in(model, prefix):
        if key in state:
            state[key] = _cuts[p].part_of(state[key])


def _divided_in(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Return (key in a state_dict, parameter) of each divided parameter; a tied parameter has several keys."""
    return ((prefix + name, p) for name, p in model.named_parameters(remove_duplicate=False) if p in _cuts)


def make_optimizer(
    params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return `cls(params, **options)` that saves a whole state_dict, and loads its part of a whole one."""
    optimizer = cls(params, **options)
    optimizer.register_state_dict_post_hook(_gather_state)
    optimizer.register_load_state_dict_pre_hook(_take_part_of_state, prepend=True)
    return optimizer


def _gather_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    return _with_state(optimizer, saved, lambda cut, p, value: cut.whole_of(value, p.device))


def _take_part_of_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    return _with_state(optimizer, saved, lambda cut, p, value: cut.part_of(value))


def _with_state(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], change: Callable[[Cut, Tensor, Any], Any]
) -> dict[str, Any]:
    """Return `saved` with the state of divided parameters changed."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    params = (p for group in optimizer.param_groups for p in group["params"])
    state = dict(saved["state"])
    for number, p in zip(numbers, params, strict=False):  # load_state_dict itself raises for different groups
        if p in _cuts and number in state:
            state[number] = {key: change(_cuts[p], p, value) for key, value in state[number].items()}
    return {**saved, "state": state}


STRATEGY = ParallelStrategy(
    splits=frozenset({"features"}),
    wrap=wrap,
    after_wrap=save_whole,
    make_optimizer=make_optimizer,
    sent_bytes=tensor_parallel_bytes,
    options={"tp_degree": "count"},
    tp_degree=None,
)
