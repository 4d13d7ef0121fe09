"""Callback that records the loop of Hugging Face's Trainer.

    from cs_systems.measure.recorder.huggingface import RecorderCallback

    Trainer(model, args, train_dataset=data, callbacks=[RecorderCallback(out="runs/mine")]).train()

A step is one update of the Trainer, with all of its accumulated gradients. If training fails, the record is written
when the process ends.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from cs_systems.measure.recorder.recorder import Recorder
from cs_systems.measure.recorder.trainer import TrainerRecorder


class RecorderCallback(TrainerCallback):  # type: ignore[misc]
    """Recorder of the training; takes the options of `Recorder`."""

    def __init__(self, out: Any, **options: Any) -> None:
        self._out, self._options = out, options
        self.recorder: Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.recorder = TrainerRecorder(model, out=self._out, **self._options)
        self.recorder.__enter__()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.recorder is not None:
            self.recorder.step().__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.recorder is not None:
            self.recorder.step().__exit__(None)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()
