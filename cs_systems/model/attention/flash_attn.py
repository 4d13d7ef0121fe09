"""Newest installed generation of the flash-attn package: FlashAttention-4, -3 or -2. `describe` names it.

CUDA only, float16 and bfloat16, d_head a multiple of 8 (of 32 for FlashAttention-4's backward on Hopper); grouped
heads. Causal from the lower right when seq_q ≠ seq_k.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.model.attention._mask import has_two_readings
from cs_systems.model.attention._refusals import no_cuda, wrong_dtype

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Generation:
    """Generation of flash-attn: the location of its `flash_attn_func` and the hardware it supports."""

    name: str
    module: str
    distribution: str
    least_capability: tuple[int, int]


_GENERATIONS = (
    Generation("FlashAttention-4", "flash_attn.cute", "flash-attn-4", (9, 0)),
    Generation("FlashAttention-3", "flash_attn_interface", "flash-attn-3", (9, 0)),
    Generation("FlashAttention-2", "flash_attn", "flash-attn", (8, 0)),
)


@cache
def _installed() -> tuple[Generation, Callable[..., Any]] | None:
    """Return the newest generation with an importable function.

    An importable package is not enough: flash-attn-4 alone leaves an empty package `flash_attn`.
    """
    for generation in _GENERATIONS:
        try:
            return generation, importlib.import_module(generation.module).flash_attn_func
        except (ImportError, AttributeError, OSError, RuntimeError):  # absent, empty, or built for another torch
            continue
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
) -> Tensor:
    """Compute attention with the flash-attn package.

    q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head).
    """
    if (found := _installed()) is None:
        raise ImportError(_missing())
    _, flash_attn_func = found
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # the package's layout is (batch, seq, heads, d_head)
    result = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    out: Tensor = result[0] if isinstance(result, tuple) else result  # some generations return the log-sum-exp too
    return out.transpose(1, 2)


@cache
def _missing() -> str:
    """Return the reason why no generation can be imported, with the remedy."""
    instead = "or use sdpa_flash, the FlashAttention-2 of torch"
    for generation in _GENERATIONS:
        try:
            version(generation.distribution)
            importlib.import_module(generation.module)
        except PackageNotFoundError:
            continue
        except (ImportError, OSError, RuntimeError) as error:  # e.g. built for another torch
            first, *_ = str(error).splitlines() or [""]
            install = (
                f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {generation.distribution}"
            )
            return f"the installed {generation.distribution} cannot be imported ({first}); run {install}, {instead}"
    return f"flash-attn is not installed; run pip install --no-build-isolation 'cs-systems[flash-attn]', {instead}"


def _unavailable(call: AttentionCall) -> str | None:
    if call.device != "cuda":
        return "a CUDA device is required; use sdpa_flash or flash_torch on the CPU"
    if reason := no_cuda() or wrong_dtype(call, DTYPES):
        return reason
    if (found := _installed()) is None:
        return _missing()
    generation, _ = found
    capability = torch.cuda.get_device_capability()
    if capability < generation.least_capability:
        instead = "sdpa_flash" if capability >= (8, 0) else "sdpa_efficient"
        return f"{generation.name} does not run on compute capability {'.'.join(map(str, capability))}; use {instead}"
    largest = 128 if generation.distribution == "flash-attn-4" and capability >= (10, 0) else 256
    if call.d_head % 8 or call.d_head > largest:
        return f"{generation.name} supports d_head 8, 16, … {largest}, got {call.d_head}; use sdpa_math or naive"
    if call.needs_backward and generation.distribution == "flash-attn-4" and capability[0] == 9 and call.d_head % 32:
        # With 4.0.0b36 on an H200, dq has a relative error of 0.2 to 1.2 at d_head 16 and 80: tiles round to 16, the
        # buffer to 32 (github.com/Dao-AILab/flash-attention/pull/2896).
        return f"{generation.name} computes a wrong gradient of q on Hopper at d_head {call.d_head}; use sdpa_flash"
    if has_two_readings(call) and call.align == "upper_left":
        return "only lower_right is supported if seq_q ≠ seq_k; use align=lower_right, or sdpa_efficient"
    return None


def _describe() -> str | None:
    if (found := _installed()) is None:
        return None
    generation, _ = found
    try:
        return f"{generation.distribution} {version(generation.distribution)} ({generation.name})"
    except PackageNotFoundError:  # importable but not installed
        return f"{generation.distribution}, version unknown ({generation.name})"


# 128 × 128 is the forward tile for d_head 64 in every generation; the others vary with the head size.
BACKEND = AttentionBackend(
    attention,
    unavailable=_unavailable,
    tolerance={dtype: TOLERANCE[dtype] for dtype in DTYPES},
    algorithm=lambda call: AttentionAlgorithm(128, 128, backward_matmuls=5, dq_accumulator_bytes=4),
    keeps={"dq_accumulator_bytes": 4},
    describe=_describe,
)
