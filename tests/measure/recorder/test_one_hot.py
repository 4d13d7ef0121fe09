"""Rows of which hardly any number differs from 0 are told from others by a sample; what is found is in the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import ONE_HOT
from cs_systems.measure.recorder.one_hot import Nonzeros, nonzeros
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import FAULTS, update


def ones_of(width: int, count: int, rows: int = 40) -> Tensor:
    """Return rows that begin with this many ones."""
    return (torch.arange(width) < count).float().expand(rows, width).contiguous()


@pytest.mark.parametrize(
    ("rows", "found"),
    [(ones_of(256, 1), Nonzeros(1, True)), (ones_of(255, 1), None),
     (ones_of(400, 4), Nonzeros(4, True)), (ones_of(400, 5), None), (ones_of(400, 0), None),
     (2 * ones_of(400, 1), Nonzeros(1, False)), (ones_of(400, 1)[0], None),
     (ones_of(400, 1).t().contiguous().t(), Nonzeros(1, True)), (ones_of(400, 1).view(4, 10, 400), Nonzeros(1, True)),
     (ones_of(400, 1).requires_grad_(), None), (ones_of(400, 1).long(), None),
     (ones_of(400, 1).to_sparse(), None)],
)  # fmt: skip
def test_few_numbers_of_a_row_are_not_zero(rows: Tensor, found: Nonzeros | None) -> None:
    assert nonzeros(rows) == found


@pytest.mark.parametrize(("zeros", "found"), [(20, Nonzeros(1, True)), (21, None)])
def test_half_of_the_rows_may_be_padding(zeros: int, found: Nonzeros | None) -> None:
    rows = ones_of(400, 1)
    rows[:zeros] = 0
    assert nonzeros(rows) == found


def test_one_dense_row_among_a_thousand_is_seen() -> None:
    rows = ones_of(400, 1, rows=1000)
    rows[777] = 1.0
    assert nonzeros(rows) is None


def test_row_has_the_calls_of_a_step_and_the_share_of_the_weight(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, FAULTS["one_hot_into_a_linear"][0]())
    (row,) = ONE_HOT.of(recorder.records[0].results)
    assert (row["module"], row["width"], row["nonzeros"], row["is_ones"], row["rows"]) == ("Linear", 2000, 1, True, 64)
    assert row["steps"] == row["of_steps"] > 1
    assert row["elements_share"] == pytest.approx(64_000 / (64_000 + 32 + 33 * 4))
    assert 0 < row["share"] < 1
    assert row["backward_ratio"] > 0


class Frozen(nn.Module):
    """Model with a fixed projection of one-hot rows."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(400, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, items: Tensor) -> Tensor:
        logits: Tensor = self.head(self.project(functional.one_hot(items, 400).float()))
        return logits


def test_frozen_weight_has_no_product_in_backward(tmp_path: Path) -> None:
    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    recorder = recorded(tmp_path, lambda: update(optimizer, model(torch.randint(400, (32,))).square().mean()))
    (row,) = ONE_HOT.of(recorder.records[0].results)
    assert (row["module"], row["backward_ratio"], row["elements_share"]) == ("Frozen.project", 0, 0)
    assert (row["function"], row["place"]) == ("Frozen.forward", f"{Path(__file__).name}:{line_of('self.project(')}")


def line_of(text: str) -> int:
    """Return the number of the first line of this file with a text."""
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)
