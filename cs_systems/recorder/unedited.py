"""Recorder of a script that was not edited: it finds the models and the optimizers, whose steps are those of the loop.

Nothing happens before the first backward pass, which shows that there is a loop, and on which device. A step ends where
the optimizer that stepped first has stepped again: the other optimizers of an iteration belong to the same step. Where
that one steps several times for a step of another, as a GAN's critic may, a caveat says that the steps differ. In a
script without an optimizer, which updates its parameters itself, a step ends with a backward pass. A model is a module
with parameters that no other module calls.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.instrument.compiler import Observation, is_tracing, passed_through, replaced, untraced
from cs_systems.record import RunRecord
from cs_systems.recorder import hooks
from cs_systems.recorder.phases import BACKWARD, FORWARD, OTHER, Tracker
from cs_systems.recorder.recorder import Recorder, Stage


class ScriptRecorder(Recorder):
    """Recorder that begins by itself and finds the steps; other options are those of `Recorder`.

    Args:
        name: the name of the loop in tables.
        stop: raise SystemExit(0) in the script after its last recorded step, at the same step on every rank.
        waits_for_nsys: keep the record of a profile of nsys in `records` alone, because its report is still to come.
    """

    _is_in_code = False

    def __init__(self, name: str, *, stop: bool = False, waits_for_nsys: bool = False, **options: Any) -> None:
        self._name, self._stop, self._waits_for_nsys, self._options = name, stop, waits_for_nsys, options
        self._first: weakref.ref[Optimizer] | None = None
        self._latest: weakref.ref[Optimizer] | None = None  # the one that stepped last, until a GradScaler returns
        # optimizer → steps found before its latest one
        self._stepped_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._most_between = 1  # steps found between two of another optimizer's
        self._found, self._finding = 0, Observation()
        self.records = []
        self._state = "new"
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward

        @passed_through
        def first_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tracing():  # torch.compile makes the backward of what it compiles
                return engine(roots, *args, **kwargs)
            wait_no_more()
            self._begin(roots[0])
            return autograd._engine_run_backward(roots, *args, **kwargs)  # observed now

        wait_no_more = replaced(autograd, "_engine_run_backward", first_backward)

    @untraced
    def _begin(self, root: Any) -> None:
        """Begin to record, in place of entering a `with` block."""
        device = root.device if isinstance(root, torch.Tensor) else None
        super().__init__(name=self._name, device=device, **self._options)
        self._last = self._all_steps if self._stop else None
        self.__enter__()

    def _install(self, tracker: Tracker) -> None:
        self._find_steps(self._finding if self._stop else self._installed)  # one that stops counts its steps until then
        super()._install(tracker)
        tracker.idle = OTHER  # nothing tells where an iteration begins
        tracker.start()
        self._installed.add(partial(hooks.patch, nn.Module, "__call__", self._calls))

    def _find_steps(self, finding: Observation) -> None:
        """Observe what ends a step."""
        if any(issubclass(type(each), Optimizer) for each in gc.get_objects()):
            finding.add(lambda: register_optimizer_step_post_hook(self._stepped).remove, is_guarded=True)
            finding.add(partial(hooks.after, GradScaler, "step", self._scaler_stepped))
        else:
            finding.add(partial(hooks.after, torch.autograd, "_engine_run_backward", self._backward_ended))

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return FORWARD for the call of a module with parameters outside of any other, and of a backward pass."""
        tracker, module = self._tracker, args[0]
        if tracker is None or tracker.is_open(FORWARD, BACKWARD) or next(module.parameters(), None) is None:
            return None
        models = self._subject.models
        if all(module is not known for known in models):
            models.append(module)  # type: ignore[attr-defined]
        return FORWARD

    @untraced
    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        tracker = self._tracker
        if tracker is not None:
            if not tracker.observes():
                return
            if self._first is None:
                self._first = weakref.ref(optimizer)
            known = self._subject.optimizers
            if all(optimizer is not each for each in known):
                known.append(optimizer)  # type: ignore[attr-defined]
            before, self._stepped_at[optimizer] = self._stepped_at.get(optimizer, self._found), self._found
            self._most_between = max(self._most_between, self._found - before)
        self._latest = weakref.ref(optimizer)
        if self._first is not None and self._first() is optimizer:
            self._iterated()

    def _scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Count a step that a GradScaler left out because a gradient was not finite."""
        if self._latest is None or self._latest() is not optimizer:
            self._stepped(optimizer)
        self._latest = None

    def _backward_ended(self, *_: Any, **__: Any) -> None:
        if self._tracker is None or self._tracker.observes():
            self._iterated()

    def _iterated(self) -> None:
        """Take the step that ends here. Raises SystemExit after the last one, if the script is to end."""
        if self._tracker is not None:
            self._count += 1
            self._take(self._tracker)
        self._found += 1
        if self._found == self._last:
            self._finding.close()  # the exception ends the loop over the hooks, so they can be removed
            raise SystemExit(0)

    def _complete(self, tracker: Tracker) -> None:
        """End the stage at the next phase, or at the end: hooks cannot be removed from inside of one."""
        tracker.before_next = lambda: self._next_stage(tracker)

    def close(self, error: BaseException | None = None) -> None:
        if self._state != "new" and self._tracker is not None:
            self._tracker.call_before_next()
        super().close(error)

    def _record(self, stage: Stage, ended: str | None, error: BaseException | None) -> RunRecord:
        record = super()._record(stage, ended, error)
        if record.status == "ok" and not self._subject.optimizers:
            what = "no optimizer stepped: a step is one backward pass"
            found = (*record.warnings, Caveat("no-optimizer", what, REMEDIES["no-optimizer"]))
            return replace(record, warnings=found)
        if record.status != "ok" or self._most_between == 1:
            return record
        what = f"one optimizer steps up to {self._most_between} times for a step of another, and each is a step here"
        kept = (caveat for caveat in record.warnings if caveat.code != "unstable")  # the kinds of steps differ
        return replace(record, warnings=(*kept, Caveat("mixed-steps", what, REMEDIES["mixed-steps"])))

    def _before_which(self, stage: Stage) -> str:
        return super()._before_which(stage) if self._found else "before an optimizer stepped"

    def _remedy(self, stage: Stage, error: BaseException | None) -> str:
        if self._found or isinstance(error, Exception):
            return super()._remedy(stage, error)
        return f"let it run longer, or, if it updates its parameters itself, {REMEDIES['no-optimizer']}"

    def _shorter(self, done: int) -> str:
        return f"--steps 1:{done}"

    def _without(self, stage: Stage) -> str:
        return (
            "leave out --snapshot and memory in --with" if stage.profiler == "memory_snapshot" else "leave out --with"
        )

    def _without_report(self, record: RunRecord) -> RunRecord:
        return record if self._waits_for_nsys else super()._without_report(record)

    def _append(self, record: RunRecord) -> None:
        if self._waits_for_nsys and (record.status, record.config["profiler"]) == ("ok", "nsys"):
            self.records.append(record)
        else:
            super()._append(record)
