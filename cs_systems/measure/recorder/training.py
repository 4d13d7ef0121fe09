"""Observer of what a loop trains: weights that do not change, gradients that nobody uses, calls that repeat.

Most is read in a few warm-up steps and in some steps after the timed ones; the timed steps only count backward passes
under autograd's anomaly detection. An error here ends the looks, and not the recording.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison import loop_findings as found
from cs_systems.core.tables import Row
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import untraced
from cs_systems.machine.device import Device
from cs_systems.measure.recorder.calls import Calls
from cs_systems.measure.recorder.double import double_row
from cs_systems.measure.recorder.gradients import Gradients, Updates
from cs_systems.measure.recorder.weights import Hooks, Weights
from cs_systems.measure.workloads._batches import tensors_in

MOST_LOOKS = 10  # steps that are looked at in a row
Known = dict[int, tuple[str, Tensor]]  # parameters by their identity, with their names


def _as_guest(function: Callable[..., None]) -> Callable[..., None]:
    """Hide a method from the program's modes and profilers, and let an error in it end the looks for good."""

    @untraced
    @functools.wraps(function)
    def guest(self: Training, *args: Any) -> None:
        if self.failure is not None:
            return
        if torch._C._autograd._profiler_enabled():  # the program's, in which operators of ours would stand
            self.look(False)
            return
        with self._own_time():
            try:
                with self._unobserved(), hidden_from_modes(), torch.no_grad():
                    function(self, *args)
            except Exception as error:  # catch everything: nothing of the program may fail by it
                self.failure, self.is_looking = error, False

    return guest


