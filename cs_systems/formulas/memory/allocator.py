"""Bytes that PyTorch's CUDA allocator counts as allocated beyond the tensors that a program requested."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

MIB = 2**20
# PyTorch allocates this workspace for each thread that calls cuBLAS on a GPU of compute capability 9.0 or newer, and
# 8.1 MiB on older ones (aten/src/ATen/cuda/CublasHandlePool.cpp). Forward and backward run in a thread each.
CUBLAS_WORKSPACE_BYTES = 32 * MIB
_ROUND = 512
_SMALL_SEGMENT, _LARGE_SEGMENT, _LEAST_OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB


def rounding(size: int, count: int) -> int:
    """Return the bytes that the caching allocator counts beyond `count` tensors of `size` bytes.

    Each tensor lies in memory newly allocated from CUDA. From 10 MiB on, a tensor gets its own block, rounded up to 2
    MiB. From 1 MiB on, tensors share blocks of 20 MiB. The rest of a block is split off if it is larger than 1 MiB.
    Below 1 MiB, sizes are rounded up to 512 bytes. Source: c10/cuda/CUDACachingAllocator.cpp.
    """
    if size <= MIB:
        return -size % _ROUND * count
    shared = 20 * MIB // size if size < 10 * MIB else 1
    left = 20 * MIB - shared * size if size < 10 * MIB else -size % (2 * MIB)
    return left * (count // shared) if left <= MIB else 0


@dataclass(eq=False)
class Block:
    """Piece of a segment, between its neighbours in address order."""

    size: int
    is_small: bool
    number: int  # order of creation, which decides between blocks of one size
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


class CachingAllocator:
    """Caching allocator with unlimited memory, for a known sequence of allocations and frees.

    It takes the smallest free block that is large enough, splits off the rest, and merges free neighbours. Small and
    large blocks are in different segments. Source: c10/cuda/CUDACachingAllocator.cpp, with its default settings.

    Attributes:
        allocated: Bytes of the blocks in use, as `torch.cuda.memory_allocated` counts them.
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._numbers = count()
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def alloc(self, requested: int) -> Block:
        size = max(_ROUND, requested + -requested % _ROUND)
        is_small = size <= MIB
        free = self._free[is_small]
        at = bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, is_small)
        rest = block.size - size
        if rest >= _ROUND if is_small else rest > MIB:
            block.size = size
            split = Block(rest, is_small, next(self._numbers), block, block.after)
            if block.after is not None:
                block.after.before = split
            block.after = split
            self._add_free(split)
        block.is_free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove_free(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        self._add_free(block)

    def _segment(self, size: int, is_small: bool) -> Block:
        whole = _LARGE_SEGMENT if size < _LEAST_OWN_SEGMENT else size + -size % (2 * MIB)
        block = Block(_SMALL_SEGMENT if is_small else whole, is_small, next(self._numbers))
        self.reserved += block.size
        return block

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.number, block))

    def _remove_free(self, block: Block) -> None:
        self._free[block.is_small].remove((block.size, block.number, block))
        block.is_free = False
