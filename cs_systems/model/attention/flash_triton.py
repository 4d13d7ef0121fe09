"""FlashAttention-2 as Triton kernels, forward and backward: memory linear in the sequence length, causal tiles skipped.

Supports fp32 (true fp32, no TF32), fp16 and bf16; d_head 1 … 256 (computed with the next power of two, so 80 and 96
cost as much as 128); any lengths, also seq_q ≠ seq_k; both alignments; grouped heads; any strides, read in place, if
128 rows of a head span less than 2³¹ elements. Gradients are the same from run to run, because nothing is accumulated
by atomics. No second derivative.

`attention(..., window=W)` lets a causal query see only the last W keys; `packed_attention` takes sequences of different
lengths, packed one after the other. Both skip tiles without a visible score.

Needs triton and compute capability 8.0; on a CPU, Triton's interpreter (TRITON_INTERPRET=1), slowly. Under
torch.compile the two passes are custom operators, so a compiled model keeps one graph around them.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cs_systems.core.shapes import ALIGNMENTS
from cs_systems.core.validation import one_of
from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.instrument.attention_calls import as_operators
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.attention._autograd import applied, without_second_derivative
from cs_systems.model.attention._mask import causal_offset, check_window, uneven_heads
from cs_systems.model.attention._operators import OPTIONS, operators
from cs_systems.model.attention._refusals import check_one_device
from cs_systems.model.kernels.prepared import PreparedPass, empty_rows
from cs_systems.model.kernels.triton.configs import Tiles, padded_d_head, tiles_for

if TYPE_CHECKING:
    from cs_systems.model.kernels.triton.launch import Launch, Packing, Problem

DTYPES = ("float32", "float16", "bfloat16")
LARGEST_D_HEAD = 256
INSTEAD = "flash_torch (for a window, naive)"  # the backend to suggest if Triton cannot run
MOST_ROWS = 128  # largest rows of a tile, inside which the kernels use 32-bit offsets


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
    tiles: Tiles | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute attention with the Triton kernels.

    q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head), where
    heads_kv divides heads. scale defaults to 1/√d_head. Under autocast the inputs are cast, as torch does for its own
    attention. tiles: replaces the table's tiles, for tuning. window: a causal query sees only the last `window` keys
    up to its own, and tiles outside are skipped. Raises ValueError with the reason and the remedy for a call that
    `unavailable` rejects.
    """
    check_window(window, causal)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out: Tensor = _apply(q, k, v, causal, scale, align, tiles, window)
    return out


class FlashAttentionTriton(torch.autograd.Function):
    """Autograd function `apply(q, k, v, is_causal=False)` on (..., seq, d_head), causal from the upper left.

    Keeps q, k, v, the output, and the log-sum-exp of the scaled scores: (..., seq_q), float32, natural logarithm, −inf
    where a query sees no key.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        align: str = "upper_left",
        tiles: Tiles | None = None,
        window: int | None = None,
    ) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        offset = causal_offset(q.shape[-2], k.shape[-2], align)
        if as_operators():
            o, lse = _forward_op(q, k, v, is_causal, offset, scale, window or 0)
        else:
            o, lse = _forward(q, k, v, is_causal, offset, scale, window or 0, tiles)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call, ctx.tiles = (is_causal, offset, scale, window or 0), tiles
        return o  # type: ignore[no-any-return]

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        if as_operators():
            gradients = _backward_op(*ctx.saved_tensors, do, *ctx.call)
        else:
            gradients = _backward(*(*ctx.saved_tensors, do, *ctx.call, ctx.tiles))
        return *gradients, None, None, None, None, None


_apply = applied(FlashAttentionTriton)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float, window: int, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output, with the layout of q, and the log-sum-exp."""
    o, lse = torch.empty_like(q), empty_rows(q)
    _FORWARD.run((q, k, v), (o, lse), causal, offset, scale, window, tiles)
    return o, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    causal: bool, offset: int, scale: float, window: int, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, each with the layout of its tensor."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _BACKWARD.run((q, k, v, o, lse, do), (dq, dk, dv), causal, offset, scale, window, tiles)
    return dq, dk, dv


