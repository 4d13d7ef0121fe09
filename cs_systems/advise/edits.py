"""Edits of a script by its syntax tree: added lines and keywords, replaced expressions, and removed statements."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple, TypeGuard

OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "Adagrad", "NAdam", "RAdam", "RMSprop", "Adamax", "Adadelta"})
OF_MODELS = ("configure_optimizers", "configure_optimizer", "setup_optimizers", "setup_optimizer")  # own methods
BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
Edit = Callable[[str], str | None]


def after_imports(*lines: str, needs: str = "") -> Edit:
    """Return the edit that adds lines below the imports; `needs` is a module that they use."""

    def edit(source: str) -> str | None:
        body = ast.parse(source).body
        imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        if not imports:
            return None
        named = {alias.asname or alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        added = [*([f"import {needs}"] if needs and needs not in named else []), *lines]
        return _inserted(source, imports[-1].end_lineno or 1, ["", *added])

    return edit


def in_calls(
    names: Collection[str],
    keywords: Mapping[str, str],
    unless: Collection[str] = (),
    where: Callable[[ast.Call], bool] = lambda call: True,
) -> Edit:
    """Return the edit that adds keywords to calls of these names, unless a call has one of these or of `unless`."""

    def edit(source: str) -> str | None:
        found = [each for each in all_calls(source, names) if _has_none(each, {*keywords, *unless}) and where(each)]
        for node in sorted(found, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0), reverse=True):
            source = _with_keywords(source, node, keywords)
        return source if found else None

    return edit


def before_optimizer(line: str) -> Edit:
    """Return the edit that adds a line, with {model} in it, before each statement that makes a model's optimizer."""

    def edit(source: str) -> str | None:
        places = {statement.lineno: model for statement, model in optimizers(source)}
        for number in sorted(places, reverse=True):
            source = above(source, number, line.format(model=places[number]))
        return source if places else None

    return edit


def replaced(text_of: Callable[[ast.expr], str | None]) -> Edit:
    """Return the edit that replaces each expression for which `text_of` returns a text, the innermost ones first."""

    def edit(source: str) -> str | None:
        changed = source
        while True:
            found = [
                (node, text)
                for node in ast.walk(ast.parse(changed))
                if isinstance(node, ast.expr) and (text := text_of(node)) is not None
            ]
            if not found:
                return changed if changed != source else None
            node, text = found[-1]
            changed = _with_text(changed, node, text)

    return edit


def replaced_argument(name: str, text: str) -> Edit:
    """Return the edit that replaces the only argument of each call of a dotted name."""

    def edit(source: str) -> str | None:
        values = [node.args[0] for node in all_calls(source, (name,)) if len(node.args) == 1]
        return _with_texts(source, values, text)

    return edit


def with_value(keyword: str, old: object, new: str, names: Collection[str] = ()) -> Edit:
    """Return the edit that changes a keyword's value in calls, of these names if any are given."""

    def text_of(value: ast.expr) -> str | None:
        return new if isinstance(value, ast.Constant) and value.value is old else None

    return valued(keyword, text_of, names)


def valued(keyword: str, text_of: Callable[[ast.expr], str | None], names: Collection[str] = ()) -> Edit:
    """Return the edit that replaces a keyword's values in calls, where `text_of` returns a text."""

    def edit(source: str) -> str | None:
        values = [each.value for node in all_calls(source, names) for each in node.keywords if each.arg == keyword]
        found = {value: text for value in values if (text := text_of(value)) is not None}
        for value in sorted(found, key=_start, reverse=True):
            source = _with_text(source, value, found[value])
        return source if found else None

    return edit


def without_calls(names: Collection[str]) -> Edit:
    """Return the edit that removes statements which only call one of these names, such as `gc.collect`."""

    def edit(source: str) -> str | None:
        found: list[tuple[ast.Expr, bool]] = []
        for parent in ast.walk(ast.parse(source)):
            for _, block in ast.iter_fields(parent):
                if isinstance(block, list):
                    removed = [one for one in block if _only_calls(one, names)]
                    found += [(one, len(removed) == len(block)) for one in removed]
        for statement, is_whole_block in sorted(found, key=lambda one: _start(one[0]), reverse=True):
            source = _without(source, statement, is_whole_block)
        return source if found else None

    return edit


def chained(*edits: Edit) -> Edit:
    """Return one edit that makes each of these edits that finds a place."""

    def edit(source: str) -> str | None:
        changed = source
        for one in edits:
            changed = one(changed) or changed
        return changed if changed != source else None

    return edit


