"""Recipes of a training step: named sets of options, chosen from measurements.

`--recipe NAME` sets the options of a cell, and the record holds each of them. The measurements are in
profiles/training_step, taken on one H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Named set of options.

    Attributes:
        summary: one line for help and documentation.
        options: field of RunConfig → value.
        in_mode: mode of a step → options that replace the others there.
        needs_hopper: whether it runs on Hopper GPUs only.
    """

    summary: str
    options: Mapping[str, Any]
    in_mode: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs_hopper: bool = False

    def of(self, mode: str) -> dict[str, Any]:
        """Return the options for a mode, such as train-step."""
        return {**self.options, **self.in_mode.get(mode, {})}


_FORWARD_PARTS = "fused_embedding_gradient", "fused_feed_forward", "fused_rmsnorm", "fused_rotary", "joined_projections"
FAST_PARTS = ("fused_cross_entropy", *_FORWARD_PARTS)

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
        in_mode={"forward": {"parts": _FORWARD_PARTS}, "train-step": {"parts": (*FAST_PARTS, "fused_weight_update")}},
        needs_hopper=True,
    ),
}


def of_hopper(config: Any) -> str | None:
    """Return the recipe for Hopper GPUs with all options as in a cell's RunConfig, or None."""
    for name, recipe in RECIPES.items():
        options = recipe.of(config.mode)
        if recipe.needs_hopper and all(getattr(config, field) == value for field, value in options.items()):
            return name
    return None
