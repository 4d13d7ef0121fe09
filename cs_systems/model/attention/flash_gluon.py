"""FlashAttention-3's method on Hopper, in Gluon, the low level of Triton: TMA, wgmma, warp specialization.

Supports fp16 and bf16; d_head a multiple of 8 up to 128 (computed as 64 or 128); any lengths, also seq_q ≠ seq_k; both
alignments; grouped heads. Tensors whose strides TMA cannot read are copied.

The gradient of q is accumulated by atomics in float32, so its last bits may differ from run to run. Under
`torch.use_deterministic_algorithms` backward raises, or warns if torch is set to warn only. No second derivative.

Needs compute capability 9.0 and triton 3.6 or 3.7, since Gluon changes between releases. Under torch.compile the two
passes are custom operators, so a compiled model keeps one graph around them.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._hopper import HopperKernels, backend_of

TRITONS = ("3.6.", "3.7.")
INSTALL = "pip install 'triton>=3.6,<3.8'"


def _problem() -> Any:
    from cs_systems.model.kernels.gluon.launch import Problem

    return Problem


def _padded_queries(call: AttentionCall) -> int:
    from cs_systems.model.kernels.layout import PADDING

    return PADDING


def _wrong_triton() -> str | None:
    if find_spec("triton") is None:
        return f"triton is not installed; run {INSTALL} (Linux)"
    if not version("triton").startswith(TRITONS):
        return (
            f"triton {version('triton')} is not supported, because Gluon changes between releases; "
            f"run {INSTALL}, or use flash_triton"
        )
    return None


def describe() -> str | None:
    return None if _wrong_triton() else f"FlashAttention-3 in Gluon, Triton {version('triton')}"


# The lambda looks up _wrong_triton at each call, because the installed packages can change.
KERNELS = HopperKernels("flash_gluon", _problem, lambda: _wrong_triton(), _padded_queries, largest_d_head=128)
BACKEND = backend_of(KERNELS, describe)
