"""Modules with results that nothing reads, and results that something reads without a gradient, or later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import REPEATED_MODULES, UNUSED_OUTPUTS, UnusedOutputsRow
from cs_systems.measure.recorder import marked, unused_outputs
from cs_systems.measure.recorder.marked import Marked, Uses, may_see_types
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import Step, update

HEADS, STEPS = 4, 20
Scores = dict[str, Tensor]
Reads = Callable[[Scores, "Heads"], object]


class Head(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.kept: Any = None


class Metered(Head):
    def forward(self, inputs: Tensor) -> Tensor:
        """Keep the mean of what is inside, whether or not the result is used."""
        inner = self[2](self[1](self[0](inputs)))
        HISTORY.append(inner.detach().mean())
        return self[3](inner)  # type: ignore[no-any-return]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 32)
        self.heads = nn.ModuleDict({f"head{number}": Head() for number in range(HEADS)})

    def forward(self, inputs: Tensor) -> Scores:
        shared = self.trunk(inputs)
        return {name: head(shared) for name, head in self.heads.items()}


@pytest.fixture(autouse=True)
def no_types(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these files, which ask for classes, be programs that do not."""
    if "asks" not in request.fixturenames:
        monkeypatch.setattr(unused_outputs, "may_see_types", lambda: False)


def loss(scores: Tensor) -> Tensor:
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def rows(out: Path, step: Step) -> list[UnusedOutputsRow]:
    recorder = recorded(out, step, STEPS)
    assert all(each.failure is None for each in recorder._observers._every)
    return [*UNUSED_OUTPUTS.of(recorder.records[0].results)]


def training(reads: Reads, model: Heads | None = None) -> Step:
    """Return a step that trains one head; something else may read the results of all."""
    model = Heads() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        scores = model(torch.randn(16, 8))
        update(optimizer, loss(scores["head1"]))
        reads(scores, model)

    return step


