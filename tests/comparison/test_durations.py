"""Estimated durations: by records of the same cell, by the nearest FLOPs, or by assumed rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cs_systems.comparison.durations import CELL_S, COMPILE_S, START_S, Machine, estimate, step_flops
from cs_systems.config import RunConfig, preset
from cs_systems.record import Measurement, RunRecord, Sample
from tests.test_record import ENVIRONMENT

CELL = RunConfig(model=preset("small"), warmup=5, steps=10)
HERE = Machine(ENVIRONMENT.device_name, False, 2)
STEP_S = 0.5


def recorded(config: RunConfig) -> RunRecord:
    samples = (Sample(0, False, STEP_S, {}, {}),) * 3
    return RunRecord("key", config.to_dict(), "ok", 0, None, ENVIRONMENT, Measurement("monotonic", samples, 0.0))


@pytest.mark.parametrize(
    ("cell", "seconds", "how"),
    [
        (CELL, CELL_S + 15 * STEP_S, "1 cell by earlier records"),
        (replace(CELL, device="cpu", steps=30), CELL_S + 35 * STEP_S, "1 cell by earlier records"),
        (replace(CELL, batch_size=8), CELL_S + 30 * STEP_S, "1 cell by FLOPs, at the rate of an earlier record"),
        (replace(CELL, compile="default", warmup_s=60.0), CELL_S + COMPILE_S + 60 + 5, "1 cell by FLOPs, at the rate"),
        (RunConfig(workload="accumulation"), 0.0, "1 cell of unknown duration left out"),
    ],
)
def test_estimate_uses_the_best_basis(cell: RunConfig, seconds: float, how: str) -> None:
    found = estimate([cell], [recorded(CELL)], HERE)
    assert found.cells_s == pytest.approx(seconds, rel=0.01)
    assert found.total_s == pytest.approx(START_S + seconds, rel=0.01)
    assert found.how.startswith(how)


def test_records_of_other_devices_and_sizes_do_not_count() -> None:
    tiny = replace(CELL, model=preset("tiny"))
    found = estimate([CELL], [recorded(tiny)], HERE)
    flops = step_flops(CELL)
    assert flops is not None
    assert found.cells_s == pytest.approx(CELL_S + 15 * flops / 2e10)
    assert found.how == "1 cell by FLOPs, at an assumed 10 GFLOP/s a thread"
    gpu = estimate([CELL], [recorded(CELL)], Machine("NVIDIA H200", True, 16))
    assert gpu.how == "1 cell by FLOPs, at an assumed 30% of the peak"
    assert gpu.cells_s == pytest.approx(CELL_S + 15 * flops / (0.3 * 67e12))
