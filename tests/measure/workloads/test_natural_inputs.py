"""Training steps from the parts that a factory gives: batches of any form, loss, optimizer, scheduler, clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cs_systems
from cs_systems.config import ConfigError, RunConfig
from cs_systems.record import RunRecord

PARTS = """
from collections import UserDict, namedtuple
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x, mask=None, labels=None):
        logits = self.fc(x if mask is None else x * mask)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(logits, loss)

@dataclass
class Batch:
    x: torch.Tensor
    nested: dict

class TakesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, batch):
        return self.fc(batch.x) * batch.nested["scale"][0]

Pair = namedtuple("Pair", ["x", "mask"])
x, labels = torch.ones(2, 4), torch.tensor([0, 2])
by_labels = lambda out, batch: nn.functional.cross_entropy(out.logits, batch[1])
by_key = lambda out, batch: nn.functional.cross_entropy(out.logits, batch["target"])

def second_is_size(config, width=4): return nn.Linear(width, 1), torch.ones(2, width)
def own_names(width, depth): return nn.Linear(width, depth), torch.ones(2, width)
def own_width(width, device): return nn.Linear(width, 2), torch.ones(2, width)
def moved_of_cfg(cfg, device): return nn.Linear(4, 2).to(device), x
def needs_one(width): return nn.Linear(width, 1), torch.ones(2, width)
def no_batch(): return []
def forgets_return(): pass
def takes_any(config, **options): return nn.Linear(4, 2), x
def dict_with_loss(config, device): return Classifier(), {"x": x, "labels": labels}
def encoding(config, device): return Classifier(), UserDict(x=x, labels=labels)
def dict_with_target(config, device): return Classifier(), {"x": x, "target": labels}, by_key
def named_tuple(config, device): return Classifier(), Pair(x, torch.ones(4)), lambda out: out.logits.sum()
def list_and_labels(config, device):
    class One(Classifier):
        def forward(self, x): return super().forward(x)
    return One(), [x, labels], by_labels
def dataclass_batch(config, device): return TakesBatch(), Batch(x, {"scale": [torch.tensor(2.0)]})
def loader(config, device):
    class One(Classifier):
        def forward(self, x): return super().forward(x)
    return One(), DataLoader(TensorDataset(x, labels), batch_size=1), by_labels
def no_arguments(): return Classifier(), {"x": x, "labels": labels}

counted = {"steps": 0, "scheduled": 0}
class CountingSGD(torch.optim.SGD):
    def __init__(self, params): super().__init__(params, lr=0.1)
    def step(self, closure=None):
        counted["steps"] += 1
        return super().step(closure)
class CountingLR(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer): super().__init__(optimizer, 1)
    def step(self, *args):
        counted["scheduled"] += 1
        return super().step(*args)
def whole(config, device):
    return {
        "model": Classifier(), "batches": [{"x": x, "labels": labels}], "optimizer": CountingSGD,
        "scheduler": CountingLR, "clip_norm": 1.0, "accumulate": 2,
    }
def instance(config, device):
    model = Classifier()
    return {"model": model, "batch": {"x": x, "labels": labels}, "optimizer": CountingSGD(model.parameters())}
def of_own(width=2, bias=True): return nn.Linear(4, width, bias=bias), x
def sized(config, device, *, width=2, bias=True): return nn.Linear(4, width, bias=bias), x
def needs_width(config, device, *, width): return nn.Linear(4, width), x
def moved(config, device): return nn.Linear(4, 2).to(device), x
def unknown_field(config, device): return {"model": Classifier(), "data": x}
def no_key_fits(config, device): return Classifier(), {"pixels": x}
def empty(config, device): return Classifier(), {}
class Nothing(nn.Linear):
    def forward(self): return self.weight
def takes_nothing(config, device): return Nothing(4, 3), {"x": x}
def neither(config, device): return Classifier(), None
def no_loss(config, device): return Classifier(), {"x": x}
def vector_loss(config, device): return nn.Linear(4, 3), x, lambda out: out.sum(1)
def ended(config, device): return nn.Linear(4, 3), iter([x])
def both(config, device): return {"model": Classifier(), "batch": x, "batches": [x]}
others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
def others_optimizer(config, device): return {"model": Classifier(), "batch": x, "optimizer": others}
def closure(config, device): return {"model": Classifier(), "batch": x, "optimizer": torch.optim.LBFGS}
def misspelt(config, device): return {"model": Classifier(), "batch": x, "optimiser": torch.optim.SGD}
model = nn.Linear(4, 3)
batch = x
def make_batch(): return {"input": x}
def sized_batch(config, device): return {"input": torch.ones(config.batch_size, 4)}
def odd_batch(width): return {"input": x}
def placed_batch(config, device): return {"input": torch.ones(2, 4, device=device)}
def batch_on_dev(cfg, dev): return {"input": x.to(dev)}
class Wide(nn.Linear):
    def __init__(self, width): super().__init__(4, width)
