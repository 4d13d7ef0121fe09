"""Tests that the state of live objects is restored, whatever a model holds and however it reacts to changes."""

from __future__ import annotations

import argparse
import functools
import gc
import random
import re
import signal
import threading
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cs_systems
from cs_systems.config import ConfigError
from cs_systems.measure.runtime import live, object_state
from cs_systems.measure.runtime.object_state import ObjectState, Stage
from cs_systems.measure.workloads._setup import TrainingSetup
from tests.pictured import picture

QUICK: dict[str, Any] = {"warmup": 1, "steps": 2, "device": "cpu"}
X = torch.randn(4, 8)


class Model(nn.Module):
    """Model that holds an object, which each forward changes."""

    def __init__(self, held: Any = None, change: Callable[[Any], object] = lambda model: None) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("nothing", None)
        self.held = held
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        out: Tensor = self.fc(x)
        return out


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError("frozen")


class FrozenDict(dict[str, Any]):
    """Dict that refuses every change by its methods."""

    __setitem__ = __delitem__ = update = clear = pop = setdefault = refuse  # type: ignore[assignment]


class FrozenOrdered(OrderedDict[str, Any]):
    """Configuration that copies its items into attributes and then refuses every change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__dict__["_frozen"] = True

    __delitem__ = update = clear = pop = refuse  # type: ignore[assignment]

    def __setitem__(self, key: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise TypeError("frozen")
        super().__setattr__(name, value)


class FrozenList(list[Any]):
    __setitem__ = append = extend = clear = refuse  # type: ignore[assignment]


@dataclass
class Config:
    width: int = 8
    names: dict[str, int] = field(default_factory=lambda: {"a": 1})


@dataclass(frozen=True)
class FrozenConfig:
    width: int = 8
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    width: int = 8
    names: list[str] = field(default_factory=lambda: ["a"])


class Slots:
    __slots__ = ("__weakref__", "later", "width")

    def __init__(self) -> None:
        self.width = 8


class SlotsAndDict(Slots):
    """Object with slots of its base and attributes of its own."""


class Point(NamedTuple):
    width: int
    names: list[str]


class Mapped:
    """Configuration that reads and writes some attributes under other names, as `attribute_map` does."""

    attribute_map = {"hidden_size": "n_embd"}  # noqa: RUF012

    def __init__(self) -> None:
        self.n_embd = 8
        self.use_cache = True

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(type(self).attribute_map.get(name, name), value)

    def __getattribute__(self, name: str) -> Any:
        if name != "attribute_map":
            name = type(self).attribute_map.get(name, name)
        return super().__getattribute__(name)


class Hostile:
    """Object that raises on every operation of a careless copy."""

    def __init__(self) -> None:
        self.__dict__["width"] = 8

    @property
    def shape(self) -> NoReturn:
        raise ValueError("not now")

    __setattr__ = __delattr__ = __deepcopy__ = __copy__ = __reduce_ex__ = __getattr__ = refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __repr__ = refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class ArrayLike(Hostile):
    def __eq__(self, other: object) -> Any:
        return numpy.array([True, False])

    __hash__ = object.__hash__


class Watched:
    """Object with a property of its own storage and a setter that others notice."""

    calls = 0

    def __init__(self) -> None:
        self._width = 8

    @property
    def width(self) -> int:
        return self._width

    @width.setter
    def width(self, value: int) -> None:
        Watched.calls += 1
        self._width = value


class Lazy:
    """Object that fills a cache at its first use."""

    @functools.cached_property
    def table(self) -> list[int]:
        return [1, 2, 3]


class Locked:
    """Object that cannot be copied: it holds a lock, a generator, a weak reference and itself."""

    def __init__(self) -> None:
        self.lock, self.steps, self.me = threading.Lock(), (n for n in range(3)), self
        self.weak, self.seen = weakref.ref(self), [0]
        self.seen_again: list[Any] = [self.seen]


def cyclic() -> list[Any]:
    made: list[Any] = [1]
    made.append({"again": made})
    return made


def into(value: Any, name: str = "width", new: Any = 9) -> None:
    value.__dict__[name] = new


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


# name → (what the model holds, how forward changes it)
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dict that refuses updates": (lambda: FrozenDict(a=1), lambda held: dict.__setitem__(held, "b", 2)),
    "ordered dict that refuses": (lambda: FrozenOrdered(a=1), lambda held: OrderedDict.__setitem__(held, "a", 2)),
    "key gone from what refuses": (
        lambda: FrozenOrdered(a=1),
        lambda held: "a" in held and OrderedDict.__delitem__(held, "a"),
    ),
    "its attributes": (lambda: FrozenOrdered(a=1, b=[2]), lambda held: into(held, "a")),
    "list in what refuses": (lambda: FrozenOrdered(a=1, b=[2]), lambda held: held["b"].append(3)),
    "list that refuses": (lambda: FrozenList([1]), lambda held: list.append(held, 2)),
    "list": (lambda: [1, 2], list.clear),
    "dict": (lambda: {"a": 1, "b": 2}, lambda held: held.update(c=held.pop("a", 0))),
    "key that is gone": (lambda: {"a": 1, "b": 2}, lambda held: held.pop("a", 0)),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda held: held["b"].append(2)),
    "counter": (lambda: Counter("aab"), lambda held: held.update("b")),
    "frozen set": (lambda: frozenset([Slots()]), lambda held: setattr(next(iter(held)), "width", 9)),
    "mapping proxy": (lambda: MappingProxyType({"a": [1]}), lambda held: gc.get_referents(held)[0].update(b=1)),
    "UserDict": (lambda: UserDict(a=1), lambda held: held.update(b=2)),
    "UserList": (lambda: UserList([1]), lambda held: held.append(2)),
    "ChainMap": (lambda: ChainMap({"a": 1}), lambda held: held.update(b=2)),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.extend(b"c")),
    "dataclass": (Config, lambda held: held.names.update(b=2)),
    "field": (Config, into),
    "attribute added": (Config, lambda held: into(held, "added")),
    "frozen dataclass": (FrozenConfig, lambda held: object.__setattr__(held, "width", 9)),
    "frozen dataclass with slots": (FrozenSlots, lambda held: object.__setattr__(held, "width", 9)),
    "list in slots": (FrozenSlots, lambda held: held.names.append("b")),
    "slots": (Slots, lambda held: setattr(held, "width", 9)),
    "slot filled later": (Slots, lambda held: setattr(held, "later", 1)),
    "slot emptied": (Slots, lambda held: hasattr(held, "width") and delattr(held, "width")),
    "slots of a base": (SlotsAndDict, lambda held: (setattr(held, "width", 9), setattr(held, "more", 1))),
    "named tuple": (lambda: Point(8, ["a"]), lambda held: held.names.append("b")),
    "namespace": (lambda: SimpleNamespace(width=8), into),
    "argparse": (lambda: argparse.Namespace(width=8), into),
    "partial": (lambda: functools.partial(Config, width=[8]), lambda held: held.keywords["width"].append(9)),
    "other names": (Mapped, lambda held: setattr(held, "hidden_size", 9)),
    "hostile": (Hostile, into),
    "hostile in a list": (lambda: [Hostile(), ArrayLike()], lambda held: held.reverse()),
    "hostile key": (lambda: {Hostile(): 1}, dict.clear),
    "array-like": (ArrayLike, into),
    "watched": (Watched, lambda held: setattr(held, "width", 9)),
    "lazy": (Lazy, lambda held: held.table),
    "locked": (Locked, lambda held: held.seen.append(1)),
    "cycle": (cyclic, lambda held: held[1].update(b=held)),
    "tensor": (lambda: torch.tensor([1.0, float("nan"), -0.0]), lambda held: held.zero_()),
    "tensor without a history": (lambda: torch.ones(2), lambda held: held.data.add_(1)),
    "expanded tensor": (lambda: torch.ones(1, 2).expand(3, 2), lambda held: held[0].add_(1)),
    "tensor of another shape": (lambda: torch.arange(4.0), lambda held: held.resize_(2).zero_()),
    "tensor in a dict": (lambda: {"k": [torch.ones(2)]}, lambda held: held["k"][0].add_(1)),
    "inference tensor": (
        lambda: torch.inference_mode()(lambda: torch.ones(2))(),
        torch.inference_mode()(lambda held: held.add_(1)),
    ),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda held: held.mul_(2)),
    "complex tensor": (lambda: torch.ones(2, dtype=torch.complex128), lambda held: held.mul_(2)),
    "quantized tensor": (quantized, lambda held: held.copy_(torch.zeros(2))),
    "fp8 tensor": (lambda: torch.ones(2).to(torch.float8_e4m3fn), lambda held: held.fill_(0)),
    "numpy array": (lambda: numpy.array([1.0, numpy.nan]), lambda held: held.fill(0)),
    "torch generator": (lambda: torch.Generator().manual_seed(1), lambda held: torch.rand(1, generator=held)),
    "python generator": (lambda: random.Random(1), lambda held: held.random()),
    "numpy generator": (lambda: numpy.random.default_rng(1), lambda held: held.random()),
    "old numpy generator": (lambda: numpy.random.RandomState(1), lambda held: held.rand()),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_objects_held_by_a_model_are_restored(name: str) -> None:
    make, change = HELD[name]
    held = make()
    model = Model(held, lambda model: change(model.held))
    model.fc.eval()
    before, weights = picture(model), model.fc.weight.clone()
    change(make())  # it can be called as often as forward is
    seen: list[Any] = []
    record = cs_systems.run(model=model, inputs=X, loss=lambda out: seen.append(picture(model)) or out.sum(), **QUICK)
    assert record.status == "ok", record.reason
    assert "not-restored" not in [caveat.code for caveat in record.warnings]
    assert seen[-1] != before, "forward changed nothing"
    assert picture(model) == before
    assert torch.equal(model.fc.weight, weights)
    assert model.fc.weight.grad is None
    assert model.training
    assert not model.fc.training
    assert Watched.calls == 0 or name == "watched"
    Watched.calls = 0


class Tied(nn.Module):
    """Model with tied weights, a parametrization, frozen and evaluating parts, an empty buffer and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8))
        self.old_norm = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.free = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8))})
        self.unregistered = [nn.Linear(8, 8)]
        self.register_buffer("mask", None)
        self.body.eval()
        self.old_norm.bias.requires_grad_(False)
        self.body.register_forward_pre_hook(lambda *_: None)
        self.embed.weight.register_hook(lambda grad: grad)
        self.embed.weight.is_shared = True
        self.change: Callable[[Any], object] = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        x = self.old_norm(self.body(self.embed(x)))
        out: Tensor = self.head(self.unregistered[0](x) * self.free["scale"])
        return out