def optimizers(source: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement that makes an optimizer of a model, with the model's name.

    It takes `NAME.parameters()`, or is a method of `NAME`, which the source also calls.
    """
    nodes = _nodes_of(source)
    called = {call.func.id for call in nodes.calls if isinstance(call.func, ast.Name)} - nodes.defined
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        for call in ast.walk(statement):
            match call:
                case ast.Call(func=ast.Attribute(ast.Name(model), name)) if name in OF_MODELS and model in called:
                    yield statement, model
                case ast.Call() if name_of(call) in OPTIMIZERS:
                    parts = (part for part in ast.walk(call) if isinstance(part, ast.Attribute))
                    given = (part for part in parts if part.attr in ("parameters", "named_parameters"))
                    if model := next((part.value.id for part in given if isinstance(part.value, ast.Name)), ""):
                        yield statement, model


def calls(source: str, names: Collection[str]) -> bool:
    """Return whether a script calls one of these names."""
    return bool(all_calls(source, names))


def names_of(source: str, module: str, function: str) -> set[str]:
    """Return the dotted names by which a script's imports reach a function of a module."""
    package, _, last = module.rpartition(".")
    found = {f"{module}.{function}"}
    for node in _nodes_of(source).imports:
        match node:
            case ast.ImportFrom(module=named) if named == module:
                found |= {each.asname or each.name for each in node.names if each.name == function}
            case ast.ImportFrom(module=named) if named == package:
                found |= {f"{each.asname or each.name}.{function}" for each in node.names if each.name == last}
            case ast.Import():
                found |= {f"{each.asname}.{function}" for each in node.names if each.name == module and each.asname}
    return found


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name: `torch.optim.AdamW(…)` → AdamW."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def all_calls(source: str, names: Collection[str] = ()) -> list[ast.Call]:
    """Return the calls of these dotted names, or of names that end with one; without names, all calls."""
    found = _nodes_of(source).calls
    return [node for node in found if not names or name_of(node) in names or dotted(node.func) in names]


class _Nodes(NamedTuple):
    """Imports and calls of a source, in the order of ast.walk, and the names of its classes, functions and imports."""

    imports: list[ast.Import | ast.ImportFrom]
    calls: list[ast.Call]
    defined: set[str]


@functools.lru_cache(maxsize=2)  # the text of a library takes seconds to parse, and every lever asks about it
def _nodes_of(source: str) -> _Nodes:
    found = _Nodes([], [], set())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found.calls.append(node)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
            found.defined.update(each.asname or each.name for each in node.names)
    return found


def _has_none(call: ast.Call, keywords: Collection[str]) -> bool:
    """Return whether a call has none of these keywords, and no ** that may have them."""
    return not any(each.arg is None or each.arg in keywords for each in call.keywords)


def _with_keywords(source: str, call: ast.Call, keywords: Mapping[str, str]) -> str:
    """Return the source with keywords after the call's last argument, before any comment behind it."""
    lines = lines_of(source)
    row = call.end_lineno or 1
    bracket = row, len(lines[row - 1].encode()[: (call.end_col_offset or 1) - 1].decode())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    *_, last = (each for each in takewhile(lambda one: one.start < bracket, tokens) if each.type not in BLANK)
    separator = {"(": "", ",": " "}.get(last.string, ", ")
    text = separator + ", ".join(f"{name}={value}" for name, value in keywords.items())
    at, column = last.end
    line = lines[at - 1]
    return "".join([*lines[: at - 1], line[:column], text, line[column:], *lines[at:]])


def dotted(node: ast.expr) -> str:
    """Return a name with its attributes, `torch.cuda.empty_cache`; "" for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


def _only_calls(node: object, names: Collection[str]) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in names


def _with_texts(source: str, nodes: Collection[ast.expr], text: str) -> str | None:
    """Return the source with each of these expressions replaced; None if there are none."""
    for node in sorted(nodes, key=_start, reverse=True):
        source = _with_text(source, node, text)
    return source if nodes else None


def _with_text(source: str, node: ast.expr, text: str) -> str:
    lines = lines_of(source)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset or 0 :].decode()
    return "".join([*lines[:first], before, text, after, *lines[last + 1 :]])


def _without(source: str, statement: ast.Expr, is_whole_block: bool) -> str:
    """Return the source without a statement; with `pass` instead if it shares its lines, or its block has no other."""
    lines = lines_of(source)
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    before = lines[first].encode()[: statement.col_offset].strip()
    after = lines[last - 1].encode()[statement.end_col_offset or 0 :].strip()
    if is_whole_block or before or (after and not after.startswith(b"#")):
        return _with_text(source, statement.value, "pass")
    return "".join([*lines[:first], *lines[last:]])


def lines_of(source: str) -> list[str]:
    """Return the lines as the parser counts them, with their ends; str.splitlines also splits at form feeds."""
    return io.StringIO(source).readlines()


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def above(source: str, number: int, line: str) -> str:
    """Return the source with a line above line `number`, indented like it."""
    text = lines_of(source)[number - 1]
    return _inserted(source, number - 1, [text[: len(text) - len(text.lstrip())] + line])


def _inserted(source: str, after: int, added: list[str]) -> str:
    """Return the source with lines added after line number `after`."""
    lines = lines_of(source)
    if after and lines[after - 1][-1:] != "\n":
        lines[after - 1] += "\n"
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    return "".join([*lines[:after], *(f"{line}{end}" for line in added), *lines[after:]])
