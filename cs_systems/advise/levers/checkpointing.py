"""Activation checkpointing: off where memory is free, which saves recomputation; on where memory is the goal."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from cs_systems.advise.edits import calls, chained, dotted, names_of, replaced, with_value
from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation
from cs_systems.config import Mode

MODULE = "torch.utils.checkpoint"
OF_CHECKPOINT = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if config.mode is Mode.FORWARD:
        return "forward alone keeps no activations"
    plans: tuple[str, ...]
    if situation.goal == "memory":
        plans = ("every:1", "selective:matmul")
    elif config.checkpoint == "none":
        return "nothing is recomputed"
    else:
        plans = ("none",)
    memory = {plan: situation.forecast(checkpoint=plan) for plan in plans if plan != config.checkpoint}
    if situation.goal == "memory":
        return [Option({"checkpoint": plan}, expected) for plan, expected in memory.items()]
    limit, needed = situation.memory_bytes, memory["none"]
    if limit and needed and needed.value > limit:
        return "without it the step does not fit into memory"
    return [Option({"checkpoint": "none"})]


def unfit(situation: Situation) -> str | None:
    if situation.record and not situation.ran.get("compiled_graphs"):  # a compiled graph recomputes unseen
        is_used = any(caveat.code == "recomputed" for caveat in situation.record.warnings)
    else:
        source = situation.source
        is_used = calls(source, names_of(source, MODULE, "checkpoint")) or "gradient_checkpointing" in source
    return None if is_used or "recomputation" in situation.causes else "the script recomputes nothing"


def hook() -> None:
    from torch.utils import checkpoint

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the function once, and keep its activations."""
        return function(*args, **{name: value for name, value in kwargs.items() if name not in OF_CHECKPOINT})

    checkpoint.checkpoint = called


def patch(source: str) -> str | None:
    """Return the text with the direct call for each torch.utils.checkpoint.checkpoint(function, …)."""
    names = names_of(source, MODULE, "checkpoint")

    def direct(node: ast.expr) -> str | None:
        if not isinstance(node, ast.Call) or dotted(node.func) not in names:
            return None
        if not node.args or isinstance(node.args[0], ast.Starred):
            return None
        kept = [each for each in node.keywords if each.arg not in OF_CHECKPOINT]
        return ast.unparse(ast.Call(node.args[0], node.args[1:], kept))

    return chained(replaced(direct), with_value("gradient_checkpointing", True, "False"))(source)


LEVER = Lever(
    "",
    options,
    "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    0.2,
    ScriptChange("activations kept instead of recomputed", unfit, hook=hook, patch=patch),
    remedies=("kept-activations", "recomputation", "out-of-memory"),
)
