"""Levers applied inside the process of an unedited script: its text, and torch right after the script imports it."""

from __future__ import annotations

import ast
import functools
import random
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher
from types import CodeType
from typing import Any

from cs_systems.advise.edits import lines_of
from cs_systems.advise.lever import Lever
from cs_systems.core import plugins


def apply(levers: Iterable[str], seed: int) -> None:
    """Apply the hooks of these levers, and change every seed that the script sets by `seed`."""
    for name in levers:
        lever: Lever = plugins.get("levers", name)
        if lever.script is not None and lever.script.hook is not None:
            lever.script.hook()
    if seed:
        _shift_seeds(seed)


def compiled(levers: Iterable[str], source: str, file: str) -> CodeType:
    """Return the code of the script with those levers written into its text that no hook can apply.

    Its lines are numbered as in the file, so that recorded places and tracebacks stay true.
    """
    text = edited(levers, source)
    tree, numbers = ast.parse(text, file), _numbers(source, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno, end = numbers[node.lineno], numbers[node.end_lineno or node.lineno]
            node.end_lineno = end
    return compile(tree, file, "exec")


def edited(levers: Iterable[str], source: str) -> str:
    """Return the script's text with those levers written into it that no hook can apply."""
    for name in levers:
        script = plugins.get("levers", name).script
        if script is not None and script.hook is None and script.patch is not None:
            source = script.patch(source) or source
    return source


def _numbers(before: str, after: str) -> dict[int, int]:
    """Return the line before the edit for each line after it; an added line has the number of the next one."""
    a, b = lines_of(before), lines_of(after)
    found: dict[int, int] = {}
    for _, first, last, new, new_last in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for number in range(new, new_last):
            found[number + 1] = min(first + number - new, max(first, last - 1), len(a) - 1) + 1
    return found


def _shift_seeds(by: int) -> None:
    import torch

    torch.manual_seed(by)
    owners: list[tuple[Any, str]] = [(torch, "manual_seed"), (torch.cuda, "manual_seed_all"), (random, "seed")]
    if "numpy" in sys.modules:
        owners.append((sys.modules["numpy"].random, "seed"))
    for owner, name in owners:
        setattr(owner, name, _shifted(getattr(owner, name), by))


def _shifted(function: Any, by: int) -> Any:
    @functools.wraps(function)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        first, *others = args or (None,)
        return function(first + by, *others, **kwargs) if isinstance(first, int) else function(*args, **kwargs)

    return seeded
