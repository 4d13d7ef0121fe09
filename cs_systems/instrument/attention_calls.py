"""FLOPs of one call of a fused attention, from the operator and its arguments.

The arguments are found by their names in the operator's schema, so that a new release of PyTorch may reorder them.
Model FLOPs count the visible scores only, by `is_causal`, a window, the lengths of packed sequences, or the content of
a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.core.shapes import AttentionCall, causal_offset
from cs_systems.formulas.cost import AttentionAlgorithm, tiled_scores, twice_credited_scores
from cs_systems.instrument.score_masks import Shown, shown_in, without_values

Algorithm = Callable[[str, AttentionCall], AttentionAlgorithm]
# Assumed for a kernel with unknown tiles: with tiles of one score it computes no hidden scores. Backward recomputes
# the scores.
UNKNOWN_TILES = AttentionAlgorithm(1, 1, backward_matmuls=5)


class Counted(NamedTuple):
    """FLOPs of one operator; `known` is False if a mask may hide some of the counted scores."""

    model: int
    hardware: int
    known: bool = True


class _Operator(NamedTuple):
    backend: str | None = None  # backend of this package with the same kernel
    align: str = "upper_left"
    by_position: bool = False  # tensors are (batch, length, heads, d_head), or packed (length, heads, d_head)


# Operator without `_forward` and `_backward` → properties known from its name.
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": _Operator("sdpa_flash", "lower_right"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Operator("sdpa_flash"),
    "aten::_scaled_dot_product_efficient_attention": _Operator("sdpa_efficient"),
    "aten::_scaled_dot_product_cudnn_attention": _Operator("sdpa_cudnn"),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Operator(),
    "aten::_flash_attention": _Operator("sdpa_flash", "lower_right", by_position=True),
    "aten::_efficient_attention": _Operator("sdpa_efficient", by_position=True),
    "aten::_cudnn_attention": _Operator("sdpa_cudnn"),
    "torch_attn::_varlen_attn": _Operator("sdpa_flash", "lower_right", by_position=True),
    "torch_attn::_varlen_attn_out": _Operator("sdpa_flash", "lower_right", by_position=True),
    "flash_attn::_flash_attn": _Operator("flash_attn", "lower_right", by_position=True),
    "flash_attn::_flash_attn_varlen": _Operator("flash_attn", "lower_right", by_position=True),
    "flash_attn_3::_flash_attn": _Operator("flash_attn", "lower_right", by_position=True),
    **{f"cs_systems::{name}": _Operator(name) for name in ("flash_torch", "flash_triton", "flash_cuda")},
}
_OTHER_NAMES = {
    "q": "query", "k": "key", "v": "value", "causal": "is_causal", "attn_mask": "mask", "attn_bias": "mask",
    "bias": "mask", "cum_seq_q": "starts_q", "cu_seq_q": "starts_q", "cu_seqlens_q": "starts_q",
    "cum_seq_k": "starts_k", "cu_seq_k": "starts_k", "cu_seqlens_k": "starts_k",
    "max_q": "longest_q", "max_seqlen_q": "longest_q", "max_k": "longest_k", "max_seqlen_k": "longest_k",
}  # fmt: skip
_FAR = 1 << 40  # a window without an end to the right
_is_counting = False


@contextmanager
def counting() -> Iterator[None]:
    """Run this package's own attention kernels as operators, so that a dispatch mode sees them."""
    global _is_counting
    before, _is_counting = _is_counting, True
    try:
        yield
    finally:
        _is_counting = before


def as_operators() -> bool:
    """Return whether this package's attention kernels must run as operators, for tracing or for counting FLOPs."""
    return torch.compiler.is_compiling() or _is_counting


def is_attention(func: Any) -> bool:
    return _stem(func) in _OPERATORS


def _stem(func: Any) -> str:
    name: str = func._schema.name
    return name.removesuffix("_backward").removesuffix("_forward")


