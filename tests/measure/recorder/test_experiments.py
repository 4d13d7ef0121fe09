"""Experiments after a recorded loop: they leave every object of the program as it was, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import cs_systems
from cs_systems.config import ConfigError
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow

WAIT_S = 0.05
LOOP: dict[str, Any] = {"warmup": 1, "steps": 3, "profile": "none"}


class Net(nn.Module):
    """Model with a buffer that forward changes, random numbers, a frozen part in eval mode and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(8).eval()
        self.last = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + random.random() * float(numpy.random.rand())
        return self.last(self.frozen(self.first(x)))


class Program:
    """Loop of a user: Adam, a schedule, gradients that outlive the step, and an average of the weights."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.batch = torch.randn(16, 8)
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.average[name].mul_(0.9).add_(p, alpha=0.1)
        self.losses.append(float(loss.detach()))

    def loop(self, steps: int, recorder: cs_systems.Recorder | None) -> None:
        for _ in range(steps):
            time.sleep(WAIT_S if recorder is not None and not recorder.done else 0)
            if recorder is None:
                self.step()
            else:
                with recorder.step():
                    self.step()

    def state(self) -> dict[str, Any]:
        """Return everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average,
            "losses": self.losses,
            "calls": self.model.calls,
            "modes": [module.training for module in self.model.modules()],
            "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()),
            "grad mode": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
        }


def same(a: Any, b: Any) -> bool:
    """Compare bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def rows_of(recorder: cs_systems.Recorder) -> list[ExperimentRow]:
    return [row for record in recorder.records for row in EXPERIMENTS.of(record.results)]


@pytest.mark.parametrize("profile", ["none", "kineto"])
def test_loop_with_experiments_computes_the_same_bits(tmp_path: Path, profile: str) -> None:
    alone = Program()
    alone.loop(10, None)
    expected = alone.state()
    recorded = Program()
    recorder = cs_systems.Recorder(
        recorded.model,
        recorded.optimizer,
        out=tmp_path,
        experiments=recorded.step,
        **LOOP | {"profile": profile, "profile_steps": 1},
    )
    with recorder:
        recorded.loop(10, recorder)
    (row,) = rows_of(recorder)
    assert (row["experiment"], row["rounds"], row["skipped"]) == ("same-batch", 3, None)
    for what, value in recorded.state().items():
        assert same(value, expected[what]), what
    assert all(not record.warnings or "not-restored" not in {w.code for w in record.warnings}
               for record in recorder.records)  # fmt: skip
    samples = [record.measurement.samples for record in recorder.records if record.measurement]
    assert [len(each) for each in samples] == [4] + [4] * (profile == "kineto")


def record(tmp_path: Path, experiments: Callable[[], Any] | None, **options: Any) -> list[ExperimentRow]:
    program = Program()
    recorder = cs_systems.Recorder(
        program.model, program.optimizer, out=tmp_path, experiments=experiments, **LOOP | options
    )
    with recorder:
        program.loop(5, recorder)
    return rows_of(recorder)


def test_loop_without_a_callable_step_has_a_reason_for_no_experiments(tmp_path: Path) -> None:
    (row,) = record(tmp_path, None)
    assert row["skipped"] == (
        "the loop gives no step that can be called again; give Recorder(experiments=FUNCTION), which runs one"
    )


def test_step_that_takes_from_an_iterator_is_not_called(tmp_path: Path) -> None:
    called: list[int] = []

    def batches() -> Iterator[int]:
        yield 1

    loader = batches()

    def step() -> None:
        called.append(next(loader))

    (row,) = record(tmp_path, step)
    assert called == []
    assert row["skipped"] == (
        "the step takes from loader, an iterator that cannot be put back; keep one batch, and use it"
    )


def test_error_of_an_experiment_does_not_end_the_loop(tmp_path: Path) -> None:
    def step() -> None:
        raise ValueError("no batch is left")

    (row,) = record(tmp_path, step)
    assert row["skipped"] == "ValueError: no batch is left"


def test_loop_runs_no_experiments_if_they_are_turned_off(tmp_path: Path) -> None:
    assert record(tmp_path, None, experiments_s=0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"experiments": lambda batch: None},
            "experiments is a function; give a function without arguments that runs a step",
        ),
        ({"experiments_s": -1}, "experiments_s is -1; give a number of seconds, at least 0"),
        (
            {"experiments": lambda: None, "experiments_s": 0},
            "experiments is given, but experiments_s is 0; leave out one of them",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cs_systems.Recorder(nn.Linear(2, 2), out=tmp_path, **options)
    assert str(error.value) == message
