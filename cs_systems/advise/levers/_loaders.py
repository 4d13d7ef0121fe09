"""Options of DataLoader, changed when a script makes one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

NAMES = ("DataLoader",)
WAITS = "data-input"  # code of the cause of a step that waits for data
POSITION = 5  # of num_workers among the arguments of a DataLoader


def has_workers(call: ast.Call) -> bool:
    """Return whether a call gives a number of workers, other than 0."""
    given = [each.value for each in call.keywords if each.arg == "num_workers"]
    return any(not isinstance(value, ast.Constant) or value.value != 0 for value in given)


def number_of(call: ast.Call) -> str:
    """Return the number of workers as the call writes it; "" without one."""
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == "num_workers"), "")


def made_with(change: Callable[[dict[str, Any]], bool]) -> Callable[[], bool]:
    """Call `change` with the keywords of each DataLoader that is made from now on; it returns whether it changed any.

    A loader of an IterableDataset is left as it is, because each worker would read all of it, unless it is divided
    among them. Returns the function that tells whether any was changed.
    """
    from torch.utils.data import DataLoader, IterableDataset

    made: Any = DataLoader.__init__
    changed: list[bool] = []

    @functools.wraps(made)
    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        if len(args) <= POSITION and not isinstance(dataset, IterableDataset):
            changed.append(change(kwargs))
        made(self, *args, **kwargs)

    DataLoader.__init__ = followed  # type: ignore[method-assign]
    return lambda: any(changed)
