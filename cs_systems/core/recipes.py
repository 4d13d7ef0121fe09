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
        in_training: options that replace the others in a whole training step.
        needs_hopper: whether it runs on Hopper GPUs only.
    """

    summary: str
    options: Mapping[str, Any]
    in_training: Mapping[str, Any] = field(default_factory=dict)
    needs_hopper: bool = False

    def of(self, *, training: bool) -> dict[str, Any]:
        """Return the options of a whole training step, or of its first phases."""
        return {**self.options, **(self.in_training if training else {})}


FAST_PARTS = (
    *("fused_cross_entropy", "fused_embedding_gradient", "fused_feed_forward", "fused_rmsnorm", "fused_rotary"),
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
        in_training={"parts": (*FAST_PARTS, "fused_weight_update")},
        needs_hopper=True,
    ),
}


def of_hopper(config: Any, *, training: bool) -> str | None:
    """Return the recipe for Hopper GPUs whose options a cell's RunConfig has, all of them, or None."""
    for name, recipe in RECIPES.items():
        options = recipe.of(training=training)
        if recipe.needs_hopper and all(getattr(config, field) == value for field, value in options.items()):
            return name
    return None
