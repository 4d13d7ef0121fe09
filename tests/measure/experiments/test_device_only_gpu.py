"""The step on the device alone, on a GPU: between the sum of its kernels and its time with launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cs_systems
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.config import RunConfig, preset
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow
from cs_systems.record import RunRecord

pytestmark = pytest.mark.gpu
TINY = RunConfig(
    model=preset("tiny", num_layers=8), seq_len=32, batch_size=1, attention="sdpa_math", warmup=5, steps=20
)


def device_only(record: RunRecord) -> ExperimentRow:
    rows = [row for row in EXPERIMENTS.of(record.results) if row["experiment"] == "device-only"]
    assert len(rows) == 1, record.results.get("experiments")
    return rows[0]


def kernels_s(record: RunRecord) -> float:
    """Return the time of the kernels of a step in its trace."""
    return float(record.results["coverage"][0]["kernel_s"]) / record.results["coverage"][0]["steps"]


def test_launch_bound_step_lasts_between_its_kernels_and_its_launches(tmp_path: Path) -> None:
    timed = cs_systems.run(TINY, experiments_s=10)
    traced = cs_systems.run(TINY, profiler="kineto", steps=3, out=tmp_path)
    row, step_s = device_only(timed), timed.measurement.median_s() if timed.measurement else None
    assert row["skipped"] is None
    assert row["time_s"] is not None
    assert step_s is not None
    assert row["time_s"] < 0.8 * step_s
    # A kernel follows another after about a microsecond; Kineto's kernels include none of that.
    assert 0.8 * kernels_s(traced) < row["time_s"] < 2.5 * kernels_s(traced)
    (found,) = [each for each in diagnose(timed).diagnoses if each.code == "launch-bound"]
    assert found.expected is not None
    assert found.expected.value == row["time_s"]


def test_step_with_more_launches_than_the_queue_takes_is_measured() -> None:
    model = preset("tiny", num_layers=60, d_model=64, d_ff=128, num_heads=2)
    row = device_only(cs_systems.run(TINY, model=model, optimizer="adamw", experiments_s=60))
    assert row["skipped"] is None
    assert row["time_s"] is not None
    assert row["baseline_s"] is not None
    assert row["time_s"] < row["baseline_s"]


def test_step_with_a_loss_scaler_is_measured() -> None:
    row = device_only(cs_systems.run(TINY, precision="fp16", optimizer="adamw_foreach", experiments_s=10))
    assert row["skipped"] is None


def test_compiled_step_is_measured_or_has_a_reason() -> None:
    record = cs_systems.run(TINY, compile="default", experiments_s=10)
    rows = [row for row in EXPERIMENTS.of(record.results) if row["experiment"] == "device-only"]
    assert all((row["time_s"] is None) == (row["skipped"] is not None) for row in rows)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5)) for _ in range(30)]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, list | tuple) else value


def test_experiments_leave_a_live_model_as_it_was_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(16, 32, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()

    def state() -> Any:
        gradients = [p.grad for p in model.parameters()]
        random = torch.cuda.get_rng_state()
        return bits([model.state_dict(), optimizer.state_dict(), gradients, random, torch.get_rng_state()])

    before = state()
    record = cs_systems.run(model=model, inputs=x, optimizer=optimizer, warmup=3, steps=5, experiments_s=10)
    assert EXPERIMENTS.of(record.results), "a step of 100 small kernels is launch-bound"
    assert state() == before
    assert all(module.training for module in model.modules())


def test_recorded_loop_on_a_gpu_computes_the_same_bits_with_experiments(tmp_path: Path) -> None:
    def loop(out: Path | None) -> Any:
        torch.manual_seed(1)
        model = Net().cuda()
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        x = torch.randn(16, 32, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        if out is None:
            for _ in range(20):
                step()
        else:
            recorder = cs_systems.Recorder(
                model, optimizer, out=out, warmup=3, steps=10, profile="none", experiments=step
            )
            with recorder:
                for _ in range(20):
                    with recorder.step():
                        step()
            (record,) = recorder.records
            assert device_only(record)["skipped"] is None
        return bits([model.state_dict(), optimizer.state_dict(), torch.cuda.get_rng_state()])

    assert loop(tmp_path) == loop(None)
