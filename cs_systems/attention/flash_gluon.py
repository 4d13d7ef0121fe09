"""FlashAttention-3's way on Hopper, written in Gluon, the low level of Triton: TMA, wgmma, warp specialisation.

Takes fp16 and bf16; d_head a multiple of 8 up to 128 (computed as 64 or 128); any lengths, seq_q ≠ seq_k too; both
alignments; grouped heads; strides that the copy engine takes, others are copied. The gradient of q is added up by
atomics in float32, so its last bits may differ from run to run: under `torch.use_deterministic_algorithms` backward
raises, or warns if torch is told to warn only. No second derivative. Needs compute capability 9.0 and triton 3.6, since
Gluon changes between releases.

Under torch.compile the two passes are custom operators, so a compiled model keeps one graph around them.
"""

from __future__ import annotations

import math
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs_systems.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.attention._mask import causal_offset
from cs_systems.attention._operators import operators
from cs_systems.attention._refusals import no_cuda, wrong_dtype
from cs_systems.formulas.cost import AttentionAlgorithm

DTYPES = ("float16", "bfloat16")
LARGEST_D_HEAD = 128
TRITON = "3.6"
NOT_DETERMINISTIC = (
    "flash_gluon adds up the gradient of q in whatever order its blocks end, and torch.use_deterministic_algorithms is "
    "on: use flash_triton, whose gradients are the same from run to run, or turn it off"
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, align: str = "upper_left"
) -> Tensor:
    """q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head).

    heads_kv divides heads. scale defaults to 1/√d_head. Under autocast the inputs are cast, as torch does for its own
    attention. Raises ValueError with the reason and the remedy for what `unavailable` refuses.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale <= 0:  # the kernels take the maximum before they scale
        q, scale = (q * 0, 1.0) if scale == 0 else (-q, -scale)
    out: Tensor = FlashAttentionGluon.apply(q, k, v, causal, causal_offset(q.shape[-2], k.shape[-2], align), scale)
    return out


class FlashAttentionGluon(torch.autograd.Function):
    """Keeps q, k, v, the output, and the log-sum-exp of the scaled scores: (batch, heads, seq_q), float32, natural
    logarithm, −inf where a query sees no key.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> Tensor:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, lse = run(q, k, v, causal, offset, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = (causal, offset, scale)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        run = _backward_op if torch.compiler.is_compiling() else _backward
        gradients = run(*(*ctx.saved_tensors, do, *ctx.call))
        return *gradients, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output, laid out as q, and the log-sum-exp."""
    _check(q, k, v)
    from cs_systems.kernels.flash_gluon import Problem, takes_layout

    o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return o.zero_(), lse.fill_(-torch.inf)
    with torch.cuda.device_of(q):  # triton launches on the current device
        q, k, v = _readable(q, k, v)
        written = o if takes_layout(o) else o.contiguous()
        Problem(q, k, v, causal, offset, scale, _multiprocessors(q)).forward(written, lse).run()
        return (o if written is o else o.copy_(written)), lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, offset: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each laid out as its tensor."""
    _alert_not_deterministic()
    from cs_systems.kernels.flash_gluon import Problem, padded_rows, takes_layout
    from cs_systems.kernels.flash_gluon_configs import padded_d_head

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    with torch.cuda.device_of(q):
        q, k, v, do = _readable(q, k, v, do)
        rows = (q.shape[0] * q.shape[1], padded_rows(q.shape[2]))
        lse_log2, delta = lse.new_empty(rows), lse.new_empty(rows)
        summed = lse.new_empty(*rows, padded_d_head(q.shape[-1]))
        written_k, written_v = (x if takes_layout(x) else x.contiguous() for x in (dk, dv))
        problem = Problem(q, k, v, causal, offset, scale, _multiprocessors(q))
        problem.prepare(o, lse, do, lse_log2, delta, summed).run()
        problem.backward(do, lse_log2, delta, summed, written_k, written_v).run()
        problem.finish(summed, dq).run()
        for x, source in ((dk, written_k), (dv, written_v)):
            if source is not x:
                x.copy_(source)
    return dq, dk, dv


def _alert_not_deterministic() -> None:
    """As torch's own operators do: RuntimeError where only deterministic ones are wanted, or a warning."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(NOT_DETERMINISTIC)
    warnings.warn(NOT_DETERMINISTIC, stacklevel=2)


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each as it is, if the copy engine can read it, or a contiguous copy."""
    from cs_systems.kernels.flash_gluon import takes_layout

    return tuple(x if takes_layout(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors)


def _multiprocessors(tensor: Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


_forward_op, _backward_op = operators("flash_gluon", _forward, _backward)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: cast them to one dtype, or call under autocast")
    if q.ndim != 4 or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}: give (batch, heads, seq, d_head); k and v must agree, and share q's batch "
            "and d_head"
        )
    dtype = str(q.dtype).removeprefix("torch.")
    call = AttentionCall(
        q.device.type, dtype, q.shape[-1], q.shape[-2], k.shape[-2], q.shape[1], k.shape[1], needs_backward=False
    )
    if reason := unavailable(call):
        raise ValueError(reason)


def unavailable(call: AttentionCall) -> str | None:
    """Why this call cannot be served here and what to do about it, or None."""
    if reason := wrong_dtype("flash_gluon", call, DTYPES):
        return reason
    if call.d_head % 8 or not 8 <= call.d_head <= LARGEST_D_HEAD:
        return f"d_head {call.d_head} is no multiple of 8 from 8 to {LARGEST_D_HEAD}: use flash_triton"
    if call.heads_q % call.heads_kv:
        return f"{call.heads_q} query heads are not a multiple of {call.heads_kv} key heads: use other numbers"
    wants_same_bits = torch.are_deterministic_algorithms_enabled()
    if call.needs_backward and wants_same_bits and not torch.is_deterministic_algorithms_warn_only_enabled():
        return NOT_DETERMINISTIC
    if call.device != "cuda":
        return "flash_gluon runs on Hopper GPUs only: use flash_torch on the CPU"
    if reason := no_cuda():
        return reason
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    if capability != "9.0":
        return f"this GPU has compute capability {capability}, and flash_gluon is for 9.0 (Hopper): use flash_triton"
    return _wrong_triton()


def _wrong_triton() -> str | None:
    if find_spec("triton") is None:
        return f"triton is not installed: pip install 'triton=={TRITON}.*' (Linux)"
    if not version("triton").startswith(f"{TRITON}."):
        return (
            f"triton is {version('triton')}, and Gluon, its low level, changes between releases: "
            f"pip install 'triton=={TRITON}.*', or use flash_triton"
        )
    return None


def algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Forward's tiles and the padded head size."""
    depth = 64 if call.d_head <= 64 else 128
    return AttentionAlgorithm(64, 128, depth, backward_matmuls=5, dq_accumulator_bytes=4)


def describe() -> str | None:
    return None if _wrong_triton() else f"FlashAttention-3 in Gluon, Triton {version('triton')}"


BACKEND = AttentionBackend(
    attention,
    unavailable=unavailable,
    tolerance={dtype: TOLERANCE[dtype] for dtype in DTYPES},
    algorithm=algorithm,
    describe=describe,
)
