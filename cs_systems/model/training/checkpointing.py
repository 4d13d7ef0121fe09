"""Activation checkpointing, applied to a model from outside.

A checkpoint keeps the input of some blocks and recomputes the rest when backward reaches them: less memory for more
FLOPs (Chen et al. 2016). Plans have the syntax of `checkpoint_plan`. torch does the recomputation
(`torch.utils.checkpoint`, non-reentrant): the same operations on the same inputs, so gradients are bitwise equal if the
kernels are deterministic. It stops as soon as it has the tensors that backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs_systems.config import Mode, Precision, RunConfig
from cs_systems.core.checkpoint_plan import Segment, items, segments
from cs_systems.machine.device import resolve_or_cpu
from cs_systems.model.attention import AttentionBackend

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# A linear layer without bias is one `mm`, in fp8 one `_scaled_mm`. The products in attention are `bmm` and are not
# kept, because the scores are large.
_LINEAR = ("mm", "_scaled_mm")
_KEPT = {"attention": _ATTENTION, "matmul": _LINEAR, "products": _LINEAR + _ATTENTION}


def without_effect(config: RunConfig) -> str | None:
    """Return the reason why the cell's checkpoints would change nothing, with the remedy, or None."""
    if config.checkpoint == "none" or config.mode is not Mode.FORWARD or config.keep_graph:
        return None
    return (
        f"checkpoint {config.checkpoint} changes nothing in mode forward, which keeps no tensors for backward; "
        "use mode forward-backward, keep_graph, or checkpoint none"
    )


def unavailable(config: RunConfig, backend: AttentionBackend | None) -> str | None:
    """Return the reason why a cell of the built-in model cannot have its checkpoints, with the remedy, or None.

    backend: the backend of its attention; None for a user's own function.
    """
    one_operator = backend.one_operator if backend else None
    plan = segments(config.checkpoint, config.model.num_layers)
    keeps_attention = any(segment.keeps in ("attention", "products") for segment in plan)
    if keeps_attention and one_operator != "always" and (one_operator is None or config.compile == "none"):
        in_float32 = config.computes_in in (Precision.FP32, Precision.TF32)
        operator = "sdpa_efficient" if in_float32 and resolve_or_cpu(config.device).is_cuda else "sdpa_flash"
        remedy = f"use attention {operator}, or checkpoint selective:matmul"
        if one_operator:
            why, remedy = "computes in one operator only if compiled", f"use compile default, or {remedy}"
        else:
            why = "does not compute in one operator"
        return f"checkpoint {config.checkpoint} keeps attention's output, which {config.attention} {why}; {remedy}"
    return without_effect(config)


def apply_checkpointing(model: nn.Module, written: str) -> None:
    """Make the blocks of `model.layers` run under the checkpoints of the plan `written`; parameter names are kept.

    Raises ValueError for a plan that `checkpoint_plan.segments` cannot read.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    if plan := segments(written, len(layers)):
        model.layers = _CheckpointedLayers(layers, plan)


def checkpoint_forwards(blocks: Iterable[nn.Module], plan: Iterable[Segment]) -> None:
    """Make the forward of each block run under its checkpoint, inside the block's hooks.

    If the forward is compiled afterwards, the compiler sees the operators and follows a selective plan.
    """
    for block, segment in zip(blocks, plan, strict=True):
        block.forward = partial(_checkpointed_call, block.forward, segment.keeps)


def checkpoint_blocks(model: nn.Module, written: str) -> str | None:
    """Make the repeated blocks of any model run under the checkpoints of the plan `written`.

    The blocks are found by structure: children of one class in a ModuleList or Sequential. Only plans whose checkpoints
    are single blocks are possible, because the code between two blocks is unknown.

    Returns:
        The reason that this plan is impossible for this model, with the remedy, or None.
    """
    if written == "none":
        return None
    stacks = _stacks(model)
    if not stacks:
        return (
            f"checkpoint {written} requires repeated blocks, and {type(model).__name__} has no ModuleList or "
            "Sequential of several blocks of one class with layers inside them; use checkpoint none"
        )
    if len(stacks) > 1 and written.startswith("blocks:"):
        return (
            f"checkpoint {written} numbers the blocks of one stack, but the model has several: "
            f"{', '.join(stacks)}; use checkpoint every:1"
        )
    plans = {}
    for name, blocks in stacks.items():
        try:
            plans[name] = segments(written, len(blocks))
        except ValueError as error:
            return str(error)
    if any(segment.blocks > 1 for plan in plans.values() for segment in plan):
        return (
            f"checkpoint {written} joins several blocks, which works for the built-in model only; use checkpoint "
            "every:1"
        )
    for name, plan in plans.items():
        checkpoint_forwards((stacks[name][segment.first] for segment in plan), plan)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a recomputed block would append to the cache again
    return None


def _stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the stacks of repeated blocks by path: the outermost lists of at least two children of one class."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or outer == "" for outer in found):
            continue
        blocks = [*module.children()]
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if (
            is_list
            and len(blocks) > 1
            and len({type(b) for b in blocks}) == 1
            and any(True for _ in blocks[0].children())
        ):
            found[name] = blocks
    return found


def _checkpointed_call(run: Callable[..., Any], keeps: str | None, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, **_selective(keeps), **kwargs)


class _CheckpointedLayers(nn.ModuleList):
    """List of the same blocks under the same names; iteration yields the blocks and checkpoints to call."""

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
    out: Tensor = checkpoint(run, x, use_reentrant=False, **_selective(keeps))
    return out


def _selective(keeps: str | None) -> dict[str, Any]:
    if not keeps:
        return {}  # torch.compile rejects a context_fn that does nothing
    return {"context_fn": partial(create_selective_checkpoint_contexts, partial(_policy, keeps))}


def _policy(keeps: str, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    own_attention = operator.namespace == "cs_systems" and keeps != "matmul"
    kept = own_attention or operator in _operators(keeps)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _operators(keeps: str) -> frozenset[Any]:
    """Return the operators of the installed torch with outputs that a selective checkpoint keeps."""
    packets = (getattr(torch.ops.aten, name, None) for name in _KEPT[keeps])
    return frozenset(packet.default for packet in packets if packet is not None)
