"""Names that a Python file defines, read from its text: a process without torch checks a name without an import."""

from __future__ import annotations

import ast
import functools
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

_DYNAMIC = {"globals", "locals", "vars", "exec", "modules", "*", "__getattr__"}  # they define names as the file runs
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def defined_names(path: Path) -> Collection[str] | None:
    """Return the names that a module defines at its top level; None where only running it can tell.

    The modules of a package are among its names.
    """
    try:
        names = _defined(path, path.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    if names is None or path.name != "__init__.py":
        return names
    return names | {inside.stem for inside in path.parent.iterdir()}


@functools.lru_cache(maxsize=64)  # each cell of a sweep asks
def _defined(path: Path, modified_ns: int) -> frozenset[str] | None:
    with tokenize.open(path) as stream:
        tree = ast.parse(stream.read())
    if not _DYNAMIC.isdisjoint(_written(tree)):
        return None
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
            continue
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def _written(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module uses, imports or gives to functions, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias | ast.FunctionDef):
            yield node.name