def frozen(config, device): return nn.Linear(4, 3).requires_grad_(False), x
def detached(config, device): return nn.Linear(4, 3), x, lambda out: out.detach().mean()
def odd_scheduler(config, device):
    return {"model": nn.Linear(4, 3), "batch": x, "scheduler": lambda optimizer: 5}
"""

Measure = Callable[..., RunRecord]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    source = tmp_path / "parts.py"
    source.write_text(PARTS)

    def run(name: str, **fields: Any) -> RunRecord:
        fields = {k: v.format(source=source) if k == "inputs" else v for k, v in fields.items()}
        config = RunConfig(workload=f"{source}:{name}", warmup=1, steps=2, device="cpu")
        return cs_systems.run(replace(config, **fields), in_process=True)

    return run


FORMS = (
    "dict_with_loss", "encoding", "dict_with_target", "named_tuple", "list_and_labels", "dataclass_batch", "loader",
    "no_arguments", "whole", "instance", "sized",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_batch_is_trained(measure: Measure, name: str) -> None:
    record = measure(name)
    assert (record.status, record.reason) == ("ok", None)
    assert record.measurement is not None
    phases = record.measurement.phase_names()
    assert [p for p in phases if p not in ("input", "clip")] == ["forward", "loss", "backward", "optimizer"]
    assert ("input" in phases) == (name in ("loader", "whole"))
    assert record.results["ran"][0]["loss"] is not None


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_precision_applies_to_nested_batches(measure: Measure, precision: str) -> None:
    assert measure("dataclass_batch", precision=precision).status == "ok"


def test_setup_with_all_parts_is_measured_with_all_phases(measure: Measure) -> None:
    record = measure("whole")
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.measurement.phase_names() == ("input", "forward", "loss", "backward", "clip", "optimizer")
    (ran,) = record.results["ran"]
    assert (ran["optimizer"], ran["parameters"]) == ("CountingSGD", 15)


def test_optimizer_of_the_config_replaces_the_setup_s(measure: Measure) -> None:
    assert measure("whole", optimizer="adamw").results["ran"][0]["optimizer"] == "adamw"
    assert measure("instance").results["ran"][0]["optimizer"] == "CountingSGD"


def test_arguments_reach_the_factory(measure: Measure) -> None:
    assert measure("sized").results["ran"][0]["parameters"] == 10
    record = measure("sized", workload_args=("width=7", "bias=false"))
    assert record.results["ran"][0]["parameters"] == 28
    unknown = measure("sized", workload_args=("depth=7",))
    assert "(config, device, *, width=2, bias=True) has no argument 'depth'; correct its name, or leave it out" in (
        unknown.reason or ""
    )
    for given, rest in (
        (
            "device=cpu",
            "device from cs-systems; leave device out of --set (in Python workload_args), and use the option",
        ),
        ("config=1", "config from cs-systems; leave config out of --set (in Python workload_args)"),
    ):
        assert f"(config, device, *, width=2, bias=True) gets {rest}" in (
            measure("sized", workload_args=(given,)).reason or ""
        )
    assert "takes_any(config, **options) has other arguments than a factory or a step; write a factory that takes" in (
        measure("takes_any", workload_args=("lr=1",)).reason or ""
    )
    missing = measure("needs_width")
    assert (
        "needs_width(config, device, *, width) requires width; give it with --set width=VALUE (in Python workload_args"
        in (missing.reason or "")
    )


def test_factory_whose_arguments_have_defaults_gets_no_config(measure: Measure) -> None:
    assert measure("of_own").results["ran"][0]["parameters"] == 10
    assert measure("of_own", workload_args=("width=7", "bias=false")).results["ran"][0]["parameters"] == 28


def test_a_module_is_trained_on_inputs_by_name(measure: Measure) -> None:
    record = measure("model", inputs="{source}:batch")
    assert record.status == "ok"
    ran = record.results["ran"][0]
    assert ran["inputs_path"] == ran["workload_path"]
    assert ran["inputs_sha256"] == ran["workload_sha256"]
    record = measure("model", inputs="{source}:make_batch")
    assert (record.status, record.reason) == ("ok", None)
    record = measure("model", inputs="{source}:sized_batch", batch_size=6)
    assert (record.status, record.reason) == ("ok", None)
    assert (
        "odd_batch(width) has other arguments than (config, device); write a function without arguments, or of "
        "(config, device), that returns the batch" in (measure("model", inputs="{source}:odd_batch").reason or "")
    )
    for name, argument in (("placed_batch", "device"), ("batch_on_dev", "dev")):
        assert f"{name} uses its argument {argument} as a torch.device, but it is a Device, whose torch.device is " in (
            measure("model", inputs=f"{{source}}:{name}").reason or ""
        )


def test_argument_that_a_model_requires_is_given_with_set(measure: Measure) -> None:
    reason = measure("Wide", inputs="{source}:batch").reason or ""
    assert reason.endswith(
        "parts.py:Wide(width) requires width; give it with --set width=VALUE (in Python workload_args=['width=VALUE'])"
    )
    record = measure("Wide", inputs="{source}:batch", workload_args=("width=3",))
    assert (record.status, record.reason) == ("ok", None)
    record = measure("Wide", inputs="{source}:no_batch", workload_args=("width=3",))
    assert (record.reason or "").endswith("parts.py:no_batch gave an empty list; return a batch")
    record = measure("Wide", inputs="{source}:forgets_return", workload_args=("width=3",))
    assert (record.reason or "").endswith("parts.py:forgets_return gave None; return a batch")
    assert (
        "parts.py:Wide is a module without inputs; name its batch as inputs path.py:name, or name a function (config, "
        "device) that returns (model, batch), or a class of a language model, whose constructor takes sizes"
    ) in (measure("Wide").reason or "")
    reason = measure("batch", inputs="{source}:batch").reason or ""
    assert reason.endswith("name an nn.Module, its class, or a function that returns one")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "moved",
            "uses its argument device as a torch.device, but it is a Device, whose torch.device is",
        ),
        (
            "second_is_size",
            "would get the device as width, its second argument; make device the second argument: "
            "(config, device, width=4)",
        ),
        (
            "own_names",
            "(width, depth) gets a RunConfig and a Device as its first two arguments; write (config, device) "
            "as its first two arguments, or give width and depth with --set width=VALUE depth=VALUE",
        ),
        (
            "own_width",
            "(width, device) gets a RunConfig and a Device as its first two arguments; write (config, device) "
            "as its first two arguments, and give width with --set width=VALUE (in Python",
        ),
        ("moved_of_cfg", "moved_of_cfg uses its argument device as a torch.device, but it is a Device, whose torch."),
        (
            "needs_one",
            "a factory or a step; give width with --set width=VALUE (in Python workload_args=['width=VALUE']), or ",
        ),
        ("unknown_field", "a training setup has no field 'data'; choose among model, batch, batches, loss, optimizer"),
        ("misspelt", "a training setup has no field 'optimiser'; did you mean optimizer? The names are model, batch"),
        (
            "no_key_fits",
            "Classifier.forward takes x, mask, labels, but the batch has pixels; rename the keys of the batch, or give",
        ),
        ("empty", "the batch is an empty dict, and Classifier.forward takes x, mask, labels; give a batch with these"),
        ("takes_nothing", "Nothing.forward takes nothing, but the batch has x; give a function forward=lambda model,"),
        (
            "no_loss",
            "the model returned an Output without a tensor loss; put the labels into the batch, or give a loss",
        ),
        ("vector_loss", "the loss function returned a tensor of shape (2,); return a scalar tensor"),
        ("ended", "or a generator has ended; give a list or DataLoader with at least one batch"),
        ("both", "batch and batches are both given; give only one of them"),
        ("neither", "no batch is given, or it is None; give batch, which every step uses, or batches, whose items"),
        ("frozen", "the loss does not depend on a trainable parameter; set requires_grad of one to True, do not"),
        ("detached", "the loss does not depend on a trainable parameter; set requires_grad of one to True, do not"),
        (
            "odd_scheduler",
            "scheduler returned 5, which is not a scheduler; give a class, or a function of the optimizer",
        ),
        ("others_optimizer", "the optimizer holds parameters that are not the model's; make it from the same model"),
    ],
)
def test_malformed_parts_are_named(measure: Measure, name: str, reason: str) -> None:
    record = measure(name)
    assert record.status == "error"
    assert reason in (record.reason or "")


def test_optimizer_with_a_closure_is_refused(measure: Measure) -> None:
    record = measure("closure")
    assert record.status == "unavailable"
    assert "optimizer LBFGS requires an argument of step(), such as a closure" in (record.reason or "")


def test_options_of_own_workloads_require_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^workload_args applies only to a workload of your own, path\.py:name, "
    ) as raised:
        RunConfig(workload_args=("a=1",))
    assert raised.value.with_options().endswith("and the workload is train_step; leave out --set")
    with pytest.raises(
        ConfigError, match=r"^inputs applies only to .* and the workload is train_step; leave out inputs$"
    ):
        RunConfig(inputs="a.py:b")
