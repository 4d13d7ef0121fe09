"""Levers applied inside the process of an unedited script: its text, and torch before the script uses it."""

from __future__ import annotations

import ast
import functools
import json
import os
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from cs_systems.advise.edits import lines_of
from cs_systems.advise.lever import Changes, Lever
from cs_systems.advise.sources import read
from cs_systems.core import plugins

UNUSED = "unused.json"  # levers that found nothing to change, in the folder of a process
PARTLY = "partly.json"  # levers that left objects as they are which their patch would change
APPLIED = "applied.json"  # levers with the code of the objects that they changed


def apply(levers: Iterable[str], seed: int) -> dict[str, Callable[[], bool]]:
    """Apply the hooks of these levers, and change every seed that the script sets by `seed`.

    Returns, for levers that may find nothing to change, the function that tells whether they changed anything so far.
    """
    told: dict[str, Callable[[], bool]] = {}
    for name in levers:
        lever: Lever = plugins.get("levers", name)
        if lever.script is not None and lever.script.hook is not None and (has_changed := lever.script.hook()):
            told[name] = has_changed
    if seed:
        _shift_seeds(seed)
    return told


def edit_modules(levers: Iterable[str], files: Collection[str]) -> None:
    """Make imports run these files with those levers written into their text that no hook can apply."""
    names, wanted, code_of = (*levers,), {*files}, SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        file = self.get_filename(fullname)
        if os.path.realpath(file) not in wanted:
            return code_of(self, fullname)
        return compiled(names, read(Path(file)), file)

    if any(_needs_text(name) for name in names):
        SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def leave_changes(told: Mapping[str, Callable[[], bool]], folder: Path) -> None:
    """Write the levers that found nothing to change, or left objects as they are, into a folder, if there are any.

    Write the code of the objects that were changed, too.
    """
    unused = [_with_reason(name, has_changed) for name, has_changed in told.items() if not has_changed()]
    partly = [name for name, changes in told.items() if isinstance(changes, Changes) and changes.left]
    code = {name: [*one.lines] for name, one in told.items() if isinstance(one, Changes) and one.lines}
    for file, found in ((UNUSED, unused), (PARTLY, partly), (APPLIED, code)):
        if found:
            (folder / file).write_text(json.dumps(found))


def _with_reason(name: str, has_changed: Callable[[], bool]) -> str:
    why = has_changed.why if isinstance(has_changed, Changes) else ""
    return f"{name} ({why})" if why else name


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
        if _needs_text(name):
            source = plugins.get("levers", name).script.patch(source) or source
    return source


def _needs_text(name: str) -> bool:
    """Return whether only a change of the text applies a lever."""
    script = plugins.get("levers", name).script
    return script is not None and script.hook is None and script.patch is not None


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
