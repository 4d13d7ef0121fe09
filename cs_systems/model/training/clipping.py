"""Functions that limit the norm of gradients, by name: torch's, and a user's own, `path.py:name`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from cs_systems.core import plugins

KIND = "training.clipping"
FORM = "a function (parameters, max_norm) that changes their gradients in place"


def clip_function(name: str) -> Callable[[Iterable[nn.Parameter], float], Any]:
    """Return the function (parameters, max_norm) of that name.

    Raises ConfigError if a user's own takes other arguments.

    A user's own function gets a list, which it may read several times.
    """
    if not plugins.is_foreign(name):
        return nn.utils.clip_grad_norm_
    made = plugins.own_function(KIND, name, "parameters, max_norm", FORM)
    return lambda parameters, max_norm: made([*parameters], max_norm)
