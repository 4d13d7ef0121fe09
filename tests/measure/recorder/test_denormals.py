"""Denormal numbers in what an optimizer keeps, counted after the recording."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cs_systems.analysis.comparison.loop_findings import DENORMALS, DenormalsRow
from cs_systems.measure.recorder.denormals import FIRST_STEP, Denormals
from cs_systems.measure.recorder.observers import Timing


def rows(optimizer: Optimizer, steps: int = FIRST_STEP, fades_at: int = 0) -> list[DenormalsRow]:
    """Return what the observer finds if the first weights' momentum is denormal from a step on."""
    observer = Denormals(nullcontext)
    for step in range(1, steps + 1):
        if step == fades_at:
            for state in optimizer.state.values():
                state["exp_avg"][: len(state["exp_avg"]) // 4] = 1e-40
        observer.step_later(optimizer)
    return [*DENORMALS.of(observer.tables(Timing({}, {}, None), {}))]


def adam(weights: int = 4096, dtype: torch.dtype = torch.float32) -> AdamW:
    parameter = nn.Parameter(torch.ones(weights, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter])
    optimizer.step()
    return optimizer


def test_share_of_denormal_numbers_is_counted() -> None:
    assert rows(adam(), fades_at=FIRST_STEP) == [
        {"optimizer": "AdamW", "state": "exp_avg", "share": 1 / 8, "step": FIRST_STEP}
    ]


@pytest.mark.parametrize("weights", [3, 4097, 100_000])
def test_some_numbers_of_a_large_state_are_read(weights: int) -> None:
    (row,) = rows(adam(weights), fades_at=FIRST_STEP) or [None]
    assert row is None if weights == 3 else row is not None and row["share"] == pytest.approx(1 / 8, abs=0.01)


def test_last_look_is_within_a_fifth_of_the_steps() -> None:
    assert rows(adam(), steps=900, fades_at=750)[0]["step"] > 750
    assert rows(adam(), steps=99, fades_at=1) == []


def test_sound_states_have_no_row() -> None:
    assert rows(adam()) == []
    assert rows(adam(dtype=torch.float64), fades_at=FIRST_STEP) == [], "1e-40 is a usual number in fp64"
    assert rows(SGD([nn.Parameter(torch.ones(8))], 0.1)) == [], "it keeps nothing"


def test_look_changes_no_state() -> None:
    optimizer = adam()
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    versions = [value._version for state in optimizer.state.values() for value in state.values()]
    rows(optimizer)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert versions == [value._version for value in after]
