"""Levers applied inside the process of an unedited script: its text, and torch right after the script imports it."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable
from typing import Any

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


def edited(levers: Iterable[str], source: str) -> str:
    """Return the script's text with those levers written into it that no hook can apply."""
    for name in levers:
        script = plugins.get("levers", name).script
        if script is not None and script.hook is None and script.patch is not None:
            source = script.patch(source) or source
    return source


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
