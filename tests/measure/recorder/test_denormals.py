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


def found_in(optimizer: Optimizer) -> list[DenormalsRow]:
    """Return what one look finds."""
    observer = Denormals(nullcontext)
    for _ in range(FIRST_STEP):
        observer.step_later(optimizer)
    return [*DENORMALS.of(observer.tables(Timing({}, {}, None), {}))]


def adam(weights: int = 4096, dtype: torch.dtype = torch.float32) -> AdamW:
    parameter = nn.Parameter(torch.ones(weights, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter])
    optimizer.step()
    return optimizer


def test_share_of_denormal_numbers_is_counted() -> None:
    (row,) = rows(adam(), fades_at=FIRST_STEP)
    assert row.pop("extra_s") is not None
    assert row == {"optimizer": "AdamW", "state": "exp_avg", "share": 1 / 8, "step": FIRST_STEP}


def test_shares_of_tensors_count_by_their_size() -> None:
    small, large = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(100_000))
    optimizer = SGD([small, large], 0.1, momentum=0.9)
    small.grad, large.grad = torch.ones(10), torch.ones(100_000)
    optimizer.step()
    optimizer.state[small]["momentum_buffer"].fill_(1e-40)
    (row,) = found_in(optimizer)
    assert row["share"] == pytest.approx(10 / 100_010)
    assert row["extra_s"] is None, "so few are not worth a trial"


@pytest.mark.parametrize(("is_flushed", "is_longer"), [(False, True), (True, False)])
def test_extra_time_of_an_update_with_denormal_numbers_is_measured(is_flushed: bool, is_longer: bool) -> None:
    parameter = nn.Parameter(torch.ones(1 << 19))
    optimizer = SGD([parameter], 0.1, momentum=0.99)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["momentum_buffer"].fill_(1e-39)
    if is_flushed and not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormal numbers")
    try:
        extra_s = (found_in(optimizer) or [{"extra_s": 0.0}])[0]["extra_s"]
    finally:
        torch.set_flush_denormal(False)
    assert extra_s is not None
    assert (extra_s > 1e-3) is is_longer


def test_optimizer_of_another_package_is_not_tried() -> None:
    class Own(SGD):
        pass

    parameter = nn.Parameter(torch.ones(8))
    optimizer = Own([parameter], 0.1, momentum=0.9)
    parameter.grad = torch.zeros(8)
    optimizer.step()
    optimizer.state[parameter]["momentum_buffer"].fill_(1e-40)
    assert [row["extra_s"] for row in found_in(optimizer)] == [None]


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
    assert rows(adam(dtype=torch.float16), fades_at=FIRST_STEP) == [], "a CPU computes with it as with fp32"
    assert rows(SGD([nn.Parameter(torch.ones(8))], 0.1)) == [], "it keeps nothing"


def test_look_changes_no_state() -> None:
    optimizer = adam()
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    versions = [value._version for state in optimizer.state.values() for value in state.values()]
    rows(optimizer)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert versions == [value._version for value in after]
