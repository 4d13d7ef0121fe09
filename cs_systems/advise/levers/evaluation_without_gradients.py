"""Evaluations under torch.no_grad(): their forward passes keep no activations and build no graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from cs_systems.advise.edits import above, name_of
from cs_systems.advise.lever import Lever, ScriptChange, Situation

DECORATOR = "@torch.no_grad()"
EVALUATES = re.compile(r"(^|_)(eval|evaluate|evaluation|validate|validation|test|accuracy)(_|$)|^valid(_|$)")
READS = {"eval", "item", "tolist", "argmax", "topk", "sum", "mean"}  # what an evaluation without a loop calls
TRAINS = {"backward", "step", "grad", "no_grad", "inference_mode", "enable_grad", "set_grad_enabled"}
BUILDS = re.compile(r"__init__$|(get|build|create|make|load)_")  # what it makes is evaluated elsewhere
MODEL_METHODS = ("forward", "training_step", "validation_step", "test_step")


def unfit(situation: Situation) -> str | None:
    return None if any(any(_evaluations(text)) for text in situation.texts) else "no function evaluates with gradients"


def patch(source: str) -> str | None:
    """Return the text with a decorator above each function that evaluates; None without such a function."""
    numbers = [function.lineno for function in _evaluations(source)]
    for number in sorted(numbers, reverse=True):
        source = above(source, number, DECORATOR)
    return source if numbers else None


def _evaluations(source: str) -> Iterator[ast.FunctionDef]:
    """Yield functions named as an evaluation, or that call .eval() and loop.

    Not those that train or switch gradients, themselves or in a function of the script that they call.
    """
    tree = ast.parse(source)
    imports = [one for node in tree.body if isinstance(node, ast.Import) for one in node.names]
    if not any(one.name == "torch" and one.asname is None for one in imports):
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    uses, left = {function.name: _uses(function) for function in functions}, {*MODEL_METHODS, *_guarded(tree)}
    for function in functions:
        if _evaluates(function) and function.name not in left and not _reached(function.name, uses) & TRAINS:
            yield function


def _evaluates(function: ast.FunctionDef) -> bool:
    """Return whether a function seems to evaluate a model.

    Neither Python's text with the function eval, nor the construction of an object, nor a check of arguments.
    """
    parts = [*ast.walk(function)]
    calls = [part.func for part in parts if isinstance(part, ast.Call)]
    if BUILDS.match(function.name) or any(isinstance(each, ast.Name) and each.id == "eval" for each in calls):
        return False
    loops = any(isinstance(part, ast.For | ast.While) for part in parts)
    called = {name_of(part) for part in parts if isinstance(part, ast.Call)}
    if named := EVALUATES.search(function.name.lower()):
        return loops or bool(called & READS) or named[0] == function.name
    return loops and "eval" in called


def _guarded(tree: ast.Module) -> set[str]:
    """Return the names that are called inside `with torch.no_grad():` or torch.inference_mode() alone."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and _switches_off(node)]
    inside = [part for block in blocks for part in ast.walk(block) if isinstance(part, ast.Call)]
    ids = {id(call) for call in inside}
    others = {name_of(part) for part in ast.walk(tree) if isinstance(part, ast.Call) and id(part) not in ids}
    return {name_of(call) for call in inside} - others


def _switches_off(block: ast.With) -> bool:
    items = (item.context_expr for item in block.items)
    return any(isinstance(one, ast.Call) and name_of(one) in ("no_grad", "inference_mode") for one in items)


def _uses(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function calls, and its attributes that train or switch gradients."""
    parts = [part for each in (*function.body, *function.decorator_list) for part in ast.walk(each)]
    called = {name_of(part) for part in parts if isinstance(part, ast.Call)}
    return called | ({part.attr for part in parts if isinstance(part, ast.Attribute)} & TRAINS)


def _reached(name: str, uses: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a function uses, itself or in functions of the script that it calls."""
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
    saves_memory=True,
)
