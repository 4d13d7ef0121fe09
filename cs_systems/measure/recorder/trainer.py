"""Recorder for the callback of a Trainer, which runs the loop; forward may be a call below the Trainer's model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from cs_systems.instrument.parameters import first_parameter
from cs_systems.measure.recorder import hooks
from cs_systems.measure.recorder.phases import BACKWARD, FORWARD
from cs_systems.measure.recorder.recorder import Recorder
from cs_systems.measure.recorder.tracker import Tracker


class TrainerRecorder(Recorder):
    """Recorder in which forward is any outermost call of a module with parameters.

    Args:
        model: the Trainer's model, which the Trainer may call or not.
        step_method: the name of the model's method that runs a step, if the Trainer calls that and not the model.
        wrapper: the module, if any, that is called with the model to run this method.
        options: the options of `Recorder`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        step_method: str | None = None,
        wrapper: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        self._step_method = step_method
        self._wrapper = None if wrapper is model else wrapper
        self._model_runs_step = False  # the wrapper makes the next call of the model

    def _called(self) -> Sequence[nn.Module]:
        return ()

    def _install(self, tracker: Tracker) -> None:
        super()._install(tracker)
        (model,) = self._subject.models
        if self._step_method in vars(model):  # compiled as a whole, so modules inside are not seen
            self._installed.add(partial(hooks.patch, model, self._step_method, lambda *_: FORWARD))
        self._installed.add(partial(hooks.patch_call, self._calls))

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return FORWARD for the outermost call of a module that computes."""
        tracker, module = self._tracker, args[0]
        if tracker is None or tracker.is_open(FORWARD, BACKWARD):
            return None
        if module is self._wrapper and not hasattr(module, "_orig_mod"):
            self._model_runs_step = True
            return None
        if self._model_runs_step and module is self._subject.models[0]:
            self._model_runs_step = False
            return None
        return None if first_parameter(module) is None else FORWARD
