"""Callbacks for the Trainer of Hugging Face, which really runs, and of Lightning, whose calls are imitated."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs_systems.record import RunRecord, read_records
from cs_systems.recorder.lightning import RecorderCallback
from tests.recorder.loops import CLEAN, loader, loss_of, net


def only(folder: Path) -> RunRecord:
    (record,) = read_records(folder)[0]
    assert (record.status, record.reason) == ("ok", None)
    return record


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_trainer_of_hugging_face_is_recorded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from cs_systems.recorder import huggingface

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    data = [{"input_ids": (ids := torch.randint(32, (8,))), "labels": ids} for _ in range(64)]
    args = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = huggingface.RecorderCallback(tmp_path / "run", **CLEAN)
    model = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
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
    """Return a callback after these batches, without warm-up, and the Trainer and module that it is called with.

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
