"""Helpers for kernels that work on a tensor's rows: strides, tiles, and the dtype of the arithmetic.

The tiles follow from the sizes; nothing is timed. A thread accesses VECTOR elements at once: 16 bytes in bfloat16.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from cs_systems.model.kernels import driver
from cs_systems.model.kernels.prepared import INTERPRETER

VECTOR = 8
LARGEST_TILE = 2048


def row_stride(x: Tensor) -> int:
    """Return the row stride of (..., width) in elements; all rows must have the same stride."""
    return x.stride(-2)


def row_count(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def tile(width: int) -> tuple[int, int]:
    """Return the elements of a tile of a row and the warps that access it.

    The tile is the largest power of two with at most an eighth of all elements wasted in the row's last tile.
    """
    block = LARGEST_TILE
    while block > 32 * VECTOR and -(-width // block) * block * 8 > width * 9:
        block //= 2
    return block, block // (32 * VECTOR)


def wide(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which a kernel computes: float64 for float64, else float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU; 2 for the interpreter."""
    return 2 if device == INTERPRETER else driver.multiprocessors(device)
