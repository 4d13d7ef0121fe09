"""Activation checkpointing, applied to a model from outside.

A checkpoint keeps the input of some blocks and recomputes the rest when backward reaches them: less memory for more
FLOPs (Chen et al. 2016). The syntax of a plan is that of `checkpoint_plan`. The recomputation is torch's
(`torch.utils.checkpoint`, non-reentrant): the same operations on the same inputs, so gradients are bitwise the same
wherever the kernels are deterministic. It stops as soon as it has the tensors that backward asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs_systems.core.checkpoint_plan import ONE_OPERATOR, Segment, items, segments

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# A linear layer without bias is one `mm`, in fp8 one `_scaled_mm`. Attention's products are `bmm`, which is not
# kept, because the scores are large.
_KEPT = {"attention": _ATTENTION, "matmul": ("mm", "_scaled_mm")}


def unavailable(written: str, attention: str) -> str | None:
    """Return the reason that this checkpoint plan is impossible with this backend, with the remedy, or None."""
    if written == "selective:attention" and attention not in ONE_OPERATOR:
        return (
            f"checkpoint selective:attention keeps the output of one attention operator, which {attention} is not; "
            f"use --attention {ONE_OPERATOR[0]}, or --checkpoint selective:matmul"
        )
    return None


def apply_checkpointing(model: nn.Module, written: str) -> None:
    """Run the blocks of `model.layers` under the checkpoints of the plan `written`; parameters keep their names.

    Raises ValueError for a plan that `checkpoint_plan.segments` cannot read.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    if plan := segments(written, len(layers)):
        model.layers = _CheckpointedLayers(layers, plan)


class _CheckpointedLayers(nn.ModuleList):
    """List of the same blocks under the same names; iteration yields the blocks and checkpoints to call in turn."""

    def __init__(self, layers: nn.ModuleList, plan: tuple[Segment, ...]) -> None:
        super().__init__(list(nn.ModuleList.__iter__(layers)))
        self._plan = plan

    def __iter__(self) -> Iterator[Any]:
        blocks = list(super().__iter__())
        return iter([_call(blocks, item) for item in items(0, len(blocks), self._plan)])


def _call(blocks: list[nn.Module], item: int | Segment) -> Callable[[Tensor], Tensor]:
    if isinstance(item, int):
        return blocks[item]
    parts = [_call(blocks, inner) for inner in items(item.first, item.stop, item.inner)]
    return partial(_checkpointed, partial(_in_turn, parts), item.keeps)


def _in_turn(parts: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def _checkpointed(run: Callable[[Tensor], Tensor], keeps: str | None, x: Tensor) -> Tensor:
    """Call `run` under one checkpoint: (B, S, D) → (B, S, D)."""
    selective: dict[str, Any] = {}
    if keeps:  # torch.compile rejects a context_fn that does nothing
        selective["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, keeps))
    out: Tensor = checkpoint(run, x, use_reentrant=False, **selective)
    return out


def _policy(keeps: str, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _operators(keeps) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _operators(keeps: str) -> frozenset[Any]:
    """Return the operators of the installed torch whose outputs a selective checkpoint keeps."""
    packets = (getattr(torch.ops.aten, name, None) for name in _KEPT[keeps])
    return frozenset(packet.default for packet in packets if packet is not None)
