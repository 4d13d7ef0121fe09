"""Faults that only the whole script shows: a schedule of another length, and weights kept without a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from cs_systems.analysis.diagnosis import diagnose
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.trainings import update

STEPS = 600
SHORT = 60  # steps of a script of which the schedule does not count
Weights = dict[str, Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def first_sentence(
    out: Path,
    optimizer: Optimizer,
    model: nn.Module,
    after: Callable[[int], None],
    last: Callable[[], object] = int,
    steps: int = STEPS,
) -> str | None:
    """Return the first sentence about a script of so many steps, which calls `after` with the number of each."""
    recorder = ScriptRecorder("script", out=out, warmup=2, steps=5, profile="none")
    try:
        for number in range(steps):
            update(optimizer, model(torch.randn(16, 8)).pow(2).mean())
            after(number)
        last()
    finally:
        recorder.close()
    assert all(each.failure is None for each in recorder._observers._every)
    causes = [
        each for each in diagnose(recorder.records).diagnoses if each.code in ("vanishing-rate", "loaded-weights")
    ]
    return causes[0].sentence if causes else None


def of_schedule(out: Path, make: Callable[[Optimizer], LRScheduler], every: int = 1) -> str | None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)
    schedule = make(optimizer)

    def after(number: int) -> None:
        if number % every == 0:
            schedule.step()

    return first_sentence(out, optimizer, model, after)


def test_schedule_of_batches_that_steps_with_the_epochs_is_named(tmp_path: Path) -> None:
    sentence = of_schedule(tmp_path, lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=STEPS), every=100)
    assert sentence == (
        "OneCycleLR is laid out for 600 steps, but has stepped 6 times in the 600 steps of SGD: at the end the "
        "learning rate is 0.000427: call scheduler.step() after each step of the optimizer, or, if it counts epochs, "
        "give it their number"
    )


def test_rate_that_is_set_by_hand_and_ends_too_early_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def after(number: int) -> None:
        optimizer.param_groups[0]["lr"] = max(1e-5, 0.01 * (1 - number / 300))

    sentence = first_sentence(tmp_path, optimizer, model, after)
    assert sentence is not None
    assert sentence.startswith("the learning rate of SGD falls from 0.01 to 1e-05 and stays there for ")
    assert sentence.endswith("with its length and its steps in the same unit")


def test_rate_that_is_cut_by_a_falling_loss_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)
    schedule = ReduceLROnPlateau(optimizer, "max", patience=10)
    sentence = first_sentence(tmp_path, optimizer, model, lambda number: schedule.step(1 / (1 + number)))
    assert sentence is not None
    assert sentence.startswith("ReduceLROnPlateau has cut the learning rate of SGD from 0.01 to 1e-08: the number that")


def converged(optimizer: Optimizer) -> Callable[[int], None]:
    schedule = ReduceLROnPlateau(optimizer, patience=3)
    return lambda number: schedule.step(max(0.1, 1 - number / 400))


def trained_in_stages(optimizer: Optimizer) -> Callable[[int], None]:
    def after(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-5 if number > 200 else 0.01

    return after


def range_test(optimizer: Optimizer) -> Callable[[int], None]:
    def after(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-6 * 1e5 ** (number / STEPS)

    return after


def falling_as_one_by_time(optimizer: Optimizer) -> Callable[[int], None]:
    schedule = LambdaLR(optimizer, lambda number: 1 / (1 + number))
    return lambda _: schedule.step()


@pytest.mark.parametrize("make", [converged, trained_in_stages, range_test, falling_as_one_by_time])
def test_small_rates_on_purpose_are_no_cause(
    make: Callable[[Optimizer], Callable[[int], None]], tmp_path: Path
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)
    assert first_sentence(tmp_path, optimizer, model, make(optimizer)) is None


@pytest.mark.parametrize(
    ("make", "every"),
    [
        (lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1), 1),
        (lambda optimizer: CosineAnnealingLR(optimizer, STEPS), 1),
        (lambda optimizer: CosineAnnealingLR(optimizer, 6), 100),  # epochs
        (lambda optimizer: CosineAnnealingLR(optimizer, 200), 100),  # a script that was made shorter
        (lambda optimizer: LinearLR(optimizer, 0.1, total_iters=20), 1),
        (lambda optimizer: ExponentialLR(optimizer, 0.001 ** (1 / STEPS)), 1),
    ],
)
def test_schedule_that_fits_the_script_is_no_cause(
    make: Callable[[Optimizer], LRScheduler], every: int, tmp_path: Path
) -> None:
    assert of_schedule(tmp_path, make, every) is None


def of_weights(
    out: Path, keep: Callable[[nn.Module], Weights], load: Callable[[nn.Module, Weights], object], at: int = SHORT - 20
) -> str | None:
    model, kept = net(), list[Weights]()

    def after(number: int) -> None:
        if number == at:
            kept.append(keep(model))

    return first_sentence(out, SGD(model.parameters(), 0.01), model, after, lambda: load(model, kept[0]), SHORT)


def state(model: nn.Module) -> Weights:
    return model.state_dict()


def plainly(model: nn.Module, weights: Weights) -> None:
    model.load_state_dict(weights)


KEEP: dict[str, Callable[[nn.Module], Weights]] = {
    "state": state,
    "part of it": lambda model: {name: tensor for name, tensor in model.state_dict().items() if "9" not in name},
    "another dictionary": lambda model: dict(model.state_dict()),
}


@pytest.mark.parametrize("kept", KEEP)
def test_weights_that_are_kept_without_a_copy_are_named(kept: str, tmp_path: Path) -> None:
    sentence = of_weights(tmp_path, KEEP[kept], plainly)
    assert sentence is not None
    assert sentence.startswith("Sequential loads its own tensors (plainly() at test_script_end.py:")
    assert sentence.endswith(
        "state_dict() returned them without a copy, and 19 steps have changed them since, so that loading does "
        "nothing: keep a copy: copy.deepcopy(model.state_dict())"
    )


def read_into(model: nn.Module, _: Weights) -> None:
    """Load weights as from a checkpoint of several ranks, which is read into the tensors of a new state."""
    state = model.state_dict()
    for tensor in state.values():
        tensor.zero_()
    model.load_state_dict(state)


def written_before(model: nn.Module, weights: Weights) -> None:
    """Load weights that are copied into the kept state, as from a checkpoint."""
    for tensor in weights.values():
        tensor.copy_(torch.zeros(()))
    model.load_state_dict(weights)


def of_an_average(model: nn.Module, _: Weights) -> None:
    average = net()
    kept = average.state_dict()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    average.load_state_dict(kept)


def into_another(model: nn.Module, _: Weights) -> None:
    net().load_state_dict(model.state_dict())


def on_the_meta_device(model: nn.Module, weights: Weights) -> None:
    model.to("meta").load_state_dict({name: tensor.to("meta") for name, tensor in weights.items()})


@pytest.mark.parametrize(
    ("keep", "load"),
    [
        (lambda model: copy.deepcopy(model.state_dict()), plainly),
        (lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()}, plainly),
        (state, read_into),
        (state, written_before),
        (state, of_an_average),
        (lambda model: model.state_dict(keep_vars=True), plainly),
        (state, into_another),
        (state, on_the_meta_device),
        (state, lambda model, _: model.state_dict()),
    ],
)
def test_weights_that_are_copied_or_loaded_elsewhere_are_no_cause(
    keep: Callable[[nn.Module], Weights], load: Callable[[nn.Module, Weights], object], tmp_path: Path
) -> None:
    assert of_weights(tmp_path, keep, load) is None


def test_functions_of_modules_are_put_back(tmp_path: Path) -> None:
    before = nn.Module.state_dict, nn.Module.load_state_dict
    of_weights(tmp_path, state, plainly)
    assert (nn.Module.state_dict, nn.Module.load_state_dict) == before
