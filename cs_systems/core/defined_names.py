"""Names that a Python file defines, read from its text, so that a process without torch can check a name."""

from __future__ import annotations

import functools
import re
import tokenize
from collections.abc import Collection
from pathlib import Path

_DYNAMIC = {"globals", "locals", "vars", "exec", "modules"}  # they can define names at run time
_OF_THE_MODULE = "__getattr__"  # the same, but a class's own says nothing of the module
# a symbol table does not show the names that these statements define
_STATEMENTS = re.compile(r"\bsys\.modules|import\s*\*")


def defined_names(path: Path) -> Collection[str] | None:
    """Return the names that a module defines at its top level; None if only running it can show them.

    For a package, its modules are included.
    """
    try:
        names = _defined(path, path.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    if names is None or path.name != "__init__.py":
        return names
    return names | {inside.stem for inside in path.parent.iterdir()}


@functools.lru_cache(maxsize=64)  # called for each cell of a sweep
def _defined(path: Path, modified_ns: int) -> frozenset[str] | None:
    import symtable

    with tokenize.open(path) as stream:
        text = stream.read()
    module = symtable.symtable(text, str(path), "exec")
    scopes = [module]
    for scope in scopes:
        scopes += scope.get_children()
    if (
        _OF_THE_MODULE in module.get_identifiers()
        or _STATEMENTS.search(text)
        or any(_DYNAMIC.intersection(scope.get_identifiers()) for scope in scopes)
    ):
        return None
    return frozenset(
        symbol.get_name()
        for scope in scopes
        for symbol in scope.get_symbols()
        if symbol.is_declared_global() or (scope is module and symbol.is_local())
    )
