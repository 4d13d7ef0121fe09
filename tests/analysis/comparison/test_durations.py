"""Estimated durations: by records of the same cell, by the nearest FLOPs, or by assumed rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cs_systems.analysis.comparison.durations import ON_CPU, ON_GPU, Machine, estimate, step_flops
from cs_systems.config import RunConfig, preset
from cs_systems.record import Measurement, RunRecord, Sample
from tests.test_record import ENVIRONMENT

CELL = RunConfig(model=preset("small"), warmup=5, steps=10)
HERE = Machine(ENVIRONMENT.device_name, False, 2)
STEP_S = 0.5
SLOW = (Sample(0, False, 9 * STEP_S, {}, {}),) * 3


def recorded(config: RunConfig) -> RunRecord:
    samples = (Sample(0, False, STEP_S, {}, {}),) * 3
    return RunRecord("key", config.to_dict(), "ok", 0, None, ENVIRONMENT, Measurement("monotonic", samples, 0.0))


@pytest.mark.parametrize(
    ("cell", "seconds", "how"),
    [
        (CELL, ON_CPU.cell_s + 15 * STEP_S, "1 cell by earlier records"),
        (replace(CELL, device="cpu", steps=30), ON_CPU.cell_s + 35 * STEP_S, "1 cell by earlier records"),
        (replace(CELL, batch_size=8), ON_CPU.cell_s + 30 * STEP_S, "1 cell by FLOPs, at the rate of an earlier record"),
        (
            replace(CELL, compile="default", warmup_s=60.0),
            ON_CPU.cell_s + ON_CPU.compile_s + 60 + 5,
            "1 cell by FLOPs, at the rate",
        ),
        (RunConfig(workload="accumulation"), 0.0, "1 cell of unknown duration left out"),
    ],
)
def test_estimate_uses_the_best_basis(cell: RunConfig, seconds: float, how: str) -> None:
    found = estimate([cell], [recorded(CELL)], HERE)
    assert found.cells_s == pytest.approx(seconds, rel=0.01)
    assert found.total_s == pytest.approx(ON_CPU.start_s + seconds, rel=0.01)
    assert found.how.startswith(how)


def test_records_of_other_devices_and_sizes_do_not_count() -> None:
    tiny = replace(CELL, model=preset("tiny"))
    found = estimate([CELL], [recorded(tiny)], HERE)
    flops = step_flops(CELL)
    assert flops is not None
    assert found.cells_s == pytest.approx(ON_CPU.cell_s + 15 * flops / 2e10)
    assert found.how == "1 cell by FLOPs, at an assumed 10 GFLOP/s a thread"
    gpu = estimate([CELL], [recorded(CELL)], Machine("NVIDIA H200", True, 16))
    assert gpu.how == "1 cell by FLOPs, at an assumed 30% of the peak"
    assert gpu.cells_s == pytest.approx(ON_GPU.cell_s + 15 * flops / (0.3 * 67e12))


def test_ranks_are_started_once_for_all_cells_of_that_number() -> None:
    ranks = [replace(CELL, strategy=name, world_size=2) for name in ("ddp_flat", "ddp_overlap", "fsdp")]
    found = estimate(ranks, [recorded(cell) for cell in ranks], HERE)
    assert found.cells_s == pytest.approx(ON_CPU.ranks_s + 3 * (ON_CPU.cell_s + 15 * STEP_S))


@pytest.mark.parametrize("first", [0, 1])
def test_profiled_record_does_not_replace_the_time_of_a_clean_one(first: int) -> None:
    slow = replace(recorded(replace(CELL, profiler="kineto")), measurement=Measurement("monotonic", SLOW, 0.0))
    records = [recorded(CELL), slow]
    found = estimate([CELL], [records[first], records[1 - first]], HERE)
    assert found.cells_s == pytest.approx(ON_CPU.cell_s + 15 * STEP_S)
    profiled = estimate([CELL], [slow], HERE)
    assert profiled.cells_s == pytest.approx(ON_CPU.cell_s + 15 * 9 * STEP_S)
