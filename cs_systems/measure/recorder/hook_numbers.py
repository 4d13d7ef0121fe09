"""Growth of hooks on a loop's models, such as hooks that the loop registers again in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as modules

from cs_systems.analysis.comparison.loop_findings import HOOKS, HooksRow
from cs_systems.instrument.parameters import own_parameters
from cs_systems.measure.recorder.observers import FewSteps, Hidden
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.subject import Subject

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Hook(NamedTuple):
    """Hook of a module or parameter; newer hooks have higher numbers."""

    number: int
    module: str
    function: Any


class HookNumbers(FewSteps):
    """Numbers of hooks on the models' modules and parameters, counted after some steps."""

    runs_operators = False

    def __init__(self, subject: Subject, hidden: Hidden) -> None:
        super().__init__()
        self._subject, self._hidden = subject, hidden
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = 0
        self._counts: list[tuple[int, int]] = []

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._steps += 1
        if not self._counts and (self._subject.models or self._steps > 1):
            with self._hidden():
                self._count()

    def look_after_step(self) -> None:
        super().look_after_step()
        self._count()

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._count()

    def end(self) -> None:
        row = self._row(self._subject.models)
        self.keep(HOOKS, [row] if row else [])

    def _count(self) -> None:
        self._counts.append((self._steps, sum(1 for _ in _hooks_of(self._subject.models))))

    def _row(self, models: Iterable[nn.Module]) -> HooksRow | None:
        """Return the growth of the number of hooks; None unless it grows both before and after the middle."""
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
                for parameter in own_parameters(module):
                    yield from _in(parameter, _OF_PARAMETERS, where)


def _in(owner: Any, names: Iterable[str], where: str) -> Iterator[Hook]:
    for name in names:
        found = getattr(owner, name, None)
        for number, function in [*found.items()] if isinstance(found, Mapping) else ():
            yield Hook(number, where, function)
