"""Error of each precision against float64, and learning in each precision."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import cs_systems
from cs_systems.config import ConfigError, ModelConfig, Precision, RunConfig
from cs_systems.core.plugins import holding
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.execute import build
from cs_systems.measure.workloads import Cell, Unavailable, precision_error
from cs_systems.measure.workloads.precision_error import PrecisionError, run_parts
from cs_systems.measure.workloads.training_curve import ALPHABET, SUCCESSORS, TrainingCurve
from cs_systems.record import Row, RunRecord
from cs_systems.report.figures import plot

MODEL = ModelConfig("custom", d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=80, context_length=8)
CONFIG = RunConfig(model=MODEL, batch_size=2, warmup=0, steps=1, device="cpu")
STEPS = 6
LEARNT, ENDS = 200, 20  # steps after which every precision has learnt; steps averaged at each end


def measured(workload: str, precision: Precision, **rest: Any) -> RunRecord:
    record = cs_systems.run(replace(CONFIG, workload=workload, precision=precision, **rest), in_process=True)
    assert record.status == "ok", record.reason
    return record


def errors(precision: Precision) -> list[Row]:
    return measured("precision_error", precision).results["precision_error"]


def test_errors_have_the_size_of_the_roundoff() -> None:
    (fp32,), (bf16,), (pure,), (_, fp16) = map(
        errors, (Precision.FP32, Precision.BF16, Precision.BF16_PURE, Precision.FP16)
    )
    for name in ("logits_error", "gradient_error", "worst_parameter_error"):
        assert 0 < fp32[name] < 1e-5
        assert 2**-13 < fp16[name] < bf16[name] < 2**-4, "fp16 has three bits more"
        assert 2**-10 < pure[name] < 2**-4
    assert {row["reference"] for row in (fp32, bf16, pure, fp16)} == {"float64"}
    assert fp32["underflow_share"] == fp32["nonfinite_share"] == 0
    assert (fp32["loss_scale"], fp16["loss_scale"]) == (None, 2**16)


def test_nan_gradient_counts_as_the_largest_error() -> None:
    for errors in ({"a": math.nan, "b": 2.0, "c": 1.0}, {"b": 2.0, "a": math.nan}, {"b": math.inf, "a": math.nan}):
        assert precision_error.farthest(errors) == "a"
    assert precision_error.farthest({"a": 1.0, "b": 2.0}) == "b"
    assert precision_error.farthest({}) is None


def test_underflow_without_loss_scale_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = precision_error.TrainStep._compute_loss

    def tiny(step: Any) -> None:
        loss(step)
        step.loss = step.loss * 2**-18

    monkeypatch.setattr(precision_error.TrainStep, "_compute_loss", tiny)
    without, scaled = errors(Precision.FP16)
    assert (without["loss_scale"], scaled["loss_scale"]) == (1, 2**16)
    assert without["underflow_share"] > 0.2
    assert scaled["underflow_share"] < without["underflow_share"] / 2


def test_loss_scale_is_halved_until_gradients_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_error, "FIRST_LOSS_SCALE", 2.0**30)
    _, scaled = errors(Precision.FP16)
    assert 1 < scaled["loss_scale"] < 2**30
    assert scaled["nonfinite_share"] == 0
    assert scaled["gradient_error"] < 2**-4


def test_fp32_is_the_reference_if_float64_does_not_fit() -> None:
    class Small(Device):
        def total_memory_bytes(self) -> int:
            return 1000

    small = Small(torch.device("cpu"))
    made = PrecisionError(Cell(replace(CONFIG, precision=Precision.BF16)), small)
    run_parts(made)
    assert made.tables()["precision_error"][0]["reference"] == "float32"
    with pytest.raises(Unavailable, match="float64 reference for fp32 does not fit in memory; use a smaller batch, c"):
        PrecisionError.preflight(Cell(CONFIG), small)
    with pytest.raises(Unavailable, match="tf32 needs an NVIDIA GPU"):
        PrecisionError.preflight(Cell(replace(CONFIG, precision=Precision.TF32)), resolve("cpu"))


@pytest.fixture(scope="module")
def curves() -> dict[Precision, RunRecord]:
    chosen = (Precision.FP32, Precision.BF16, Precision.FP16)
    return {precision: measured("training_curve", precision, steps=STEPS) for precision in chosen}


def test_all_precisions_train_on_equal_data_and_differ_by_rounding(
    curves: dict[Precision, RunRecord],
) -> None:
    tables = {precision: record.results["training_curve"] for precision, record in curves.items()}
    assert {len(rows) for rows in tables.values()} == {STEPS}
    firsts = {precision: rows[0]["loss"] for precision, rows in tables.items()}
    assert firsts[Precision.BF16] == pytest.approx(firsts[Precision.FP32], rel=1e-2)
    assert firsts[Precision.BF16] != firsts[Precision.FP32]
    assert tables[Precision.FP32][-1]["loss"] < firsts[Precision.FP32]
    assert {row["loss_scale"] for row in tables[Precision.FP16]} == {2**16}
    assert {row["loss_scale"] for row in tables[Precision.FP32]} == {None}
    assert "curves" in plot.kinds(list(curves.values()))
    assert "<svg" in plot.svg(list(curves.values()), "curves")


def test_training_data_can_be_learned() -> None:
    made = TrainingCurve(Cell(CONFIG), resolve("cpu"))
    followers: dict[int, set[int]] = {}
    for _ in range(100):
        for row in made.batch().tolist():
            for token, after in itertools.pairwise(row):
                followers.setdefault(token, set()).add(after)
    assert ALPHABET / 2 < len(followers) <= ALPHABET
    assert {len(found) for found in followers.values()} <= set(range(1, SUCCESSORS + 1))


def test_overflowing_step_is_skipped_and_training_recovers() -> None:
    made = TrainingCurve(Cell(replace(CONFIG, precision=Precision.FP16)), resolve("cpu"))
    made.train.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    before = made.train.model.lm_head.weight.clone()
    run_parts(made)
    assert made.rows[0] == {"step": 0, "loss": made.rows[0]["loss"], "loss_scale": 2.0**30, "skipped": True}
    assert torch.equal(made.train.model.lm_head.weight, before)
    while made.rows[-1]["skipped"]:
        run_parts(made)
    assert made.rows[-1]["loss_scale"] < 2.0**30
    assert not torch.equal(made.train.model.lm_head.weight, before)
    assert made.train.model.lm_head.weight.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_errors_and_learning_on_gpu(precision: Precision) -> None:
    for row in measured("precision_error", precision, device="cuda").results["precision_error"]:
        assert row["reference"] == "float64"
        most = {Precision.FP32: 1e-5, Precision.FP8: 2**-2}.get(precision, 2**-4)
        assert 0 < row["gradient_error"] < most
    rows = measured("training_curve", precision, device="cuda", steps=LEARNT).results["training_curve"]
    losses = [row["loss"] for row in rows]
    assert fmean(losses[-ENDS:]) < fmean(losses[:ENDS]), "single losses vary with the data of their step"


def _own(config: RunConfig, device: Any) -> Any:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    batches = DataLoader(torch.randn(16, 8), batch_size=config.batch_size, shuffle=True)  # type: ignore[arg-type]
    return layers, batches, lambda y: y.square().mean()


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.BF16_PURE])
def test_own_model_is_compared_on_the_same_batch_and_dropout(precision: Precision) -> None:
    config = RunConfig(workload="live own", precision=precision, profiler="precision_error", device="cpu")
    with holding(config.workload, _own):
        made = build(Cell(config), resolve("cpu"))
        run_parts(made)
    rows = made.tables()["precision_error"]  # type: ignore[attr-defined]
    assert len(rows) == 1 + (precision is Precision.FP16)
    for row in rows:
        assert 0 < row["logits_error"] < 0.02
        assert 0 < row["gradient_error"] < 0.02
        assert row["reference"] == "float32"


class Loss(nn.Linear):
    """Model that returns only its loss, as some do when labels are given."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).square().mean()}


