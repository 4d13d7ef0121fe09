"""Launches of the Gluon FlashAttention kernels on tensors: descriptors, grids, options. Triton 3.6 or 3.7."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs_systems.model.kernels.gluon.backward import KEYS, OWNED, BackwardPlan, flash_backward_kernel
from cs_systems.model.kernels.gluon.configs import BACKWARD, BackwardOptions, ForwardOptions, forward_options
from cs_systems.model.kernels.gluon.forward import ROWS, ForwardPlan, flash_forward_kernel
from cs_systems.model.kernels.gluon.rows import flash_finish_kernel, flash_prepare_kernel
from cs_systems.model.kernels.layout import heads_together, padded_d_head, padded_rows
from cs_systems.model.kernels.triton.launch import Launch

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
L2_FOR_KEYS_BYTES = 32 << 20
"""Share of Hopper's 50 to 60 MB of L2 cache for the keys and values of the heads that are computed together."""


BLOCK = 64
"""Rows per program in the kernels before and after the backward."""


@dataclass(frozen=True)
class Problem:
    """One attention call on q (batch, heads, seq_q, d_head) and k, v (batch, heads_kv, seq_k, d_head).

    `takes_layout` accepts the tensors. Query i sees key j when not causal or j <= i + offset. scale > 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    offset: int
    scale: float
    multiprocessors: int

    @property
    def padded_q(self) -> int:
        """Length seq_q as `backward` requires it."""
        return padded_rows(self.q.shape[2])

    def forward(self, o: Tensor, lse: Tensor, options: ForwardOptions | None = None) -> Launch:
        """Return the launch that writes o and lse (batch, heads, seq_q), float32."""
        batch, heads, seq_q, d_head = self.q.shape
        heads_kv, seq_k = self.k.shape[1:3]
        depth, rows = padded_d_head(d_head), ROWS.value
        options = options or forward_options(d_head, self.causal, seq_q)
        row_tiles = -(-seq_q // (rows * options.consumers))
        tiles = batch * heads * row_tiles
        group = heads // heads_kv
        head_bytes = 2 * seq_k * depth * self.k.element_size()
        arguments = {
            "q": described(self.q, rows, depth),
            "k": described(self.k, options.block_n, depth),
            "v": described(self.v, options.block_n, depth),
            "o": described(o, rows, depth),
            "lse": lse,
            "seq_q": seq_q,
            "seq_k": seq_k,
            "heads": heads,
            "group": group,
            "batch_heads": batch * heads,
            "offset": self.offset,
            "row_tiles": row_tiles,
            "heads_in_l2": max(1, L2_FOR_KEYS_BYTES // head_bytes) * group,
            "scale_log2": self.scale * math.log2(math.e),
            "C": constants(
                ForwardPlan,
                consumers=options.consumers,
                block_n=options.block_n,
                d_head=depth,
                stages=options.stages,
                causal=self.causal,
                mask_first=self.causal or seq_k % options.block_n != 0,
                mask_more=self.causal and (self.offset % rows != 0 or (options.ping_pong and options.consumers == 3)),
                overlap=options.overlap,
                ping_pong=options.ping_pong,
            ),
        }
        programs = min(self.multiprocessors, tiles) if options.persistent else tiles
        return Launch(flash_forward_kernel, (programs, 1), arguments, {"num_warps": 4})

    def prepare(self, o: Tensor, lse: Tensor, do: Tensor, lse_log2: Tensor, delta: Tensor, summed: Tensor) -> Launch:
        """Return the launch that writes lse_log2 and delta, and zeros to summed, the inputs of `backward`."""
        arguments: dict[str, Any] = {"o": o, "do": do, "lse": lse}
        arguments |= {
            "lse_log2": lse_log2,
            "delta": delta,
            "summed": summed,
            "o_strides": o.stride(),
            "do_strides": do.stride(),
            "padded_q": lse_log2.shape[-1],
        }
        return self._rows(flash_prepare_kernel, arguments, lse_log2.shape[-1])

    def finish(self, summed: Tensor, dq: Tensor) -> Launch:
        """Return the launch that makes dq, in any layout, from the sums of `backward`."""
        arguments = {"summed": summed, "dq": dq, "dq_strides": dq.stride(), "scale": self.scale}
        return self._rows(flash_finish_kernel, arguments | {"padded_q": self.padded_q}, self.q.shape[2])

    def _rows(self, kernel: Any, arguments: dict[str, Any], rows: int) -> Launch:
        batch, heads, seq_q, d_head = self.q.shape
        depth, blocks = padded_d_head(d_head), -(-rows // BLOCK)
        arguments |= {"heads": heads, "seq_q": seq_q, "blocks": blocks, "D": d_head, "DEPTH": depth, "ROWS": BLOCK}
        programs = batch * heads * blocks * (depth // 64 if kernel is flash_finish_kernel else 1)
        return Launch(kernel, (programs, 1), arguments, {"num_warps": 4})

    def backward(
        self, do: Tensor, lse_log2: Tensor, delta: Tensor, summed: Tensor, dk: Tensor, dv: Tensor,
        options: BackwardOptions | None = None,
    ) -> Launch:  # fmt: skip
        """Return the launch that writes dk and dv, and adds dq / scale to `summed`.

        summed is (batch · heads, padded_q, padded d_head), float32, in an order of its own. lse_log2 and delta are
        (batch · heads, padded_q), as `prepare` wrote them.
        """
        batch, heads, seq_q, d_head = self.q.shape
        heads_kv, seq_k = self.k.shape[1:3]
        depth, keys = padded_d_head(d_head), KEYS.value
        options = options or BACKWARD[depth]
        rows = options.block_m
        arguments = {
            "q": described(self.q, rows, depth),
            "k": described(self.k, keys, depth),
            "v": described(self.v, keys, depth),
            "do": described(do, rows, depth),
            "lse_log2": described_row(lse_log2, rows),
            "delta": described_row(delta, rows),
            "summed": described_flat(summed),
            "dk": described(dk, keys, depth),
            "dv": described(dv, keys, depth),
            "seq_k": seq_k,
            "heads": heads,
            "group": heads // heads_kv,
            "batch_heads_kv": batch * heads_kv,
            "heads_in_l2": heads_together(self.q, self.k, self.causal, options.l2_bytes),
            "offset": self.offset,
            "row_tiles": -(-seq_q // rows),
            "padded_q": lse_log2.shape[-1],
            "scale": self.scale,
            "scale_log2": self.scale * math.log2(math.e),
            "C": constants(
                BackwardPlan,
                block_m=rows,
                d_head=depth,
                stages=options.stages,
                causal=self.causal,
                tail=seq_k % OWNED.value != 0,
                late=int(options.late),
            ),
        }
        grid = (batch * heads_kv * -(-seq_k // OWNED.value), 1)
        return Launch(flash_backward_kernel, grid, arguments, {"num_warps": 4})


def constants(plan: Any, **values: Any) -> Any:
    """Return a plan whose fields the compiler treats as constants."""
    return plan(**{name: gl.constexpr(value) for name, value in values.items()})


def described(tensor: Tensor, rows: int, depth: int) -> Any:
    """Return a descriptor with blocks of (1, 1, rows, depth) of a (batch, heads, seq, d_head) tensor.

    Reads past its ends give zeros.
    """
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, depth], TYPES[tensor.dtype])
    # A dimension of one element may have any stride, but TMA still requires a valid one.
    sizes = list(tensor.shape)
    strides = [stride if size > 1 else depth for size, stride in zip(sizes, tensor.stride(), strict=True)]
    return TensorDescriptor(tensor, sizes, [*strides[:-1], 1], [1, 1, rows, depth], layout)


def described_row(tensor: Tensor, rows: int) -> Any:
    """Return a descriptor with blocks of `rows` numbers of a contiguous tensor, read as one row."""
    layout = gl.NVMMASharedLayout.get_default_for([rows], TYPES[tensor.dtype])
    return TensorDescriptor(tensor, [tensor.numel()], [1], [rows], layout)


def described_flat(tensor: Tensor) -> Any:
    """Return a descriptor with blocks of 4096 numbers of a contiguous tensor."""
    layout = gl.NVMMASharedLayout(0, 8 * tensor.element_size(), 2)
    return TensorDescriptor(tensor, [tensor.numel() // 256, 256], [256, 1], [16, 256], layout)
