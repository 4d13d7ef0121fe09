"""FlashAttention-3's method on Hopper, in CUDA C++: TMA, wgmma, warp specialization, explicit placement of every wait.

Supports fp16 and bf16; d_head a multiple of 8 up to 256 (computed as 64, 80, 96, 128 or 256); any lengths, also seq_q ≠
seq_k; both alignments; grouped heads. Tensors with strides that TMA cannot read are copied.

The gradient of q is accumulated in float32 in the order in which the blocks of keys finish, so its last bits may differ
from run to run. Under `torch.use_deterministic_algorithms` the blocks add in the order of the keys, and backward took
1.2 to 2.5 times as long on one H200. No second derivative.

Needs compute capability 9.0, and cuda-core with NVRTC, which compiles the kernels on first use, in seconds. Under
torch.compile the two passes are custom operators, so a compiled model keeps one graph around them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.instrument.attention_calls import as_operators
from cs_systems.model.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.model.attention._autograd import applied, without_second_derivative
from cs_systems.model.attention._mask import causal_offset, uneven_heads
from cs_systems.model.attention._operators import operators
from cs_systems.model.attention._refusals import check_one_device, no_cuda, wrong_dtype
from cs_systems.model.kernels.cuda import driver
from cs_systems.model.kernels.driver import multiprocessors
from cs_systems.model.kernels.layout import computed_d_head, padded_d_head, takes_layout
from cs_systems.model.kernels.prepared import PreparedPass, empty_rows

if TYPE_CHECKING:
    from cs_systems.model.kernels.cuda.launch import Problem

DTYPES = ("float16", "bfloat16")
LARGEST_D_HEAD = 256  # the same limit as flash_triton's


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, align: str = "upper_left"
) -> Tensor:
    """Compute attention with the CUDA kernels.

    q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head), where
    heads_kv divides heads. scale defaults to 1/√d_head. Under autocast the inputs are cast, as torch does for its
    own attention. Raises ValueError with the reason and the remedy for a call that `unavailable` rejects.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale <= 0:  # the kernels take the maximum before scaling, so the scale must be positive
        q, scale = (q * 0, 1.0) if scale == 0 else (-q, -scale)
    out: Tensor = _apply(q, k, v, causal, causal_offset(q.shape[-2], k.shape[-2], align), scale)
    return out


class _FlashAttention(torch.autograd.Function):
    """Autograd function of the backend.

    Keeps q, k, v, the output, and the log-sum-exp of the scaled scores: (batch, heads, seq_q), float32, natural
    logarithm, −inf where a query sees no key.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> Tensor:
        run = _forward_op if as_operators() else _forward
        o, lse = run(q, k, v, causal, offset, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = (causal, offset, scale)
        return o

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        run = _backward_op if as_operators() else _backward
        gradients = run(*(*ctx.saved_tensors, do, *ctx.call))
        return *gradients, None, None, None


_apply = applied(_FlashAttention)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, with the layout of q, and the log-sum-exp."""
    o, lse = torch.empty_like(q), empty_rows(q)
    if q.numel() and k.numel():
        _FORWARD.run((q, k, v), (o, lse), causal, offset, scale)
        return o, lse
    _check(q, k, v)
    return o.zero_(), lse.fill_(-torch.inf)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    causal: bool, offset: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, each with the layout of its tensor."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    in_order = torch.are_deterministic_algorithms_enabled()
    _BACKWARD.run((q, k, v, o, lse, do), (dq, dk, dv), causal, offset, scale, in_order)
    return dq, dk, dv


def _forward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool, offset: int, scale: float,
) -> tuple[list[Any], dict[str, Tensor]]:  # fmt: skip
    return [_problem(device, q, k, v, causal, offset, scale).forward(o, lse)], {}


