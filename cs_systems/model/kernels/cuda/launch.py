"""Launches of the FlashAttention kernels in CUDA C++ for Hopper (kernels/cuda/*.cu) on tensors."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cs_systems.model.kernels.cuda.driver import Launch, Macros, tensor_map
from cs_systems.model.kernels.cuda.launch_forward import forward
from cs_systems.model.kernels.driver import Address
from cs_systems.model.kernels.layout import computed_d_head, heads_together, padded_d_head

# bytes of the L2 cache for the queries of causal heads that are processed together
L2_BYTES = {64: 40 << 20, 128: 20 << 20, 256: 20 << 20}


@dataclass(frozen=True)
class BackwardTile:
    """Tile sizes of backward_tiles.cuh.

    queries: per tile. keys: per block. part: queries per product, and per block of the kernels before and after it.
    cost: time of a tile, relative to the other tiles of the same d_head.
    """

    queries: int
    keys: int
    part: int
    shared_bytes: int
    cost: float = 1.0

    @property
    def macros(self) -> Macros:
        return ("QUERIES", self.queries), ("KEYS", self.keys), ("PART", self.part), ("SHARED_BYTES", self.shared_bytes)

    def visited(self, seq_q: int, seq_k: int, offset: int | None) -> int:
        """Return the number of tiles that a head's blocks compute; query i sees keys j <= i + offset, None: all."""
        tiles = -(-seq_q // self.queries)
        firsts = (0 if offset is None else max(key - offset, 0) // self.queries for key in range(0, seq_k, self.keys))
        return sum(tiles - min(first, tiles - 1) for first in firsts)


BACKWARD_TILES = {
    64: (BackwardTile(128, 128, 64, 195 << 10),),
    128: (BackwardTile(80, 128, 80, 226 << 10), BackwardTile(64, 128, 64, 195 << 10, cost=0.85)),
    256: (BackwardTile(64, 64, 64, 226 << 10),),
}
"""Padded d_head → the tiles of its backward. The cost was measured on one H100, with many keys."""


@cache
def backward_tile(d_head: int, seq_q: int, seq_k: int, offset: int | None) -> BackwardTile:
    """Return backward's tile: the one with the least total time for the tiles that it has to compute.

    Smaller tiles compute fewer hidden scores, but cost more for each query. offset: as in `BackwardTile.visited`.
    """
    tiles = BACKWARD_TILES[padded_d_head(d_head)]
    return min(tiles, key=lambda tile: tile.cost * tile.visited(seq_q, seq_k, offset))


class Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("seq_k", "heads", "group", "batch_heads_kv", "heads_in_l2")),
        *((name, ctypes.c_int) for name in ("offset", "row_tiles", "padded_q")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    )


class Strides(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_longlong) for name in ("batch", "head", "row"))


class Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("heads", "seq_q", "padded_q", "d_head")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Problem:
    """One attention call on q (batch, heads, seq_q, d_head) and k, v (batch, heads_kv, seq_k, d_head), in bf16 or fp16.

    Query i sees key j when not causal or j <= i + offset. scale > 0. `takes_layout` accepts all tensors of that dtype.
    Only the layout of tensors matters: the launches name their operands q, k, v, o, lse, do, dq, dk, dv, and the
    scratch tensors lse_log2, delta, summed and turns.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    offset: int
    scale: float
    multiprocessors: int

    @property
    def _tile(self) -> BackwardTile:
        _, _, seq_q, d_head = self.q.shape
        return backward_tile(d_head, seq_q, self.k.shape[2], self.offset if self.causal else None)

    @property
    def padded_q(self) -> int:
        """Length seq_q as `backward` requires it: whole tiles."""
        return -(-self.q.shape[2] // self._tile.queries) * self._tile.queries

    @property
    def turns(self) -> int:
        """Number of separately summed pieces of dq: one per 8 warps for each tile."""
        batch, heads, _, _ = self.q.shape
        return batch * heads * self.padded_q // self._tile.queries * 8

    def forward(self, o: Tensor, lse: Tensor) -> Launch:
        """Return the launch that writes o and lse (batch, heads, seq_q).

        lse is float32, natural logarithm, −inf where no key is seen.
        """
        return forward(
            self.q, self.k, self.v, o, causal=self.causal, offset=self.offset, scale=self.scale,
            multiprocessors=self.multiprocessors,
        )  # fmt: skip

    def prepare(
        self, o: Tensor, lse: Tensor, do: Tensor, lse_log2: Tensor, delta: Tensor, summed: Tensor,
        turns: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        """Return the launch that prepares the inputs of `backward`.

        It writes lse_log2 and delta, in a special order, and zeros to summed and turns.
        """
        names = ("o", "do", "lse", "lse_log2", "delta", "summed")
        parameters = (*map(Address, names), optional("turns", turns), strides(o), strides(do), self._rows())
        return self._launch("rows", "attend_prepare", lse_log2.numel() // self._tile.part, 256, 0, parameters)

    def finish(self, summed: Tensor, dq: Tensor) -> Launch:
        """Return the launch that makes dq from the sums of `backward`."""
        blocks = summed.numel() // (self._tile.part * 64)
        parameters = (Address("summed"), Address("dq"), strides(dq), self._rows())
        return self._launch("rows", "attend_finish", blocks, 128, 0, parameters, overlaps=True)

    def backward(
        self, do: Tensor, lse_log2: Tensor, delta: Tensor, summed: Tensor, dk: Tensor, dv: Tensor,
        turns: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        """Return the launch that writes dk and dv, and adds dq / scale to `summed`.

        summed is (batch · heads, padded_q, padded d_head), float32, in a special order. lse_log2 and delta are
        (batch · heads, padded_q), as `attend_prepare` wrote them. With `turns` (self.turns), int32, each number of dq
        is summed in the order of the keys, the same in every run.
        """
        batch, heads, seq_q, d_head = self.q.shape
        heads_kv, seq_k = self.k.shape[1:3]
        depth, rows, keys = padded_d_head(d_head), self._tile.queries, self._tile.keys
        sizes = Sizes(
            seq_k=seq_k,
            heads=heads,
            group=heads // heads_kv,
            batch_heads_kv=batch * heads_kv,
            heads_in_l2=heads_together(self.q, self.k, self.causal or turns is not None, L2_BYTES[depth]),
            offset=self.offset,
            row_tiles=-(-seq_q // rows),
            padded_q=self.padded_q,
            scale=self.scale,
            scale_log2=self.scale * math.log2(math.e),
        )
        maps = (
            tensor_map("q", self.q, rows),
            tensor_map("k", self.k, keys),
            tensor_map("v", self.v, keys),
            tensor_map("do", do, rows),
            tensor_map("dk", dk, 16),
            tensor_map("dv", dv, 16),
        )
        parameters = (*maps, *map(Address, ("lse_log2", "delta", "summed")), optional("turns", turns), sizes)
        flags = {"CAUSAL": self.causal, "TAIL": seq_k % keys != 0, "DETERMINISTIC": turns is not None}
        macros = tuple((name, int(flag)) for name, flag in flags.items())
        blocks, shared_bytes = batch * heads_kv * -(-seq_k // keys), self._tile.shared_bytes
        return self._launch("backward", "attend_backward", blocks, 384, shared_bytes, parameters, macros, overlaps=True)

    def _launch(
        self, source: str, kernel: str, blocks: int, threads: int, shared_bytes: int, parameters: tuple[Any, ...],
        macros: Macros = (), overlaps: bool = False,
    ) -> Launch:  # fmt: skip
        d_head = self.q.shape[-1]
        columns = (("D", padded_d_head(d_head)), ("WIDTH", computed_d_head(d_head)))
        common = (*columns, ("FP16", int(self.q.dtype == torch.float16)))
        macros = (*common, *self._tile.macros, *macros)
        return Launch(source, kernel, macros, blocks, threads, shared_bytes, parameters, overlaps)

    def _rows(self) -> Rows:
        _, heads, seq_q, d_head = self.q.shape
        return Rows(heads, seq_q, self.padded_q, d_head, self.scale)


def optional(operand: str, tensor: Tensor | None) -> Address | ctypes.c_void_p:
    """Return the parameter for the address of an operand, 0 if it is absent."""
    return ctypes.c_void_p(None) if tensor is None else Address(operand)


def strides(tensor: Tensor) -> Strides:
    return Strides(*tensor.stride()[:3])
