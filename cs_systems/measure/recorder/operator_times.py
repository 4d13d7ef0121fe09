"""Times of single operators of a backward pass, and whether the tensors that autograd keeps for them are packed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from cs_systems.instrument.compiler import Undo, passed_through, replaced


class OperatorTimer:
    """Hooks that time one operator of a backward pass.

    Attributes:
        time_s: its time so far.
    """

    def __init__(self, node: Any) -> None:
        self.time_s, self._begin_s = 0.0, 0.0
        self._hooks = [node.register_prehook(self._begins), node.register_hook(self._ends)]

    def _begins(self, *_: Any) -> None:
        self._begin_s = time.perf_counter()

    def _ends(self, *_: Any) -> None:
        self.time_s += time.perf_counter() - self._begin_s

    def remove(self) -> None:
        for each in self._hooks:
            each.remove()


def is_packing() -> bool:
    """Return whether hooks pack the tensors that autograd keeps, perhaps since before an observer looked."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def packing_noted(note: Callable[[], object]) -> Undo:
    """Call a function whenever tensors that autograd keeps begin to be packed; return a function that ends this."""
    own = saved_tensors_hooks.__enter__

    @passed_through
    @functools.wraps(own)
    def entered(hooks: Any) -> Any:
        note()
        return own(hooks)

    return replaced(saved_tensors_hooks, "__enter__", entered)
