"""Edits of a script by its syntax tree: lines after the imports, keywords in calls, lines before an optimizer."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping

OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "Adagrad", "NAdam", "RAdam", "RMSprop", "Adamax", "Adadelta"})
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


def in_calls(names: Collection[str], keywords: Mapping[str, str], unless: Collection[str] = ()) -> Edit:
    """Return the edit that adds keywords to calls of these names, unless a call has one of these or of `unless`."""

    def edit(source: str) -> str | None:
        found = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and name_of(node) in names and _has_none(node, {*keywords, *unless})
        ]
        for node in sorted(found, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0), reverse=True):
            source = _with_keywords(source, node, keywords)
        return source if found else None

    return edit


def before_optimizer(line: str) -> Edit:
    """Return the edit that adds a line, with {model} in it, before each statement that makes a model's optimizer."""

    def edit(source: str) -> str | None:
        places = {statement.lineno: model for statement, model in optimizers(source)}
        for number in sorted(places, reverse=True):
            text = source.splitlines()[number - 1]
            indent = text[: len(text) - len(text.lstrip())]
            source = _inserted(source, number - 1, [indent + line.format(model=places[number])])
        return source if places else None

    return edit


def optimizers(source: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement that makes an optimizer of `NAME.parameters()`, with the name."""
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and name_of(call) in OPTIMIZERS:
                for part in ast.walk(call):
                    match part:
                        case ast.Attribute(value=ast.Name(id=model), attr="parameters" | "named_parameters"):
                            yield statement, model
                            break


def calls(source: str, names: Collection[str]) -> bool:
    """Return whether a script calls one of these names."""
    return any(isinstance(node, ast.Call) and name_of(node) in names for node in ast.walk(ast.parse(source)))


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name: `torch.optim.AdamW(…)` → AdamW."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _has_none(call: ast.Call, keywords: Collection[str]) -> bool:
    """Return whether a call has none of these keywords, and no ** that may have them."""
    return not any(each.arg is None or each.arg in keywords for each in call.keywords)


def _with_keywords(source: str, call: ast.Call, keywords: Mapping[str, str]) -> str:
    lines = source.splitlines(keepends=True)
    at = (call.end_lineno or 1) - 1
    line = lines[at].encode()
    end = (call.end_col_offset or 1) - 1  # position of the closing bracket
    before = "".join([*lines[:at], line[:end].decode()])
    text = ", ".join(f"{name}={value}" for name, value in keywords.items())
    kept = before.rstrip()
    separator = "" if kept.endswith("(") else " " if kept.endswith(",") else ", "
    spaces = before[len(kept) :]
    return "".join([kept, separator, text, spaces if "\n" in spaces else "", line[end:].decode(), *lines[at + 1 :]])


def _inserted(source: str, after: int, added: list[str]) -> str:
    """Return the source with lines added after line number `after`."""
    lines = source.splitlines(keepends=True)
    if after and lines[after - 1][-1:] != "\n":
        lines[after - 1] += "\n"
    return "".join([*lines[:after], *(f"{line}\n" for line in added), *lines[after:]])
