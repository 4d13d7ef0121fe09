"""Products of a step on a GPU: those in bf16 are faster, and the expectation is near the step in bf16."""

from __future__ import annotations

import pytest

import cs_systems
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.config import RunConfig, preset
from cs_systems.core.experiments import EXPERIMENTS

pytestmark = pytest.mark.gpu
# Large enough that the GPU limits the step in bf16 too; else no time is expected.
LARGE = RunConfig(
    model=preset("small", num_layers=4), seq_len=512, batch_size=32, attention="sdpa_efficient", warmup=5, steps=10
)


def test_expected_gain_of_the_step_is_measured_with_products_in_bf16() -> None:
    record = cs_systems.run(LARGE, experiments_s=10)
    rows = {row["instead"]: row for row in EXPERIMENTS.of(record.results) if row["experiment"] == "products"}
    assert {*rows} == {"bf16", "tf32"}
    times = {name: row["time_s"] or 0.0 for name, row in rows.items()}
    baseline_s = rows["bf16"]["baseline_s"]
    assert record.measurement is not None
    step_s = record.measurement.median_s()
    assert baseline_s is not None
    assert step_s is not None
    assert 0 < times["bf16"] < baseline_s < step_s
    assert times["tf32"] < baseline_s
    (found,) = [each for each in diagnose(record).diagnoses if each.code == "unused-tensor-cores"]
    assert found.expected is not None
    assert found.expected.low <= found.expected.value <= found.expected.high < step_s


def test_step_in_bf16_has_no_experiment_with_its_products() -> None:
    record = cs_systems.run(LARGE, precision="bf16", experiments_s=10)
    assert "products" not in {row["experiment"] for row in EXPERIMENTS.of(record.results)}