def _backward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, causal: bool, offset: int, scale: float, in_order: bool,
) -> tuple[list[Any], dict[str, Tensor]]:  # fmt: skip
    problem = _problem(device, q, k, v, causal, offset, scale)
    rows = (q.shape[0] * q.shape[1], problem.padded_q)
    lse_log2, delta = lse.new_empty(rows), lse.new_empty(rows)
    summed = lse.new_empty(*rows, padded_d_head(q.shape[-1]))
    turns = {"turns": lse.new_empty(problem.turns, dtype=torch.int32)} if in_order else {}
    launches = [
        problem.prepare(o, lse, do, lse_log2, delta, summed, **turns),
        problem.backward(do, lse_log2, delta, summed, dk, dv, **turns),
        problem.finish(summed, dq),
    ]
    return launches, {"lse_log2": lse_log2, "delta": delta, "summed": summed, **turns}


def _problem(device: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> Problem:
    from cs_systems.model.kernels.cuda.launch import Problem

    return Problem(q, k, v, causal, offset, scale, multiprocessors(device))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError with the reason and the remedy for an unsupported call."""
    check_one_device(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one dtype, or call under autocast")
    if not q.ndim == k.ndim == 4 or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; give each the shape (batch, heads, seq, d_head): k and v alike, with "
            "the batch and the d_head of q"
        )
    dtype, (_, heads_q, seq_q, d_head) = str(q.dtype).removeprefix("torch."), q.shape
    call = AttentionCall(q.device.type, dtype, d_head, seq_q, k.shape[-2], heads_q, k.shape[1], needs_backward=False)
    if reason := unavailable(call):
        raise ValueError(f"flash_cuda: {reason}")


_INPUTS = ("q", "k", "v")
_FORWARD = PreparedPass(_INPUTS, ("o", "lse"), _forward_launches, takes_layout, _check)
_BACKWARD = PreparedPass(
    (*_INPUTS, "o", "lse", "do"), ("dq", "dk", "dv"), _backward_launches, takes_layout,
    lambda *inputs: _check(*inputs[:3]),
)  # fmt: skip
_forward_op, _backward_op = operators("flash_cuda", _forward, _backward)


def unavailable(call: AttentionCall) -> str | None:
    """Return the reason why this call is not supported, with the remedy, or None."""
    if call.device != "cuda":
        return "a Hopper GPU is required; use flash_torch on the CPU"
    if reason := wrong_dtype(call, DTYPES):
        return reason
    if call.d_head % 8 or not 8 <= call.d_head <= LARGEST_D_HEAD:
        instead = "flash_triton" if call.d_head <= LARGEST_D_HEAD else "sdpa_math or naive"
        return f"d_head {call.d_head} is not a multiple of 8 from 8 to {LARGEST_D_HEAD}; use {instead}"
    if call.heads_q % call.heads_kv:
        return uneven_heads(call.heads_q, call.heads_kv)
    if reason := no_cuda():
        return reason
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        have, instead = ".".join(map(str, capability)), "flash_triton" if capability >= (8, 0) else "sdpa_efficient"
        return f"compute capability 9.0 (Hopper) is required, and this GPU has {have}; use {instead}"
    return driver.missing()


def algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return forward's tiles, the head sizes of the products and of dq's buffer, and backward's padded queries."""
    from cs_systems.model.kernels.cuda.launch import backward_tile

    depth = padded_d_head(call.d_head)
    offset = causal_offset(call.seq_q, call.seq_k, call.align) if call.causal else None
    return AttentionAlgorithm(
        64, 128 if depth <= 128 else 80, computed_d_head(call.d_head), backward_matmuls=5,
        dq_accumulator_bytes=4, dq_accumulator_d_head=depth,
        padded_queries=backward_tile(call.d_head, call.seq_q, call.seq_k, offset).queries,
    )  # fmt: skip


def describe() -> str | None:
    return None if driver.missing() else "FlashAttention-3 in CUDA C++"


BACKEND = AttentionBackend(
    attention,
    unavailable=unavailable,
    tolerance={dtype: TOLERANCE[dtype] for dtype in DTYPES},
    algorithm=algorithm,
    keeps={"dq_accumulator_bytes": 4},
    one_operator="compiled",
    describe=describe,
)
