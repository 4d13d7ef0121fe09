"""Weights and hooks of the models of a loop, read between steps to be compared later."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as modules

from cs_systems.analysis.comparison.loop_findings import HooksRow
from cs_systems.measure.recorder.gradients import evenly, some_values

MOST_PARAMETERS = 512  # that are compared
MOST_VALUES = 512  # of a parameter
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Weights:
    """Elements of parameters at one time.

    Attributes:
        changed: by the identity of a parameter that was compared, whether one of its elements has changed.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.changed: dict[int, bool] = {}
        self._before = [(weakref.ref(p), _digest(p)) for p in evenly(parameters, MOST_PARAMETERS)]

    def compare(self) -> None:
        """Compare the parameters that still exist."""
        for reference, before in self._before:
            if (parameter := reference()) is not None and before is not None:
                self.changed[id(parameter)] = _digest(parameter) != before


def _digest(parameter: Tensor) -> int | None:
    values = some_values(parameter, MOST_VALUES)
    return hash(values) if values else None


class Hook(NamedTuple):
    """Hook of a module or of a parameter; a newer one has a higher number."""

    number: int
    module: str
    function: Any


class Hooks:
    """Numbers of hooks on the modules and parameters of models, counted after some steps."""

    def __init__(self) -> None:
        self._counts: list[tuple[int, int]] = []

    def count(self, step: int, models: Iterable[nn.Module]) -> None:
        """Count the hooks after a step."""
        self._counts.append((step, sum(1 for _ in _hooks_of(models))))

    def row(self, models: Iterable[nn.Module]) -> HooksRow | None:
        """Return the growth of the number of hooks; None if it does not grow before and after the middle."""
        if len(self._counts) < 3:
            return None
        (begin, first), *between, (end, last) = self._counts
        middle, count = max(between, key=lambda each: min(each[0] - begin, end - each[0]))
        if not (begin < middle < end and first < count < last):
            return None
        newest = max(_hooks_of(models), key=lambda hook: hook.number)
        code = getattr(newest.function, "__code__", None)
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else None
        per_step = (last - first) / (end - begin)
        return {"steps": end - begin, "first": first, "last": last, "per_step": per_step, "module": newest.module,
                "place": place}  # fmt: skip


def _hooks_of(models: Iterable[nn.Module]) -> Iterator[Hook]:
    yield from _in(modules, ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"), "all")
    seen: set[int] = set()
    for model in models:
        for name, module in model.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                where = f"{type(model).__name__}.{name}".rstrip(".")
                yield from _in(module, _OF_MODULES, where)
                for parameter in module.parameters(recurse=False):
                    yield from _in(parameter, _OF_PARAMETERS, where)


def _in(owner: Any, names: Iterable[str], where: str) -> Iterator[Hook]:
    for name in names:
        found = getattr(owner, name, None)
        for number, function in [*found.items()] if isinstance(found, Mapping) else ():
            yield Hook(number, where, function)
