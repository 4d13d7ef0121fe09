"""Comparison of the calls of modules in a recorded loop leaves the program's modules as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from cs_systems.measure.recorder import Recorder, one_hot
from tests.measure.recorder.trainings import forget_compilations, update

CALL = nn.Module.__call__


class Twice(nn.Module):
    """Model with first layers that run for each of two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.layers[0](inputs[:, :1])
        first: torch.Tensor = self.layers[:2](inputs)
        return first.sum() + self.layers(inputs).sum()


def hooks_of(model: nn.Module) -> int:
    """Return the number of hooks inside the model, and of global ones."""
    inner = (each for each in model.modules() if each is not model)
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_all = (modules._global_forward_hooks, modules._global_forward_pre_hooks, modules._global_backward_hooks)
    return sum(len(getattr(each, name)) for each in inner for name in names) + sum(map(len, of_all))


def record(out: Path, at_step: Callable[[int, Twice], object]) -> tuple[Recorder, list[bool]]:
    """Record 16 steps; return the recorder, and for each step whether the call of modules was replaced."""
    forget_compilations()
    model = Twice()
    optimizer = SGD(model.parameters(), 1e-3)
    replaced = []
    recorder = Recorder(model, optimizer, out=out, warmup=5, steps=4, profile="none", stacks=False)
    with recorder:
        for number in range(16):
            with recorder.step():
                at_step(number, model)
                replaced.append(nn.Module.__call__ is not CALL)
                assert not hooks_of(model)
                update(optimizer, model(torch.randn(64, 64)))
    return recorder, replaced


def test_call_of_modules_is_replaced_in_a_few_warmup_steps_alone(tmp_path: Path) -> None:
    recorder, replaced = record(tmp_path, lambda *_: None)
    assert [number for number, is_replaced in enumerate(replaced) if is_replaced] == [1, 2, 3]
    assert nn.Module.__call__ is CALL
    assert all(each.failure is None for each in recorder._observers._every)
    (row,) = recorder.records[0].results["repeated_modules"]
    assert (row["calls"], row["steps"]) == (2, 3)


class Recurrent(nn.Module):
    """Model that reads an orthogonal weight, which is computed anew at each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.transition = parametrizations.orthogonal(nn.Linear(40, 40, bias=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            inputs = self.transition(inputs)
        return inputs.sum()


@pytest.mark.parametrize("is_cached", [False, True])
def test_weight_of_a_repeated_parametrization_is_named_unless_it_is_cached(is_cached: bool, tmp_path: Path) -> None:
    forget_compilations()
    model = Recurrent()
    optimizer = SGD(model.parameters(), 1e-3)
    recorder = Recorder(model, optimizer, out=tmp_path, warmup=5, steps=4, profile="none", stacks=False)
    with recorder:
        for _ in range(12):
            with recorder.step(), parametrize.cached() if is_cached else nullcontext():
                loss = model(torch.randn(16, 40))
                update(optimizer, loss)
    rows = recorder.records[0].results.get("repeated_modules", [])
    expected = [] if is_cached else [("_Orthogonal", 3, "Recurrent.transition.weight", "matrix_exp")]
    assert [(row["module"], row["calls"], row["parametrized"], row["method"]) for row in rows] == expected


def test_nothing_stays_replaced_after_an_error_in_a_model(tmp_path: Path) -> None:
    def fail(number: int, model: Twice) -> None:
        model.fails = number == 2

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(tmp_path, fail)
    assert nn.Module.__call__ is CALL


def test_process_that_compiles_is_not_looked_at(tmp_path: Path) -> None:
    @torch.compile(backend="eager")
    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    recorder, replaced = record(tmp_path, lambda *_: double(torch.ones(2)))
    assert not any(replaced)
    assert "repeated_modules" not in recorder.records[0].results


def test_error_of_an_observer_of_calls_leaves_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_hot, "_weight_of", lambda _: 1 / 0)
    recorder, _ = record(tmp_path, lambda *_: None)
    failed = [type(each).__name__ for each in recorder._observers._every if each.failure is not None]
    assert failed == ["OneHot"]
    assert recorder.records[0].results["repeated_modules"]
