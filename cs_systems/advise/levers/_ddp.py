"""Options of DistributedDataParallel, changed when a script wraps its model, or in its text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from cs_systems.advise.edits import Edit, calls, in_calls, names_of
from cs_systems.advise.lever import Changes, Situation

CLASS = "DistributedDataParallel"
FLAG = "require_backward_grad_sync"  # read in each forward pass; no_sync() sets it, too
MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")


def unfit(situation: Situation) -> str | None:
    """Return why no option of DistributedDataParallel can be tried, or None."""
    if not situation.has_ranks:
        return "the script runs as one process"
    return None if calls(situation.source, class_names(situation.source)) else f"the script makes no {CLASS}"


def unless_set(keyword: str) -> Callable[[Situation], str | None]:
    """Return the check that refuses a script without DistributedDataParallel, or that sets this option."""

    def check(situation: Situation) -> str | None:
        return unfit(situation) or (f"the script sets {keyword} itself" if f"{keyword}=" in situation.source else None)

    return check


def leaves_out_averages(situation: Situation) -> bool:
    """Return whether a script averages no gradients in some of its passes."""
    return FLAG in situation.source or calls(situation.source, ("no_sync",))


def made_with(**options: Any) -> Callable[[], Changes]:
    """Return the hook that makes models with these options, whatever the script gives."""

    def hook() -> Changes:
        from torch.nn.parallel import DistributedDataParallel

        made, changes = DistributedDataParallel.__init__, Changes()

        @functools.wraps(made)
        def with_options(self: Any, *args: Any, **kwargs: Any) -> None:
            changes.made += 1
            made(self, *args, **kwargs | options)

        DistributedDataParallel.__init__ = with_options  # type: ignore[method-assign]
        return changes

    return hook


def patch(**options: Any) -> Edit:
    """Return the edit that adds these options to each call of DistributedDataParallel."""

    def edit(source: str) -> str | None:
        return in_calls(class_names(source), {name: str(value) for name, value in options.items()})(source)

    return edit


def class_names(source: str) -> Collection[str]:
    """Return the dotted names by which a source reaches the class."""
    return {CLASS}.union(*(names_of(source, module, CLASS) for module in MODULES))
