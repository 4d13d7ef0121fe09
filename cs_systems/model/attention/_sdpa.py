"""Base of the four `sdpa_*` backends: torch's scaled_dot_product_attention restricted to one kernel.

`sdpa_kernel` switches all other kernels off, so torch raises if the named one cannot run, without a fallback. On CUDA
`unavailable` queries torch's own selector with the shapes of the call and returns torch's message, because its rules
change from release to release.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.model.attention._mask import causal_offset, has_blind_queries, has_two_readings, hidden_keys
from cs_systems.model.attention._refusals import no_cuda, wrong_dtype

_SELECTORS = {
    SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: cuda.can_use_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
}
HALF = ("float16", "bfloat16")
_ON_CPU = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
_TAKES_LOWER_RIGHT_ON_CUDA = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def sdpa_backend(
    kernel: SDPBackend,
    algorithm: Callable[[AttentionCall], AttentionAlgorithm],
    dtypes: tuple[str, ...],
    cuda_dtypes: tuple[str, ...] | None = None,
    **declared: Any,
) -> AttentionBackend:
    """Return the backend that forces `kernel`, for the dtypes that it supports.

    cuda_dtypes: the dtypes on CUDA, if fewer are supported there. declared: the literals that the backend's file
    declares.
    """
    return AttentionBackend(
        partial(_attention, kernel=kernel),
        unavailable=partial(_unavailable, kernel=kernel, dtypes={"cpu": dtypes, "cuda": cuda_dtypes or dtypes}),
        tolerance={dtype: TOLERANCE[dtype] for dtype in dtypes},
        algorithm=algorithm,
        describe=lambda: f"torch {torch.__version__} scaled_dot_product_attention, {kernel.name} only",
        **declared,
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: SDPBackend,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
) -> Tensor:
    seq_q, seq_k = q.shape[-2], k.shape[-2]
    upper_left = causal and causal_offset(seq_q, seq_k, align) == 0
    mask = None
    if causal and not upper_left:
        if kernel is SDPBackend.MATH or q.device.type == "cpu":
            mask = ~hidden_keys(seq_q, seq_k, align, q.device)
        else:  # the fused kernels recognise this mask by its class and skip the hidden tiles
            from torch.nn.attention.bias import causal_lower_right  # this import loads torch.compile, which takes 2.5 s

            mask = causal_lower_right(seq_q, seq_k)
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=upper_left, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _unavailable(call: AttentionCall, *, kernel: SDPBackend, dtypes: Mapping[str, tuple[str, ...]]) -> str | None:
    name = kernel.name
    if call.device == "cpu" and kernel not in _ON_CPU:
        return f"torch has no {name} kernel on the CPU; use sdpa_flash or sdpa_math"
    if reason := wrong_dtype(call, dtypes[call.device]):
        return reason
    if call.device == "cpu":
        return None
    if reason := no_cuda():
        return reason
    if kernel is SDPBackend.MATH:
        return None
    if has_blind_queries(call):
        return (
            f"torch's {name} gives NaN where a query sees no key (lower_right, seq_q > seq_k); use naive or sdpa_math"
        )
    if call.align == "lower_right" and has_two_readings(call):
        if kernel not in _TAKES_LOWER_RIGHT_ON_CUDA:
            return f"torch's {name} supports only the causal mask upper_left; use align=upper_left, or sdpa_flash"
        if kernel is SDPBackend.EFFICIENT_ATTENTION and call.heads_q != call.heads_kv:
            return f"torch's {name} supports lower_right only with as many key heads as query heads; use sdpa_flash"
    return _rejected_by_selector(kernel, call)


@lru_cache(maxsize=256)  # called before each cell, and torch gives some warnings only once
def _rejected_by_selector(kernel: SDPBackend, call: AttentionCall) -> str | None:
    """Return torch's reason to reject the call for this kernel on the current CUDA device, or None.

    The selector itself would write its reasons to stderr. A rejected call gives them as Python warnings and raises
    before allocating anything.
    """
    dtype = getattr(torch, call.dtype)
    row = torch.empty(call.d_head, dtype=dtype, device="cuda", requires_grad=call.needs_backward)
    query = row.expand(1, call.heads_q, call.seq_q, call.d_head)  # a view of one row, which takes no memory
    key = row.expand(1, call.heads_kv, call.seq_k, call.d_head)
    is_causal = call.causal and (call.align == "upper_left" or call.seq_q == call.seq_k)
    params = cuda.SDPAParams(query, key, key, None, 0.0, is_causal, call.heads_q != call.heads_kv)
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(kernel):
        warnings.simplefilter("always")
        if _SELECTORS[kernel](params):
            return None
        with suppress(RuntimeError):
            scaled_dot_product_attention(query, key, key, is_causal=is_causal, enable_gqa=call.heads_q != call.heads_kv)
    reasons = (str(w.message).split(" (Triggered internally")[0].strip() for w in caught)
    words = "; ".join(r for r in reasons if not r.endswith("because:") and "runtime disabled" not in r)
    return f"torch's {kernel.name} rejects the call: {words or 'no reason given'}; use naive or sdpa_math"
