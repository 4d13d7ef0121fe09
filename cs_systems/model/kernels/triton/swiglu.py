# mypy: allow-untyped-defs, allow-incomplete-defs
"""SwiGLU in Triton, silu(gate) · value, and its backward: one launch each. Importing it needs triton.

Forward moves 3 elements for each of the output, backward 5: gate, value and the gradient in, two gradients out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels.triton.launch import Launch
from cs_systems.model.kernels.triton.rows import row_count, row_stride, tile, wide


@triton.jit
def swiglu_kernel(
    gate, value, out, gate_row, value_row, out_row, width, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Write silu(gate) · value for one tile of a row. The grid is (rows · tiles,)."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    a = tl.load(gate + row * gate_row + i, mask=inside, other=0.0).to(WIDE)
    b = tl.load(value + row * value_row + i, mask=inside, other=0.0).to(WIDE)
    product = a / (1 + tl.exp(-a)) * b
    tl.store(out + row * out_row + i, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    gate, value, d_out, d_gate, d_value, gate_row, value_row, d_out_row, d_gate_row, d_value_row, width, tiles,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and value for one tile of a row. The grid is (rows · tiles,)."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    a = tl.load(gate + row * gate_row + i, mask=inside, other=0.0).to(WIDE)
    b = tl.load(value + row * value_row + i, mask=inside, other=0.0).to(WIDE)
    d = tl.load(d_out + row * d_out_row + i, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-a))
    of_gate = d * b * sigmoid * (1 + a * (1 - sigmoid))
    of_value = d * a * sigmoid
    tl.store(d_gate + row * d_gate_row + i, of_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_value + row * d_value_row + i, of_value.to(d_value.dtype.element_ty), mask=inside)


def forward(device: int, gate: Tensor, value: Tensor, out: Tensor) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes out. All are (..., width), with a single row stride."""
    return [_launch(swiglu_kernel, gate=gate, value=value, out=out)], {}


def backward(
    device: int, gate: Tensor, value: Tensor, d_out: Tensor, d_gate: Tensor, d_value: Tensor
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes d_gate and d_value. All are (..., width), with a single row stride."""
    tensors = {"gate": gate, "value": value, "d_out": d_out, "d_gate": d_gate, "d_value": d_value}
    return [_launch(swiglu_backward_kernel, **tensors)], {}


def _launch(kernel, **tensors: Tensor) -> Launch:
    gate = tensors["gate"]
    width = gate.shape[-1]
    block, warps = tile(width)
    tiles = triton.cdiv(width, block)
    strides = {f"{name}_row": row_stride(x) for name, x in tensors.items()}
    sizes = {"width": width, "tiles": tiles, "BLOCK": block, "WIDE": wide(gate.dtype)}
    return Launch(kernel, (row_count(gate) * tiles, 1), {**tensors, **strides, **sizes}, {"num_warps": warps})