def _forward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool, offset: int, scale: float, window: int, tiles: Tiles | None,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    problem = _problem(device, q, k, v, causal, offset, scale, window, tiles)
    return [problem.forward(_as_4d(o), lse)], {}


def _backward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, causal: bool, offset: int, scale: float, window: int, tiles: Tiles | None,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    problem = _problem(device, q, k, v, causal, offset, scale, window, tiles)
    lse, o, do, dq, dk, dv = _as_4d(lse[..., None])[..., 0], *map(_as_4d, (o, do, dq, dk, dv))
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    launches = [problem.dq(o, lse, do, lse_log2, delta, dq), problem.dkdv(do, lse_log2, delta, dk, dv)]
    return launches, {"lse_log2": lse_log2, "delta": delta}


def _problem(
    device: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float, window: int,
    tiles: Tiles | None, packing: Packing | None = None,
) -> Problem:  # fmt: skip
    from cs_systems.model.kernels.triton.launch import Problem

    capability = None if device < 0 else torch.cuda.get_device_capability(device)
    tiles = tiles or tiles_for(capability, q.element_size(), q.shape[-1])
    tiles = tiles.without_descriptors() if packing else tiles  # TMA would read beyond the end into the next sequence
    return Problem(_as_4d(q), _as_4d(k), _as_4d(v), causal, offset, scale, tiles, window, packing)


def _as_4d(x: Tensor) -> Tensor:
    """Reshape (..., seq, d_head) to (batch, heads, seq, d_head), a view with at most two leading dimensions."""
    if x.ndim > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.ndim)] if x.ndim != 3 else x[:, None]


def _reads(x: Tensor) -> bool:
    """Return True if the kernels can access (..., seq, d_head) in place, as one batch of heads."""
    is_one_batch = all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.ndim - 4))
    return is_one_batch and _tiles_are_near(x)


