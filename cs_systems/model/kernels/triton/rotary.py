# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotation of the adjacent pairs of queries and keys in Triton, forward and backward. Importing it needs triton.

One launch rotates both, from any strides to any strides, so the output may be the input. The tables of cosines and
sines are read as they are. The launch can also copy a third tensor, by which backward gathers all gradients of one
product.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels.triton.launch import Launch
from cs_systems.model.kernels.triton.rows import tile, wide


@triton.jit
def _rotated(x, cos, sin, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    even, odd = tl.split(tl.reshape(x.to(WIDE), (BLOCK // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))


@triton.jit
def _place(strides, batch, head, position, i):
    return batch.to(tl.int64) * strides[0] + position.to(tl.int64) * strides[2] + head * strides[1] + i * strides[3]


@triton.jit
def rotary_kernel(
    q, k, v, cos, sin, q_out, k_out, v_out,
    q_strides, k_strides, v_strides, q_out_strides, k_out_strides, v_out_strides, seq, width, tiles,
    D_HEAD: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of the heads of one position of q and k, and copy the tile of v (None: not copied).

    Tensors are (batch, heads, seq, D_HEAD); width: heads · D_HEAD. cos, sin: (seq or more, D_HEAD / 2). INVERSE: by the
    opposite angle. The grid is (batch · seq · tiles,).
    """
    row, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK
    batch, position = row // seq, row % seq
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    head, i = column // D_HEAD, column % D_HEAD
    pair = start // 2 + tl.arange(0, BLOCK // 2)
    angle = position * (D_HEAD // 2) + pair % (D_HEAD // 2)
    c = tl.load(cos + angle, mask=pair < width // 2, other=0.0).to(WIDE)
    s = tl.load(sin + angle, mask=pair < width // 2, other=0.0).to(WIDE)
    if INVERSE:
        s = -s
    x = tl.load(q + _place(q_strides, batch, head, position, i), mask=inside, other=0.0)
    y = tl.load(k + _place(k_strides, batch, head, position, i), mask=inside, other=0.0)
    if v is not None:
        z = tl.load(v + _place(v_strides, batch, head, position, i), mask=inside, other=0.0)
        tl.store(v_out + _place(v_out_strides, batch, head, position, i), z, mask=inside)
    x = _rotated(x, c, s, BLOCK, WIDE).to(q_out.dtype.element_ty)
    y = _rotated(y, c, s, BLOCK, WIDE).to(k_out.dtype.element_ty)
    tl.store(q_out + _place(q_out_strides, batch, head, position, i), x, mask=inside)
    tl.store(k_out + _place(k_out_strides, batch, head, position, i), y, mask=inside)


def rotate(
    device: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes q_out and k_out, which may be q and k. All are (batch, heads, seq, d_head)."""
    moved = {"q": q, "k": k, "v": None, "q_out": q_out, "k_out": k_out, "v_out": None}
    return [_launch(moved, cos, sin, inverse)], {}


def rotate_and_copy(
    device: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    q_out: Tensor, k_out: Tensor, v_out: Tensor, inverse: bool,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    """Return the launch that writes q_out, k_out and v_out."""
    moved = {"q": q, "k": k, "v": v, "q_out": q_out, "k_out": k_out, "v_out": v_out}
    return [_launch(moved, cos, sin, inverse)], {}


def _launch(tensors: dict[str, Any], cos: Tensor, sin: Tensor, inverse: bool) -> Launch:
    batch, heads, seq, d_head = tensors["q"].shape
    block, warps = tile(heads * d_head)
    tiles = triton.cdiv(heads * d_head, block)
    strides = {f"{name}_strides": (0, 0, 0, 0) if x is None else x.stride() for name, x in tensors.items()}
    sizes = {"seq": seq, "width": heads * d_head, "tiles": tiles, "D_HEAD": d_head, "BLOCK": block}
    options = {"INVERSE": inverse, "WIDE": wide(tensors["q"].dtype)}
    arguments = {**tensors, "cos": cos, "sin": sin, **strides, **sizes, **options}
    return Launch(rotary_kernel, (batch * seq * tiles, 1), arguments, {"num_warps": warps})