IDS = torch.arange(4)


def state_of(*objects: Any) -> Any:
    """Return everything that the objects hold, and the state of the random numbers."""
    generators = torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state(legacy=False))
    return picture(*objects), generators


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        model(IDS).sum().backward()
        optimizer.step()
    return optimizer


# What forward may do to the structure of its model.
CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "parameter replaced": lambda model: setattr(model.free, "scale", nn.Parameter(torch.ones(8) * 2)),
    "tied weight untied": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(8, 8))),
    "parameter added": lambda model: setattr(model, "more", nn.Parameter(torch.ones(8))),
    "module replaced": lambda model: setattr(model, "old_norm", nn.Identity()),
    "module deleted": lambda model: model._modules.pop("spare", None),
    "module added": lambda model: model.add_module("spare", nn.Linear(8, 8)),
    "buffer filled": lambda model: setattr(model, "mask", torch.ones(8)),
    "buffer added": lambda model: model.register_buffer("cache", torch.ones(8)),
    "hook added": lambda model: model.head.register_forward_hook(lambda *_: None),
    "mode changed": lambda model: model.body[1].train(),
    "frozen": lambda model: model.embed.weight.requires_grad_(False),
    "memory replaced": lambda model: setattr(model.embed.weight, "data", model.embed.weight.data * 2),
    "gradient replaced": lambda model: setattr(model.embed.weight, "grad", torch.ones(8, 8)),
    "attribute of a parameter": lambda model: setattr(model.embed.weight, "is_shared", False),
    "class changed": lambda model: setattr(model.body, "__class__", type("Other", (nn.Sequential,), {})),
    "random numbers": lambda model: (random.random(), numpy.random.rand(), torch.rand(1)),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("mode", ["forward", "train-step"])
