"""Fused updates that are tried on copies: what they find, what they leave as it was, and what they leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_leaves

from cs_systems.analysis.comparison.loop_findings import FUSED_UPDATES, FusedUpdateRow
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder import fused_updates
from cs_systems.measure.recorder.copied_updates import CopiedUpdate
from cs_systems.measure.recorder.fused_updates import FusedUpdates
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.subject import Subject
from tests.measure.recorder.test_training import recorded

LAYERS = 30


def many_layers(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(4, 16)).square().mean()
    return loss


def found(
    optimizer: Optimizer, loss: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch, *, steps: int = 3, again: int = 1
) -> list[FusedUpdateRow]:
    """Return what the observer finds after some steps, each with `again` updates."""
    monkeypatch.setattr(FusedUpdates, "_share", lambda _: 1.0)
    observer = FusedUpdates(Subject("loop", resolve("cpu"), [], [optimizer], None, 1))
    observer.begins(Period.WARMUP)
    for _ in range(steps):
        for _ in range(again):
            optimizer.zero_grad()
            loss().backward()
            observer.look_before_update(optimizer)
            optimizer.step(loss) if isinstance(optimizer, LBFGS) else optimizer.step()  # type: ignore[arg-type]
        observer.look_after_step()
    observer.stop_looking()
    with torch.no_grad():
        observer.end()
    assert observer.failure is None
    return [*FUSED_UPDATES.of(observer.kept)]


def adam_of_two_groups(model: nn.Module) -> Optimizer:
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:20], "lr": 1e-4}, {"params": parameters[20:], "weight_decay": 0.1, "name": "last"}]
    return AdamW(groups, foreach=True)


MADE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: Adam(model.parameters()),
    "AdamW": lambda model: AdamW(model.parameters(), amsgrad=True),
    "AdamW of two groups": adam_of_two_groups,
    "SGD": lambda model: SGD(model.parameters(), momentum=0.9, nesterov=True),
    "Adagrad": lambda model: Adagrad(model.parameters()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MADE)
def test_fused_update_of_many_parameters_takes_less(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = many_layers().to(dtype)
    inputs = torch.ones(4, 16, dtype=dtype)
    (row,) = found(MADE[name](model), lambda: model(inputs).square().mean(), monkeypatch, again=2)
    assert row["optimizer"] == name.partition(" ")[0]
    assert (row["parameters"], row["tried"], row["updates"]) == (2 * LAYERS, 2 * LAYERS, 2.0)
    assert 0 < row["low_share"] <= row["fused_share"] <= row["high_share"]
    assert row["fused_share"] < 0.9
    assert row["time_s"] > 0


@pytest.mark.parametrize("name", MADE)
def test_trial_leaves_the_training_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    optimizer = MADE[name](model)
    loss = lambda: loss_of(model)  # noqa: E731
    found(optimizer, loss, monkeypatch)
    loss().backward()
    calls = list[int]()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict(), [p.grad for p in model.parameters()]))
    versions = [p._version for p in model.parameters()]
    state = torch.get_rng_state()
    assert before_an_update(optimizer, monkeypatch)
    after = (optimizer.state_dict(), model.state_dict(), [p.grad for p in model.parameters()])
    for was, now in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(was, now) if isinstance(was, Tensor) else was == now
    assert versions == [p._version for p in model.parameters()]
    assert torch.equal(state, torch.get_rng_state())
    assert calls == []


@pytest.mark.parametrize("name", MADE)
def test_copies_are_updated_as_the_parameters_would_be(name: str) -> None:
    model = many_layers()
    optimizer = MADE[name](model)
    loss_of(model).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, fused_updates.GRADIENT)
    chosen = [*model.parameters()]
    with torch.no_grad():
        forms = ({}, fused_updates.FUSED)
        made = [CopiedUpdate(optimizer, chosen, fused_updates._gradient, form=form) for form in forms]
        optimizer.step()
        for each in made:
            each.update()
            copies = [p for group in each.optimizer.param_groups for p in group["params"]]
            for parameter, own in zip(model.parameters(), copies, strict=True):
                torch.testing.assert_close(own, parameter)


class Own(AdamW):
    pass


UNFIT: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused": lambda model: AdamW(model.parameters(), fused=True),
    "own subclass": lambda model: Own(model.parameters()),
    "without a fused form": lambda model: RMSprop(model.parameters()),
    "of a closure": lambda model: LBFGS(model.parameters(), max_iter=1),
    "differentiable": lambda model: Adam(model.parameters(), differentiable=True),
}


def before_an_update(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[FusedUpdateRow]:
    """Return what the observer finds if it looks at the gradients that there are."""
    monkeypatch.setattr(FusedUpdates, "_share", lambda _: 1.0)
    observer = FusedUpdates(Subject("loop", resolve("cpu"), [], [optimizer], None, 1))
    observer.begins(Period.WARMUP)
    observer.look_before_update(optimizer)
    observer.look_after_step()
    with torch.no_grad():
        observer.end()
    assert observer.failure is None
    return [*FUSED_UPDATES.of(observer.kept)]


@pytest.mark.parametrize("name", [*MADE, *UNFIT])
def test_only_optimizers_that_can_be_fused_are_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    loss_of(model).backward()
    optimizer = {**MADE, **UNFIT}[name](model)
    assert bool(before_an_update(optimizer, monkeypatch)) is (name in MADE)


@pytest.mark.parametrize("is_same", [True, False])
def test_gradient_whose_elements_lie_in_another_order_is_not_tried(
    is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(16, 16))
    weight.grad = torch.rand(16, 16) if is_same else torch.rand(16, 16).t()
    assert bool(before_an_update(SGD([weight], momentum=0.9), monkeypatch)) is is_same


def test_sparse_and_complex_gradients_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.Embedding(64, 8, sparse=True)
    assert found(SGD(table.parameters()), lambda: table(torch.tensor([1])).sum(), monkeypatch) == []
    wave = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    assert found(Adam([wave]), lambda: wave.abs().sum(), monkeypatch) == []


def test_parameters_without_a_gradient_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    optimizer = AdamW(model.parameters())
    (row,) = found(optimizer, lambda: model[-1](torch.ones(4, 16)).square().mean(), monkeypatch)
    assert row["parameters"] == 2


class Made:
    """Copies of the trials that an observer makes: their sizes, with gradients and states, and their bytes in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, self.bytes = list[int](), 0
        own, made = CopiedUpdate.__init__, self

        def init(trial: CopiedUpdate, *args: Any, **kwargs: Any) -> None:
            own(trial, *args, **kwargs)
            for group in trial.optimizer.param_groups:
                for copied in group["params"]:
                    made.sizes.append(copied.nbytes)
                    tensors = [copied, copied.grad, *trial.optimizer.state[copied].values()]
                    made.bytes += sum(each.nbytes for each in tensors)

        monkeypatch.setattr(CopiedUpdate, "__init__", init)


