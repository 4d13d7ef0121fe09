"""From tensors to launches of the FlashAttention-2 kernels: grids, strides, tiles. Importing it needs triton.

A `Launch` is a kernel call as data: `run()` performs it; `cs_systems.kernels.compile` compiles it without a GPU, exactly as
`run()` would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from cs_systems.kernels.flash_triton_backward import dkdv_kernel, dq_kernel
from cs_systems.kernels.flash_triton_configs import Tile, Tiles, padded_d_head, tiles_for
from cs_systems.kernels.flash_triton_forward import forward_kernel

INTERPRETED = not isinstance(forward_kernel, JITFunction)  # TRITON_INTERPRET was set when triton was imported


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        if all(self.grid):  # an empty grid is an error of the driver's; there is nothing to do
            self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True)
class Problem:
    """One attention call on q (batch, heads, seq_q, d_head) and k, v (batch, heads_kv, seq_k, d_head), any strides.

    Query i sees key j when not causal or j <= i + offset. tiles: None for the table's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    offset: int
    scale: float
    tiles: Tiles | None = None

    def forward(self, o: Tensor, lse: Tensor) -> Launch:
        """o as q; lse (batch, heads, seq_q), float32, contiguous. Both are written."""
        tile = self._tiles().forward
        grid = (math.prod(self.q.shape[:2]), triton.cdiv(self.q.shape[2], tile.block_m))
        arguments = self._arguments(tile) | _with_strides(o=o)
        return Launch(forward_kernel, grid, arguments | {"lse": lse} | self._heads(), _options(tile))

    def dq(self, o: Tensor, lse: Tensor, do: Tensor, delta: Tensor, dq: Tensor) -> Launch:
        """Writes dq and delta (batch, heads, seq_q), float32, contiguous. Runs before `dkdv`, which reads delta."""
        tile = self._tiles().dq
        grid = (math.prod(self.q.shape[:2]), triton.cdiv(self.q.shape[2], tile.block_m))
        arguments = self._arguments(tile) | _with_strides(o=o, do=do, dq=dq) | {"lse": lse, "delta": delta}
        return Launch(dq_kernel, grid, arguments | self._heads() | {"scale": self.scale}, _options(tile))

    def dkdv(self, lse: Tensor, do: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> Launch:
        """Writes dk and dv."""
        tile = self._tiles().dkdv
        grid = (math.prod(self.k.shape[:2]), triton.cdiv(self.k.shape[2], tile.block_n))
        arguments = self._arguments(tile) | _with_strides(do=do, dk=dk, dv=dv) | {"lse": lse, "delta": delta}
        heads = {"heads_kv": self.k.shape[1], "GROUP": self.q.shape[1] // self.k.shape[1]}
        return Launch(dkdv_kernel, grid, arguments | heads | {"scale": self.scale}, _options(tile))

    def _tiles(self) -> Tiles:
        capability = torch.cuda.get_device_capability(self.q.device) if self.q.is_cuda else None
        return self.tiles or tiles_for(capability, self.q.element_size(), self.q.shape[-1])

    def _heads(self) -> dict[str, int]:
        return {"heads": self.q.shape[1], "group": self.q.shape[1] // self.k.shape[1]}

    def _arguments(self, tile: Tile) -> dict[str, Any]:
        return _with_strides(q=self.q, k=self.k, v=self.v) | {
            "seq_q": self.q.shape[2],
            "seq_k": self.k.shape[2],
            "offset": self.offset,
            "scale_log2": self.scale * math.log2(math.e),
            "D": self.q.shape[-1],
            "BLOCK_D": padded_d_head(self.q.shape[-1]),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "CAUSAL": self.causal,
        }


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _with_strides(**tensors: Tensor) -> dict[str, Any]:
    """Each tensor under its name, with its four strides (in elements) as `<name>_strides`."""
    return {key: value for name, t in tensors.items() for key, value in ((name, t), (f"{name}_strides", t.stride()))}
