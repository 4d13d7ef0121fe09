"""Times of single operators of a backward pass, and whether the tensors that autograd keeps for them are packed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
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


Products = Callable[[], Sequence[Tensor]]
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 15, 0.15  # of a measured computation


def compared_s(now: Products, other: Products, wanted: Sequence[Tensor]) -> tuple[float, float]:
    """Return the times of two ways to compute the same, with the gradients of `wanted`, measured in turns.

    The first is the lower quartile, since other programs make some rounds longer; the fastest give the ratio.
    """
    rounds = list[tuple[float, float]]()
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < MOST_ROUNDS and sum(map(sum, rounds)) < ROUNDS_S):
        rounds.append((_lasted_s(now, wanted), _lasted_s(other, wanted)))
    times_s, others_s = zip(*rounds, strict=True)
    usual_s = sorted(times_s)[len(times_s) // 4]
    return usual_s, usual_s * min(others_s) / min(times_s)


def _apart() -> AbstractContextManager[object]:
    """Return a context in which hooks of the program, as of a checkpoint around a call, see no tensor of these."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if is_packing() else nullcontext()


def _lasted_s(products: Products, wanted: Sequence[Tensor]) -> float:
    begin_s = time.perf_counter()
    with torch.enable_grad(), _apart():
        results = products()
        torch.autograd.grad(results, wanted, [torch.ones_like(each) for each in results])
    return time.perf_counter() - begin_s


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
