"""Random numbers of a recorded loop: repeated ones have rows, and the functions that draw them are restored."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import MANY_DRAWS, RANDOM_DRAWS
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import update

FUNCTIONS = {"rand": torch, "get_rng_state": torch, "dropout": functional, "randn": np.random}


def loss_with_noise(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    inputs = torch.randn(16, 8)
    return model(inputs + torch.rand_like(inputs)).square().mean()


def record(out: Path, model: nn.Module) -> ScriptRecorder:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return recorded(out, lambda: update(optimizer, loss_with_noise(model)))


def test_row_has_the_function_shape_and_place_of_a_draw(tmp_path: Path) -> None:
    recorder = record(tmp_path, nn.Sequential(nn.Linear(8, 4), nn.Dropout()))
    rows = RANDOM_DRAWS.of(recorder.records[0].results)
    first = loss_with_noise.__code__.co_firstlineno
    assert [(row["drawn"], row["shape"], row["function"]) for row in rows] == [
        ("torch.randn", "16 × 8", "loss_with_noise"),
        ("torch.rand_like", "16 × 8", "loss_with_noise"),
        ("dropout", "16 × 4", "loss_with_noise"),
    ]
    places = [f"test_random_draws.py:{first + line}" for line in (2, 3, 3)]
    assert [row["place"] for row in rows] == places
    assert all(row["steps"] == 3 for row in rows)


def test_many_draws_at_one_place_are_counted_by_the_step_with_the_fewest(tmp_path: Path) -> None:
    model, steps = nn.Linear(8, 4), count()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        inputs = torch.randn(16, 8)
        for _ in range(100 + next(steps)):
            inputs = inputs + torch.randn_like(inputs)
        for _ in range(19):
            inputs = inputs * torch.rand(16, 1)
        update(optimizer, model(inputs).square().mean())

    recorder = recorded(tmp_path, step)
    (row,) = MANY_DRAWS.of(recorder.records[0].results)
    place = f"test_random_draws.py:{step.__code__.co_firstlineno + 3}"
    assert row["drawn"] == "torch.randn_like"
    assert row["function"].endswith("step")
    assert (row["place"], row["calls"]) == (place, 101)


def test_functions_are_restored_after_the_observed_steps(tmp_path: Path) -> None:
    before = {name: getattr(owner, name) for name, owner in FUNCTIONS.items()}
    during: list[bool] = []
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        update(optimizer, loss_with_noise(model))
        during.append(all(getattr(owner, name) is not before[name] for name, owner in FUNCTIONS.items()))

    recorded(tmp_path, step)
    assert during.count(True) == 3
    assert not any(during[5:])
    assert all(getattr(owner, name) is before[name] for name, owner in FUNCTIONS.items())
    assert "normal_" not in vars(Tensor)


def test_default_device_that_begins_in_an_observed_step_applies_later_too(tmp_path: Path) -> None:
    torch.utils._device._device_constructors.cache_clear()
    devices: list[str] = []
    model = nn.Linear(8, 4)
    optimizer, steps = torch.optim.SGD(model.parameters(), 0.1), count()

    def step() -> None:
        if next(steps) >= 3:
            with torch.device("meta"):
                devices.append(torch.randn(16).device.type)
        update(optimizer, loss_with_noise(model))

    recorded(tmp_path, step)
    assert {*devices} == {"meta"}
