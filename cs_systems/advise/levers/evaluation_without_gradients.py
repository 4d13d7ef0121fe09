"""Evaluations under torch.no_grad(): their forward passes keep no activations and build no graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from cs_systems.advise.edits import name_of
from cs_systems.advise.lever import Lever, ScriptChange, Situation

DECORATOR = "@torch.no_grad()"
EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test|accuracy|metrics?)(_|$)")
TRAINS = {"backward", "step", "grad", "no_grad", "inference_mode", "enable_grad", "set_grad_enabled"}
MODEL_METHODS = ("forward", "training_step", "validation_step", "test_step")


def unfit(situation: Situation) -> str | None:
    return None if any(_evaluations(situation.source)) else "no function evaluates with gradients"


def patch(source: str) -> str | None:
    """Return the text with a decorator above each function that evaluates; None without such a function."""
    lines = source.splitlines(keepends=True)
    found = sorted(_evaluations(source), key=lambda one: -one.lineno)
    for function in found:
        lines.insert(function.lineno - 1, f"{' ' * function.col_offset}{DECORATOR}\n")
    return "".join(lines) if found else None


def _evaluations(source: str) -> Iterator[ast.FunctionDef]:
    """Yield functions named as an evaluation, or that call .eval(), and that neither train nor switch gradients off."""
    tree = ast.parse(source)
    if not any(isinstance(node, ast.Import) and any(one.name == "torch" for one in node.names) for node in tree.body):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name in MODEL_METHODS:
            continue
        parts = [part for each in (*node.body, *node.decorator_list) for part in ast.walk(each)]
        called = {name_of(part) for part in parts if isinstance(part, ast.Call)}
        switched = {part.attr for part in parts if isinstance(part, ast.Attribute)} & TRAINS
        if not (called & TRAINS or switched) and ("eval" in called or EVALUATES.search(node.name.lower())):
            yield node


LEVER = Lever(
    "",
    None,
    DECORATOR,
    0.1,
    ScriptChange("evaluations without gradients", unfit, patch=patch),
    remedies=("unused-graph", "periodic-steps", "rollouts"),
)
