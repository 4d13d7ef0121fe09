"""Evaluations under torch.no_grad(): their forward passes keep no activations and build no graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from cs_systems.advise.edits import above, name_of
from cs_systems.advise.lever import Lever, ScriptChange, Situation

DECORATOR = "@torch.no_grad()"
EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test|accuracy)(_|$)")
TRAINS = {"backward", "step", "grad", "no_grad", "inference_mode", "enable_grad", "set_grad_enabled"}
MODEL_METHODS = ("forward", "training_step", "validation_step", "test_step")


def unfit(situation: Situation) -> str | None:
    return None if any(_evaluations(situation.source)) else "no function evaluates with gradients"


def patch(source: str) -> str | None:
    """Return the text with a decorator above each function that evaluates; None without such a function."""
    numbers = [function.lineno for function in _evaluations(source)]
    for number in sorted(numbers, reverse=True):
        source = above(source, number, DECORATOR)
    return source if numbers else None


def _evaluations(source: str) -> Iterator[ast.FunctionDef]:
    """Yield functions named as an evaluation, or that call .eval().

    Not those that train or switch gradients, themselves or in a function of the script that they call.
    """
    tree = ast.parse(source)
    imports = [one for node in tree.body if isinstance(node, ast.Import) for one in node.names]
    if not any(one.name == "torch" and one.asname is None for one in imports):
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    uses = {function.name: _uses(function) for function in functions}
    for function in functions:
        called = uses[function.name]
        evaluates = "eval" in called or EVALUATES.search(function.name.lower())
        if evaluates and function.name not in MODEL_METHODS and not _reached(function.name, uses) & TRAINS:
            yield function


def _uses(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function calls, and those of its attributes that train or switch gradients."""
    parts = [part for each in (*function.body, *function.decorator_list) for part in ast.walk(each)]
    called = {name_of(part) for part in parts if isinstance(part, ast.Call)}
    return called | ({part.attr for part in parts if isinstance(part, ast.Attribute)} & TRAINS)


def _reached(name: str, uses: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a function uses, with those of the script's functions that it calls."""
    found, open_ = set[str](), [name]
    while open_:
        new = uses.get(open_.pop(), set()) - found
        found |= new
        open_ += new
    return found


LEVER = Lever(
    "",
    None,
    DECORATOR,
    0.1,
    ScriptChange("evaluations without gradients", unfit, patch=patch),
    remedies=("unused-graph", "periodic-steps", "rollouts"),
)