UNREAD: dict[str, Reads] = {
    "nothing": lambda scores, _: None,
    "names": lambda scores, _: [*scores],
    "another_by_its_name": lambda scores, _: scores["head1"].argmax(1),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_heads_that_nothing_reads_are_counted(kind: str, tmp_path: Path) -> None:
    (row,) = rows(tmp_path, training(UNREAD[kind]))
    assert row["module"].startswith("Heads.heads.head")
    assert (row["calls"], row["steps"]) == (HEADS - 1, 2)
    assert 0 < row["share"] < 1
    assert row["place"] is not None


HISTORY: list[Any] = []
READ: dict[str, Reads] = {
    "metric": lambda scores, _: [each.argmax(1) for each in scores.values()],
    "number": lambda scores, _: [each[0, 0].item() for each in scores.values()],
    "text": lambda scores, _: str(scores),
    "array": lambda scores, _: [each.detach().numpy() for each in scores.values()],
    "data": lambda scores, _: [each.data for each in scores.values()],
    "all_at_once": lambda scores, _: torch.stack([*scores.values()]).mean().item(),
    "without_gradients": lambda scores, _: torch.no_grad()(lambda: [loss(each) for each in scores.values()])(),
    "kept": lambda scores, _: HISTORY.append(scores),
    "later": lambda scores, _: (HISTORY.append(scores), [each.mean() for each in HISTORY[-3:][0].values()]),
}


@pytest.mark.parametrize("kind", READ)
def test_results_that_are_read_or_kept_give_no_row(kind: str, tmp_path: Path) -> None:
    HISTORY.clear()
    assert rows(tmp_path, training(READ[kind])) == []
    assert not any(type(each) is Marked for scores in HISTORY for each in scores.values())
    HISTORY.clear()


def with_a_hook(model: Heads) -> None:
    for head in model.heads.values():
        head[0].register_forward_hook(lambda _, __, result: HISTORY.append(float(result.detach().mean())))


def with_a_kept_tensor(model: Heads) -> None:
    for head in model.heads.values():
        head[2].register_forward_pre_hook(lambda module, inputs: setattr(module, "seen", inputs[0].detach()))


def with_a_pre_hook(model: Heads) -> None:
    for head in model.heads.values():
        head[2].register_forward_pre_hook(lambda _, inputs: HISTORY.append(float(inputs[0].detach().mean())))


def count(head: Head, *_: Any) -> None:
    head.calls.add_(1)  # type: ignore[operator, union-attr]


def with_a_meter(model: Heads) -> None:
    for name in model.heads:
        model.heads[name] = Metered()


def with_changed_buffers(model: Heads) -> None:
    for head in model.heads.values():
        head.register_buffer("calls", torch.zeros(()))
        head[0].register_forward_pre_hook(partial(count, head))


@pytest.mark.parametrize(
    "change", [with_a_hook, with_a_kept_tensor, with_a_pre_hook, with_a_meter, with_changed_buffers]
)
def test_of_modules_that_do_more_than_return_only_the_last_layer_counts(
    change: Callable[[Heads], None], tmp_path: Path
) -> None:
    model = Heads()
    change(model)
    (row,) = rows(tmp_path, training(UNREAD["nothing"], model))
    assert row["module"].endswith(".3")


def test_frozen_modules_give_no_row(tmp_path: Path) -> None:
    model = Heads()
    for name, head in model.heads.items():
        head.requires_grad_(name == "head1")
    assert rows(tmp_path, training(UNREAD["nothing"], model)) == []


@pytest.mark.parametrize("adds", [False, True])
def test_heads_of_other_passes_of_the_step_are_used(adds: bool, tmp_path: Path) -> None:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        for name in model.heads:
            scores = model(torch.randn(16, 8))
            loss(scores[name]).backward()
        optimizer.step()

    def added() -> None:
        update(optimizer, sum(loss(each) for each in model(torch.randn(16, 8)).values()))  # type: ignore[arg-type]

    assert rows(tmp_path, added if adds else step) == []


def test_marks_leave_repeated_calls_known(tmp_path: Path) -> None:
    model, given = Heads(), torch.randn(128, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        first, second = model(given), model(given)
        update(optimizer, loss(first["head1"]) + loss(second["head1"]))

    results = recorded(tmp_path, step, STEPS).records[0].results
    assert [row["steps"] for row in REPEATED_MODULES.of(results)] == [3]
    assert [row["calls"] for row in UNUSED_OUTPUTS.of(results)] == [2 * (HEADS - 1)]


@pytest.mark.parametrize("asks", [True])
def test_programs_that_ask_for_classes_get_plain_tensors(asks: bool, tmp_path: Path) -> None:
    seen: set[Any] = set()
    assert may_see_types() is asks
    found = rows(tmp_path, training(lambda scores, _: seen.update(map(type, scores.values()))))
    assert (found, seen) == ([], {Tensor})


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("y = type(x) is Tensor", True),
        ("y = x.__class__", True),
        ("y = kinds[type(x)]", True),
        ("y = type(self).__name__", False),
        ("y = x.type(int)", False),
        ("y = isinstance(x, Tensor)", False),
    ],
)
def test_source_shows_whether_classes_are_asked_for(
    line: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"{line}\n", encoding="utf-8")
    program = ModuleType("program")
    program.__file__ = str(file)
    monkeypatch.setattr(marked, "sys", SimpleNamespace(modules={"program": program}))
    assert may_see_types() is asks


def test_mark_ends_with_the_first_use() -> None:
    looks = [True]
    uses, others = Uses(lambda: looks[0]), Uses(lambda: looks[0])
    tensor = torch.randn(3, requires_grad=True) * 2
    uses.mark(tensor)
    others.mark(tensor)
    assert type(tensor.detach()) is Tensor
    assert not uses.is_used
    looks[0] = False
    assert type(torch.stack([torch.ones(3), tensor])) is Tensor
    assert uses.is_used
    assert others.is_used
    assert type(tensor) is Tensor
    assert not vars(tensor)
