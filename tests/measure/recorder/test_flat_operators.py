"""Parameters that get gradients of zeros, because an operator without a derivative follows them, and sound models."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD, Adam, AdamW

from cs_systems.analysis.comparison.loop_findings import FLAT_OPERATORS
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.analysis.diagnosis.flat_operators import FEWEST
from cs_systems.measure.recorder import flat_operators
from cs_systems.measure.recorder.flat_operators import line_of_call
from tests.measure.recorder.test_training import recorded

WIDTH = 8
Loss = Callable[["Codec", Tensor], Tensor]


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4))
        self.decoder = nn.Linear(4, WIDTH)
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, inputs: Tensor, rounded: Callable[[Tensor], Tensor] = torch.round) -> Tensor:
        decoded: Tensor = self.decoder(rounded(self.encoder(inputs) * 8) / 8)
        return decoded


class Passed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def found(tmp_path: Path, loss: Loss, steps: int = 40, *, clears: bool = True, made: Any = SGD) -> list[Any]:
    """Return the row of a loop with this loss, and the first cause that is told of it."""
    torch.manual_seed(0)
    model = Codec()
    optimizer = made(model.parameters(), lr=0.01)

    def step() -> None:
        loss(model, torch.randn(32, WIDTH)).backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()

    recorder = recorded(tmp_path, step, steps)
    rows = FLAT_OPERATORS.of(recorder.records[0].results)
    return [*rows, diagnose(recorder.records).diagnoses[0].code] if rows else []


def squared(decoded: Tensor, x: Tensor) -> Tensor:
    return (decoded - x).square().mean()


CUT: dict[str, Loss] = {
    "round": lambda codec, x: squared(codec(x), x),
    "floor": lambda codec, x: squared(codec(x, torch.floor), x),
    "ceil": lambda codec, x: squared(codec(x, torch.ceil), x),
    "trunc": lambda codec, x: squared(codec(x, torch.trunc), x),
    "sign": lambda codec, x: squared(codec(x, torch.sign), x),
    "round in place": lambda codec, x: squared(codec(x, lambda codes: codes.round_()), x),
    "round to decimals": lambda codec, x: squared(codec(x, lambda codes: codes.round(decimals=1)), x),
    "round, clamped": lambda codec, x: squared(codec(x, lambda codes: codes.clamp(-9, 9).round().clamp(-8, 7)), x),
}
SOUND: dict[str, Loss] = {
    "straight through": lambda codec, x: squared(codec(x, lambda codes: codes + (codes.round() - codes).detach()), x),
    "own function": lambda codec, x: squared(codec(x, Passed.apply), x),
    "another path": lambda codec, x: squared(codec(x), x) + 0.1 * codec.encoder(x).square().mean(),
    "fraction": lambda codec, x: squared(codec(x, lambda codes: codes - codes.floor()), x),
    "noise": lambda codec, x: squared(codec(x, lambda codes: codes + torch.rand_like(codes) - 0.5), x),
    "target": lambda codec, x: squared(codec(x, torch.tanh), codec.encoder(x).sum(1, keepdim=True).round()),
    "without gradients": lambda codec, x: squared(codec.decoder(codec.encoder(x).detach().round()), x),
}


@pytest.mark.parametrize("name", CUT)
def test_parameters_behind_an_operator_without_derivative_are_found(name: str, tmp_path: Path) -> None:
    row, code = found(tmp_path, CUT[name])
    assert (row["operators"], row["module"], row["parameters"]) == (name.split()[0].strip(","), "Codec.encoder", 4)
    assert row["steps"] >= FEWEST
    assert code == "flat-operators"


@pytest.mark.parametrize("name", SOUND)
def test_other_models_are_left_out(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, SOUND[name]) == []


def test_operators_of_several_paths_are_listed(tmp_path: Path) -> None:
    def both(codec: Codec, x: Tensor) -> Tensor:
        return squared(codec(x), x) + squared(codec(x, torch.floor), x)

    row, _ = found(tmp_path, both)
    assert (row["operators"], row["place"]) == ("floor, round", "")


def test_rows_of_a_table_behind_a_sign_are_found(tmp_path: Path) -> None:
    row, _ = found(tmp_path, lambda codec, x: squared(codec.table(torch.arange(len(x)) % 16).sign(), x))
    assert (row["operators"], row["module"], row["parameters"]) == ("sign", "Embedding", 1)


def test_gradient_by_a_hook_is_left_out(tmp_path: Path) -> None:
    def hooked(codec: Codec, x: Tensor) -> Tensor:
        codes = codec.encoder(x)
        codes.register_hook(torch.ones_like)
        return squared(codec.decoder(codes.round()), x)

    assert found(tmp_path, hooked) == []


def test_gradient_of_another_pass_is_left_out(tmp_path: Path) -> None:
    def twice(codec: Codec, x: Tensor) -> Tensor:
        codec.encoder(x).square().mean().backward()
        return squared(codec(x), x)

    assert found(tmp_path, twice) == []


def test_gradients_that_are_never_cleared_are_left_out(tmp_path: Path) -> None:
    steps = iter(range(100))

    def first(codec: Codec, x: Tensor) -> Tensor:
        return squared(codec(x, torch.tanh if next(steps) == 0 else torch.round), x)

    assert found(tmp_path, first, clears=False) == []


def test_large_graphs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_operators, "MOST_NODES", 10)
    assert found(tmp_path, CUT["round"]) == []


def in_turns(codec: Codec, x: Tensor, steps: Iterator[int]) -> Tensor:
    """Round in all steps but every 16th, as some programs add a term of the loss only in some steps."""
    return squared(codec(x, torch.tanh if next(steps) % 16 == 15 else torch.round), x)


@pytest.mark.parametrize("optimizer", [SGD, partial(SGD, momentum=0.9), Adam, partial(AdamW, weight_decay=0.1)])
def test_parameters_that_another_step_moves_are_left_out(optimizer: Any, tmp_path: Path) -> None:
    steps = count()
    assert found(tmp_path, lambda codec, x: in_turns(codec, x, steps), made=optimizer) == []


@pytest.mark.parametrize(
    "optimizer", [partial(SGD, weight_decay=0.1), partial(Adam, weight_decay=0.1), partial(AdamW, weight_decay=0.1)]
)
def test_parameters_that_only_decay_are_found(optimizer: Any, tmp_path: Path) -> None:
    row, _ = found(tmp_path, CUT["round"], made=optimizer)
    assert row["parameters"] == 4


class Single(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (
            np.floor(2.5) * math.ceil(0.5) * x  # of numbers
            .mul(2).fix()
        )  # fmt: skip


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.frac() + torch.frac(2 * x).detach()


def test_single_line_that_calls_an_operator_is_its_place() -> None:
    model = nn.Sequential(Single(), nn.Linear(2, 2))
    line = Single.forward.__code__.co_firstlineno + 3
    assert line_of_call([model], "fix") == ("Single.forward", f"test_flat_operators.py:{line}")


def test_operator_of_several_lines_has_no_place() -> None:
    assert line_of_call([Single(), Twice()], "round") == ("", "")


class Default(nn.Module):
    def forward(self, x: Tensor, rounded: Any = torch.cosh) -> Tensor:
        self.shown = x.detach().cosh()
        return rounded(x)  # type: ignore[no-any-return]


def test_operator_that_is_also_named_without_a_call_has_no_place() -> None:
    assert line_of_call([Default()], "cosh") == ("", "")


def test_operator_that_another_file_calls_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers_of_model.py").write_text("def cut(x):\n    return x.fix()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flat_operators, "is_own", lambda file: "test_flat" in file or "helpers_of" in file)
    importlib.import_module("helpers_of_model")
    assert line_of_call([Single()], "fix") == ("", "")


def test_operator_outside_of_the_classes_of_the_model_has_no_place() -> None:
    assert line_of_call([nn.Linear(2, 2)], "fix") == ("", "")
    assert line_of_call([Twice()], "fix") == ("", "")


def test_operator_next_to_a_class_of_a_library_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_operators, "is_own", lambda _: False)
    assert line_of_call([Single()], "fix") == ("", "")
