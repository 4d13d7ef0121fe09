"""`--clip`: the norm of all gradients together is limited before the update of the built-in training step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import cs_systems
from cs_systems.config import ConfigError, Mode, Phase, Precision, RunConfig, describe, preset
from cs_systems.machine import device as devices
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.report.frame import frame
from cs_systems.report.tables.records import render

CPU = devices.resolve("cpu")
PLAIN = RunConfig(model=preset("tiny", context_length=8), batch_size=2, device="cpu", warmup=0, steps=2)
CLIP = 0.01


def _after_backward(config: RunConfig) -> TrainStep:
    step = TrainStep(Cell(config), CPU)
    step.prepare()
    for name, run in step.step():
        if name in (Phase.CLIP, Phase.OPTIMIZER):
            break
        run()
    return step


def _norm(step: TrainStep) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in step.model.parameters() if p.grad is not None]))


def test_update_uses_gradients_clipped_to_the_norm() -> None:
    step, reference = TrainStep(Cell(replace(PLAIN, clip=CLIP)), CPU), _after_backward(PLAIN)
    assert _norm(reference) > 10 * CLIP
    step.prepare()
    names = [name for name, run in step.step() if run() is None]
    assert names == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER]
    assert _norm(step) == pytest.approx(CLIP, rel=1e-3)
    nn.utils.clip_grad_norm_(reference.model.parameters(), CLIP)
    reference._update()
    for ours, expected in zip(step.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_fp16_gradients_are_unscaled_before_their_norm() -> None:
    step = TrainStep(Cell(replace(PLAIN, clip=CLIP, precision=Precision.FP16)), CPU)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in step.model.parameters()]
    step.prepare()
    for _, run in step.step():
        run()
    assert _norm(step) == pytest.approx(CLIP, rel=1e-2)
    assert any(not torch.equal(p, old) for p, old in zip(step.model.parameters(), before, strict=True))


def test_norm_is_in_record_and_table() -> None:
    records = [cs_systems.run(replace(PLAIN, clip=clip), in_process=True) for clip in (None, CLIP)]
    assert [record.status for record in records] == ["ok", "ok"]
    assert [record.config["clip"] for record in records] == [None, CLIP]
    assert frame(records).groupby("record")["clip"].first().dropna().tolist() == [CLIP]
    assert "clip" in records[1].measurement.phase_names()  # type: ignore[union-attr]
    assert "clip norm" in render(records, "markdown")
    assert f"clip {CLIP}" in describe(records[1].run_config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": Mode.FORWARD}, "clip requires mode train-step, got forward; leave out clip"),
        (
            {"strategy": "zero1_flat", "world_size": 2},
            "clip is not supported by strategy zero1_flat, which divides the model or the optimizer's state; leave out",
        ),
        ({"strategy": "fsdp", "world_size": 2}, "clip is not supported by strategy fsdp, which divides the model"),
        (
            {"parts": ("update_in_backward",), "optimizer": "adamw_master", "precision": "bf16-pure"},
            "clip requires all gradients before the update, but update_in_backward updates in backward; leave out one",
        ),
    ],
)
def test_clip_that_cannot_be_applied_is_unavailable(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unavailable) as raised:
        TrainStep.preflight(Cell(replace(PLAIN, clip=CLIP, **change)), CPU)
    assert str(raised.value).startswith(reason)


def test_clipping_on_two_ranks_uses_their_averaged_gradients() -> None:
    record = cs_systems.run(replace(PLAIN, clip=CLIP, strategy="ddp_flat", world_size=2))
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    names = record.measurement.phase_names()
    assert names.index(Phase.CLIP) > names.index(Phase.SYNCHRONIZE), "the gradients of all ranks are averaged first"


def test_clip_below_or_at_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^clip is 0\.0; it must be above 0$"):
        RunConfig(clip=0)
