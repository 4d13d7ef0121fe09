"""Calls of a model that repeat another one of the same step: the same input, where one result would do.

A call is compared by some elements of its tensors and by its other arguments. Hooks on the results tell which of them
backward uses: two calls with dropout, both used, are no repetition.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import RepeatedCallsRow
from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.workloads._batches import tensors_in

MOST_CALLS = 64  # of a step that are compared
MOST_VALUES = 256  # of a tensor
MOST_PARTS = 100  # of an argument
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Call:
    """Call of a model that autograd records, in a step of the loop, after some backward passes of it."""

    model: str
    key: Hashable
    step: int
    passes: int
    values: int | None = None  # hash of some elements of the result; None if they cannot be read
    is_used: bool = False  # by a backward pass

    def gives_the_same(self, earlier: Call) -> bool:
        """Return whether both have the same result, in one graph: micro-batches have a backward pass each."""
        is_of_graph = earlier.is_used and earlier.passes == self.passes
        return is_of_graph and earlier.key == self.key and earlier.values == self.values is not None


class Calls:
    """Observer of the calls of models with gradients, in steps that are looked at."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._open: list[Call | None] = []
        self._handles: list[Any] = []
        self._in_step = 0
        self.steps = self.passes = 0

    def begins(self, model: nn.Module, arguments: Any) -> None:
        """Note a call. arguments: None if autograd does not record it."""
        self._in_step += 1
        key = _key(arguments) if arguments is not None and self._in_step <= MOST_CALLS else None
        self._open.append(
            None if key is None else Call(type(model).__name__, (id(model), key), self.steps, self.passes)
        )

    def ends(self, result: Any) -> None:
        """Note the result of the call."""
        call = self._open.pop() if self._open else None
        output = next((tensor for tensor in tensors_in(result) if tensor.grad_fn is not None), None)
        if call is None or output is None or output.grad_fn is None:
            return
        values = some_values(output, MOST_VALUES)
        call.values = hash(values) if values else None
        self._calls.append(call)

        @untraced
        def is_used(*_: Any) -> None:
            call.is_used = True

        self._handles.append(output.grad_fn.register_hook(is_used))

    def step_ends(self) -> None:
        """Begin to compare the calls of the next step."""
        self.steps += 1
        self._in_step = 0
        self._open.clear()

    def close(self) -> None:
        """Remove the hooks from the results; calls that follow are in a step by themselves."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self.steps += 1

    def repeated(self) -> Iterator[RepeatedCallsRow]:
        """Yield a row for each class of models with repeated calls.

        A result that backward does not use may repeat a call of the step before, as a metric after the update does.
        """
        steps, calls, used = defaultdict[str, set[int]](set), Counter[str](), Counter[str]()
        for step, (before, now) in enumerate(itertools.pairwise([[], *self._by_step()])):
            for position, call in enumerate(now):
                others = [each for each in (*before, *now) if each.is_used and each.key == call.key]
                if any(map(call.gives_the_same, now[:position])) if call.is_used else others:
                    steps[call.model].add(step)
                    calls[call.model] += 1
                    used[call.model] += call.is_used
        looked_at = len({call.step for call in self._calls})
        for model, found in steps.items():
            all_calls = sum(call.model == model for call in self._calls)
            yield {"model": model, "steps": len(found), "of_steps": looked_at, "calls": calls[model],
                   "used": used[model], "of_calls": all_calls}  # fmt: skip

    def _by_step(self) -> list[list[Call]]:
        return [[call for call in self._calls if call.step == step] for step in range(self.steps)]


def _key(arguments: Any) -> Hashable | None:
    """Return a key that only equal arguments share; None where nothing tells them from others."""
    parts = [*itertools.islice(_parts(arguments), MOST_PARTS)]
    return tuple(parts) if any(isinstance(part, _Part) and part.is_telling for part in parts) else None


class _Part(NamedTuple):
    """Tensor among the arguments. is_telling: its elements differ, so that others are hardly the same by chance."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_telling: bool
    values: int


def _parts(value: Any) -> Iterator[Hashable]:
    if isinstance(value, Tensor):
        values = some_values(value, MOST_VALUES)
        yield _Part(tuple(value.shape), value.dtype, value.requires_grad, len({*values}) > 1, hash(values))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from _parts(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part)
    else:
        yield value if isinstance(value, _ATOMS) else id(value)
