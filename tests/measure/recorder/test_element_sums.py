"""Running totals over the elements of a tensor are told from other long chains of small operators."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from cs_systems.analysis.comparison.loop_findings import ELEMENT_SUMS
from cs_systems.measure.recorder.element_sums import FEWEST, MOST_ELEMENTS, MOST_SOURCES, element_sums
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import update

COUNT = 300
ZERO = torch.zeros(())


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def total(terms: Iterable[Tensor]) -> Tensor:
    return sum(terms, start=ZERO)


def by_index(values: Tensor) -> Tensor:
    result = ZERO
    for at in range(len(values)):
        result = result + (values[at] - 1.0) ** 2
    return result


def in_place(values: Tensor) -> Tensor:
    result = torch.zeros(())
    for value in values:
        result += value
    return result


def losses(values: Tensor) -> Tensor:
    return total(functional.mse_loss(value, ZERO) for value in values)


def rows(width: int, count: int = COUNT) -> Tensor:
    return total(row.sum() for row in leaf(count, width) * 2)


SUMS: dict[str, Callable[[], Tensor]] = {
    "builtin": lambda: sum(leaf(COUNT) ** 2) / COUNT,
    "builtin of rows with one number": lambda: sum(leaf(COUNT, 1) ** 2).sum(),
    "as one of several losses": lambda: leaf(3).sum() + 10 * sum(leaf(COUNT) * 2),
    "by index": lambda: by_index(leaf(COUNT) * 2),
    "in place": lambda: in_place(leaf(COUNT) * 2),
    "loss of each element": lambda: losses(leaf(COUNT) * 2),
    "of short rows": lambda: rows(MOST_ELEMENTS),
    "of the fewest elements": lambda: sum(leaf(FEWEST) * 2),
    "of some tensors": lambda: total([x for _ in range(MOST_SOURCES) for x in leaf(COUNT) * 2]),
}


def discounted() -> Tensor:
    result, rewards = ZERO, leaf(COUNT) * 2
    for at in range(COUNT):
        result = 0.9 * result + rewards[at]
    return result


def integrated() -> Tensor:
    state, forces = ZERO, leaf(COUNT) * 2
    for at in range(COUNT):
        state = state + 0.1 * torch.sin(state) * forces[at]
    return state


def residual() -> Tensor:
    state, weight = torch.zeros(4), leaf(4, 4)
    for _ in range(COUNT):
        state = state + torch.tanh(weight @ state)
    return state.sum()


def crf() -> Tensor:
    """Return the partition function of a chain of tags, a true recurrence."""
    scores, transitions = leaf(COUNT, 5) * 2, leaf(5, 5)
    alpha = scores[0]
    for at in range(1, COUNT):
        alpha = torch.logsumexp(alpha[:, None] + transitions, 0) + scores[at]
    return alpha.logsumexp(0)


def noisy_walk() -> Tensor:
    state = leaf(4)
    for _ in range(COUNT):
        state = state + torch.randn(4)
    return state.sum()


def sample_by_sample() -> Tensor:
    model = nn.Linear(8, 1)
    return total([model(torch.randn(8)).sum() for _ in range(COUNT)])


def called_in_a_loop() -> Tensor:
    model, result = nn.Linear(8, 1), ZERO
    for _ in range(COUNT):
        result = result + model(torch.randn(8)).sum()
    return result


OTHERS: dict[str, Callable[[], Tensor]] = {
    "whole tensor": lambda: (leaf(COUNT) ** 2).sum(),
    "losses of 20 tasks": lambda: total([(leaf(8) * 2).mean() for _ in range(20)]),
    "elements of a short tensor": lambda: sum(leaf(FEWEST - 1) * 2),
    "levels of a pyramid": lambda: total([leaf(64, 64).abs().mean() for _ in range(8)]),
    "penalty of many weights": lambda: total([leaf(8).pow(2).sum() for _ in range(COUNT)]),
    "rows before they are added": lambda: total([row.sum() for row in leaf(COUNT, 4) * 2]),
    "results of many calls": sample_by_sample,
    "calls of a model in a loop": called_in_a_loop,
    "long rows": lambda: rows(MOST_ELEMENTS + 1),
    "large layers": lambda: rows(4096, 120),
    "too many tensors": lambda: total([x for _ in range(MOST_SOURCES + 1) for x in leaf(COUNT) * 2]),
    "discounted returns": discounted,
    "Euler's method": integrated,
    "residual connections": residual,
    "partition function of tags": crf,
    "random walk": noisy_walk,
    "cumulative sums": lambda: torch.stack([*itertools.accumulate(leaf(COUNT) * 2)]).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_running_total_over_elements_is_found(name: str) -> None:
    found = element_sums(SUMS[name]())
    assert len(found) == 1
    assert found[0].operators >= FEWEST - 1
    assert found[0].last - found[0].first >= FEWEST - 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_and_recurrences_are_no_running_totals(name: str) -> None:
    assert element_sums(OTHERS[name]()) == []


def squared(values: Tensor) -> Tensor:
    return sum(values**2) / len(values)


def mean_squared(values: Tensor) -> Tensor:
    return (values**2).mean()


def regression(loss: Callable[[Tensor], Tensor], late: Collection[int] = ()) -> Callable[[], None]:
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), 1e-3)
    number = itertools.count()

    def step() -> None:
        if next(number) in late:
            time.sleep(0.05)
        update(optimizer, loss(model(torch.randn(600, 8)).squeeze(1)))

    return step


@pytest.mark.parametrize("loss", [squared, mean_squared])
def test_function_that_adds_up_elements_is_in_the_table_with_its_operators(
    loss: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    recorder = recorded(tmp_path, regression(loss))
    assert all(each.failure is None for each in recorder._observers._every)
    found = ELEMENT_SUMS.of(recorder.records[0].results)
    if loss is mean_squared:
        assert not found
        return
    (row,) = found
    assert (row["operators"], row["function"], row["calls"]) == (600, "squared", "sum")
    assert row["time_s"] > 3e-4
    assert row["samples"] > 0


def test_totals_are_found_though_the_steps_that_were_looked_at_are_slow(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, regression(squared, range(17, 22)))
    (row,) = ELEMENT_SUMS.of(recorder.records[0].results)
    assert (row["operators"], row["function"], row["calls"]) == (600, "squared", "sum")
