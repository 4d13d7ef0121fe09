"""Recurrent layers that walk over samples: what has to agree with the shapes, and what the table holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from cs_systems.analysis.comparison.loop_findings import SAMPLES_AS_TIME
from cs_systems.measure.recorder.module_calls import SeenCall
from cs_systems.measure.recorder.samples_as_time import BY_LOADER, BY_STATE, batch_sizes, shown_by, walked
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import last_along_dimension_1, recurrent

LAYER = nn.GRU(3, 5)


def call(module: nn.Module, inputs: tuple[Any, ...], result: Any = None, **named: Any) -> SeenCall:
    return SeenCall(module, (inputs, named), result, 0.0, 0.0, 0.0, module, True)


@pytest.mark.parametrize(
    ("module", "inputs", "shape"),
    [(LAYER, (torch.randn(7, 4, 3),), (7, 4, 3)), (LAYER, (torch.randn(7, 3),), None),
     (LAYER, (torch.randn(7, 7, 3),), None), (LAYER, (torch.randn(7, 1, 3),), None),
     (LAYER, (torch.randn(1, 7, 3),), None), (LAYER, (torch.randn(7, 4, 3), torch.zeros(1, 4, 5)), None),
     (nn.LSTM(3, 5, batch_first=True), (torch.randn(7, 4, 3),), None),
     (LAYER, (nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]),), None)],
)  # fmt: skip
def test_layer_may_walk_over_samples_without_batch_first_and_state(
    module: nn.Module, inputs: tuple[Any, ...], shape: tuple[int, ...] | None
) -> None:
    assert walked(call(module, inputs)) == shape


def last(states: Tensor) -> Tensor:
    return states[:, -1]


def shown(inputs: tuple[Tensor, ...], result: Callable[[Tensor], Any], **named: Tensor) -> str | None:
    """Return what shows the fault in a model that returns a result of the states of 7 samples with 4 steps."""
    walk = torch.randn(7, 4, 3)
    model = call(nn.Identity(), inputs, result(LAYER(walk)[0]), **named)
    return shown_by(call(LAYER, (walk,)), (7, 4, 3), model)


@pytest.mark.parametrize(
    ("inputs", "result", "found"),
    [((torch.zeros(7, 4),), last, BY_STATE), ((torch.zeros(7, 4, 2),), last, BY_STATE),
     ((torch.zeros(7, 4),), lambda states: (last(states), states.sum()), BY_STATE),
     ((torch.zeros(7, 4),), lambda states: states.select(1, 3), BY_STATE),
     ((torch.zeros(7, 4),), lambda states: {"logits": states[:, -1, :2]}, BY_STATE),
     ((torch.zeros(7, 4), torch.zeros(7)), last, BY_STATE),
     ((torch.zeros(7, 4), torch.zeros(4)), last, None),  # lengths of 4 sequences
     ((torch.zeros(7, 4),), lambda states: states[:, 0], None),
     ((torch.zeros(7, 4),), lambda states: states.mean(1), None),
     ((torch.zeros(7, 4),), lambda states: last(states).detach(), None),
     ((torch.zeros(7, 4),), lambda states: states[-1], None),
     ((torch.zeros(7, 4),), lambda states: states, None),
     ((torch.zeros(7, 4),), lambda states: states.flatten(0, 1), None),
     ((torch.zeros(7, 4),), lambda states: (last(states), states.softmax(1)), None),
     ((torch.zeros(7, 4),), lambda states: states.sum(), None),
     ((torch.zeros(4, 7),), last, None), ((torch.zeros(7, 2, 4),), last, None), ((torch.zeros(28),), last, None),
     ((torch.zeros(7, 4, 2, 2),), last, None), ((), last, None)],
)  # fmt: skip
def test_model_that_takes_the_last_state_shows_samples(
    inputs: tuple[Tensor, ...], result: Callable[[Tensor], Any], found: str | None
) -> None:
    assert shown(inputs, result) == found


def test_shuffled_loader_shows_samples_however_the_states_are_pooled() -> None:
    loader = iter(DataLoader(torch.zeros(70, 4), batch_size=7, shuffle=True))
    assert shown((next(loader),), lambda states: states.mean(1)) == BY_LOADER
    assert shown((torch.zeros(7, 2, 4),), lambda states: states.mean(1)) == BY_LOADER, "4 was its last dimension"
    assert shown((torch.zeros(7, 4),), lambda states: states) is None
    del loader
    assert shown((torch.zeros(7, 4),), lambda states: states.mean(1)) is None


@pytest.mark.parametrize(
    ("options", "is_known"),
    [({"batch_size": 777, "shuffle": True}, True), ({"batch_size": 777}, False),
     ({"batch_size": 777, "shuffle": True, "collate_fn": lambda samples: default_collate(samples).t()}, False),
     ({"batch_size": None}, False)],
)  # fmt: skip
def test_size_of_a_loader_is_known_if_it_shuffles_and_stacks_samples(options: dict[str, Any], is_known: bool) -> None:
    batches = iter(DataLoader(torch.zeros(2000, 4), **options))
    next(batches)
    assert (777 in batch_sizes()) == is_known


def test_row_names_the_layer_and_its_line(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, recurrent(last_along_dimension_1))
    (row,) = SAMPLES_AS_TIME.of(recorder.records[0].results)
    assert (row["module"], row["kind"], row["evidence"]) == ("Recurrent.layer", "GRU", BY_STATE)
    assert (row["samples"], row["length"], row["width"]) == (16, 6, 8)
    assert row["steps"] == row["of_steps"] > 1
    assert str(row["place"]).startswith("trainings.py:")
