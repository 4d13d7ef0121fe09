"""Gradients averaged over ranks in the last micro-batch alone, where a script accumulates them over several."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from cs_systems.advise.edits import above, all_calls, dotted, name_of, replaced
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers import _ddp

UNNAMED, COUNTER = "_", "micro_step"
GRAPH = "static_graph"


class Place(NamedTuple):
    """Loop over micro-batches, the model that it calls, and the condition under which a pass is the last one."""

    loop: ast.For
    model: str
    is_last: str


def unfit(situation: Situation) -> str | None:
    if reason := _ddp.unfit(situation):
        return reason
    if _ddp.leaves_out_averages(situation):
        return "the script leaves out the average in some passes already"
    if GRAPH in situation.source or GRAPH in getattr(situation.cell, "levers", ()):
        return f"{GRAPH} needs the same work in each pass"
    found = any(next(places(text), None) for text in situation.texts)
    return None if found else "no loop was found that calls its model and backward several times for each update"


def patch(source: str) -> str | None:
    """Return the text with the flag set in each loop over micro-batches; None without such a loop."""
    found = sorted(places(source), key=lambda place: place.loop.lineno, reverse=True)
    for loop, model, is_last in found:
        source = _named(above(source, loop.body[0].lineno, f"{model}.{_ddp.FLAG} = {is_last}"), loop.target)
    return source if found else None


def places(source: str) -> Iterator[Place]:
    """Yield each loop that calls a DistributedDataParallel and backward several times for each update.

    Its passes are counted by `range`, with the update after the loop, or by a condition with `%` around the update.
    """
    tree, wraps = ast.parse(source), {call.end_lineno for call in all_calls(source, _ddp.names(source))}
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.value.end_lineno in wraps)
    models = {dotted(target) for node in assigned if isinstance(node.value, ast.Call) for target in node.targets}
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or loop.body[0].lineno == loop.lineno:
            continue
        parts = [*_own(loop.body)]
        called = [part for part in parts if isinstance(part, ast.Call)]
        names = {name_of(call) for call in called}
        model = next((name for call in called if (name := dotted(call.func)) in models), None)
        is_last = _of_condition(loop, parts) if "step" in names else _of_range(loop)
        if "backward" in names and model is not None and is_last is not None:
            yield Place(loop, model, is_last)


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the parts of a loop's body that run once for each of its passes: not those of loops and functions in it."""
    open_: list[ast.AST] = [*body]
    while open_:
        part = open_.pop()
        yield part
        if not isinstance(part, ast.For | ast.While | ast.FunctionDef | ast.Lambda):
            open_ += ast.iter_child_nodes(part)


def _of_range(loop: ast.For) -> str | None:
    """Return the condition for a loop over range(COUNT); None for another one."""
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[])):
            counts = f"({ast.unparse(count)})" if isinstance(count, ast.BinOp | ast.IfExp) else ast.unparse(count)
            return f"{COUNTER if name == UNNAMED else name} == {counts} - 1"
    return None


def _of_condition(loop: ast.For, parts: list[ast.AST]) -> str | None:
    """Return the condition around the update, if it holds the same at the beginning of a pass; None otherwise."""
    tests = [part.test for part in parts if isinstance(part, ast.If) and _updates(part.body)]
    if len(tests) != 1 or not any(isinstance(part, ast.Mod) for part in ast.walk(tests[0])):
        return None
    stored = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    read = {part.id for part in ast.walk(tests[0]) if isinstance(part, ast.Name)}
    stored |= {dotted(part) for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)}
    read |= {dotted(part) for part in ast.walk(tests[0]) if isinstance(part, ast.Attribute)}
    has_calls = any(isinstance(part, ast.Call) and name_of(part) != "len" for part in ast.walk(tests[0]))
    return None if stored & read or has_calls else ast.unparse(tests[0])


def _updates(body: list[ast.stmt]) -> bool:
    return any(isinstance(part, ast.Call) and name_of(part) == "step" for one in body for part in ast.walk(one))


def _named(source: str, target: ast.expr) -> str:
    """Return the source with a name for the loop's counter, if it has none."""

    def text_of(node: ast.expr) -> str | None:
        is_it = isinstance(node, ast.Name) and (node.lineno, node.col_offset) == (target.lineno, target.col_offset)
        return COUNTER if is_it and getattr(node, "id", "") == UNNAMED else None

    return replaced(text_of)(source) or source


LEVER = Lever(
    "sums of gradients over ranks in another order",
    None,
    f"model.{_ddp.FLAG} = is_last_micro_batch",
    0.1,
    ScriptChange("gradients averaged in the last micro-batch alone", unfit, patch=patch),
    remedies=("gradient-accumulation",),
)
