"""Half precision on a CPU: an operator is timed in it and in fp32, as the model computes in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cs_systems.analysis.comparison.loop_findings import HALF_PRECISION, HalfPrecisionRow
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import update


def rows(out: Path, model: nn.Module, inputs: torch.Tensor, autocast: torch.dtype | None) -> list[HalfPrecisionRow]:
    """Return the rows of a recorded loop that trains a model under autocast to this dtype."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(inputs).square().mean()
        update(optimizer, loss)

    recorder = recorded(out, step)
    assert all(each.failure is None for each in recorder._observers._every)
    return [*HALF_PRECISION.of(recorder.records[0].results)]


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_each_kind_of_layer_is_timed_in_the_precision_of_autocast(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4))
    found = rows(tmp_path, model, torch.randn(2, 1, 4, 4), dtype)
    assert [(row["operator"], row["precision"], row["is_autocast"]) for row in found] == [
        ("matrix product", name, True),
        ("convolution", name, True),
    ]
    assert all(row["time_s"] > 0 and row["float32_s"] > 0 for row in found)


def test_weights_in_half_precision_are_timed_without_autocast(tmp_path: Path) -> None:
    (found,) = rows(tmp_path, nn.Linear(8, 4).bfloat16(), torch.randn(2, 8).bfloat16(), None)
    assert (found["operator"], found["precision"], found["is_autocast"]) == ("matrix product", "bf16", False)


def test_fp32_is_not_timed(tmp_path: Path) -> None:
    assert rows(tmp_path, nn.Linear(8, 4), torch.randn(2, 8), None) == []
