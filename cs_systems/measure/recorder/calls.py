"""Calls of a model that repeat another call in the same step: the same input, so one result would be enough.

A call is compared by some elements of its tensors and by its other arguments. Hooks on the results show which of them
backward uses: two calls with dropout, both used, are not a repetition. Calls inside a transformation of torch.func
are left out, such as vmap: its tensors hide their elements.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import REPEATED_CALLS, RepeatedCallsRow
from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.workloads._batches import tensors_in

MOST_CALLS = 64  # most compared calls per step
MOST_VALUES = 256  # most compared elements of a tensor
MOST_PARTS = 100  # most compared parts of an argument
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Call:
    """Call of a model that autograd records: its step, its mode, and the number of backward passes before it."""

    model: str
    key: Hashable
    step: int
    passes: int
    trains: bool
    values: int | None = None  # hash of some elements of the result; None if they cannot be read
    is_used: bool = False  # whether a backward pass uses its result

    def gives_the_same(self, earlier: Call) -> bool:
        """Return whether both calls have the same result in one graph; micro-batches have separate backward passes."""
        is_of_graph = earlier.is_used and earlier.passes == self.passes
        return is_of_graph and earlier.key == self.key and earlier.values == self.values is not None


class Calls(FewSteps):
    """Observer of calls of models with gradients, in observed steps."""

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[Any] = []
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._calls: list[Call] = []
        self._open: list[Call | None] = []
        self._in_step = self._steps = self._passes = 0

    def look_at_call(self, call: ModelCall) -> None:
        if call.is_in_update:
            return
        (model, *positional), named = call.arguments
        is_plain = torch._C._functorch.peek_interpreter_stack() is None
        # a compiled call does not identify its model
        is_known = call.is_recorded and is_plain and isinstance(model, nn.Module)
        self._in_step += 1
        key = _key((positional, named)) if is_known and self._in_step <= MOST_CALLS else None
        self._open.append(
            None
            if key is None
            else Call(type(model).__name__, (id(model), key), self._steps, self._passes, model.training)
        )

    def look_at_result(self, result: Any, is_in_update: bool) -> None:
        if is_in_update:
            return
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

    def look_after_backward(self) -> None:
        self._passes += 1

    def look_after_step(self) -> None:
        self._steps += 1
        self._in_step = 0
        self._open.clear()
        super().look_after_step()

    def stop_looking(self) -> None:
        """Remove the hooks from the results; later calls belong to a separate step."""
        super().stop_looking()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self._steps += 1

    def end(self) -> None:
        self.keep(REPEATED_CALLS, [*self._repeated()])
        self._calls.clear()

    def _repeated(self) -> Iterator[RepeatedCallsRow]:
        """Yield a row for each class of models with repeated calls.

        A result that backward does not use may repeat a call of the previous step, such as a metric after the update.
        """
        steps, calls, used, evaluated = defaultdict[str, set[int]](set), Counter[str](), Counter[str](), Counter[str]()
        for step, (before, now) in enumerate(itertools.pairwise([[], *self._by_step()])):
            for position, call in enumerate(now):
                others = [each for each in (*before, *now) if each.is_used and each.key == call.key]
                if any(map(call.gives_the_same, now[:position])) if call.is_used else others:
                    steps[call.model].add(step)
                    calls[call.model] += 1
                    used[call.model] += call.is_used
                    is_trained = any(each.trains for each in others)
                    evaluated[call.model] += is_trained and not (call.is_used or call.trains)
        looked_at = len({call.step for call in self._calls})
        for model, found in steps.items():
            all_calls = sum(call.model == model for call in self._calls)
            yield {"model": model, "steps": len(found), "of_steps": looked_at, "calls": calls[model],
                   "used": used[model], "evaluated": evaluated[model], "of_calls": all_calls}  # fmt: skip

    def _by_step(self) -> list[list[Call]]:
        return [[call for call in self._calls if call.step == step] for step in range(self._steps)]


def _key(arguments: Any) -> Hashable | None:
    """Return a key that only equal arguments share; None if they cannot be distinguished from others."""
    parts = [*itertools.islice(_parts(arguments), MOST_PARTS)]
    return tuple(parts) if any(isinstance(part, _Part) and part.is_telling for part in parts) else None


class _Part(NamedTuple):
    """Tensor among the arguments.

    `is_telling` if its elements differ, so that an equal tensor is hardly a coincidence.
    """

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