@pytest.mark.parametrize("name", CHANGES)
def test_structure_of_a_model_in_training_is_restored(name: str, mode: str) -> None:
    model = Tied()
    optimizer = trained(model)
    model.eval() if mode == "forward" else None
    model.change = CHANGES[name]
    batch = IDS.clone()
    before = state_of(model, optimizer, batch)
    record = cs_systems.run(model=model, inputs=batch, optimizer=optimizer, mode=mode, **QUICK)
    assert record.status == "ok", record.reason
    assert state_of(model, optimizer, batch) == before


def compiled(how: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        made = how(model)
        return made if isinstance(made, nn.Module) else model

    return make


def called(model: nn.Module) -> nn.Module:
    model(X)
    return model


def observed(model: Any) -> nn.Module:
    """Give a model hooks of every kind."""
    model[0].register_forward_pre_hook(lambda *_: None)
    model[0].register_forward_hook(lambda module, inputs, out: out * 2, always_call=True)
    model[2].register_full_backward_hook(lambda *_: None)
    model[2].register_full_backward_pre_hook(lambda *_: None)
    model.register_state_dict_post_hook(lambda *_: None)
    return called(model)


def low_precision(model: Any) -> nn.Module:
    scale = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    model[1].register_parameter("scale", scale)
    return model


def pruned(model: Any) -> nn.Module:
    from torch.nn.utils import prune

    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return called(model)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": compiled(lambda model: torch.compile(model, backend="aot_eager")),
    "torch.compile, called": compiled(lambda model: called(torch.compile(model, backend="aot_eager"))),
    "model.compile()": compiled(lambda model: model.compile(backend="aot_eager")),
    "block.compile()": compiled(lambda model: model[0].compile(backend="aot_eager")),
    "compiled forward": compiled(
        lambda model: setattr(model, "forward", torch.compile(model.forward, backend="aot_eager"))
    ),
    "hooks": compiled(observed),
    "lazy, called": compiled(lambda model: called(nn.Sequential(nn.LazyLinear(8), model))),
    "pruned": compiled(pruned),
    "fp8 weights": compiled(low_precision),
    "frozen part": compiled(lambda model: model[0].requires_grad_(False) and model),
    "average of weights": compiled(torch.optim.swa_utils.AveragedModel),
    "shared memory": compiled(lambda model: model.share_memory()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_model_of_every_kind_is_restored(kind: str) -> None:
    model = KINDS[kind]()
    for trains, mode in ((False, "forward"), (False, "train-step"), (True, "train-step")):
        model.train(trains)
        before = state_of(model)
        record = cs_systems.run(model=model, inputs=X, mode=mode, **QUICK)
        assert record.status == "ok", record.reason
        assert state_of(model) == before, mode


def test_buffer_on_meta_is_refused() -> None:
    model = Model()
    model.register_buffer("angles", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match="buffer angles of the model is on the meta device, without values; load the"):
        cs_systems.run(model=model, inputs=X, **QUICK)


class StepThenRaise(torch.optim.SGD):
    """Optimizer that fails after it changed the weights."""

    error: BaseException

    def step(self, closure: Any = None) -> None:
        super().step()
        raise self.error


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "optimizer"])
@pytest.mark.parametrize(
    "error", [ValueError("mine"), torch.OutOfMemoryError("CUDA out of memory."), KeyboardInterrupt(), SystemExit(1)]
)
def test_model_is_restored_after_a_failed_measurement(error: BaseException, where: str) -> None:
    model = Model([1], lambda model: model.held.append(2))
    optimizer: Any = StepThenRaise(model.parameters(), lr=0.1)
    optimizer.error = error
    options: dict[str, Any] = {"optimizer": optimizer if where == "optimizer" else torch.optim.SGD}
    times: list[int] = []

    def fail_later(*_: Any) -> None:
        times.append(1)
        if len(times) == 2:
            raise error

    if where == "forward":
        model.fc.register_forward_hook(fail_later)
    if where == "backward":
        model.fc.weight.register_hook(fail_later)
    if where == "loss":
        options["loss"] = lambda out: fail_later() or out.sum()
    model.eval()
    before = state_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if isinstance(error, Exception):
            record = cs_systems.run(model=model, inputs=X, **options, **QUICK)
            assert record.status == ("oom" if isinstance(error, torch.OutOfMemoryError) else "error")
        else:
            with pytest.raises(type(error)):
                cs_systems.run(model=model, inputs=X, **options, **QUICK)
    assert state_of(model, optimizer) == before


