"""Models in DistributedDataParallel that a rank trains without it, so that no gradient is averaged over the ranks.

DistributedDataParallel averages the gradients of a pass only if its own forward was called before. A model whose passes
go through `ddp.module` is trained by each rank alone. A digest of its weights shows whether they differ between ranks.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import sys
import weakref
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_ranks import ReplicaReport
from cs_systems.measure.recorder.gradients import MOST_PARAMETERS, evenly, some_values
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.stacks import Line, function_of, is_own, place_of
from cs_systems.measure.recorder.subject import parameters_of


class _Replica:
    """Model inside DistributedDataParallel on this rank.

    Attributes:
        parameters: those with gradients that DistributedDataParallel would average.
        modules: the model and the modules in it, by `id`. codes: the code of their own methods.
        line: the line that calls the model with gradients.
        digest: of the weights before the first backward pass of this step. is_updated: an optimizer has updated it.
        steps: digests of the steps with an update, by the step's number.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = weakref.ref(model)
        self.name = type(model.module).__name__
        ignored = {*model.parameters_to_ignore}
        named = model.module.named_parameters()
        self.parameters = [weakref.ref(p) for name, p in named if p.requires_grad and name not in ignored]
        modules = [*model.module.modules()]
        self.modules = {id(module) for module in modules}
        classes = {kind for module in modules for kind in type(module).__mro__}
        self.codes = {code for kind in classes for each in vars(kind).values() if (code := _own_code(each))}
        self.ranks = sorted(dist.get_process_group_ranks(model.process_group))
        self.line: Line | None = None
        self.steps: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        self.digest: str | None = None
        self.is_updated = False

    def known(self) -> list[Tensor]:
        """Return the parameters that still exist."""
        return [p for reference in self.parameters if (p := reference()) is not None]

    def report(self) -> ReplicaReport:
        of = self.known()
        return {
            "model": self.name,
            "parameters": len(of),
            "size_bytes": sum(p.numel() * p.element_size() for p in of),
            "ranks": self.ranks,
            "steps": self.steps,
            "function": function_of(self.line) if self.line else None,
            "place": place_of(self.line) if self.line else None,
        }


class Replicas(FewSteps):
    """Observer of the models in DistributedDataParallel that are trained without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._replicas: list[_Replica] | None = None

    def called(self, model: DistributedDataParallel) -> None:
        """Note a call of DistributedDataParallel with gradients, which may be in a step without looks."""
        self._called.add(model)

    def reports(self) -> list[ReplicaReport]:
        """Return what is known of the models that were updated, though DistributedDataParallel was never called."""
        return [each.report() for each in self._of_others() if each.steps]

    def _of_others(self) -> list[_Replica]:
        return [each for each in self._replicas or () if each.model() not in (None, *self._called)]

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        for each in self._replicas or ():
            if each.digest is not None and each.is_updated:
                each.steps[str(number)] = each.digest
            each.forget()

    def step_failed(self) -> None:
        for each in self._replicas or ():
            each.forget()

    def stop_looking(self) -> None:
        super().stop_looking()
        self.step_failed()

    def look_at_call(self, call: ModelCall) -> None:
        if not call.is_recorded or call.is_in_update:
            return
        for each in self._of_others():
            if each.line is None and id(call.arguments[0][0]) in each.modules:
                each.line = _line_outside(each.codes)

    def look_before_backward(self, roots: Any) -> None:
        if self._replicas is None:
            of = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
            self._replicas = [_Replica(model) for model in of if model.process_group.size() > 1]
        for each in self._of_others():
            if each.digest is None:
                values = [some_values(p) for p in evenly(each.known(), MOST_PARAMETERS)]
                each.digest = hashlib.sha256(repr(values).encode()).hexdigest()[:16] if any(values) else None

    def look_before_update(self, optimizer: Optimizer) -> None:
        updated = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        for each in self._of_others():
            each.is_updated |= any(id(p) in updated for p in each.known())


def _own_code(member: Any) -> CodeType | None:
    """Return the code of a method that the program itself defines."""
    function = inspect.unwrap(member) if callable(member) else member
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) and is_own(code.co_filename) else None


def _line_outside(codes: set[CodeType]) -> Line | None:
    """Return the program's innermost line outside of these methods and what they call."""
    line, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            line = None
        elif line is None and is_own(frame.f_code.co_filename):
            line = frame.f_code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return line
