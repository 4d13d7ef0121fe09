"""Gradients averaged over ranks in the last micro-batch alone, where a script accumulates them over several."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cs_systems.advise.edits import OPTIMIZERS, above, all_calls, dotted, name_of, replaced
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers import _ddp

UNNAMED, COUNTER = "_", "micro_step"
GRAPH = "static_graph"
USUAL = {"optimizer", "optim", "opt"}  # names of optimizers that are made in another file
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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

    Its passes are counted by `range`, with the only update after the loop, or by a condition with `%` around the only
    update. Loops whose last pass may be another one are left out: with a break, another update, or a changed counter.
    """
    tree = ast.parse(source)
    models = _made(tree, all_calls(source, _ddp.class_names(source)))
    optimizers = _made(tree, all_calls(source, OPTIMIZERS)) | USUAL
    for loop, after in _loops(tree):
        own, deep = [*_own(loop.body)], [part for one in loop.body for part in ast.walk(one)]
        calls = [part for part in own if isinstance(part, ast.Call)]
        model = next((name for call in calls if (name := dotted(call.func)) in models), None)
        if model is None or not any(name_of(call) == "backward" for call in calls) or not _can_be_edited(loop, own):
            continue
        updates = [part for part in deep if _updates(part, optimizers)]
        later = any(_updates(part, optimizers) for one in after for part in ast.walk(one))
        is_last = _of_condition(own, deep, updates) if updates else _of_range(loop, deep)
        if is_last is not None and later is not bool(updates):
            yield Place(loop, model, is_last)


def _made(tree: ast.AST, calls: Iterable[ast.Call]) -> set[str]:
    """Return the names to which the results of these calls are assigned."""
    ends = {(call.lineno, call.col_offset) for call in calls}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    made = [node for node in assigned if (node.value.lineno, node.value.col_offset) in ends]
    return {dotted(target) for node in made for target in node.targets} - {""}


def _loops(tree: ast.AST) -> Iterator[tuple[ast.For, Sequence[ast.stmt]]]:
    """Yield each for loop with the statements after it in its block."""
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            for number, one in enumerate(block if isinstance(block, list) else []):
                if isinstance(one, ast.For):
                    yield one, block[number + 1 :]


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the parts of a loop's body, without the parts of loops and functions in it."""
    for part in body:
        yield part
        if not isinstance(part, (ast.For, ast.While, ast.Lambda, *DEFINITIONS)):
            yield from _own(ast.iter_child_nodes(part))


def _can_be_edited(loop: ast.For, own: Sequence[ast.AST]) -> bool:
    """Return whether a line fits above the first statement of a loop that ends after its last pass."""
    first = loop.body[0]
    return not (
        first.lineno == loop.lineno
        or isinstance(first, DEFINITIONS)
        or any(isinstance(part, ast.Break) for part in own)
    )


def _updates(part: ast.AST, optimizers: set[str]) -> bool:
    """Return whether a part of the code is a step of an optimizer, also by a gradient scaler."""
    if not isinstance(part, ast.Call) or name_of(part) != "step" or not isinstance(part.func, ast.Attribute):
        return False
    named = (dotted(part.func.value), *map(dotted, part.args))
    return any(name in optimizers or name.rpartition(".")[2] in optimizers for name in named)


def _of_range(loop: ast.For, deep: Sequence[ast.AST]) -> str | None:
    """Return the condition for a loop over range(COUNT) that clears no gradients; None for another one."""
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[])):
            if any(isinstance(part, ast.Call) and name_of(part) == "zero_grad" for part in deep):
                return None
            if not _is_constant(count, deep) or (name == UNNAMED and name in _names(deep, ast.Load)):
                return None
            is_plain = isinstance(count, ast.Name | ast.Attribute | ast.Constant | ast.Call)
            number = ast.unparse(count) if is_plain else f"({ast.unparse(count)})"
            return f"{COUNTER if name == UNNAMED else name} == {number} - 1"
    return None


def _of_condition(own: Sequence[ast.AST], deep: Sequence[ast.AST], updates: Sequence[ast.AST]) -> str | None:
    """Return the condition around all updates, if it is the same on all ranks and at the beginning of a pass."""
    around = [part for part in own if isinstance(part, ast.If) and any(_is_in(update, part.body) for update in updates)]
    if len(around) != 1 or not all(_is_in(update, around[0].body) for update in updates):
        return None
    test = around[0].test
    is_counted = any(isinstance(part, ast.Mod) for part in ast.walk(test))
    return ast.unparse(test) if is_counted and _is_constant(test, deep) else None


def _is_in(part: ast.AST, body: Iterable[ast.AST]) -> bool:
    return any(part is each for one in body for each in ast.walk(one))


def _is_constant(value: ast.expr, deep: Sequence[ast.AST]) -> bool:
    """Return whether an expression has no effect, and the same value on all ranks and at any place of a loop's body."""
    parts = [*ast.walk(value)]
    has_effect = any(isinstance(part, ast.NamedExpr | ast.Starred | ast.Await) for part in parts)
    calls = any(isinstance(part, ast.Call) and name_of(part) != "len" for part in parts)
    read = _names(parts, ast.Load)
    return not (has_effect or calls or read & _names(deep, ast.Store) or any("rank" in name for name in read))


def _names(parts: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Return the names, with their attributes, that are read or stored."""
    found = (part for part in parts if isinstance(part, ast.Name | ast.Attribute))
    return {dotted(part) for part in found if isinstance(part.ctx, context)} - {""}


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
