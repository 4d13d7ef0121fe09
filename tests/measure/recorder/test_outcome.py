"""Tests of a loop's outcome: a NaN loss and skipped optimizer steps are caveats, found without extra computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems import Recorder
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.measure.recorder.outcome import Outcome, caveats_of
from cs_systems.measure.recorder.unedited import ScriptRecorder
from tests.measure.recorder.loops import CLEAN, batches, loss_of, net

Loop = Callable[[Path, Callable[[], None]], list[Caveat]]


def by_recorder(out: Path, step: Callable[[], None], steps: int = 4) -> list[Caveat]:
    with Recorder(out=out, **CLEAN) as recorder:
        for _ in range(steps):
            with recorder.step():
                step()
    return [*recorder.records[0].warnings]


def by_script(out: Path, step: Callable[[], None], steps: int = 4) -> list[Caveat]:
    recorder = ScriptRecorder("script", out=out, **CLEAN)
    for _ in range(steps):
        step()
    recorder.close()
    return [*recorder.records[0].warnings]


either = pytest.mark.parametrize("loop", [by_recorder, by_script])


def of(code: str, caveats: list[Caveat]) -> list[str]:
    return [caveat.message for caveat in caveats if caveat.code == code]


@either
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("bad", "skipped"), [({0}, 0), ({1}, 1), ({0, 1, 2, 3}, 3)])
def test_steps_that_a_scaler_skips_are_counted(
    loop: Loop, fused: bool, bad: set[int], skipped: int, tmp_path: Path
) -> None:
    """Skip steps of a warm-up step and three timed ones."""
    model, numbers = net(), iter(range(9))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, next(batches(1))) * (float("inf") if next(numbers) in bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    found = loop(tmp_path, step)
    messages = of("skipped-steps", found)
    assert len(messages) == bool(skipped)
    if skipped:
        begin = f"{skipped} of 3 optimizer steps were skipped by the GradScaler (scale 65,536 at first, "
        assert messages[0].startswith(begin)
        assert REMEDIES["skipped-steps"] in [caveat.remedy for caveat in found]
    assert of("inf-loss", found) == [], "a scaled loss may be infinite"


def test_skipped_step_of_one_optimizer_does_not_count_for_another(tmp_path: Path) -> None:
    good, bad = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (good, bad)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step() -> None:
        for model, factor in ((good, 1.0), (bad, float("inf"))):
            scaler.scale(loss_of(model, next(batches(1))) * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    (message,) = of("skipped-steps", by_recorder(tmp_path, step))
    assert message.startswith("3 of 6 optimizer steps were skipped")


@either
@pytest.mark.parametrize(("value", "code"), [("nan", "nan-loss"), ("inf", "inf-loss"), ("1", None)])
def test_nan_loss_is_a_caveat(loop: Loop, value: str, code: str | None, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        (loss_of(model, next(batches(1))) + float(value)).backward()
        optimizer.step()

    found = [caveat.code for caveat in loop(tmp_path, step) if caveat.code.endswith("-loss")]
    assert found == [code] * (code is not None)


def test_loss_inside_functorch_is_not_read(tmp_path: Path) -> None:
    weight = torch.ones(3)

    def step() -> None:
        torch.func.grad(lambda w: (w * float("nan")).sum())(weight)

    assert of("nan-loss", by_recorder(tmp_path, step)) == []


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_no_operator_is_added_to_a_step(tmp_path: Path) -> None:
    """Compare the operators of a step; reading a value would add one."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    found = []

    def step() -> None:
        with _Operators() as operators:
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(loss_of(model, next(batches(1)))).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(operators.names)

    by_recorder(tmp_path, step, steps=8)
    assert found[2] == found[7] != []


def test_loss_that_is_a_part_of_a_large_tensor_is_read_and_not_kept() -> None:
    """mse_loss, for example, returns a part of the memory in which it has computed."""
    outcome = Outcome()
    large: Tensor = nn.Parameter(torch.full((1000,), float("nan"))) * 1
    memory = StorageWeakRef(large.untyped_storage())
    outcome.backward_begins((large,))
    assert outcome.row()["fault"] is None, "it is no scalar"
    outcome.backward_begins((large[0],))
    assert outcome.row()["fault"] == "NaN"
    del large
    assert memory.expired()
    assert [caveat.code for caveat in caveats_of(outcome.row())] == ["nan-loss"]


@pytest.mark.parametrize(
    ("losses", "early", "late"),
    [([3.0, 2.0, *[4.0] * 5, 40.0, 30.0], 3.0, 30.0), ([1.0] * 7, None, None), ([1.0] * 8 + [math.inf], None, None)],
)
def test_first_and_last_losses_are_compared(losses: list[float], early: float | None, late: float | None) -> None:
    outcome = Outcome()
    for loss in losses:
        outcome.backward_begins((torch.tensor(loss),))
    row = outcome.row()
    assert (row["early_loss"], row["late_loss"]) == (early, late)
    assert row["losses"] == (len(losses) if early else 0)
