# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMS normalization in Triton, with the addition before it, forward and backward. Importing it needs triton.

Forward reads x (and the tensor to add) and writes their sum and the normalized rows, in one launch. Backward reads the
sum and both gradients and writes the gradient of x; its programs loop over rows and keep their share of the weight's
gradient, which a second, small launch sums in a fixed order. Results are the same from run to run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels.triton.launch import Launch
from cs_systems.model.kernels.triton.rows import multiprocessors, row_count, row_stride, wide

THREAD_ELEMENTS = 16  # elements of a row per thread
WARPS = 16  # warps of backward per multiprocessor
LEAST_ROWS = 8  # rows per program of backward, so that the shares of d_weight stay small compared with the rows
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 128, 16, 8  # 3 µs less for 1024 rows than 32, 32, 4, on one H100


@triton.jit
def rms_norm_kernel(
    x, added, weight, total, y, scale, x_row, added_row, total_row, y_row, width,
    EPS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write total = x + added (None: not written), y = total · scale · weight, and scale, for one row.

    scale = 1 / sqrt(mean(total²) + EPS). The grid is (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    element = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(WIDE)
    if added is not None:
        element += tl.load(added + row * added_row + i, mask=inside, other=0.0).to(WIDE)
        rounded = element.to(total.dtype.element_ty)
        tl.store(total + row * total_row + i, rounded, mask=inside)
        element = rounded.to(WIDE)
    factor = tl.rsqrt(tl.sum(element * element, 0) / width + EPS)
    tl.store(scale + row, factor)
    w = tl.load(weight + i, mask=inside, other=0.0).to(WIDE)
    tl.store(y + row * y_row + i, (element * factor * w).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    x, weight, scale, d_y, d_total, d_x, shares, x_row, d_y_row, d_total_row, d_x_row, rows, width,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write d_x = d_total + the gradient through the norm, for every programs-th row, and a share of d_weight.

    x: the input of the norm. d_total: None if the input is not used elsewhere. shares: (programs, width).
    """
    first, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    inside = i < width
    w = tl.load(weight + i, mask=inside, other=0.0).to(WIDE)
    share = tl.zeros([BLOCK], WIDE)
    for n in tl.range(first, rows, programs, num_stages=STAGES):
        row = tl.cast(n, tl.int64)
        factor = tl.load(scale + row)
        normalized = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(WIDE) * factor
        d = tl.load(d_y + row * d_y_row + i, mask=inside, other=0.0).to(WIDE)
        share += d * normalized
        d *= w
        d = (d - normalized * (tl.sum(d * normalized, 0) / width)) * factor
        if d_total is not None:
            d += tl.load(d_total + row * d_total_row + i, mask=inside, other=0.0).to(WIDE)
        tl.store(d_x + row * d_x_row + i, d.to(d_x.dtype.element_ty), mask=inside)
    tl.store(shares + first * width + i, share, mask=inside)


@triton.jit
def norm_sum_rows_kernel(shares, d_weight, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sum of the rows of shares (count, width) for COLUMNS columns. The grid is (width / COLUMNS,)."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], shares.dtype.element_ty)
    for start in range(0, count, ROWS):
        n = start + tl.arange(0, ROWS)
        inside = (n[:, None] < count) & (i[None, :] < width)
        total += tl.load(shares + n[:, None] * width + i[None, :], mask=inside, other=0.0)
    tl.store(d_weight + i, tl.sum(total, 0).to(d_weight.dtype.element_ty), mask=i < width)


def forward(
    device: int, x: Tensor, weight: Tensor, y: Tensor, scale: Tensor, eps: float
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes y, as x (..., width), and scale (rows,); weight: (width,)."""
    return [_forward({"x": x, "added": None, "total": None, "y": y}, weight, scale, eps)], {}


def add_forward(
    device: int, x: Tensor, weight: Tensor, added: Tensor, total: Tensor, y: Tensor, scale: Tensor, eps: float
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launch that writes total = x + added, and its y and scale."""
    return [_forward({"x": x, "added": added, "total": total, "y": y}, weight, scale, eps)], {}


def _forward(tensors: dict[str, Any], weight: Tensor, scale: Tensor, eps: float) -> Launch:
    x = tensors["x"]
    block, warps = _tile(x.shape[-1])
    sizes = {"width": x.shape[-1], "EPS": eps, "BLOCK": block, "WIDE": wide(tensors["y"].dtype)}
    arguments = {**_with_strides(tensors), "weight": weight, "scale": scale, **sizes}
    return Launch(rms_norm_kernel, (row_count(x), 1), arguments, {"num_warps": warps})


def backward(
    device: int, x: Tensor, weight: Tensor, scale: Tensor, d_y: Tensor, d_x: Tensor, d_weight: Tensor
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launches that write d_x, as x, and d_weight; and the scratch tensor for shares of d_weight."""
    return _backward(device, {"x": x, "d_y": d_y, "d_total": None, "d_x": d_x}, weight, scale, d_weight)


def add_backward(
    device: int, x: Tensor, weight: Tensor, scale: Tensor, d_y: Tensor, d_total: Tensor, d_x: Tensor, d_weight: Tensor
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launches of `backward` for an x that also has the gradient d_total from elsewhere."""
    return _backward(device, {"x": x, "d_y": d_y, "d_total": d_total, "d_x": d_x}, weight, scale, d_weight)


def _backward(
    device: int, tensors: dict[str, Any], weight: Tensor, scale: Tensor, d_weight: Tensor
) -> tuple[list[Launch], dict[str, Tensor]]:
    x = tensors["x"]
    rows, width = row_count(x), x.shape[-1]
    block, warps = _tile(width)
    programs = program_count(rows, multiprocessors(device), warps)
    shares = scale.new_empty(programs, width)
    sizes = {"rows": rows, "width": width, "BLOCK": block, "WIDE": wide(x.dtype)}
    sizes |= {"STAGES": _stages(block * x.element_size())}
    arguments = {**_with_strides(tensors), "weight": weight, "scale": scale, "shares": shares, **sizes}
    summed = {"shares": shares, "d_weight": d_weight, "count": programs, "width": width}
    summed |= {"ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
    return [
        Launch(rms_norm_backward_kernel, (programs, 1), arguments, {"num_warps": warps}),
        Launch(norm_sum_rows_kernel, (triton.cdiv(width, SUM_COLUMNS), 1), summed, {"num_warps": SUM_WARPS}),
    ], {"shares": shares}


def program_count(rows: int, multiprocessors: int, warps: int) -> int:
    """Return the number of backward's programs, with rows shared evenly: at least LEAST_ROWS if that fills a GPU."""
    most = multiprocessors * max(1, WARPS // warps)
    most = min(rows, most, max(multiprocessors, rows // LEAST_ROWS))
    return most and -(-rows // -(-rows // most))


def _tile(width: int) -> tuple[int, int]:
    """Return the elements of a whole row that a program holds, and its number of warps."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(32, block // (32 * THREAD_ELEMENTS)))


def _stages(row_bytes: int) -> int:
    """Return the number of rows of each tensor that backward processes or loads ahead, in 48 KiB of shared memory."""
    return 3 if row_bytes <= 8 << 10 else 2 if row_bytes <= 16 << 10 else 1


def _with_strides(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors with the strides of their rows; None has stride 0."""
    return tensors | {f"{name}_row": 0 if x is None else row_stride(x) for name, x in tensors.items()}
