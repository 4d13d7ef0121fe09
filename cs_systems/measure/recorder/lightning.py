"""Callback that records the loop of Lightning's Trainer, without importing Lightning.

    from cs_systems.measure.recorder.lightning import RecorderCallback

    Trainer(callbacks=[RecorderCallback(out="runs/mine")]).fit(module, loader)

A step is one batch; with accumulated gradients, all batches of one update. Forward is any call that `training_step`
makes of the module itself or of a module in it.
"""

from __future__ import annotations

from typing import Any

from cs_systems.measure.recorder.recorder import Recorder
from cs_systems.measure.recorder.trainer import TrainerRecorder

_OTHER_HOOKS = ("on_", "setup", "teardown")


class RecorderCallback:
    """Recorder of the training; takes the options of `Recorder`. All other callback hooks do nothing."""

    state_key = "cs_systems.RecorderCallback"

    def __init__(self, out: Any, **options: Any) -> None:
        self._out, self._options = out, options
        self.recorder: Recorder | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_OTHER_HOOKS):
            return _nothing
        raise AttributeError(f"RecorderCallback has no attribute {name!r}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        wrapper = getattr(getattr(trainer, "strategy", None), "model", None)
        self.recorder = TrainerRecorder(
            pl_module, optimizers, step_method="training_step", wrapper=wrapper, out=self._out, **self._options
        )
        self.recorder.__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            if self.recorder._in_step:  # after -1 from the module, the Trainer does not report the end of the batch
                self.recorder._step_ends(failed=True)
            self.recorder.step().__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            self.recorder.step().__exit__(None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.recorder is not None:
            self.recorder.close(exception)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


def _nothing(*_: Any, **__: Any) -> None:
    return
