"""Unfused attention of a step on a GPU: its fused calls are faster, and the expectation is near the fused step."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cs_systems
from cs_systems.config import RunConfig, preset
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow

pytestmark = pytest.mark.gpu
LONG = RunConfig(
    model=preset("small", num_layers=4, context_length=1024),
    seq_len=1024,
    batch_size=32,  # so that no step waits for its launches, which takes 20 ms on a slow host
    precision="bf16",
    warmup=5,
    steps=10,  # type: ignore[arg-type]
)


def attention_rows(config: RunConfig) -> dict[str, ExperimentRow]:
    record = cs_systems.run(config, experiments_s=10)
    return {row["instead"]: row for row in EXPERIMENTS.of(record.results) if row["experiment"] == "attention"}


def test_fused_calls_are_faster_than_those_of_the_step_and_explain_the_fused_step() -> None:
    rows = attention_rows(LONG)
    assert "flash" in rows
    flash = rows["flash"]
    assert flash["skipped"] is None
    assert flash["time_s"] is not None
    assert flash["baseline_s"] is not None
    assert flash["time_s"] < flash["baseline_s"]
    assert flash["stands_for"].startswith("4 calls of scaled_dot_product_attention, 1 distinct, forward and backward")
    steps = [cs_systems.run(LONG, attention=name).measurement for name in ("naive", "sdpa_flash")]
    unfused_s, fused_s = (step.median_s() if step else None for step in steps)
    assert unfused_s is not None
    assert fused_s is not None
    expected_s = unfused_s - flash["baseline_s"] + flash["time_s"]
    assert 0.7 * fused_s < expected_s < 1.3 * fused_s


def test_fused_step_has_no_row() -> None:
    assert attention_rows(replace(LONG, attention="sdpa_flash")) == {}
