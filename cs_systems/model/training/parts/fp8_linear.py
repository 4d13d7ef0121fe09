"""Linear layers of the blocks in fp8, combinable with other parts: one scale per tensor, recomputed at each use.

The product, its error bounds and their source are the same as in `training.fp8`; lm_head stays in bfloat16, because fp8
would round the logits. Parameters keep their dtype, so that master weights and a graph of the step work with it. Unlike
the other parts it changes the result: outputs and gradients have the error of fp8.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cs_systems.config import Precision, RunConfig
from cs_systems.machine.device import resolve
from cs_systems.model.training import fp8
from cs_systems.model.training.parts import Part
from cs_systems.model.training.parts.fused_rotary import RotatingAttention, RotatingJoinedAttention
from cs_systems.model.training.parts.joined_projections import JoinedAttention, JoinedLinear, Product
from cs_systems.model.transformer import Linear


class Fp8Projection(Linear):
    """Linear with its product in fp8: (..., in) → (..., out)."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8.linear(x, self.weight)


class Fp8JoinedLinear(JoinedLinear):
    """JoinedLinear with its product in fp8: (..., in) → the output of each layer, (..., out), or all side by side."""

    def forward(self, x: Tensor, *, whole: bool = False, product: Product = fp8.linear) -> Any:
        return super().forward(x, whole=whole, product=product)


class RotatingFp8Attention(JoinedAttention):
    """JoinedAttention with its product in fp8, followed by the kernel of fused_rotary."""

    rotated_heads = RotatingAttention.rotated_heads


def unavailable(config: RunConfig) -> str | None:
    if config.precision is Precision.FP8:
        return "precision fp8 already replaces the linear layers; leave fp8_linear out of parts"
    model, rows = config.model, config.batch_size * config.tokens_per_sequence
    sizes = {"d_model": model.d_model, "d_ff": model.d_ff, "batch × context": rows}
    instead = "leave fp8_linear out of parts"  # because its cell may compute in bf16 already
    return fp8.misfit(sizes, instead) or fp8.unavailable(resolve(config.device), instead)


PART = Part(
    replaces="linear layers",
    in_blocks={
        Linear: Fp8Projection,
        JoinedLinear: Fp8JoinedLinear,
        RotatingJoinedAttention: RotatingFp8Attention,
    },
    unavailable=unavailable,
    computes_in="fp8",
    tolerance={"float64": 0.2, "float32": 0.2, "bfloat16": 0.2},
)
