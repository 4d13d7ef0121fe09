"""The same batch again: made where a step waits for its input, and read by the rule for waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cs_systems
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.cli import main
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.experiments import EXPERIMENTS
from cs_systems.measure.runtime.allowance import Allowance
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import RunRecord, read_records

WAIT_S = 0.05
SOURCE = f"""
import time, torch
from torch import nn

class Slow:
    def __iter__(self):
        while True:
            time.sleep({WAIT_S})
            yield torch.randn(8, 16)

def make():
    return {{"model": nn.Linear(16, 16), "batches": Slow()}}

def quick():
    return nn.Linear(16, 16), torch.randn(8, 16)
"""


class Slow:
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(WAIT_S)
            yield torch.randn(8, 16)


def live(**options: Any) -> RunRecord:
    quick: dict[str, Any] = {"warmup": 1, "steps": 3, "device": "cpu"}
    return cs_systems.run(model=nn.Linear(16, 16), batches=Slow(), **quick | options)


def test_step_without_its_loader_is_measured_and_becomes_the_expectation() -> None:
    record = live(experiments_s=10)
    (row,) = EXPERIMENTS.of(record.results)
    assert (row["experiment"], row["of"], row["rounds"], row["skipped"]) == ("same-batch", "step", 5, None)
    assert record.measurement is not None
    assert row["baseline_s"] == record.measurement.median_s()
    assert row["time_s"] is not None
    assert row["low_s"] is not None
    assert row["high_s"] is not None
    assert 0 < row["low_s"] <= row["time_s"] <= row["high_s"]
    assert row["time_s"] < row["baseline_s"] - WAIT_S / 2
    (found,) = diagnose(record).diagnoses
    assert found.expected is not None
    assert (found.code, found.expected.value, found.expected.how) == ("data-input", row["time_s"], "measured")
    assert "; measured: " in found.sentence
    assert "instead of" in found.sentence


def test_steps_of_an_experiment_do_not_count_as_samples() -> None:
    record = live(experiments_s=10)
    assert record.measurement is not None
    assert len(record.measurement.samples) == 4


@pytest.mark.parametrize("options", [{}, {"experiments_s": 0.0}])
def test_no_experiment_runs_without_a_time_limit_for_it(options: dict[str, Any]) -> None:
    assert EXPERIMENTS.of(live(**options).results) == ()


def test_experiment_that_would_take_longer_than_the_time_for_it_is_left_out() -> None:
    (row,) = EXPERIMENTS.of(live(experiments_s=0.01).results)
    assert row["time_s"] is None
    assert row["skipped"] is not None
    assert row["skipped"].startswith("it takes about ")
    assert row["skipped"].endswith("10.0 ms are left of the time for experiments")


def test_profiled_cell_compares_with_its_steps_before_the_profiler() -> None:
    record = live(profiler="kineto", warmup=0, experiments_s=10)
    (row,) = EXPERIMENTS.of(record.results)
    assert record.clean is not None
    assert [sample.warmup for sample in record.clean.samples] == [False] * 3
    assert set(record.clean.samples[0].submit_s) == set(record.clean.phase_names()) >= {"input", "optimizer"}
    assert row["baseline_s"] == record.clean.median_s()
    assert diagnose(record).diagnoses[0].code == "data-input"


def test_sweep_announces_the_experiments_of_each_cell(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SOURCE)
    cells = [RunConfig(f"{tmp_path}/slow.py:{name}", steps=2, warmup=1, device="cpu") for name in ("make", "quick")]
    said: list[Progress] = []
    records = [*cs_systems.sweep(cells, experiments_s=10, on_progress=said.append)]
    assert [len(EXPERIMENTS.of(record.results)) for record in records] == [1, 0]
    ((count, cost_s),) = [each.experiments for each in said if each.experiments]
    assert count == 1
    assert cost_s > 5 * WAIT_S


def test_cells_share_the_time_for_experiments() -> None:
    record = live(experiments_s=10)
    (row,) = EXPERIMENTS.of(record.results)
    cell, allowed = RunConfig(), Allowance(1.0)
    allowed.spend(replace(record, results=EXPERIMENTS.filled([{**row, "spent_s": 0.75}])))
    assert allowed.of([cell]) == 0.25
    assert allowed.of([RunConfig("toy")]) == 0
    allowed.spend(replace(record, results=EXPERIMENTS.filled([{**row, "spent_s": 3.0}])))
    assert allowed.of([cell]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experiments_s": -1}, "experiments_s is -1; give a number of seconds, at least 0"),
        (
            {"experiments_s": 1, "workload": "toy"},
            "experiments_s has no effect, because workload toy is no training step; leave out experiments_s",
        ),
        (
            {"experiments_s": 1, "profiler": "memory"},
            "experiments_s has no effect, because profiler memory changes the step; leave out experiments_s",
        ),
        (
            {"experiments_s": 1, "workload": lambda: None},
            "experiments_s requires an object that can be put back, and the workload is a function or a Workload; give "
            "model= and inputs=, or a TrainingSetup, or leave out experiments_s",
        ),
    ],
    ids=("negative", "toy", "memory", "function"),
)
def test_time_for_experiments_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cs_systems.run(**options)
    assert str(error.value) == message


def test_command_announces_its_experiments_and_skips_them_with_no_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SOURCE)
    common = ["--workload", f"{tmp_path}/slow.py:make", "--device", "cpu", "--warmup", "1", "--steps", "2"]
    assert main(["time", *common, "--out", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr()
    assert "experiments: 1, about " in shown.err
    assert " (--no-experiments leaves them out)" in shown.err
    assert "; measured: " in " ".join(shown.out.split())
    assert main(["time", *common, "--out", str(tmp_path / "b"), "--no-experiments"]) == 0
    shown = capsys.readouterr()
    assert "experiment" not in shown.err
    (record,), _ = read_records(tmp_path / "b")
    assert "experiments" not in record.results


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--experiments-s", "0"], "--experiments-s must be more than 0 s, got 0; for none, use --no-experiments"),
        (
            ["--experiments-s", "3", "--no-experiments"],
            "--no-experiments and --experiments-s exclude each other; leave out one of them",
        ),
        (
            ["--no-experiments", "--workload", "toy"],
            "there are no experiments here, because workload toy is no training step; leave out --no-experiments",
        ),
    ],
)
def test_option_without_effect_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", *words, "--device", "cpu"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
