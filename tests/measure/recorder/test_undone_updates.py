"""Steps that something undoes before a model is called again, and others of which little is left for a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cs_systems.analysis.comparison.loop_findings import UNDONE_UPDATES, UndoneUpdatesRow
from cs_systems.analysis.diagnosis import diagnose
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import Step, update

STEPS = 40
Parts = tuple[nn.Module, Optimizer, Callable[[], Tensor]]


def parts(kind: type[Optimizer] = SGD, lr: float = 0.01) -> Parts:
    """Return a model, its optimizer, and a function that returns the loss of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    return model, optimizer, lambda: (model(torch.randn(16, 8)) - 1).square().mean()


def rows(out: Path, step: Step) -> list[UndoneUpdatesRow]:
    recorder = recorded(out, step, STEPS)
    assert all(each.failure is None for each in recorder._observers._every)
    return [*UNDONE_UPDATES.of(recorder.records[0].results)]


@torch.no_grad()
def write(model: nn.Module, other: nn.Module, kept: float) -> None:
    for p, t in zip(model.parameters(), other.parameters(), strict=True):
        p.mul_(kept).add_(t, alpha=1 - kept)


def backwards(kind: type[Optimizer] = Adam) -> Step:
    """Return a step with a soft update that writes to the trained network."""
    model, optimizer, loss = parts(kind)
    target = copy.deepcopy(model).requires_grad_(False)

    def step() -> None:
        update(optimizer, loss())
        write(model, target, 0.005)

    return step


def restored() -> Step:
    model, optimizer, loss = parts()
    first = copy.deepcopy(model.state_dict())

    def step() -> None:
        update(optimizer, loss())
        model.load_state_dict(first)

    return step


@pytest.mark.parametrize(("make", "left"), [(backwards, 0.01), (restored, 1e-6)])
def test_undone_steps_are_told_first(make: Callable[[], Step], left: float, tmp_path: Path) -> None:
    recorder = recorded(tmp_path, make(), STEPS)
    (row,) = UNDONE_UPDATES.of(recorder.records[0].results)
    assert (row["parameters"], row["compared"]) == (4, 4)
    assert row["steps"] > 4
    assert row["left"] <= left
    assert diagnose(recorder.records).diagnoses[0].code == "undone-updates"


def plain() -> Step:
    _, optimizer, loss = parts()
    return lambda: update(optimizer, loss())


def forwards() -> Step:
    model, optimizer, loss = parts()
    target = copy.deepcopy(model).requires_grad_(False)

    def step() -> None:
        update(optimizer, loss())
        write(target, model, 0.995)

    return step


def evaluated_with_an_average() -> Step:
    """Return a step that puts averaged weights in for an evaluation, and takes them out again."""
    model, optimizer, loss = parts()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step() -> None:
        update(optimizer, loss())
        average.update_parameters(model)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        with torch.no_grad():
            loss()
        model.load_state_dict(own)

    return step


def lookahead() -> Step:
    model, optimizer, loss = parts()
    slow, numbers = copy.deepcopy(model), iter(range(10_000))

    def step() -> None:
        update(optimizer, loss())
        if next(numbers) % 5 == 4:
            write(slow, model, 0.5)
            write(model, slow, 0.0)

    return step


def sharpness_aware() -> Step:
    model, optimizer, loss = parts()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            [p.add_(move) for p, move in zip(model.parameters(), moves, strict=True)]
        optimizer.zero_grad()
        loss().backward()
        with torch.no_grad():
            [p.sub_(move) for p, move in zip(model.parameters(), moves, strict=True)]
        optimizer.step()

    return step


def clipped() -> Step:
    model, optimizer, loss = parts(lr=0.1)

    def step() -> None:
        update(optimizer, loss())
        with torch.no_grad():
            [p.clamp_(-0.01, 0.01) for p in model.parameters()]

    return step


def adapted_to_each_batch() -> Step:
    """Return a step that adapts a model, uses it, and restores its weights for the next batch."""
    model, optimizer, loss = parts()
    first = copy.deepcopy(model.state_dict())

    def step() -> None:
        model.load_state_dict(first)
        update(optimizer, loss())
        with torch.no_grad():
            loss()

    return step


def few_weights_left() -> Step:
    """Return a step with a mask that leaves one weight of 256 in each matrix."""
    model, optimizer, loss = parts()

    def step() -> None:
        update(optimizer, loss())
        with torch.no_grad():
            for p in model.parameters():
                p.view(-1)[1:] = 0

    return step


def with_a_slow_rate() -> Step:
    _, optimizer, loss = parts(lr=0.0)
    return lambda: update(optimizer, loss())


def two_optimizers() -> Step:
    model, optimizer, loss = parts()
    second = SGD(model.parameters(), 0.01)
    first = copy.deepcopy(model.state_dict())
    both: Iterator[Optimizer] = iter([optimizer, second] * STEPS)

    def step() -> None:
        update(next(both), loss())
        model.load_state_dict(first)

    return step


def best_restored_once() -> Step:
    model, optimizer, loss = parts()
    best, numbers = copy.deepcopy(model.state_dict()), iter(range(10_000))

    def step() -> None:
        update(optimizer, loss())
        if next(numbers) == 3:
            model.load_state_dict(best)

    return step


SOUND = [plain, forwards, evaluated_with_an_average, lookahead, sharpness_aware, clipped, adapted_to_each_batch,
         few_weights_left, with_a_slow_rate, two_optimizers, best_restored_once]  # fmt: skip


@pytest.mark.parametrize("make", SOUND)
def test_steps_that_last_or_serve_give_no_row(make: Callable[[], Step], tmp_path: Path) -> None:
    assert rows(tmp_path, make()) == []