class Key:
    """Key of a dict that cannot be found again."""

    broken = False

    def __hash__(self) -> int:
        if self.broken:
            raise ValueError("no hash")
        return 1


def test_unrestorable_object_is_named_and_the_rest_is_restored() -> None:
    key = Key()

    def change(model: Any) -> None:
        model.held["table"].clear()
        model.held["after"].append(1)
        key.broken = True

    model = Model({"table": {key: 1}, "after": [0]}, change)
    weights = model.fc.weight.clone()
    message = (
        "the measurement may have changed model.held['table'] (ValueError: no hash), and could not restore it; load "
        "the model again before it is trained or saved, and build again what else is named"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as warned:
        record = cs_systems.run(model=model, inputs=X, **QUICK)
    assert len(warned) == 1
    assert record.status == "ok"
    found = [f"{each.message}; {each.remedy}" for each in record.warnings if each.code == "not-restored"]
    assert found == [message]
    assert "not-restored" in repr(record)
    assert model.held["after"] == [0]
    assert torch.equal(model.fc.weight, weights)
    assert model.fc.weight.grad is None


class Unreadable(Tensor):
    """Tensor with values that no function can read."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"no {function}")


def test_unreadable_object_is_named_and_the_rest_is_measured() -> None:
    held = torch.ones(2).as_subclass(Unreadable)
    model = Model(["a", held, [1]], lambda model: model.held[2].append(2))
    weights = model.fc.weight.clone()
    with pytest.warns(
        UserWarning, match=r"may have changed model.held\[1\] \(NotImplementedError: no aten.detach.default\)"
    ):
        record = cs_systems.run(model=model, inputs=X, **QUICK)
    assert record.status == "ok", record.reason
    assert model.held[2] == [1]
    assert torch.equal(model.fc.weight, weights)


def test_view_that_autograd_rejects_is_restored() -> None:
    base = torch.ones(4, requires_grad=True)
    view, _ = base.view(4).split(2)
    with torch.no_grad():
        base.add_(1)
    state = ObjectState(TrainingSetup(Model([view]), X))
    base.data.add_(1)
    assert state.restore() == []
    assert base.tolist() == [2, 2, 3, 3]


def test_weights_are_restored_first() -> None:
    model = Tied()
    setup = TrainingSetup(model, IDS, optimizer=trained(model))
    stages = [kept.stage for kept in ObjectState(setup)._kept]
    assert stages == sorted(stages)
    assert {*stages} == {*Stage}
    paths = {kept.node.path() for kept in ObjectState(setup)._kept if kept.stage is Stage.WEIGHTS}
    assert {"model.embed.weight", "model.unregistered[0].bias", "model.free.scale"} <= paths


def test_ctrl_c_waits_until_the_model_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pressed = Model([1], lambda model: model.held.append(2)), []
    weights, restore = model.fc.weight.clone(), ObjectState.restore

    def with_ctrl_c(state: ObjectState, *stages: Any) -> list[str]:
        pressed.append(1)
        signal.raise_signal(signal.SIGINT)
        return restore(state, *stages)

    monkeypatch.setattr(live.ObjectState, "restore", with_ctrl_c)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        cs_systems.run(model=model, inputs=X, **QUICK)
    assert (len(pressed), model.held, torch.equal(model.fc.weight, weights)) == (2, [1], True)
    assert signal.getsignal(signal.SIGINT) is handler


class CountingLoss(nn.Module):
    """Loss that counts its calls, trains a temperature and keeps state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.temperature, self.seen = nn.Parameter(torch.ones(())), [0.0]

    def forward(self, out: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        self.seen.append(1.0)
        return (out * self.temperature).sum()


class CountingForward:
    """Forward that counts its calls, and pads the batch in place."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        self.calls += 1
        batch["x"][0] = 0
        batch["names"].append("seen")
        return model(batch["x"])


def test_batch_loss_and_forward_are_restored() -> None:
    model, loss, forward = Model(), CountingLoss(), CountingForward()
    batch = UserDict(x=X.clone(), names=["a"])
    before = state_of(model, loss, forward, batch)
    record = cs_systems.run(model=model, inputs=batch, loss=loss, forward=forward, **QUICK)
    assert record.status == "ok", record.reason
    assert state_of(model, loss, forward, batch) == before
    assert loss.temperature.grad is None


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=99, cycle_momentum=False),
    "several": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor", "Muon", "NAdam"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_optimizer_and_scheduler_are_restored(kind: str, schedule: str) -> None:
    model = Model()
    weights = [model.fc.weight] if kind == "Muon" else model.parameters()
    optimizer = getattr(torch.optim, kind)(weights, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    scheduler = SCHEDULERS[schedule](optimizer)
    before = state_of(model, optimizer, scheduler)
    record = cs_systems.run(model=model, inputs=X, loss=Tensor.sum, optimizer=optimizer, scheduler=scheduler, **QUICK)
    assert record.status == "ok", record.reason
    assert state_of(model, optimizer, scheduler) == before


LEAVES = st.one_of(st.integers(), st.text(max_size=2), st.none(), st.builds(lambda: torch.ones(2)), st.builds(Slots))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(lambda values: deque(values), st.lists(inner, max_size=3)),
        st.builds(lambda value: FrozenDict(a=value), inner),
        st.builds(lambda value: SimpleNamespace(value=value), inner),
        st.builds(lambda value: OrderedDict(a=value, b=[value]), inner),
        st.builds(lambda a, b: (a, [b]), inner, inner),
    ),
    max_leaves=12,
)


def disturb(value: Any, pick: Callable[[int], int], seen: set[int]) -> None:
    """Change some of the objects that a value holds in place."""
    if id(value) in seen:
        return
    seen.add(id(value))
    children: list[Any] = []
    if isinstance(value, OrderedDict):
        children = [*value.values()]
        value.move_to_end(next(iter(value))) if value and pick(2) else value.clear()
    elif isinstance(value, dict):
        children = [*value.values()]
        dict.__setitem__(value, "new", 1) if pick(2) else dict.clear(value)
    elif isinstance(value, (list, deque)):
        children = [*value]
        value.append(1) if pick(2) else value.clear()
    elif isinstance(value, tuple):
        children = [*value]
    elif isinstance(value, SimpleNamespace):
        children = [value.value]
        value.more = 1
    elif isinstance(value, Slots):
        value.width += 1
    elif isinstance(value, Tensor):
        value.add_(1)
    for child in children:
        disturb(child, pick, seen)


@settings(max_examples=60, deadline=None)
@given(held=TREES, data=st.data())
def test_nested_containers_of_any_form_are_restored(held: Any, data: st.DataObject) -> None:
    model = Model(held)
    before = picture(model)
    state = ObjectState(TrainingSetup(model, X))
    disturb(held, lambda most: data.draw(st.integers(0, most - 1)), set())
    assert state.restore() == []
    assert picture(model) == before


def test_only_changed_objects_are_written() -> None:
    """Memory that must not be written, and a dict that another thread reads, are not touched."""
    read_only = numpy.ones(2, dtype=numpy.float32)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the tensor is writeable
        shared = torch.from_numpy(read_only)
    model = Model({"mask": shared, "overlapping": torch.arange(3.0).as_strided((2, 2), (1, 1))})
    version = shared._version, model.fc.weight._version
    state = ObjectState(TrainingSetup(model, X))
    assert state.restore() == []
    assert (shared._version, model.fc.weight._version) == version


def test_graph_made_before_can_still_be_run_backward() -> None:
    def gradients(measure: bool) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        loss = model(X).square().sum()
        if measure:
            assert cs_systems.run(model=model, inputs=X, **QUICK).status == "ok"
        loss.backward()
        return [p.grad.tolist() for p in model.parameters() if p.grad is not None]

    assert gradients(measure=True) == gradients(measure=False)


def test_freed_storage_stays_freed_or_is_filled_again() -> None:
    freed, used = torch.ones(2), torch.ones(4)[2:]
    freed.untyped_storage().resize_(0)
    state = ObjectState(TrainingSetup(Model([freed, used]), X))
    used.untyped_storage().resize_(0)
    assert state.restore() == []
    assert used.tolist() == [1, 1]
    assert freed.untyped_storage().nbytes() == 0


def test_scripted_model_is_restored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = cs_systems.run(model=model, inputs=X, **QUICK)
    assert record.status == "ok", record.reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == [None, None, None, None]


def test_modules_are_restored_in_a_model_with_many_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_state, "MOST_OBJECTS", 50)
    far: list[Any] = []
    model = Model([[[n] for n in range(100)], [[[far]]]])
    model.deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.BatchNorm1d(8))))
    state = ObjectState(TrainingSetup(model, X))
    model.deep.eval()
    model.deep[0][0][0].running_mean.fill_(3)
    far.append(1)
    assert state.restore() == []
    assert model.deep[0][0][0].training
    assert not model.deep[0][0][0].running_mean.any()
    assert far == [1]


def test_unchanging_services_are_not_followed() -> None:
    """Threads, files, loggers, data sets and functions change independently."""

    class Worker(threading.Thread):
        count = 0

    class Numbers(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.read = 0

    seen: list[int] = []
    model = Model([Worker(), Numbers(), seen.append])
    state = ObjectState(TrainingSetup(model, X))
    model.held[0].count, model.held[1].read = 5, 5
    model.held[2](1)
    state.restore()
    assert (model.held[0].count, model.held[1].read, seen) == (5, 5, [1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "cpu"}, {"precision": "bf16-pure"}], ids=str)
def test_model_on_a_gpu_is_restored(options: dict[str, Any]) -> None:
    model = Model([torch.ones(3, device="cuda")], lambda model: model.held[0].add_(1)).cuda()
    model(X.cuda()).sum().backward()
    before = [(p, p.detach().clone(), p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    record = cs_systems.run(model=model, inputs=X, **({"warmup": 1, "steps": 2} | options))
    assert record.status == "ok", record.reason
    assert "not-restored" not in [caveat.code for caveat in record.warnings]
    for now, (parameter, values, gradient, gradients) in zip(model.parameters(), before, strict=True):
        assert now is parameter
        assert torch.equal(now, values)
        assert now.grad is gradient
        assert torch.equal(gradient, gradients)
    assert model.held[0].tolist() == [2, 2, 2], "as the call before left it"