def attention_flops(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], algorithm: Algorithm | None
) -> Counted:
    """Return the FLOPs of a call of an operator that `is_attention`.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its other arguments.
        algorithm: Returns the tiles of a backend of this package, given its name and the call; None if tiles are
            unknown.
    """
    operator, given = _OPERATORS[_stem(func)], _by_name(func, args, kwargs)
    query, value = given["query"], given["value"]
    d_head, d_value = query.shape[-1], value.shape[-1]
    heads = query.shape[-2] if operator.by_position else query.shape[-3] if query.dim() > 2 else 1
    align = operator.align if given.get("custom_mask_type") != 2 else "lower_right"
    right, window = _visible(given)
    twice = computed = 0
    known, tiles = True, UNKNOWN_TILES
    for count, queries, keys in _sequences(given, operator, heads):
        offset = None if right is None else given.get("offset", causal_offset(queries, keys, align)) + right
        call = AttentionCall(
            query.device.type, str(query.dtype).removeprefix("torch."), d_head, queries, keys, heads,
            heads, causal=offset is not None, align=align, window=window,
        )  # fmt: skip
        if algorithm is not None and operator.backend is not None:
            tiles = algorithm(operator.backend, call)
        credited = twice_credited_scores(queries, keys, offset, window)
        computed += count * tiled_scores(queries, keys, offset, window, tiles)
        mask = given.get("mask")
        if mask is not None:
            shown = _shown(mask, queries, keys, offset)
            known = known and shown.known
            credited = min(credited, shown.of(2 * queries * keys))
        elif without_values(query) and given.get("starts_q") is not None:
            known = False
        twice += count * credited
    computed = max(computed, -(-twice // 2))
    padding = (tiles.d_head or d_head) - d_head
    if "backward" in func._schema.name:
        executed = 2 * computed * ((tiles.backward_matmuls - 2) * (d_head + padding) + 2 * (d_value + padding))
        return Counted(2 * twice * (d_head + d_value), executed, known)
    return Counted(twice * (d_head + d_value), 2 * computed * (d_head + d_value + 2 * padding), known)


def _by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name in the schema; arguments with the same meaning get the same name."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def _visible(given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return (number of keys after its own position that a query sees, number of keys in its window); None for all.

    The first is 0 in a causal call.
    """
    is_causal = bool(given.get("is_causal") or given.get("custom_mask_type"))
    sides = given.get("window_size") or given.get("window") or (-1, -1)
    if isinstance(sides, int):  # window size in keys
        return (0, sides) if is_causal else (None, None)
    left = _not_negative(given.get("window_size_left", sides[0]))
    right = 0 if is_causal else _not_negative(given.get("window_size_right", sides[1]))
    if left is None:
        return right, None
    right = _FAR if right is None else right
    return right, left + right + 1


def _not_negative(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _sequences(given: Mapping[str, Any], operator: _Operator, heads: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number of score matrices, queries, keys) for each sequence length."""
    query, key = given["query"], given["key"]
    if given.get("starts_q") is not None:
        starts = given["starts_q"], given.get("starts_k")
        longest = given["longest_q"], given["longest_k"]
        lengths = [
            [most] * (len(each) - 1) if without_values(each) else each.diff().tolist()
            for each, most in zip((starts[0], starts[0] if starts[1] is None else starts[1]), longest, strict=True)
        ]
        yield from ((heads, queries, keys) for queries, keys in zip(*lengths, strict=True))
        return
    length = -3 if operator.by_position else -2
    matrices = heads
    for size in query.shape[:-3]:
        matrices *= size
    yield matrices, query.shape[length], key.shape[length]


def _shown(mask: Tensor, queries: int, keys: int, offset: int | None) -> Shown:
    if without_values(mask):
        return Shown(1, 1, known=False)
    mask = mask[..., :queries, :keys]
    mask = mask.expand(*mask.shape[:-2], queries, keys)
    if offset is not None:  # the kernel applies the mask and the causal limit
        rows = torch.arange(queries, device=mask.device)[:, None]
        hidden = torch.arange(keys, device=mask.device) > rows + offset
        mask = mask.masked_fill(hidden, False if mask.dtype is torch.bool else -torch.inf)
    return shown_in(mask)
