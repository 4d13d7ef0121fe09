"""Single elements of tensors that a program's own lines use one by one, in a recorded loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import SINGLE_ELEMENTS
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.trainings import forget_compilations

LENGTH = 20
Bias = Callable[[Tensor], Tensor]  # a matrix that the model adds, from its input


def written_by_numbers(inputs: Tensor) -> Tensor:
    bias = torch.zeros(LENGTH, LENGTH)
    for i in range(LENGTH):
        for j in range(LENGTH):
            bias[i, j] = float(i > j)
    return bias


def written_by_tensors(inputs: Tensor) -> Tensor:
    bias, rows = torch.zeros(LENGTH, LENGTH), torch.arange(LENGTH)
    for i in rows:
        for j in range(LENGTH):
            bias[i, j] = inputs[0, j]
    return bias


def compared(inputs: Tensor) -> Tensor:
    return torch.full((LENGTH, LENGTH), sum(1.0 for row in inputs for value in row if value > 0))


def read_by_item(inputs: Tensor) -> Tensor:
    return torch.tensor([[value.item() for value in row] for row in inputs])


def as_a_whole(inputs: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH).tril() * (inputs > 0).float().mean()


def row_by_row(inputs: Tensor) -> Tensor:
    bias = torch.zeros(LENGTH, LENGTH)
    for _ in range(LENGTH):
        for i in range(LENGTH):
            bias[i] = inputs[i]
    return bias


def as_numbers_of_python(inputs: Tensor) -> Tensor:
    return torch.tensor([[value + 1.0 for value in row] for row in inputs.tolist()])


def one_number(inputs: Tensor) -> Tensor:
    return torch.full((LENGTH, LENGTH), inputs.mean().item())


class Biased(nn.Module):
    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(LENGTH, LENGTH), bias

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs) + self.bias(inputs)
        return output


def recorded(bias: Bias, out: Path) -> ScriptRecorder:
    forget_compilations()
    torch.manual_seed(0)
    model = Biased(bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    recorder = ScriptRecorder("script", out=out, warmup=5, steps=3, profile="none")
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(LENGTH, LENGTH)).square().mean().backward()
        optimizer.step()
    recorder.close()
    assert all(each.failure is None for each in recorder._observers._every)
    return recorder


@pytest.mark.parametrize(
    ("bias", "reads", "writes"),
    [(written_by_numbers, 0, 400), (written_by_tensors, 0, 400), (compared, 400, 0), (read_by_item, 400, 0)],
)
def test_elements_are_counted_by_the_line_that_uses_them(bias: Bias, reads: int, writes: int, tmp_path: Path) -> None:
    methods = {name: vars(Tensor).get(name) for name in ("__setitem__", "__bool__", "item")}
    (row,) = SINGLE_ELEMENTS.of(recorded(bias, tmp_path).records[0].results)
    assert row["function"].startswith(bias.__name__)
    assert row["place"].startswith("test_single_elements.py:")
    assert (row["reads"], row["writes"]) == (reads, writes)
    assert 0.2e-6 * LENGTH**2 < row["time_s"] < 1e-3 * LENGTH**2
    assert methods == {name: vars(Tensor).get(name) for name in methods}


@pytest.mark.parametrize("bias", [as_a_whole, row_by_row, as_numbers_of_python, one_number])
def test_rows_and_whole_tensors_are_no_single_elements(bias: Bias, tmp_path: Path) -> None:
    assert not SINGLE_ELEMENTS.of(recorded(bias, tmp_path).records[0].results)


def test_other_work_of_the_line_is_no_time_of_its_elements(tmp_path: Path) -> None:
    weight, rates = torch.zeros(300, 300), torch.rand(250).tolist()

    def steps_of_euler(inputs: Tensor) -> Tensor:
        state = torch.zeros(300, 300)
        for rate in torch.tensor(rates):
            state = state + (state @ weight) * float(rate)
        return state[:LENGTH, :LENGTH]

    began_s = time.perf_counter()
    steps_of_euler(weight)
    line_s = time.perf_counter() - began_s
    (row,) = SINGLE_ELEMENTS.of(recorded(steps_of_euler, tmp_path).records[0].results)
    assert row["reads"] == 250
    assert row["time_s"] < line_s / 5


def test_elements_that_autograd_records_are_left_out(tmp_path: Path) -> None:
    """A recurrence may need each one before the next."""
    weight = torch.ones(1, requires_grad=True)

    def recurrence(inputs: Tensor) -> Tensor:
        states = torch.zeros(LENGTH, LENGTH)
        for i in range(1, LENGTH):
            for j in range(LENGTH):
                states[i, j] = 0.5 * weight * states[i - 1, j].clone()
        return states

    assert not SINGLE_ELEMENTS.of(recorded(recurrence, tmp_path).records[0].results)
