"""Operands, tiles and shared memory of the kernels that are built on product.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cs_systems.model.kernels.cuda.driver import Macros, tensor_map
from cs_systems.model.kernels.driver import Struct, TensorMap

ROWS, FINISHERS, THREADS = 128, 3, 384
"""Rows of a tile; the warps that work on finished tiles; all threads of a block."""
BLOCK = 64
"""Columns of a block in shared memory: the widths of operands are multiples of it."""
MOST_ACROSS = 12
"""Number of neighbouring tiles that are computed together, so that their operands stay in the L2 cache."""


@dataclass(frozen=True)
class ProductOptions:
    """Options of product.cuh.

    columns: columns of a tile, 128 or 256. depth: summed elements per stage. ahead: rows that each finishing warp
    loads ahead. cluster: blocks that share the right operand.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 3
    ahead: int = 6
    cluster: int = 2

    def shared_bytes(self, row_bytes: int) -> int:
        """Return the shared memory of a block with finishing warps that load rows of this many bytes ahead."""
        stages, rows = self.stages * (ROWS + self.columns) * self.depth * 2, FINISHERS * self.ahead if row_bytes else 0
        return stages + ROWS * self.columns * 2 + rows * row_bytes + 8 * (2 * self.stages + 4 + rows)

    def macros(self, left_trans: bool, right_trans: bool, problems: int = 1) -> Macros:
        return (
            ("PROBLEMS", problems),
            ("COLUMNS", self.columns),
            ("DEPTH", self.depth),
            ("STAGES", self.stages),
            ("AHEAD", self.ahead),
            ("CLUSTER", self.cluster),
            ("LEFT_TRANS", int(left_trans)),
            ("RIGHT_TRANS", int(right_trans)),
        )

    def blocks(self, tiles: int, multiprocessors: int) -> int:
        return min(tiles, multiprocessors // self.cluster) * self.cluster

    def tiles(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the number of tiles of products (rows, columns); the tiles of a cluster count as one."""
        return sum(down * across for down, across in (self._tiles(*shape) for shape in shapes))

    def products(
        self, left: Sequence[TensorMap], right: Sequence[TensorMap], shapes: Sequence[Sequence[int]], depth: int
    ) -> Struct:
        """Return the kernel parameter `products` for results of these shapes, summed over `depth`."""
        extents, first = list[Extent](), 0
        for shape in shapes:
            down, across = self._tiles(*shape)
            extents.append(Extent(first, down, across, -(-across // -(-across // MOST_ACROSS))))
            first += down * across
        return Struct((*left, *right, *extents, ctypes.c_int(depth), ctypes.c_int(first)))

    def _tiles(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // (ROWS * self.cluster)), -(-columns // self.columns)


class Extent(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("first_tile", "down", "across", "together"))


class Sizes(ctypes.Structure):
    _fields_ = (("tokens", ctypes.c_int), ("columns", ctypes.c_int))


def summed_along_rows(operand: str, x: Tensor, rows: int) -> TensorMap:
    """Return the tensor map of x (rows, summed), in boxes of this many rows and 64 summed elements."""
    return tensor_map(operand, x[None, None], rows)


def summed_along_columns(operand: str, x: Tensor, depth: int, columns: int) -> TensorMap:
    """Return the tensor map of x (summed, width), in boxes of this many summed elements and columns, in blocks of 64.

    The width is a multiple of 64.
    """
    blocks = x.unflatten(-1, (-1, BLOCK)).transpose(0, 1)  # (width / 64, summed, 64)
    return replace(tensor_map(operand, blocks[None], depth), box=(BLOCK, depth, columns // BLOCK, 1))
