"""Tests of the callbacks for Hugging Face's Trainer and, if it is installed, for Lightning's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.measure.recorder.lightning import RecorderCallback
from cs_systems.record import RunRecord, read_records
from tests.measure.recorder.loops import CLEAN, Ticks, batches, loader, loss_of, net


def only(folder: Path) -> RunRecord:
    (record,) = read_records(folder)[0]
    assert (record.status, record.reason) == ("ok", None)
    return record


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("calls_parts", [False, True])
def test_trainer_of_hugging_face_is_recorded(calls_parts: bool, tmp_path: Path) -> None:
    """Record a Trainer, also one with a loss that calls parts of the model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from cs_systems.measure.recorder import huggingface

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    data = [{"input_ids": (ids := torch.randint(32, (8,))), "labels": ids} for _ in range(64)]
    args = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = huggingface.RecorderCallback(tmp_path / "run", **CLEAN)
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])

    def loss_of_parts(model: Any, inputs: dict[str, Tensor], **_: Any) -> Tensor:
        logits = model.lm_head(model.transformer(inputs["input_ids"])[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    if calls_parts:
        trainer.compute_loss = loss_of_parts
    trainer.train()
    record = only(tmp_path / "run")
    assert record.config["workload"] == "loop GPT2LMHeadModel"
    assert record.measurement is not None
    assert len(record.measurement.timed) == 3
    assert {"input", "forward", "backward", "clip", "optimizer"} <= {*record.measurement.phase_names()}
    assert callback.recorder is not None
    assert callback.recorder.done


def test_trainer_of_lightning_is_recorded(tmp_path: Path) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = SimpleNamespace(optimizers=[optimizer])
    callback = RecorderCallback(tmp_path, **CLEAN)
    callback.setup(trainer, module, stage="fit")
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    for i, batch in enumerate(loader(6)):
        callback.on_train_batch_start(trainer, module, batch, i)
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
        callback.on_train_batch_end(trainer, module, None, batch, i)
    callback.on_train_end(trainer, module)
    record = only(tmp_path)
    assert record.results["ran"][0]["optimizer"] == "SGD"
    assert callback.state_dict() == {}
    with pytest.raises(AttributeError, match="has no attribute 'recorded'"):
        _ = callback.recorded


def trained(out: Path, batches: int, skipped: Collection[int] = ()) -> tuple[RecorderCallback, tuple[Any, Any]]:
    """Return a callback after these batches, without warm-up, with its Trainer and module.

    skipped: batches for which the module's on_train_batch_start returned -1; the Trainer reports no end of them.
    """
    hooked = SimpleNamespace(optimizers=[]), net()
    callback = RecorderCallback(out, **CLEAN | {"warmup": 0})
    callback.on_train_start(*hooked)
    for i, batch in enumerate(loader(batches)):
        callback.on_train_batch_start(*hooked, batch, i)
        if i not in skipped:
            loss_of(hooked[1], batch).backward()
            callback.on_train_batch_end(*hooked, None, batch, i)
    return callback, hooked


class Module(nn.Module):
    """Module like Lightning's, with a training step that calls its parts, or itself."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls, self.body, self.head = calls, net(), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.calls == "compiled parts" and not hasattr(self.body, "_orig_mod"):
            self.body = torch.compile(self.body, backend="aot_eager")  # type: ignore[assignment]
        outputs = self(batch[0]) if self.calls == "all" else self.forward(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1])


class Wrapper(nn.Module):
    """Module that a Lightning strategy wraps around another, to run its training step."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        def redirected(batch: tuple[Tensor, Tensor]) -> Tensor:
            del self.module.forward
            return self.module.training_step(batch)

        self.module.forward = redirected  # type: ignore[method-assign, assignment]
        return self.module(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("calls", ["parts", "all", "compiled parts", "compiled step"])
def test_calls_of_the_training_step_count_as_forward(calls: str, is_wrapped: bool, tmp_path: Path) -> None:
    """Count the phases by a clock of one second a reading: the forward of two parts lasts two."""
    module = Module(calls)
    if calls == "compiled step":  # as Lightning does for a compiled module
        module.training_step = torch.compile(module.training_step, backend="aot_eager")  # type: ignore[method-assign]
    called = Wrapper(module) if is_wrapped else lambda batch: module.training_step(batch)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = SimpleNamespace(optimizers=[optimizer], strategy=SimpleNamespace(model=called if is_wrapped else module))
    callback = RecorderCallback(tmp_path, clock=Ticks(), **CLEAN)
    callback.on_train_start(trainer, module)
    for i, batch in enumerate(batches(6)):
        callback.on_train_batch_start(trainer, module, batch, i)
        optimizer.zero_grad()
        called(batch).backward()
        optimizer.step()
        callback.on_train_batch_end(trainer, module, None, batch, i)
    callback.on_train_end(trainer, module)
    record = only(tmp_path)
    assert record.measurement is not None
    assert median(record.measurement.durations_s("forward")) == (2 if "parts" in calls else 1)
    assert median(record.measurement.durations_s("loss")) > 0
    assert "no-forward" not in [caveat.code for caveat in record.warnings]
    assert (record.results["ran"][0]["models"], record.results["ran"][0]["precision"]) == ("Module", "fp32")
    assert ("training_step" in vars(module)) == (calls == "compiled step")


def test_training_step_that_calls_no_module_has_no_forward(tmp_path: Path) -> None:
    callback, hooked = RecorderCallback(tmp_path, **CLEAN), (SimpleNamespace(optimizers=[]), net())
    callback.on_train_start(*hooked)
    for i, batch in enumerate(batches(6)):
        callback.on_train_batch_start(*hooked, batch, i)
        hooked[1][0].weight.sum().backward()
        callback.on_train_batch_end(*hooked, None, batch, i)
    callback.on_train_end(*hooked)
    assert "no-forward" in [caveat.code for caveat in only(tmp_path).warnings]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", [False, True])
def test_real_trainer_of_lightning_is_recorded(compiles: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Real(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = RecorderCallback(tmp_path, **CLEAN)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet)
    module = Real()
    trainer.fit(torch.compile(module, backend="aot_eager") if compiles else module, loader(6))
    record = only(tmp_path)
    assert record.measurement is not None
    assert median(record.measurement.durations_s("forward")) > 0
    assert record.config["workload"] == "loop Real"


def test_batch_that_lightning_skips_does_not_end_the_loop(tmp_path: Path) -> None:
    callback, hooked = trained(tmp_path, 4, skipped={1})
    callback.on_train_end(*hooked)
    measured = only(tmp_path).measurement
    assert measured is not None
    assert len(measured.timed) == 3


def test_failure_under_lightning_keeps_the_record(tmp_path: Path) -> None:
    callback, hooked = trained(tmp_path, 2)
    callback.on_exception(*hooked, ValueError("no more"))
    caveat = next(c for c in only(tmp_path).warnings if c.code == "few-samples")
    assert caveat.message == "2 of 3 steps were timed, because the loop ended after 2 with ValueError: no more"
