"""Rows of linear layers' results that get no gradient, and results of which most are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import UNREAD_ROWS, UnreadRowsRow
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.unread_rows import UnreadRows
from tests.measure.recorder.test_training import recorded

SAMPLES, LENGTH, WIDTH, ITEMS = 8, 16, 32, 400
Losses = Callable[[Tensor], Tensor | list[Tensor]]


class Scores(nn.Module):
    def __init__(self, items: int = ITEMS) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, items)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs).tanh())  # type: ignore[no-any-return]


def rows(losses: Losses, items: int = ITEMS, model: nn.Module | None = None, steps: int = 3) -> list[UnreadRowsRow]:
    """Return what the observer finds in some steps; the scores give the losses, each with a backward pass."""
    model = Scores(items) if model is None else model
    observer = UnreadRows(Subject("loop", resolve("cpu"), [model], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    try:
        for _ in range(steps):
            found = losses(model(torch.randn(SAMPLES, LENGTH, WIDTH)))
            for loss in found if isinstance(found, list) else [found]:
                observer.look_before_backward(loss)
                loss.backward(retain_graph=True)
            observer.look_after_step()
    finally:
        observer.stop_looking()
    observer.end()
    return [*UNREAD_ROWS.of(observer.kept)]


def entropy(scores: Tensor) -> Tensor:
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def last_of_each(scores: Tensor) -> Tensor:
    index = torch.full((SAMPLES, 1, 1), LENGTH - 1).expand(-1, -1, scores.shape[-1])
    return entropy(scores.gather(1, index)[:, 0])


READ: dict[str, tuple[Losses, int]] = {
    "last": (lambda scores: entropy(scores[:, -1]), SAMPLES),
    "last_two": (lambda scores: entropy(scores[:, -2:].flatten(0, 1)), 2 * SAMPLES),
    "first_of_time_first": (lambda scores: entropy(scores.transpose(0, 1)[0]), SAMPLES),
    "logarithm": (lambda scores: -scores.log_softmax(-1)[:, -1, 0].mean(), SAMPLES),
    "logarithm_by_number": (lambda scores: -scores.log_softmax(2)[:, -1].mean(), SAMPLES),
    "scaled": (lambda scores: entropy((scores / 0.7).relu()[:, -1]), SAMPLES),
    "last_for_each_other": (
        lambda scores: entropy((scores[:, -1] + torch.zeros(4, 1, 1)).flatten(0, 1)),
        SAMPLES,
    ),
    "flat": (lambda scores: entropy(scores.reshape(-1, ITEMS)[::LENGTH]), SAMPLES),
}


@pytest.mark.parametrize("kind", READ)
def test_rows_without_a_gradient_are_told_of_the_last_layer(kind: str) -> None:
    losses, read = READ[kind]
    (row,) = rows(losses)
    assert (row["layer"], row["rows"], row["read"]) == ("Scores.head", SAMPLES * LENGTH, read)
    assert (row["products"], row["steps"]) == (1, 3)
    assert 0 < row["read_s"] < row["time_s"]


class SegmentAdd(torch.autograd.Function):
    """Sum over parts of the rows, with the name of an operator of torch within its own."""

    @staticmethod
    def forward(_: Any, scores: Tensor) -> Tensor:
        return scores.flatten(0, 1).unflatten(0, (SAMPLES, LENGTH)).sum(1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient[:, None].expand(-1, LENGTH, -1)


PARTS = torch.arange(SAMPLES * LENGTH) // LENGTH


def best_of_each(scores: Tensor) -> Tensor:
    """Return the loss of the rows with the least first score, which the program chooses among all."""
    return entropy(scores[torch.arange(SAMPLES), scores.detach()[..., 0].argmin(1)])


NONE: dict[str, Losses] = {
    "mask": lambda scores: entropy(scores[torch.rand(SAMPLES, LENGTH).argsort(1) < 2]),
    "gathered": last_of_each,
    "largest_of_each_column": lambda scores: entropy(scores.gather(1, scores.argmax(1, keepdim=True))[:, 0]),
    "chosen_by_its_scores": best_of_each,
    "added_up": lambda scores: entropy(scores.new_zeros(SAMPLES, ITEMS).index_add(0, PARTS, scores.flatten(0, 1))),
    "scattered": lambda scores: entropy(
        scores.new_zeros(SAMPLES, ITEMS).scatter_add(0, PARTS[:, None].expand(-1, ITEMS), scores.flatten(0, 1))
    ),
    "put": lambda scores: entropy(
        scores.new_zeros(SAMPLES, ITEMS).index_put((PARTS,), scores.flatten(0, 1), accumulate=True)
    ),
    "pooled": lambda scores: entropy(
        torch.addmm(torch.zeros(ITEMS), nn.functional.one_hot(PARTS).float().t(), scores.flatten(0, 1))
    ),
    "function_of_the_program": lambda scores: entropy(SegmentAdd.apply(scores)),
    "broadcast": lambda scores: entropy((scores + torch.zeros(4, 1, 1, 1))[0, :, -1]),
    "nothing": lambda scores: scores[:, :0].sum() + scores[:, :0].mean(0).sum(),
    "all": lambda scores: entropy(scores.flatten(0, 1)),
    "shifted": lambda scores: entropy(scores[:, :-1].flatten(0, 1)),
    "half": lambda scores: entropy(scores[: SAMPLES // 2].flatten(0, 1)),
    "another_reader": lambda scores: entropy(scores[:, -1]) + 1e-3 * scores.square().mean(),
    "another_pass": lambda scores: [entropy(scores[:, -1]), scores[:, :-1].square().mean()],
    "over_time": lambda scores: -scores.log_softmax(1)[:, -1].mean(),
    "summed_over_time": lambda scores: entropy(scores.cumsum(1)[:, -1]),
    "features": lambda scores: entropy(scores[..., :40].flatten(0, 1)),
    "heads": lambda scores: scores.unflatten(-1, (10, 40))[:, :, 0].mean(),
    "transposed": lambda scores: scores.transpose(1, 2)[:, :4].mean(),
    "chosen": lambda scores: scores.gather(2, torch.zeros(SAMPLES, LENGTH, 1, dtype=torch.long)).mean(),
}


@pytest.mark.parametrize("kind", NONE)
def test_other_readers_give_no_row(kind: str) -> None:
    assert rows(NONE[kind]) == []


def test_few_scores_and_a_width_equal_to_the_length_give_no_row() -> None:
    assert rows(READ["last"][0], items=8) == []

    class Square(Scores):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.repeat(1, ITEMS // LENGTH, 1))

    assert rows(lambda scores: entropy(scores[:, -1]), model=Square()) == []


def test_a_layer_that_picks_before_it_computes_gives_no_row() -> None:
    class Picks(Scores):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs).tanh()[:, -1])  # type: ignore[no-any-return]

    assert rows(entropy, model=Picks()) == []


def test_layer_that_shares_its_weight_has_its_own_name() -> None:
    class Tied(Scores):
        def __init__(self) -> None:
            super().__init__()
            self.a_table = nn.Embedding(ITEMS, WIDTH)
            self.a_table.weight = self.head.weight

    (row,) = rows(READ["last"][0], model=Tied())
    assert row["layer"] == "Tied.head"


def test_weight_without_a_layer_is_named() -> None:
    class Own(Scores):
        def forward(self, inputs: Tensor) -> Tensor:
            return functional.linear(self.body(inputs), self.scores)

    model = Own()
    model.scores = nn.Parameter(torch.randn(ITEMS, WIDTH))
    (row,) = rows(READ["last"][0], model=model)
    assert row["layer"] == "Own.scores"


def test_layer_that_another_pass_reads_whole_gives_no_row() -> None:
    model = Scores()

    def both(scores: Tensor) -> list[Tensor]:
        return [entropy(scores[:, -1]), entropy(model(torch.randn(2, LENGTH, WIDTH)).flatten(0, 1))]

    assert rows(both, model=model) == []


def test_layer_in_bf16_is_measured_in_bf16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (row,) = rows(lambda scores: entropy(scores[:, -1].float()))
    assert row["read"] == SAMPLES


def test_a_product_of_two_results_is_no_layer() -> None:
    class Own(Scores):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs).tanh() @ self.head.weight.tanh().t()

    assert rows(READ["last"][0], model=Own()) == []


def test_layers_below_a_checkpoint_are_not_seen() -> None:
    class Saving(Scores):
        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]

    model = Saving()
    assert rows(lambda scores: entropy(scores[:, -1]) + 0 * model.head.bias.sum(), model=model) == []


def test_rows_are_measured_in_a_loop(tmp_path: Path) -> None:
    model = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        entropy(model(torch.randn(SAMPLES, LENGTH, WIDTH))[:, -1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    (row,) = UNREAD_ROWS.of(recorded(tmp_path, step).records[0].results)
    assert (row["layer"], row["read"]) == ("Scores.head", SAMPLES)
