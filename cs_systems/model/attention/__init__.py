"""Attention backends, one file each; a new file exports `BACKEND = AttentionBackend(...)`.

Every backend is `(q, k, v, *, causal=False, scale=None, align="upper_left") -> out` on tensors of shape (batch, heads,
seq, d_head). k and v may have fewer heads (grouped queries) and another length if the backend supports it. The output
of a query that sees no key is 0. A backend never falls back to another: for a call that it does not support,
`unavailable` returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cs_systems.core.shapes import AttentionCall as AttentionCall
from cs_systems.formulas.cost import FULL_MATRIX, AttentionAlgorithm

if TYPE_CHECKING:
    from torch import Tensor


TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
"""dtype name → largest relative error ‖out − ref‖ / ‖ref‖ against float64, for a backend that sums in float32."""


def always_available(call: AttentionCall) -> str | None:
    return None


@dataclass(frozen=True)
class AttentionBackend:
    """Implementation of attention with its properties.

    Attributes:
        function: the call itself, as in the module docstring.
        unavailable: returns the reason why a call is not supported, with the remedy, or None. The reason does not name
            the backend, because callers put the name in front of it.
        tolerance: in the form of TOLERANCE, for outputs and gradients; dtypes that it does not name are not supported.
        algorithm: returns the properties of the implementation's computation for a call, for executed FLOPs and
            predicted memory.
        rounds_scores: whether it keeps the scores in the dtype of q. The error of a score s is then up to u |s|, with u
            the dtype's unit roundoff, and its weight has this relative error: in bfloat16 (u = 2⁻⁸) 6% at a score of
            16, however exact the sums are. A row dominated by one weight has the same error. Must be a literal, like
            the next four attributes, because a process without torch reads them from the file.
        full_matrix: whether its scores are a whole matrix, computed by torch's own operations as in naive, instead of
            tiles.
        keeps: the properties of its algorithm that determine memory, if they differ from naive's (with `full_matrix`)
            or from `formulas.memory.fit.TILED`.
        torch_kernel: the kernel of torch's scaled_dot_product_attention that it forces: one of `formulas.sdpa.KERNELS`.
        one_operator: "always" if a call is one torch operator, so that a checkpoint can keep its output; "compiled" if
            this is so only in a compiled model.
        has_window: whether the function also takes `window=W`: a causal query sees only the last W keys up to its own.
        describe: returns the implementation that runs, with its version, for the record ("flash-attn 2.8.3
            (FlashAttention-2)").
    """

    function: Callable[..., Tensor]
    unavailable: Callable[[AttentionCall], str | None] = always_available
    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)
    algorithm: Callable[[AttentionCall], AttentionAlgorithm] = lambda call: FULL_MATRIX
    rounds_scores: bool = False
    full_matrix: bool = False
    keeps: Mapping[str, Any] = field(default_factory=dict)
    torch_kernel: str | None = None
    one_operator: Literal["always", "compiled"] | None = None
    has_window: bool = False
    describe: Callable[[], str | None] = lambda: None

    def refusal(self, call: AttentionCall) -> str | None:
        """Return the reason why the call is not supported, with the remedy, or None."""
        if call.window is not None and not self.has_window:
            return "a sliding window is not supported; use flash_triton, flex or naive, or leave out the window"
        return self.unavailable(call)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        align: str = "upper_left",
        window: int | None = None,
    ) -> Tensor:
        options = {} if window is None else {"window": window}
        return self.function(q, k, v, causal=causal, scale=scale, align=align, **options)
