"""FlashAttention-3's method on Hopper, in CUDA C++: TMA, wgmma, warp specialization, explicit placement of every wait.

Supports fp16 and bf16; d_head a multiple of 8 up to 256 (computed as 64, 80, 96, 128 or 256); any lengths, also seq_q ≠
seq_k; both alignments; grouped heads. Tensors whose strides TMA cannot read are copied.

The gradient of q is accumulated in float32 in the order in which the blocks of keys finish, so its last bits may differ
from run to run. Under `torch.use_deterministic_algorithms` the blocks take turns in the order of the keys, and the
backward took 1.2 to 2.5 times as long on one H200. No second derivative.

Needs compute capability 9.0, and cuda-core with NVRTC, which compiles the kernels on first use, in seconds. Under
torch.compile the two passes are custom operators, so a compiled model keeps one graph around them.
"""

from __future__ import annotations

from typing import Any

from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._hopper import HopperKernels, backend_of
from cs_systems.model.attention._mask import causal_offset
from cs_systems.model.kernels.cuda import driver
from cs_systems.model.kernels.layout import computed_d_head


def _problem() -> Any:
    from cs_systems.model.kernels.cuda.launch import Problem

    return Problem


def _padded_queries(call: AttentionCall) -> int:
    from cs_systems.model.kernels.cuda.launch import backward_tile

    offset = causal_offset(call.seq_q, call.seq_k, call.align) if call.causal else None
    return backward_tile(call.d_head, call.seq_q, call.seq_k, offset).queries


def describe() -> str | None:
    return None if driver.missing() else "FlashAttention-3 in CUDA C++"


# The lambda looks up `missing` at each call, because the installed packages can change.
KERNELS = HopperKernels(
    "flash_cuda",
    _problem,
    lambda: driver.missing(),
    _padded_queries,
    largest_d_head=256,
    computed_d_head=computed_d_head,
    repeatable=True,
)
BACKEND = backend_of(KERNELS, describe)
