"""Launches of the FlashAttention forward in CUDA C++ for Hopper (kernels/cuda/forward.cu) on tensors."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cs_systems.model.kernels.cuda.driver import Launch, Macros, tensor_map
from cs_systems.model.kernels.driver import Address, Counter
from cs_systems.model.kernels.layout import computed_d_head, padded_d_head

ROWS = 64
"""Queries that one warpgroup computes."""
WARP_ROWS = 16
WARPGROUP = 128
L2_FOR_KEYS_BYTES = 32 << 20


@dataclass(frozen=True)
class ForwardOptions:
    """Options of forward.cu.

    consumers: warpgroups of 64 queries. keys: per tile. *_stages: tiles in flight. o_in_q: o takes the place of q in
    shared memory.
    """

    consumers: int
    keys: int
    k_stages: int
    v_stages: int
    ping_pong: bool = False
    q_in_registers: bool = False
    o_in_q: bool = False

    def shared_bytes(self, depth: int) -> int:
        tiles = (1 if self.o_in_q else 2) * self.consumers * ROWS + (self.k_stages + self.v_stages) * self.keys
        barriers = 3 * self.consumers + 2 * self.k_stages + 2 * self.v_stages
        return 1024 + tiles * depth * 2 + 8 * barriers  # 1024 for the alignment of tiles

    def macros(self, d_head: int, causal: bool, seq_k: int, fp16: bool) -> Macros:
        return (
            ("D", padded_d_head(d_head)),
            ("WIDTH", computed_d_head(d_head)),
            ("CONSUMERS", self.consumers),
            ("KEYS", self.keys),
            ("K_STAGES", self.k_stages),
            ("V_STAGES", self.v_stages),
            ("CAUSAL", int(causal)),
            ("TAIL", int(not causal and seq_k % self.keys != 0)),
            ("FP16", int(fp16)),
            ("PING_PONG", int(self.ping_pong)),
            ("Q_IN_REGISTERS", int(self.q_in_registers)),
            ("O_IN_Q", int(self.o_in_q)),
        )


OPTIONS = {
    64: ForwardOptions(3, 128, 3, 3, ping_pong=True),
    128: ForwardOptions(2, 128, 3, 2, q_in_registers=True),
    256: ForwardOptions(2, 80, 2, 2, o_in_q=True),
}
"""Padded d_head → its fastest options on one H200."""


class Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("seq_q", "seq_k", "heads", "group", "batch_heads", "offset", "first_row")),
        *((name, ctypes.c_int) for name in ("row_tiles", "heads_in_l2")),
        ("scale_log2", ctypes.c_float),
    )


def first_row(seq_q: int, rows: int) -> int:
    """Return the row, at most 0, at which the tiles of a causal call begin.

    Causal tiles end with the queries, so that the partial tile is the shortest. The row may be up to 15 rows later,
    since each warp stores its 16 rows at once and TMA cannot store from a row below 0.
    """
    return -(-seq_q % rows // WARP_ROWS * WARP_ROWS)


def forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, *,
    causal: bool, offset: int, scale: float, multiprocessors: int,
) -> Launch:  # fmt: skip
    """Return the launch that writes o and lse (batch, heads, seq_q).

    lse is float32, natural logarithm, −inf where no key is seen. q, o (batch, heads, seq_q, d_head) and k, v (batch,
    heads_kv, seq_k, d_head) are accepted by `takes_layout`; only their layout matters. Query i sees key j if not causal
    or j <= i + offset; scale > 0.
    """
    batch, heads, seq_q, d_head = q.shape
    heads_kv, seq_k = k.shape[1:3]
    depth = padded_d_head(d_head)
    options = OPTIONS[depth]
    rows, group = ROWS * options.consumers, heads // heads_kv
    row_tiles = -(-seq_q // rows)
    sizes = Sizes(
        seq_q=seq_q,
        seq_k=seq_k,
        heads=heads,
        group=group,
        batch_heads=batch * heads,
        offset=offset,
        first_row=first_row(seq_q, rows) if causal else 0,
        row_tiles=row_tiles,
        heads_in_l2=max(1, L2_FOR_KEYS_BYTES // (2 * seq_k * depth * k.element_size())) * group,
        scale_log2=scale * math.log2(math.e),
    )
    maps = (
        tensor_map("q", q, ROWS),
        tensor_map("k", k, options.keys),
        tensor_map("v", v, options.keys),
        tensor_map("o", o, WARP_ROWS),
    )
    return Launch(
        "forward",
        "attend_forward",
        options.macros(d_head, causal, seq_k, q.dtype == torch.float16),
        min(batch * heads * row_tiles, multiprocessors),
        (options.consumers + 1) * WARPGROUP,
        options.shared_bytes(depth),
        (*maps, Address("lse"), Counter(), sizes),
    )
