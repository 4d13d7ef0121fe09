"""Tests of batch sizes: samples and tokens, and None if a batch does not show them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.measure.workloads._batches import samples_in, tokens_in

PLAIN, LSTM, FIRST = nn.Linear(4, 2), nn.LSTM(8, 8), nn.LSTM(8, 8, batch_first=True)
X, LABELS, SEQUENCES, IDS = torch.ones(16, 4), torch.ones(16), torch.ones(5, 16, 8), torch.ones(5, 16).long()


@pytest.mark.parametrize(
    ("batch", "model", "expected"),
    [
        pytest.param(X, PLAIN, 16, id="tensor"),
        pytest.param({"x": X, "labels": [LABELS]}, PLAIN, 16, id="nested"),
        pytest.param({"mask": torch.ones(5, 5), "x": torch.ones(16, 5)}, PLAIN, None, id="mask before the inputs"),
        pytest.param({"x": torch.ones(16, 5), "mask": torch.ones(5, 5)}, PLAIN, None, id="mask after the inputs"),
        pytest.param({"scale": torch.tensor(2.0), "x": X}, PLAIN, 16, id="scalar before the inputs"),
        pytest.param({"scale": torch.ones(1), "x": X}, PLAIN, None, id="scalar of one dimension"),
        pytest.param((SEQUENCES, LABELS), PLAIN, None, id="time before the samples of the labels"),
        pytest.param((IDS, IDS), LSTM, None, id="time first in all tensors"),
        pytest.param((IDS, IDS), FIRST, 5, id="batch first in the module"),
        pytest.param((X, LABELS), LSTM, 16, id="labels beside inputs of a module that is not batch first"),
        pytest.param({"n": 3}, PLAIN, None, id="no tensor"),
    ],
)
def test_samples_are_the_first_dimension_that_all_tensors_share(batch: Any, model: nn.Module, expected: Any) -> None:
    assert samples_in(batch, model) == expected


def test_boolean_mask_does_not_count_as_tokens() -> None:
    assert tokens_in((torch.ones(5, 5, dtype=torch.bool), IDS)) is None
    assert tokens_in((IDS, IDS)) == 80
