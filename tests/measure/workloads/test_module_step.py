"""Training step of a user's module, which a factory returns with its inputs, in every precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cs_systems
from cs_systems.cli._sweep import outcome
from cs_systems.config import Mode, Precision, RunConfig
from cs_systems.record import RunRecord

USER_CODE = """
import torch
from torch import nn

def model(): return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3))
def with_inputs(config, device): return model(), torch.arange(6)
def with_infinite_loss(config, device): return model(), (torch.arange(6),), lambda out: out.float().sum() + float("inf")
def with_loss(config, device): return model(), (torch.arange(6),), lambda out: out.float().sum() * float("nan")
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
    def forward(self, x, times): return {"y": self.fc(x) * times}
def dict_given(config, device): return Pair(), (torch.ones(1, 2), 3)
def dict_and_loss(config, device): return Pair(), (torch.ones(1, 2), 3), lambda out: out["y"].sum()
def alone(config, device): return model()
instance = model()
"""


@pytest.fixture
def measure(tmp_path: Path):  # type: ignore[no-untyped-def]
    source = tmp_path / "mine.py"
    source.write_text(USER_CODE)

    def run(name: str, **fields: object) -> RunRecord:
        config = RunConfig(workload=f"{source}:{name}", warmup=0, steps=2, device="cpu")
        return cs_systems.run(replace(config, **fields), in_process=True)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("precision", [p for p in Precision if p not in (Precision.TF32, Precision.FP8)])
def test_module_with_inputs_trains_in_every_precision(measure, precision: Precision) -> None:  # type: ignore[no-untyped-def]
    record = measure("with_inputs", precision=precision)
    assert (record.status, record.reason) == ("ok", None)
    assert record.measurement.phase_names() == ("forward", "loss", "backward", "optimizer")
    (ran,) = record.results["ran"]
    assert (ran["precision"], ran["optimizer"]) == (precision.value, "adamw_fused")
    assert 0 < ran["loss"] < 10
    assert set(record.frame()["precision"]) == {precision.value}


@pytest.mark.parametrize(
    ("mode", "phases"),
    [(Mode.FORWARD, ("forward",)), (Mode.FORWARD_BACKWARD, ("forward", "loss", "backward"))],
)
def test_mode_selects_the_phases(measure, mode: Mode, phases: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    record = measure("dict_and_loss", mode=mode)
    assert record.measurement.phase_names() == phases
    assert record.results["ran"][0]["optimizer"] is None


def test_loss_function_of_the_factory_is_used(measure) -> None:  # type: ignore[no-untyped-def]
    for name, message in (
        ("with_loss", "the loss is NaN, so that its times are left out [nan-loss]"),
        ("with_infinite_loss", "the loss is infinite,"),
    ):
        record = measure(name)
        assert not record.is_timing
        assert outcome(record).startswith(message)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "dict_given",
            "the model returned a dict without a tensor loss; put the labels into the batch, or give",
        ),
        ("alone", "returned a module without inputs; return (module, batch), or (module, batch, loss)"),
        ("instance", "is a module without inputs; name its batch as inputs path.py:name, or name a function"),
    ],
)
def test_missing_inputs_or_loss_are_named(measure, name: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    record = measure(name)
    assert record.status == "error"
    assert reason in record.reason


def test_tf32_without_gpu_is_unavailable(measure) -> None:  # type: ignore[no-untyped-def]
    record = measure("with_inputs", precision=Precision.TF32)
    assert record.status == "unavailable"
    assert "tf32 needs an NVIDIA GPU" in record.reason