class Training:
    """Observer of what a loop trains.

    Args:
        unobserved: returns a context in which the recorder counts nothing as the program's.
        own_time: returns a context for each look, whose time is not the loop's.
        models: returns the models that are known now.
        optimizers: returns the optimizers that are known now.

    Attributes:
        is_looking: the steps now are looked at.
        failure: an error of the observation itself, after which nothing is looked at.
    """

    def __init__(
        self,
        unobserved: Callable[[], AbstractContextManager[None]],
        own_time: Callable[[], AbstractContextManager[None]],
        models: Callable[[], Sequence[nn.Module]],
        optimizers: Callable[[], Iterable[Optimizer]],
    ) -> None:
        self._unobserved, self._own_time = unobserved, own_time
        self._models, self._optimizers = models, optimizers
        self.failure: Exception | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far: they were not part of the training."""
        self.is_looking = False
        self._gradients, self._calls, self._hooks = Gradients(), Calls(), Hooks()
        self._weights: Weights | None = None
        self._steps = self._looks = self._first_step = self._compared_steps = 0
        self._passes = self._anomalous = 0
        self._needs_input_gradients = False
        self.tables: dict[str, Sequence[Row]] = {}

    def step_ended(self) -> None:
        """Count a step, and look at the weights when the models are known."""
        self._steps += 1
        if self._weights is None and (self._models() or self._steps > 1):
            self._weights, self._first_step = Weights(()), self._steps
            self._look_at_weights()
        if self.is_looking:
            self._look_ended()

    def timing_begins(self) -> None:
        """Begin to count for the timed steps."""
        self._passes = self._anomalous = 0

    @_as_guest
    def timing_ended(self, shapes: Collection[tuple[int, ...]], device: Device) -> None:
        """Compare the weights, and keep what was counted in the timed steps.

        shapes: of the first inputs of the models' calls in a step.
        """
        self._hooks.count(self._steps, self._models())
        self._compared_steps = self._steps - self._first_step
        if self._weights is not None:
            self._weights.compare()
        if self._anomalous:
            self._keep(found.ANOMALY, [{"passes": self._passes, "with_detection": self._anomalous}])
        double = double_row(self._models(), shapes, device)
        self._keep(found.DOUBLE, [double] if double else [])

    def look(self, wanted: bool) -> None:
        """Begin or end to look at each step."""
        if wanted != self.is_looking:
            self.is_looking, self._looks = wanted, 0
            self._gradients.forget()
            self._calls.close()

    @_as_guest
    def _look_at_weights(self) -> None:
        self._weights = Weights([p for _, p in self._parameters().values()])
        self._hooks.count(self._steps, self._models())

    @_as_guest
    def _look_ended(self) -> None:
        self._calls.step_ends()
        self._hooks.count(self._steps, self._models())
        self._looks += 1
        if self._looks >= MOST_LOOKS:
            self.look(False)

    def backward_begins(self) -> None:
        """Count a backward pass, and look at the gradients before it if this step is looked at."""
        self._passes += 1
        self._anomalous += torch.is_anomaly_enabled()
        if self.is_looking:
            self._look_before_backward()

    @_as_guest
    def _look_before_backward(self) -> None:
        self._gradients.backward_begins(self._optimizers(), [p for _, p in self._parameters().values()])

    @_as_guest
    def backward_ends(self) -> None:
        """Look at the gradients after a backward pass."""
        self._gradients.backward_ends(is_for_inputs=self._needs_input_gradients)
        self._calls.passes += 1
        self._needs_input_gradients = False

    @_as_guest
    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Look at the gradients before an optimizer's step."""
        self._gradients.step_begins(optimizer)

    @_as_guest
    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Look at the gradients after an optimizer's step."""
        self._gradients.step_ends(optimizer)

    @_as_guest
    def step_was_skipped(self, optimizer: Optimizer) -> None:
        """Note a step that a GradScaler has skipped."""
        if self.is_looking:
            self._gradients.step_was_skipped(optimizer)

    def call_begins(self, arguments: Any) -> None:
        """Look at an outermost call of a model. arguments: the positional ones, the model first, and the named ones."""
        self._look_at_call(arguments, torch.is_grad_enabled())

    @_as_guest
    def _look_at_call(self, arguments: Any, is_recorded: bool) -> None:
        (model, *positional), named = arguments
        inputs = [*tensors_in(arguments)]
        self._needs_input_gradients |= is_recorded and any(t.is_leaf and t.requires_grad for t in inputs)
        is_known = is_recorded and isinstance(model, nn.Module)  # that of a compiled call is not given
        self._calls.begins(model, (positional, named) if is_known else None)

    @_as_guest
    def call_ends(self, result: Any) -> None:
        """Look at the result of an outermost call of a model."""
        self._calls.ends(result)

    def end(self) -> None:
        """Make the tables, while models and optimizers are still known."""
        self.look(False)
        self._conclude()

    @_as_guest
    def _conclude(self) -> None:
        rows = [
            self._updates(optimizer) for optimizer in dict.fromkeys((*self._optimizers(), *self._gradients.updates))
        ]
        self._keep(found.UPDATES, [row for row in rows if row["steps"] or row["compared"]])
        used, unused = self._gradients.used, self._gradients.unused
        if unused and not any(each.is_own for each in self._gradients.updates.values()):
            self._keep(found.UNUSED_PASSES, [{"passes": used + unused, "unused": unused}])
        self._keep(found.UNUSED_GRADIENTS, self._held_by_none())
        self._keep(found.REPEATED_CALLS, [*self._calls.repeated()])
        hooks = self._hooks.row(self._models())
        self._keep(found.HOOKS, [hooks] if hooks else [])
        self._gradients, self._calls = Gradients(), Calls()

    def _keep(self, table: Any, rows: Sequence[Any]) -> None:
        if rows:
            self.tables |= table.filled(rows)

    def _parameters(self) -> Known:
        """Return the parameters of all models, then those that only an optimizer holds."""
        known: Known = {}
        for model in self._models():
            for name, parameter in model.named_parameters():
                known.setdefault(id(parameter), (f"{type(model).__name__}.{name}", parameter))
        for optimizer in self._optimizers():
            for held in _held(optimizer):
                known.setdefault(id(held), (type(optimizer).__name__, held))
        return known

    def _updates(self, optimizer: Optimizer) -> found.UpdatesRow:
        of = self._gradients.updates.get(optimizer) or Updates(optimizer)
        parameters = _held(optimizer)
        changed = self._weights.changed if self._weights is not None else {}
        compared = [changed[id(p)] for p in parameters if id(p) in changed]
        dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters}
        return {
            "optimizer": type(optimizer).__name__,
            "parameters": len(parameters),
            "steps": of.steps,
            "again": of.again,
            "stale": of.stale,
            "cleared": of.cleared,
            "missing": of.missing,
            "zero": of.zero,
            "learning_rate": max((float(g["lr"]) for g in optimizer.param_groups if "lr" in g), default=None),
            "dtype": dtypes.pop() if len(dtypes) == 1 else None,
            "compared_steps": self._compared_steps,
            "compared": len(compared),
            "changed": sum(compared),
        }

    def _held_by_none(self) -> list[found.UnusedGradientsRow]:
        """Return a row for the parameters with gradients that no optimizer holds, nor the program itself updates."""
        gradients, known = self._gradients, self._parameters()
        often = {which for which, passes in gradients.held_by_none.items() if 2 * passes > gradients.passes}
        if not often:
            return []
        optimizers = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
        held = {id(p): p for each in optimizers for p in _held(each)}
        changed = self._weights.changed if self._weights is not None else {}
        unheld = [each for which, each in known.items() if which in often - held.keys() and not changed.get(which)]
        elements, dtypes = _elements(p for _, p in unheld), {p.dtype for _, p in unheld}
        # The optimizer may hold copies in another precision, from which the program writes the weights.
        if not unheld or _elements(p for p in held.values() if p.dtype not in dtypes) >= elements:
            return []
        with_gradient = [p for which, (_, p) in known.items() if which in often or p.grad is not None]
        first = unheld[0][0]
        return [{"parameters": len(unheld), "elements": elements, "share": elements / _elements(with_gradient),
                 "first": first}]  # fmt: skip


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
