"""Recorder of a script that was not edited: the steps are those of its optimizer, and its models are found.

Nothing happens before the first backward pass, which shows that there is a loop, and on which device. A step ends where
the optimizer that stepped first has stepped again: the other optimizers of an iteration belong to the same step. A
model is a module with parameters that no other module calls.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs_systems.recorder import hooks
from cs_systems.recorder.phases import FORWARD, OTHER, Tracker
from cs_systems.recorder.recorder import Recorder


class ScriptRecorder(Recorder):
    """Recorder that begins by itself and finds the steps; `options` are those of `Recorder`."""

    def __init__(self, name: str, **options: Any) -> None:
        self._name, self._options = name, options
        self._first: weakref.ref[Optimizer] | None = None
        self.records = []
        self._state = "new"
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward

        def first_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            autograd._engine_run_backward = engine
            self._begin(roots[0])
            return autograd._engine_run_backward(roots, *args, **kwargs)  # observed now

        autograd._engine_run_backward = first_backward

    def _begin(self, root: Any) -> None:
        """Begin to record, in place of entering a `with` block."""
        device = root.device if isinstance(root, torch.Tensor) else None
        super().__init__(name=self._name, device=device, **self._options)
        self.__enter__()

    def _install(self, tracker: Tracker) -> None:
        super()._install(tracker)
        tracker.idle = OTHER  # nothing tells where an iteration begins
        tracker.start()
        self._installed.callback(hooks.patch(nn.Module, "__call__", self._calls))
        self._observed = vars(nn.Module)["__call__"]
        handle = register_optimizer_step_post_hook(self._stepped)
        self._installed.callback(handle.remove)

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return FORWARD for the call of a module with parameters outside of any other."""
        tracker, module = self._tracker, args[0]
        if tracker is None or tracker.is_open(FORWARD) or next(module.parameters(), None) is None:
            return None
        models = self._subject.models
        if all(module is not known for known in models):
            models.append(module)  # type: ignore[attr-defined]
        return FORWARD

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        tracker = self._tracker
        if tracker is None or not tracker.observes():
            return
        if vars(nn.Module)["__call__"] is not self._observed:  # torch.fx puts its own function back after tracing
            nn.Module.__call__ = self._observed  # type: ignore[method-assign]
        if self._first is None:
            self._first = weakref.ref(optimizer)
        known = self._subject.optimizers
        if all(optimizer is not each for each in known):
            known.append(optimizer)  # type: ignore[attr-defined]
        if self._first() is optimizer:
            self._count += 1
            self._take(tracker)

    def _complete(self, tracker: Tracker) -> None:
        """End the stage at the next phase: hooks cannot be removed from inside of one."""
        tracker.before_next = lambda: self._next_stage(tracker)
