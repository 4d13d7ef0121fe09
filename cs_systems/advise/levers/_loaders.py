"""Options of DataLoader, changed when a script makes one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from cs_systems.advise.lever import Changes, Situation

NAMES = ("DataLoader",)
WAITS = "data-input"  # code of the cause of a step that waits for data
POSITION = 5  # of num_workers among the arguments of a DataLoader


def unfit_stream(situation: Situation) -> str | None:
    """Return why the script's number of workers stays as it is, if it names a dataset that is read in order."""
    if "IterableDataset" in situation.source:
        return "each worker would read the whole IterableDataset, unless it is divided among them"
    return None


def may_take_workers(call: ast.Call) -> bool:
    """Return whether a call cannot have its number of workers among its arguments without names."""
    return len(call.args) <= POSITION and not any(isinstance(each, ast.Starred) for each in call.args)


def has_workers(call: ast.Call) -> bool:
    """Return whether a call gives a number of workers, other than 0."""
    given = [each.value for each in call.keywords if each.arg == "num_workers"]
    return any(not isinstance(value, ast.Constant) or value.value != 0 for value in given)


def number_of(call: ast.Call) -> str:
    """Return the number of workers as the call writes it; "" without one."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == "num_workers"), "")


def made_with(change: Callable[[dict[str, Any]], str]) -> Changes:
    """Call `change` with the keywords of each DataLoader that is made from now on.

    It returns the code of the loader with what it changed, or "" if it changed nothing.

    A loader of an IterableDataset is left as it is, because each worker would read all of it, unless it is divided
    among them. Returns the changes, which count the loaders.
    """
    from torch.utils.data import DataLoader, IterableDataset

    made: Any = DataLoader.__init__
    changes = Changes()

    @functools.wraps(made)
    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        if isinstance(dataset, IterableDataset):
            changes.left += 1
        elif len(args) <= POSITION:
            line = change(kwargs)
            changes.made += bool(line)
            changes.lines |= {line: None} if line else {}
        made(self, *args, **kwargs)

    DataLoader.__init__ = followed  # type: ignore[method-assign]
    return changes
