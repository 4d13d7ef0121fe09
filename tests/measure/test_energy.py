"""Energy of the timed steps: windows of a counter, what is unknown, and the columns that show it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cs_systems
from cs_systems.config import RunConfig
from cs_systems.core.units import human
from cs_systems.formulas.energy import ENERGY, EnergyRow, idle_step_j, joined, mean_w, of_steps, step_j
from cs_systems.machine.device import Device
from cs_systems.machine.energy import Meter
from cs_systems.measure.runtime.stragglers import merged
from tests.report.conftest import ok

CPU = Device(torch.device("cpu"))


class Package:
    """Counter of one CPU package in a folder as the kernel's, and a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self._folder = 0.0, folder / "intel-rapl:0"
        self._folder.mkdir()
        (self._folder / "name").write_text("package-0\n")
        (self._folder / "max_energy_range_uj").write_text("1000000000\n")
        core = folder / "intel-rapl:0:0"
        core.mkdir()
        (core / "name").write_text("core\n")
        self.set_j(999.0)

    def set_j(self, joules: float) -> None:
        (self._folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")

    def clock(self) -> float:
        return self.now_s


def test_a_window_of_rapl_counts_packages_and_wraps_at_their_range(tmp_path: Path) -> None:
    package = Package(tmp_path)
    meter = Meter(CPU, clock=package.clock, powercap=tmp_path)
    meter.begin()
    package.now_s = 2.0
    package.set_j(29.0)  # after 1000 J it began at 0 again
    (row,) = meter.end(10)
    assert row == {"source": "rapl", "steps": 10, "window_s": 2.0, "energy_j": pytest.approx(30.0), "idle_w": None}
    assert (step_j(row), mean_w(row), idle_step_j(row)) == (pytest.approx(3.0), pytest.approx(15.0), None)


def test_a_short_window_has_no_energy(tmp_path: Path) -> None:
    package = Package(tmp_path)
    meter = Meter(CPU, clock=package.clock, powercap=tmp_path)
    meter.begin()
    package.now_s = 0.04
    (row,) = meter.end(10)
    assert (row["energy_j"], step_j(row), mean_w(row)) == (None, None, None)


@pytest.mark.parametrize("alone", [True, False])
def test_device_without_an_energy_counter_has_no_row(alone: bool, tmp_path: Path) -> None:
    if not alone:
        Package(tmp_path)
    meter = Meter(CPU, alone=alone, powercap=tmp_path)
    meter.begin()
    assert meter.end(10) == []


def row(energy_j: float | None = 600.0, idle_w: float | None = 100.0) -> EnergyRow:
    return {"source": "nvml", "steps": 20, "window_s": 2.0, "energy_j": energy_j, "idle_w": idle_w}


def test_windows_one_after_the_other_and_of_several_ranks_are_joined() -> None:
    assert joined([row(), row()], at_once=False) == [
        {"source": "nvml", "steps": 40, "window_s": 4.0, "energy_j": 1200.0, "idle_w": 100.0}
    ]
    assert joined([row(), row()], at_once=True) == [
        {"source": "nvml", "steps": 20, "window_s": 2.0, "energy_j": 1200.0, "idle_w": 200.0}
    ]
    assert joined([row(), row(None)], at_once=False)[0]["energy_j"] is None
    assert joined([], at_once=True) == []


def test_energy_of_steps_without_gaps_is_the_mean_power_in_their_time() -> None:
    (found,) = of_steps([row()], [0.09] * 20)
    assert found["energy_j"] == pytest.approx(540)
    assert found["window_s"] == pytest.approx(1.8)


def test_columns_of_a_record_show_energy_of_all_ranks() -> None:
    record = ok(RunConfig(steps=20), 0.1, 1e9, 1 << 20)
    record = replace(record, results={**record.results, "ran": [{"tokens": 2048}], **ENERGY.filled([row()])})
    (step,) = record.frame().query("phase == 'step'").to_dict("records")
    assert (step["step_j"], step["above_idle_j"], step["mean_w"]) == (30.0, 20.0, 300.0)
    assert step["tokens_per_j"] == pytest.approx(2048 / 30)
    together = merged([record, record])
    assert ENERGY.of(together.results)[0]["energy_j"] == 1200.0
    assert [human(value, name) for value, name in ((0.5, "step_j"), (3.0, "tokens_per_j"), (701.0, "mean_w"))] == [
        "500 mJ",
        "3.00",
        "701 W",
    ]


@pytest.mark.gpu
def test_energy_of_a_gpu_is_between_idle_and_the_power_limit() -> None:
    record = cs_systems.run(RunConfig(precision="bf16", attention="sdpa_flash", warmup=3, steps=20, steps_s=2.0))
    (found,) = ENERGY.of(record.results)
    assert record.measurement is not None
    assert found["source"] == "nvml"
    assert found["steps"] == len(record.measurement.timed)
    assert found["window_s"] >= sum(record.measurement.durations_s("step"))
    power = mean_w(found)
    assert power is not None
    assert (found["idle_w"] or 20.0) < power < 1200