def test_model_that_returns_its_loss_alone_has_no_outputs_to_compare() -> None:
    config = RunConfig(workload="live own", precision=Precision.BF16, profiler="precision_error", device="cpu")
    with holding(config.workload, lambda config, device: (Loss(8, 2), torch.ones(2, 8))):
        made = build(Cell(config), resolve("cpu"))
        with pytest.raises(ConfigError, match="returned a dict without a floating-point tensor of one or"):
            run_parts(made)


@dataclass
class Output:
    """Output of a model as a dataclass, which PyTorch's trees do not open."""

    logits: torch.Tensor


class InDataclass(nn.Linear):
    """Model that returns a dataclass."""

    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x))


def test_outputs_in_a_dataclass_are_compared() -> None:
    config = RunConfig(workload="live own", precision=Precision.BF16, profiler="precision_error", device="cpu")
    parts = (InDataclass(8, 2), torch.randn(16, 8), lambda out: out.logits.square().mean())
    with holding(config.workload, lambda config, device: parts):
        made = build(Cell(config), resolve("cpu"))
        run_parts(made)
    (row,) = made.tables()["precision_error"]  # type: ignore[attr-defined]
    assert 0 <= row["logits_error"] < 0.02


class Shifted(nn.Module):
    """Softmax of shifted scores: the shift's gradient is 0, so its computed value is only roundoff."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.shift = nn.Linear(8, 4), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scores(x) + self.shift).softmax(-1)


def test_parameter_without_influence_is_not_the_worst() -> None:
    config = RunConfig(workload="live own", precision=Precision.BF16, profiler="precision_error", device="cpu")
    with holding(config.workload, lambda config, device: (Shifted(), torch.randn(16, 8), lambda y: y.square().sum())):
        made = build(Cell(config), resolve("cpu"))
        run_parts(made)
    (row,) = made.tables()["precision_error"]  # type: ignore[attr-defined]
    assert str(row["worst_parameter"]).startswith("scores")
    assert 0 < row["worst_parameter_error"] < 0.1


@pytest.mark.parametrize(
    ("made", "fields", "reason"),
    [
        (
            _own,
            {"precision": Precision.FP32},
            "fp32 is the reference of the numerical errors, and is not compared with itself",
        ),
        (_own, {"attention": "flex"}, "does not use attention="),
        (lambda config, device: print, {}, "runs the step itself, so its outputs and gradients cannot be compared; "),
        (lambda: None, {}, "runs the step itself, so its outputs and gradients cannot be compared; name a function"),
    ],
)
def test_own_error_that_cannot_be_measured_has_a_reason(made: Any, fields: dict[str, Any], reason: str) -> None:
    config = RunConfig(workload="live own", **{"precision": Precision.BF16, "profiler": "precision_error", **fields})
    with holding(config.workload, made), pytest.raises(Unavailable, match=reason):
        run_parts(build(Cell(config), resolve("cpu")))
