# mypy: allow-untyped-defs, allow-incomplete-defs
"""Quantization of a matrix to fp8, as is and transposed, in one Triton launch. Importing it needs triton.

A product in fp8 takes x (m, k) row-major; the sum over m in backward takes its transpose. A launch reads each element
once and writes it twice: 4 bytes for an element in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels.triton.launch import Launch

BLOCK, WARPS = 64, 4  # on one H200 nearly twice as fast as 128


@triton.jit
def quantize_kernel(x, scale, kept, turned, x_row, rows, columns, tiles, BLOCK: tl.constexpr):
    """Write one tile of x · (1 / scale) to `kept` (rows, columns) and `turned` (columns, rows)."""
    i = (tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    j = (tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (i < rows) & (j < columns)
    wide = tl.load(x + i * x_row + j, mask=inside, other=0.0).to(tl.float32)
    rounded = (wide * tl.div_rn(1.0, tl.load(scale))).to(kept.dtype.element_ty)
    tl.store(kept + i * columns + j, rounded, mask=inside)
    tl.store(turned + j.to(tl.int64) * rows + i, rounded, mask=inside)


def quantize(
    device: int, x: Tensor, scale: Tensor, kept: Tensor, turned: Tensor, *rest: object
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes `kept` (m, n) and `turned` (n, m), both contiguous, from x (m, n)."""
    rows, columns = x.shape
    tiles = triton.cdiv(columns, BLOCK)
    arguments = {"x": x, "scale": scale, "kept": kept, "turned": turned, "x_row": x.stride(0), "rows": rows}
    arguments |= {"columns": columns, "tiles": tiles, "BLOCK": BLOCK}
    return [Launch(quantize_kernel, (triton.cdiv(rows, BLOCK) * tiles, 1), arguments, {"num_warps": WARPS})], {}
