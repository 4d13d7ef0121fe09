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
        options: field of RunConfig → value.
        large: the fields that differ for models of at least `large_from` parameters.
    """

    summary: str
    options: Mapping[str, Any]
    large: Mapping[str, Any] = field(default_factory=dict)
    large_from: int = 0

    def of(self, parameters: int) -> dict[str, Any]:
        """Return the options for a model with that many parameters."""
        return {**self.options, **(self.large if parameters >= self.large_from else {})}


_PARTS = ("joined_projections", "fused_cross_entropy")

RECIPES = {
    "eager": Recipe("autocast and torch's FlashAttention-2", {"precision": "bf16", "attention": "sdpa_flash"}),
    "compiled": Recipe(
        "the same, each block compiled",
        {"precision": "bf16", "attention": "sdpa_flash", "compile": "default", "compile_scope": "block"},
    ),
    "fast": Recipe(
        "bf16 with exact master weights, joined products, own attention, one CUDA graph; Hopper only",
        {
            "precision": "bf16-pure",
            "attention": "flash_cuda",
            "compile": "default",
            "compile_scope": "block",
            "graph": "step",
            "optimizer": "adamw_master",
            "parts": _PARTS,
        },
        # Hides the update behind backward: 3% at 3.4 billion parameters, nothing below 1 billion.
        large={"parts": (*_PARTS, "update_in_backward")},
        large_from=2_000_000_000,
    ),
}
