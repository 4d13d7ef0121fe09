"""FLOPs of one call of FlexAttention, from its mask function, its score function and its blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cs_systems.instrument.attention_calls import Counted
from cs_systems.instrument.score_masks import MOST_ELEMENTS, Shown, shown_in, without_values

FLEX = ("flex_attention", "flex_attention_backward")
_SCORES = {"flex_attention": 3, "flex_attention_backward": 7}  # index of the score function among the arguments
_BUFFERS = -2  # index of further tensors for the score function
_PARTIAL, _WHOLE, _SIZES, _MASK = 2, 4, slice(-3, -1), -1  # block counts, block sizes, mask function: see as_tuple


def flex_flops(name: str, args: tuple[Any, ...]) -> Counted:
    """Return the FLOPs of a call of an operator in FLEX: model FLOPs of visible scores, executed ones of blocks."""
    query, key, value = args[:3]
    mask = next(one for one in args if isinstance(one, tuple) and one and callable(one[_MASK]))
    cells, width, d_value = query.shape[:-1].numel() * key.shape[-2], query.shape[-1], value.shape[-1]
    shown = _shown(mask, args[_SCORES[name]], args[_BUFFERS], query, key)
    twice = shown.of(2 * cells)
    computed = max(_computed(mask, query, cells), -(-twice // 2))
    if name == "flex_attention":
        return Counted(twice * (width + d_value), 2 * computed * (width + d_value), shown.known)
    return Counted(2 * twice * (width + d_value), 2 * computed * (3 * width + 2 * d_value), shown.known)


def _shown(mask: tuple[Any, ...], score: Any, buffers: tuple[Any, ...], query: Tensor, key: Tensor) -> Shown:
    batch, heads = mask[_PARTIAL].shape[:2]  # 1 if the mask is the same for all
    if without_values(query) or without_values(mask[_PARTIAL]):
        return Shown(1, 1, known=False)
    sizes = (batch, heads, query.shape[-2], key.shape[-2])
    indices = [torch.arange(size, device=query.device) for size in sizes]
    seen = mask[_MASK](*(index.view([-1] + [1] * (3 - dim)) for dim, index in enumerate(indices)))
    if _is_identity(score):
        return shown_in(seen.expand(sizes))
    sizes = (*query.shape[:-1], key.shape[-2])
    if math.prod(sizes) > MOST_ELEMENTS:
        return Shown(1, 1, known=False)
    return shown_in(_scores(score, buffers, torch.zeros(sizes, device=query.device)).masked_fill(~seen, -torch.inf))


def _is_identity(score: Any) -> bool:
    from torch.nn.attention.flex_attention import _identity

    if not isinstance(score, torch.fx.GraphModule):
        return bool(score is _identity)
    first, *_, last = score.graph.nodes
    return last.args[0] in (first, (first,), [first])


def _scores(score: Any, buffers: tuple[Any, ...], scores: Tensor) -> Tensor:
    """Return the scores after applying the score function, which takes one score and its indices."""
    for dims in ((3,), (2,), (1,), (0,)):
        places = [0 if dim in dims else None for dim in range(4)]
        score = torch.vmap(score, in_dims=(0, *places, *(None for _ in buffers)))
    changed = score(scores, *(torch.arange(size, device=scores.device) for size in scores.shape), *buffers)
    found: Tensor = changed[0] if isinstance(changed, tuple) else changed
    return found


def _computed(mask: tuple[Any, ...], query: Tensor, cells: int) -> int:
    """Return the number of scores in all blocks that are not fully masked, over all heads."""
    if without_values(mask[_PARTIAL]):
        return cells
    blocks = sum(int(mask[kind].sum()) for kind in (_PARTIAL, _WHOLE) if mask[kind] is not None)
    rows, columns = mask[_SIZES]
    matrices = query.shape[:-2].numel() // mask[_PARTIAL].shape[:2].numel()
    computed: int = matrices * blocks * rows * columns
    return min(computed, cells)
