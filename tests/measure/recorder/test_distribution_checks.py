"""Waits for the GPU in the checks of torch.distributions: found by their line, and told from a program's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, kl_divergence
from torch.optim import AdamW

from cs_systems.analysis.comparison.loop_findings import DISTRIBUTION_CHECKS, HOST_SYNC, DistributionChecksRow
from cs_systems.measure.recorder import hooks
from cs_systems.measure.recorder.distribution_checks import DistributionChecks
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.trainings import forget_compilations

MOMENTS = 6


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for an accelerator, for whose answer the host waits when it reads the truth of a tensor."""
    monkeypatch.setattr(hooks, "_runs_on_accelerator", lambda tracker: True)
    monkeypatch.setattr(hooks, "_OF_ACCELERATORS", ((Tensor, "__bool__", hooks._always(HOST_SYNC)),))
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile leaves the checks out in its process


def made(numbers: Tensor, checks: bool | None) -> Normal:
    mean, spread = numbers.chunk(2, -1)
    return Normal(mean, spread.exp(), validate_args=checks)


def recorded(out: Path, loss_of: Callable[[Tensor, Tensor], Any]) -> list[DistributionChecksRow]:
    forget_compilations()
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = AdamW(model.parameters())
    recorder = ScriptRecorder("script", out=out, warmup=5, steps=12, profile="none")
    try:
        for _ in range(30):
            optimizer.zero_grad()
            sum(loss_of(model(torch.randn(8, 4)), torch.randn(8, 3)) for _ in range(MOMENTS)).backward()
            optimizer.step()
    finally:
        recorder.close()
    assert all(each.failure is None for each in recorder._observers._every)
    return list(DISTRIBUTION_CHECKS.of(recorder.records[-1].results))


def test_checks_of_parameters_and_samples_are_counted_by_their_line(tmp_path: Path) -> None:
    def loss_of(numbers: Tensor, target: Tensor) -> Tensor:
        found = made(numbers, None)
        return kl_divergence(found, made(numbers * 0.5, None)).mean() - found.log_prob(target).mean()

    make, use = recorded(tmp_path, loss_of)
    assert (make["distribution"], make["function"], make["waits"]) == ("Normal", "made", 2 * 2 * MOMENTS)
    assert (use["distribution"], use["waits"]) == ("Normal", MOMENTS)
    assert use["function"].endswith("loss_of")
    assert 0.0 < make["time_s"] < 1.0


def test_no_check_is_counted_where_the_program_leaves_it_out(tmp_path: Path) -> None:
    assert recorded(tmp_path, lambda numbers, target: -made(numbers, False).log_prob(target).mean()) == []


def test_waits_of_the_program_itself_are_no_checks(tmp_path: Path) -> None:
    def loss_of(numbers: Tensor, target: Tensor) -> Tensor:
        for _ in range(8):
            if numbers.isnan().any():
                break
        return -made(numbers, False).log_prob(target).mean()

    assert recorded(tmp_path, loss_of) == []


def test_a_few_checks_of_a_step_are_left_out(tmp_path: Path) -> None:
    """One distribution with one sample waits 3 times: 18 times a step, which is not worth a cause."""
    assert recorded(tmp_path, lambda numbers, target: -made(numbers, None).log_prob(target).mean()) == []


def test_time_of_checks_leaves_out_the_work_of_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, each_s = DistributionChecks.look_at_wait, 0.003

    def slow(self: DistributionChecks) -> None:
        sleep(each_s)
        look(self)

    monkeypatch.setattr(DistributionChecks, "look_at_wait", slow)
    (row,) = recorded(tmp_path, lambda numbers, target: sum(made(numbers, None).mean.sum() for _ in range(2)))
    assert row["waits"] == 2 * 2 * MOMENTS
    assert 0.0 < row["time_s"] < each_s * row["waits"] / 2


def test_checks_at_all_lines_are_counted_in_the_step(tmp_path: Path) -> None:
    def loss_of(numbers: Tensor, target: Tensor) -> Tensor:
        means, spreads = numbers.chunk(2, -1)
        spread = spreads.exp()
        every = [
            Normal(means, spread),
            Normal(means, spread * 2),
            Normal(means, spread * 3),
            Normal(means, spread * 4),
            Normal(means, spread * 5),
            Normal(means, spread * 6),
            Normal(means, spread * 7),
        ]
        return torch.stack([each.stddev.mean() for each in every]).mean()

    rows = recorded(tmp_path, loss_of)
    assert [row["waits"] for row in rows] == [2 * MOMENTS] * 5
    assert {row["step_waits"] for row in rows} == {7 * 2 * MOMENTS}
    assert all(row["step_time_s"] > sum(each["time_s"] for each in rows) for row in rows)