def _tiles_are_near(x: Tensor) -> bool:
    """Return True if all elements of any tile of (..., seq, d_head) are less than 2³¹ apart."""
    rows, columns = min(x.shape[-2], MOST_ROWS) - 1, x.shape[-1] - 1
    return rows * x.stride(-2) + columns * x.stride(-1) < 2**31


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_one_device(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one dtype, or call under autocast")
    # With 3 dimensions the first is the batch; with more, the third last is heads. Kernels would read past the end of a
    # smaller batch.
    batch_q, batch_k = (x.shape[:-3] or x.shape[:-2] for x in (q, k))
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.ndim != k.ndim or batch_q != batch_k:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        needs = "with q's number of dimensions, q's batch and q's d_head"
        raise ValueError(f"q, k, v have shapes {shapes}; give k and v the same shape, {needs}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not _tiles_are_near(x):
            raise ValueError(
                f"the rows of {name} are {x.stride(-2)} elements apart and its columns {x.stride(-1)}, too many for "
                f"the kernels' 32-bit offsets; pass {name}.contiguous()"
            )
    heads_q, heads_kv = _as_4d(q).shape[1], _as_4d(k).shape[1]
    dtype = str(q.dtype).removeprefix("torch.")
    call = AttentionCall(q.device.type, dtype, q.shape[-1], q.shape[-2], k.shape[-2], heads_q, heads_kv)
    if reason := unavailable(call):
        raise ValueError(f"flash_triton: {reason}")


_INPUTS = ("q", "k", "v")
_FORWARD = PreparedPass(_INPUTS, ("o", "lse"), _forward_launches, _reads, _check)
_BACKWARD = PreparedPass(
    (*_INPUTS, "o", "lse", "do"), ("dq", "dk", "dv"), _backward_launches, _reads, lambda *inputs: _check(*inputs[:3])
)
_forward_op, _backward_op = operators("flash_triton", _forward, _backward, f"{OPTIONS}, int window")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model leaves its graph here
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
    window: int | None = None,
) -> Tensor:
    """Compute attention of sequences of different lengths, packed one after the other, with the Triton kernels.

    q (rows, heads, d_head); k, v (rows, heads_kv, d_head) → (rows, heads, d_head). Sequence i has the rows starts[i] to
    before starts[i + 1] of each: int32, on the device of q, from 0 to the number of rows. longest_*: the length of the
    longest sequence, or more. `attention` has the same other options, here for each sequence. The values in starts are
    not checked, because that would wait for the GPU.
    """
    check_window(window, causal)
    one_of("alignment", align, ALIGNMENTS)
    _check_packed(q, k, v, starts_q, starts_k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    longest = (min(longest_q, q.shape[0]), min(longest_k, k.shape[0]))
    options = (causal, scale, align == "lower_right", window or 0, q.shape[0])
    out: Tensor = _Packed.apply(q, k, v, starts_q, starts_k, longest, options)
    return out


class _Packed(torch.autograd.Function):
    """Autograd function of packed sequences: keeps q, k, v, the output, and the log-sum-exp (heads, rows)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest: tuple[int, int],
        options: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        sequences = partial(_sequences, len(starts_q) - 1)
        inputs = (sequences(q, longest[0]), sequences(k, longest[1]), sequences(v, longest[1]), starts_q, starts_k)
        _PACKED_FORWARD.run(inputs, (sequences(o, longest[0]), lse), *options)
        ctx.save_for_backward(q, k, v, starts_q, starts_k, o, lse)
        ctx.longest, ctx.options = longest, options
        return o

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, starts_q, starts_k, o, lse = ctx.saved_tensors
        do = do if _tiles_are_near(do.transpose(0, 1)) else do.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        q, o, do, to_dq = (_sequences(len(starts_q) - 1, x, ctx.longest[0]) for x in (q, o, do, dq))
        k, v, to_dk, to_dv = (_sequences(len(starts_q) - 1, x, ctx.longest[1]) for x in (k, v, dk, dv))
        _PACKED_BACKWARD.run((q, k, v, starts_q, starts_k, o, lse, do), (to_dq, to_dk, to_dv), *ctx.options)
        return dq, dk, dv, None, None, None, None


def _sequences(count: int, x: Tensor, longest: int) -> Tensor:
    """Return a packed tensor as (sequences, heads, rows of the longest, d_head).

    Every sequence begins at the first row, because the kernels add the starts.
    """
    return x[:longest].transpose(0, 1).expand(count, -1, -1, -1)


def _check_packed(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> None:
    if not q.ndim == k.ndim == 3 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; pass q as (tokens, heads, d_head), and k and v both "
            "as (tokens, heads_kv, d_head)"
        )
    for name, starts in (("starts_q", starts_q), ("starts_k", starts_k)):
        if starts.dtype != torch.int32 or starts.ndim != 1 or not len(starts) or starts.device != q.device:
            found = f"{starts.dtype} of shape {tuple(starts.shape)} on {starts.device}"
            raise ValueError(
                f"{name} is {found}; pass an int32 tensor of one dimension on {q.device}, with one number more than "
                "there are sequences"
            )
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"starts_q has {len(starts_q)} numbers, but starts_k has {len(starts_k)}; both need "
            "one number more than there are sequences"
        )
    _check(*(x.transpose(0, 1)[None] for x in (q, k, v)))


def _packed_forward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, o: Tensor, lse: Tensor,
    causal: bool, scale: float, lower_right: bool, window: int, total_q: int,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    from cs_systems.model.kernels.triton.launch import Packing

    packing = Packing(starts_q, starts_k, total_q, lower_right)
    return [_problem(device, q, k, v, causal, 0, scale, window, None, packing).forward(o, lse)], {}


def _packed_backward_launches(
    device: int, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, o: Tensor, lse: Tensor,
    do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, scale: float, lower_right: bool, window: int, total_q: int,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    from cs_systems.model.kernels.triton.launch import Packing

    packing = Packing(starts_q, starts_k, total_q, lower_right)
    problem = _problem(device, q, k, v, causal, 0, scale, window, None, packing)
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    launches = [problem.dq(o, lse, do, lse_log2, delta, dq), problem.dkdv(do, lse_log2, delta, dk, dv)]
    return launches, {"lse_log2": lse_log2, "delta": delta}


_PACKED_INPUTS = (*_INPUTS, "starts_q", "starts_k")
_PACKED_FORWARD = PreparedPass(
    _PACKED_INPUTS, ("o", "lse"), _packed_forward_launches, lambda x: True, lambda *inputs: None
)
_PACKED_BACKWARD = PreparedPass(
    (*_PACKED_INPUTS, "o", "lse", "do"), ("dq", "dk", "dv"), _packed_backward_launches, lambda x: True,
    lambda *inputs: None,
)  # fmt: skip


def unavailable(call: AttentionCall) -> str | None:
    """Return the reason why this call is not supported, with the remedy, or None."""
    if find_spec("triton") is None:
        return f"triton is not installed; run pip install triton (Linux), or use the backend {INSTEAD}"
    if call.dtype not in DTYPES:
        return f"{call.dtype} is not supported; use {', '.join(DTYPES)}, or the backend {INSTEAD}"
    if not 1 <= call.d_head <= LARGEST_D_HEAD:
        return f"d_head {call.d_head} is not from 1 to {LARGEST_D_HEAD}; use naive or sdpa_math"
    if call.heads_q % call.heads_kv:
        return uneven_heads(call.heads_q, call.heads_kv)
    from cs_systems.model.kernels.triton.launch import INTERPRETED

    return _unavailable_interpreted(call) if INTERPRETED else _unavailable_compiled(call)


def _unavailable_interpreted(call: AttentionCall) -> str | None:
    if call.device != "cpu":
        return "TRITON_INTERPRET is set, so nothing would run on the GPU; unset it, or use device cpu"
    if call.dtype == "bfloat16":
        return "Triton's interpreter computes wrong bfloat16 products; use float32 or float16, or a GPU"
    if _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return "Triton's interpreter before 3.7 fails with numpy 2.4 and later; install numpy<2.4 or triton>=3.7"
    return None


def _unavailable_compiled(call: AttentionCall) -> str | None:
    if call.device != "cuda":
        return f"Triton has no kernels for {call.device}; use {INSTEAD}, a GPU, or TRITON_INTERPRET=1 (slow)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; use device cpu, or install a CUDA build of torch"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        have = ".".join(map(str, capability))
        needs = "compute capability 8.0 or newer is required"
        return f"{needs}, and this GPU has {have}; use sdpa_efficient (for a window, naive)"
    return None


def _release(package: str) -> tuple[int, int]:
    major, minor, *_ = version(package).split(".")
    return int(major), int(minor)


def algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return forward's tiles, the padded head size and the number of backward's products.

    backward_matmuls is 7: q kᵀ, do vᵀ and ds k in the dq kernel; q kᵀ, do vᵀ, pᵀ do and dsᵀ q in the dk-dv kernel,
    which recomputes the scores instead of adding to dq with atomics.
    """
    capability = torch.cuda.get_device_capability() if call.device == "cuda" and torch.cuda.is_available() else None
    tile = tiles_for(capability, 4 if call.dtype == "float32" else 2, call.d_head).forward
    return AttentionAlgorithm(tile.block_m, tile.block_n, padded_d_head(call.d_head), backward_matmuls=7)


def describe() -> str | None:
    if find_spec("triton") is None:
        return None
    from cs_systems.model.kernels.triton.launch import INTERPRETED

    return f"FlashAttention-2, Triton {version('triton')}{' interpreter' if INTERPRETED else ''}"


BACKEND = AttentionBackend(
    attention, unavailable, algorithm=algorithm, one_operator="compiled", has_window=True, describe=describe
)