@pytest.mark.parametrize("is_in_groups", [False, True])
def test_copies_of_a_large_model_have_few_bytes(is_in_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    most = 2 * 4 * sum(p.nbytes for p in model.parameters()) // 4
    monkeypatch.setattr(fused_updates, "MOST_BYTES", most)
    made = Made(monkeypatch)
    groups = [{"params": [p], "lr": 1e-4 * 0.9**i} for i, p in enumerate(model.parameters())]
    optimizer = AdamW(groups if is_in_groups else model.parameters())
    (row,) = found(optimizer, lambda: loss_of(model), monkeypatch)
    assert most // 2 < made.bytes <= most
    assert row["parameters"] == 2 * LAYERS
    assert LAYERS // 4 <= row["tried"] <= LAYERS // 2 + 1
    small, large = (made.sizes.count(each) for each in (16 * 4, 16 * 16 * 4))
    assert abs(small - large) <= 2, "biases and weights, one of each per layer"


def test_embedding_before_layers_takes_the_place_of_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample weights too where every second parameter is a bias."""
    model = nn.Sequential(nn.Embedding(10, 90), *(nn.Linear(90, 90) for _ in range(13)))
    monkeypatch.setattr(fused_updates, "MOST_BYTES", 2 * 4 * 5 * 90 * 90 * 4)
    made = Made(monkeypatch)
    (row,) = found(AdamW(model.parameters()), lambda: model(torch.arange(10)).square().mean(), monkeypatch)
    assert row["tried"] < row["parameters"] == 27
    assert made.sizes.count(90 * 90 * 4) >= 2 * 3
    mean = sum(p.nbytes for p in model.parameters()) / 27
    assert 1 / 1.5 <= sum(made.sizes) / len(made.sizes) / mean <= 1.5


def test_large_parameter_is_left_out_unless_it_has_most_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, is_tried in ((16, True), (2048, False)):
        model = many_layers()
        table = nn.Embedding(width, 64)
        monkeypatch.setattr(fused_updates, "MOST_BYTES", 2 * 4 * table.weight.nbytes - 1 if width == 16 else 1 << 18)
        made = Made(monkeypatch)
        loss = lambda: loss_of(model) + table(torch.tensor([1])).square().mean()  # noqa: B023, E731
        rows = found(AdamW([*model.parameters(), *table.parameters()]), loss, monkeypatch)
        assert bool(rows) is is_tried
        assert table.weight.nbytes not in made.sizes


class Clock:
    """Clock on which an update of a trial takes some time."""

    def __init__(self, update_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.updates = 0.0, 0

        def update(_: CopiedUpdate) -> None:
            self.now_s += update_s
            self.updates += 1

        monkeypatch.setattr(CopiedUpdate, "update", update)

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("update_s", "rounds"), [(0.001, [31, 31, 31]), (0.02, [10, 10]), (0.06, [7]), (0.11, [3]), (0.2, []), (2.0, [])]
)
def test_trials_of_all_optimizers_end_after_a_second(
    update_s: float, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedUpdates, "_share", lambda _: 1.0)
    models = [many_layers() for _ in range(3)]
    optimizers: list[Optimizer] = [AdamW(model.parameters()) for model in models]
    clock = Clock(update_s, monkeypatch)
    observer = FusedUpdates(Subject("loop", resolve("cpu"), [], optimizers, None, 1), clock)
    observer.begins(Period.WARMUP)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model).backward()
        observer.look_before_update(optimizer)
        optimizer.step()
    observer.look_after_step()
    with torch.no_grad():
        observer.end()
    rows = [*FUSED_UPDATES.of(observer.kept)]
    assert [row["rounds"] for row in rows] == rounds
    assert clock.now_s < 1.0 + 2 * update_s, "the first updates of one more optimizer"
    assert [row["others"] for row in rows] == [3 - len(rounds)] * len(rounds)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_request_for_foreach_is_noted(foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    (row,) = found(AdamW(model.parameters(), foreach=foreach), lambda: loss_of(model), monkeypatch)
    assert row["is_foreach"] is (foreach is True)


def test_version_of_torch_that_cannot_fuse_gives_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_layers()
    own = AdamW.__init__

    def refuses(self: Any, *args: Any, fused: bool | None = None, **kwargs: Any) -> None:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")
        own(self, *args, **kwargs)

    monkeypatch.setattr(AdamW, "__init__", refuses)
    assert found(AdamW(model.parameters()), lambda: loss_of(model), monkeypatch) == []


@pytest.mark.parametrize("fused", [False, True])
def test_unfused_optimizer_of_a_loop_is_named(fused: bool, tmp_path: Path) -> None:
    model = many_layers()
    optimizer = AdamW(model.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    recorder = recorded(tmp_path, step)
    assert all(each.failure is None for each in recorder._observers._every)
    assert ("unfused-optimizer" in {each.code for each in diagnose(recorder.records).diagnoses}) is not fused


def test_small_share_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_updates, "LEAST_SHARE", 0.9)
    model = nn.Linear(512, 512)
    optimizer = SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8192, 512)).square().mean().backward()
        optimizer.step()

    assert "fused_updates" not in recorded(tmp_path, step).records[0].results
