"""Tiles of the FlashAttention-2 Triton kernels, as a table.

Keys: architecture, bytes of an element, padded head size. It replaces an autotuner, because the first call of a process
must not benchmark, and two processes must run the same kernels. `scripts/studies/triton_tile_sizes.py` measures tiles;
`attention(..., tiles=...)` accepts others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Tile of block_m queries by block_n keys; num_warps and num_stages are Triton's launch options.

    descriptors: the tensors over which the kernel loops are read through tensor descriptors (TMA; from compute
    capability 9.0 on).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


@dataclass(frozen=True)
class Tiles:
    """Tiles of one configuration, one for each kernel."""

    forward: Tile
    dq: Tile
    dkdv: Tile

    def without_descriptors(self) -> Tiles:
        return Tiles(*(replace(tile, descriptors=False) for tile in (self.forward, self.dq, self.dkdv)))


def padded_d_head(d_head: int) -> int:
    """Return the head size that the kernels compute with: a power of two, at least 16.

    16 is the size of the smallest tensor-core product.
    """
    return max(16, 1 << (d_head - 1).bit_length())


# (bytes of an element, largest padded d_head) → tiles; the first large enough entry is used.
Table = dict[tuple[int, int], Tiles]

# Multiprocessors with 99 KiB of shared memory (8.6, 8.9, 12.0), and unknown ones.
_DEFAULT: Table = {
    (2, 64): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (2, 256): Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    (4, 64): Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 128): Tiles(Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 32, 8, 1)),
    (4, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_SM_80: Table = _DEFAULT | {
    (2, 64): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    (2, 128): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
}
# Winners on one H200, causal, bf16, 4096 long, of all candidates in profiles/flash_triton_tune/h200.jsonl
_SM_90: Table = _DEFAULT | {
    (2, 32): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, descriptors=True), Tile(64, 64, 4, 3, descriptors=True)),
    (2, 64): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3, descriptors=True)),
    (2, 128): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3, descriptors=True), Tile(64, 64, 4, 2, descriptors=True)),
    (2, 256): Tiles(
        Tile(128, 64, 8, 2, descriptors=True),
        Tile(128, 32, 8, 3, descriptors=True),
        Tile(32, 64, 8, 3, descriptors=True),
    ),
}
# Not measured: chosen by registers and occupancy.
_SM_100: Table = _DEFAULT | {
    (2, 64): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (2, 128): Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    (2, 256): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_BY_CAPABILITY: dict[tuple[int, int], Table] = {(8, 0): _SM_80, (9, 0): _SM_90, (10, 0): _SM_100}


@functools.cache
def tiles_for(capability: tuple[int, int] | None, element_bytes: int, d_head: int) -> Tiles:
    """Return the tiles for a compute capability (None: the interpreter), an element size and a head size up to 256."""
    table = _DEFAULT if capability is None else _BY_CAPABILITY.get(capability, _DEFAULT)
    return next(
        tiles
        for (size, largest), tiles in sorted(table.items())
        if size == element_bytes and largest >= padded_d_head(d_head)
    )
