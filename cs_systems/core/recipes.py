"""Recipes of a training step: named sets of options, chosen from measurements.

`--recipe NAME` gives the options of a cell their values, and the record holds each of them. The measurements are in
profiles/training_step, taken on one H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """One named set of options.

    Attributes:
        summary: one line for help and documentation.
        options: field of RunConfig → value.
        from_parameters: number of parameters → the options that replace the others from that size on, ascending.
    """

    summary: str
    options: Mapping[str, Any]
    from_parameters: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, parameters: int) -> dict[str, Any]:
        """Return the options for a model with that many parameters."""
        chosen = dict(self.options)
        for least, options in self.from_parameters.items():
            if parameters >= least:
                chosen |= options
        return chosen


FAST_PARTS = (
    *("fused_cross_entropy", "fused_embedding_gradient", "fused_rmsnorm", "fused_rotary", "fused_swiglu"),
    "joined_projections",
)

RECIPES = {
    "eager": Recipe("autocast and torch's FlashAttention-2", {"precision": "bf16", "attention": "sdpa_flash"}),
    "compiled": Recipe(
        "the same, each block compiled",
        {"precision": "bf16", "attention": "sdpa_flash", "compile": "default", "compile_scope": "block"},
    ),
    "fast": Recipe(
        "bf16 with exact master weights, own attention and fused kernels, compiled blocks, one CUDA graph; Hopper only",
        {
            "precision": "bf16-pure",
            "attention": "flash_cuda",
            "compile": "default",
            "compile_scope": "block",
            "graph": "step",
            "optimizer": "adamw_master",
            "parts": FAST_PARTS,
        },
        # An update inside backward gains 1 to 2% at 3.4 billion parameters, and nothing below 1 billion.
        from_parameters={2_000_000_000: {"parts": (*FAST_PARTS, "update_in_backward")}},
    ),
}
