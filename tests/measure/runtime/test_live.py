"""Tests of live objects, as in a notebook: they are measured in this process and restored."""

from __future__ import annotations

import random
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cs_systems
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import units
from cs_systems.machine import device as devices
from cs_systems.measure.runtime.sweep import Records
from cs_systems.record import RunRecord

QUICK: dict[str, Any] = {"warmup": 1, "steps": 2, "device": "cpu"}


class Net(nn.Module):
    """Model with two blocks, so that checkpoints find them, a buffer that forward changes and a user's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)) for _ in "ab")
        self.fc = nn.Linear(16, 3)
        self.seen = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        logits = self.fc(x)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits.float(), labels)}


@dataclass
class Batch:
    x: Tensor
    labels: Tensor


X, LABELS = torch.randn(16, 16), torch.arange(16) % 3
BATCH = {"x": X, "labels": LABELS}


def of_batch(model: nn.Module, batch: Any) -> Any:
    return model(batch.x, batch.labels)


class One(Net):
    """Model with one argument; the labels go to the loss."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


def by_labels(out: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(out.float(), batch[1])


class Stepper:
    """Object that is nearly a Workload."""

    def step(self) -> list[Any]:
        return []


def step() -> None:
    X.square().sum()


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, LABELS), batch_size=8)


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "mapping": lambda: {"model": Net(), "inputs": BATCH},
    "encoding": lambda: {"model": Net(), "inputs": UserDict(BATCH)},
    "tuple": lambda: {"model": One(), "inputs": (X, LABELS), "loss": by_labels},
    "list": lambda: {"model": One(), "inputs": [X, LABELS], "loss": by_labels},
    "tensor": lambda: {"model": Net(), "inputs": X},
    "dataclass": lambda: {"model": Net(), "inputs": Batch(X, LABELS), "forward": of_batch},
    "loader": lambda: {"model": One(), "inputs": loader(), "loss": by_labels},
    "batches": lambda: {"model": Net(), "batches": [BATCH, BATCH], "accumulate": 2, "clip_norm": 1.0},
    "optimizer class": lambda: {"model": Net(), "inputs": BATCH, "optimizer": partial(torch.optim.SGD, lr=0.1)},
    "setup": lambda: {"workload": cs_systems.TrainingSetup(Net(), BATCH)},
    "parts": lambda: {"workload": {"model": Net(), "batch": BATCH}},
    "pair": lambda: {"workload": (Net(), BATCH)},
    "factory": lambda: {"workload": lambda config, device: (Net(), BATCH)},
    "step": lambda: {"workload": step},
    "partial": lambda: {"workload": partial(step)},
}


SAMPLES = {"step": None, "partial": None, "loader": 8, "batches": 32}  # of a step, where it is not one batch


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_live_object_is_measured(form: str) -> None:
    record = cs_systems.run(**FORMS[form](), **QUICK)
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    names = record.measurement.phase_names()
    is_step = form in ("step", "partial")
    assert ("call" in names) if is_step else {"forward", "loss", "backward", "optimizer"} <= {*names}
    assert ("input" in names) == (form in ("loader", "batches"))
    assert record.config["workload"].startswith("live ")
    (ran,) = record.results["ran"]
    assert ran.get("samples") == SAMPLES.get(form, 16)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return everything that a measurement must leave unchanged, as plain values."""
    return {
        "parameters": {
            name: (p.tolist(), p.dtype, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()
        },
        "gradients": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
        "buffers": {name: b.tolist() for name, b in model.named_buffers()},
        "modules": [(name, id(module), module.training) for name, module in model.named_modules()],
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "seen": model.seen,
        "optimizer": repr(optimizer.state_dict()),
        "optimizer attributes": sorted(optimizer.__dict__),
        "scheduler": repr(scheduler.state_dict()),
        "random": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "grad mode": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "float32 products": torch.backends.cuda.matmul.fp32_precision,
        "float32 convolutions": torch.backends.cudnn.conv.fp32_precision,
        "threads": torch.get_num_threads(),
    }


def trained() -> tuple[Net, torch.optim.Optimizer, Any]:
    """Return a model in the middle of training: with gradients, state of the optimizer, and a frozen, an eval part."""
    model = Net()
    model.blocks[0].eval()
    model.fc.bias.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(X, LABELS)["loss"].backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


OUTCOMES = {  # if it is not a success
    "{'precision': 'bf16-pure'}": ("error", "RuntimeError: expected dtype f"),  # the optimizer's state is in fp32
    "{'loss': <class 'float'>}": ("error", "TypeError: float() argument mu"),
}


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "forward"},
        {"mode": "forward-backward", "checkpoint": "every:1"},
        {"mode": "train-step", "clip_norm": 0.1},
        {"precision": "bf16-pure"},
        {"precision": "fp8"},
        {"compile": "aot_eager", "mode": "forward"},
        {"profiler": "kineto"},
        {"profiler": "memory"},
        {"loss": float},
    ],
    ids=str,
)
def test_measurement_restores_model_and_process(options: dict[str, Any]) -> None:
    model, optimizer, scheduler = trained()
    before = everything(model, optimizer, scheduler)
    record = cs_systems.run(model=model, inputs=BATCH, optimizer=optimizer, scheduler=scheduler, **(QUICK | options))
    after = everything(model, optimizer, scheduler)
    assert [name for name in before if after[name] != before[name]] == []
    assert (record.status, (record.reason or "")[:30]) == OUTCOMES.get(str(options), ("ok", "")), record.reason


def test_training_after_a_measurement_continues_as_without_it() -> None:
    def losses(measure: bool) -> list[float]:
        torch.manual_seed(3)
        model, optimizer, scheduler = trained()
        found = []
        for _ in range(3):
            if measure:
                cs_systems.run(model=model, inputs=BATCH, optimizer=optimizer, scheduler=scheduler, **QUICK)
            optimizer.zero_grad()
            loss = model(X, LABELS)["loss"]
            loss.backward()
            optimizer.step()
            scheduler.step()
            found.append(float(loss.detach()))
        return found

    assert losses(measure=True) == losses(measure=False)


def test_callers_grad_mode_and_default_dtype_are_kept() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            record = cs_systems.run(model=nn.Linear(16, 3), inputs=X.double(), **QUICK)
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert record.status == "ok", record.reason


@pytest.mark.parametrize("before", ["tf32", "ieee", "mixed"])
def test_fp32_has_no_tf32_in_convolutions_and_the_callers_setting_is_kept(before: str) -> None:
    cudnn: Any = torch.backends.cudnn
    seen: list[str] = []

    def settings() -> list[str]:
        return [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]

    def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.extend(settings())
        with cudnn.flags(enabled=False):  # raises where torch's older and newer settings contradict each other
            output: torch.Tensor = model(batch)
        return output

    at_first = settings()
    try:
        if before != "tf32":
            cudnn.conv.fp32_precision = "ieee"
        if before == "ieee":
            cudnn.rnn.fp32_precision = "ieee"
        callers = settings()
        record = cs_systems.run(model=nn.Linear(16, 3), inputs=X, forward=forward, precision="fp32", **QUICK)
        assert settings() == callers
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = at_first
    assert record.status == "ok", record.reason
    assert seen
    assert "tf32" not in seen


def test_folder_is_an_ordinary_run_with_the_profile(tmp_path: Path) -> None:
    records = [cs_systems.run(model=Net(), inputs=BATCH, out=tmp_path, **QUICK) for _ in range(2)]
    records += [cs_systems.run(model=Net(), inputs=BATCH, out=tmp_path, profiler="kineto", name="profiled", **QUICK)]
    read, complaints = cs_systems.read_records(tmp_path)
    assert (read, complaints) == (records, [])
    assert [(r.config["workload"], r.repeat) for r in read] == [("live Net", 0), ("live Net", 1), ("live profiled", 0)]
    assert (tmp_path / read[2].artifacts["trace"]).is_file()
    frame = cs_systems.load(tmp_path)
    assert {*frame["workload"]} == {"live Net", "live profiled"}
    assert frame["samples_per_s"].dropna().tolist() == pytest.approx(
        [16 / median for median in frame.query("phase == 'step'")["median_s"]]
    )
    with pytest.raises(ConfigError, match="'live Net' was an object of the process that measured it; measure it again"):
        cs_systems.run(read[0].run_config)


def test_profile_without_a_folder_names_no_file() -> None:
    record = cs_systems.run(model=Net(), inputs=BATCH, profiler="kineto", **QUICK)
    assert (record.status, record.artifacts) == ("ok", {})
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "no-tables")
    assert caveat.message == (
        "the trace holds no kernel: it has times of the ranges on the host, but none of the device"
    )
    assert caveat.remedy == ("profile on a GPU, or see its operators: cs-systems analyze TRACE (give out= to keep it)")
    assert ".trace.json" not in record.to_json()


def test_option_unused_by_the_step_is_refused() -> None:
    record = cs_systems.run(workload=step, precision="bf16", **QUICK)
    assert record.status == "unavailable"
    assert record.reason == (
        "live step does not use precision=; read config.precision in a factory (config, device), or leave out "
        "precision="
    )


def test_checkpoints_are_of_the_blocks_of_a_live_model() -> None:
    deep = Net()
    deep.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(14))  # more than the default preset has
    found = [cs_systems.run(model=deep, inputs=BATCH, checkpoint=f"blocks:{n}", **QUICK) for n in (13, 14)]
    assert [record.status for record in found] == ["ok", "unavailable"], found[0].reason
    assert "names block 14, which does not exist; choose among blocks 0 to 13" in str(found[1].reason)


def test_option_unused_by_a_live_model_is_refused() -> None:
    record = cs_systems.run(RunConfig(model=cs_systems.preset("tiny")), model=Net(), inputs=BATCH, **QUICK)
    assert record.reason == (
        "the model Net does not use the preset of the RunConfig; leave out model= of the RunConfig"
    )
    record = cs_systems.run(model=Net(), inputs=BATCH, attention="sdpa_math", **QUICK)
    assert record.reason == "the model Net does not use attention=; leave out attention="


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        ({}, "workload is an empty dict; give the key 'model', the key 'batch' or 'batches', and any of loss, "),
        ((torch.ones(2), Net()), "workload is a tuple of (Tensor, Net); give (model, batch) or (model, batch, loss), "),
    ],
)
def test_object_without_a_step_is_an_error(workload: Any, reason: str) -> None:
    assert str(cs_systems.run(workload=workload, **QUICK).reason).startswith(reason)


# Calls of the library with wrong arguments, and the message. They are texts, because mypy would reject the calls.
REFUSED = {
    "run(stepz=3)": "run has no argument 'stepz'; did you mean steps",
    "run(model=Net(), inputs=X, size='tiny')": r"run has no argument 'size'; write model=preset\('tiny'\)$",
    "run(model=nn.Linear, inputs=X)": "model is the class Linear; give an instance, such as Linear\\(…\\)$",
    "run(model=Net(), inputs='abc')": "inputs is 'abc', a text; give a tensor, dict, tuple, list or DataLoader$",
    "run(model=preset('tiny'), inputs=X)": (
        "inputs= requires an nn.Module as model=, got a ModelConfig; give a module, or leave out inputs=$"
    ),
    "run(model=Net(), inputs=X, parts=('fused_rmsnorm',))": (
        "parts applies only to train_step and training_curve, and the workload is live Net; leave out parts$"
    ),
    "run(workload=5)": r"workload is 5; give a factory \(config, device\), \(model, batch\), \(model, batch, loss\), a",
    "run(workload=Net)": r"workload is the class Net, and a module requires inputs; use run\(model=Net\(…\), ",
    "run(device=torch.device('cpu'))": r"device is torch.device\('cpu'\); write 'cpu'$",
    "run(device=torch.device('mps'))": r"device is torch.device\('mps'\); write 'auto', 'cpu', 'cuda' or 'cuda:N'$",
    "RunConfig(device=3)": "device is 3; write 'auto', 'cpu', 'cuda' or 'cuda:N'$",
    "RunConfig(compile=True)": "compile mode is True; choose among none, default, reduce-overhead",
    "RunConfig(workload=Net())": r"workload is a Net; give its name, .* or measure the object itself with run\(model=…",
    "RunConfig(parts='fused_rmsnorm')": r"parts is 'fused_rmsnorm'; give a tuple .* \('fused_rmsnorm',\), or a list",
    "RunConfig(size='large')": r"RunConfig has no argument 'size'; write model=preset\('large'\)$",
    "RunConfig(d_ff=8)": r"RunConfig has no argument 'd_ff'; write model=preset\('small', d_ff=8\)$",
    "RunConfig(context_length=8)": "RunConfig has no argument 'context_length'; use seq_len$",
    "RunConfig(checkpoint='every:1', workload='attention', mode='forward')": (
        "checkpoint does not apply to workload attention; leave out checkpoint$"
    ),
    "run(Net())": r"config is a Net; give a RunConfig, or call run\(model=…\) for a ModelConfig, ",
    "run(model=Net())": "model= requires inputs=; give one batch, or a DataLoader of batches",
    "run(model=Net(), inputs=X, batches=[X])": "inputs= and batches= exclude each other; give one of them",
    "run(inputs=X)": "inputs= requires an nn.Module as model=, and none is given; give both, or leave",
    "run(model='small')": r"model is 'small'; give an nn.Module, or a ModelConfig such as preset\('small'\)",
    "run(workload=step, loss=step)": "workload= and loss= exclude each other; leave out loss=, or give all parts as",
    "run(RunConfig(workload='toy'), model=Net(), inputs=X)": (
        "workload toy cannot be combined with model=, inputs=; leave out that workload, or leave out model=, inputs=$"
    ),
    "run(workload=step, timeout_s=3)": "requires a worker process, .*; leave out timeout_s, or name the object",
    "run(model=Net(), inputs=X, strategy='torch_ddp', world_size=2)": (
        "strategy torch_ddp on world_size 2 requires a worker process"
    ),
    "run(workload=step, name='a:b')": "name is 'a:b'; give one or more printable characters, without a colon",
    "run(workload=lambda *, width: None)": (
        r"^<lambda>.*width\) requires width, which run\(\) does not give; pass a function .* calls it with width=VALUE$"
    ),
    "run(workload=Net())": r"workload is a Net, and a module requires inputs; use run\(model=…, inputs=…\)",
    "run(workload=Stepper())": "a Stepper has a method step, but lacks prepare, cost, describe; add def prepare",
    "run(workload=object())": r"workload is an object; give a factory \(config, device\), \(model, batch\)",
    "run(workload=lambda a: a)": r"^<lambda>\(a\) has other arguments than a factory or a step; write a factory",
    "run(workload={'model': Net(), 'bach': X})": r"no field 'bach'; did you mean batch or batches\? The names are",
    "run(RunConfig(), 3, steps=2)": r"run takes only config by position; give the others by name, as in run\(model=…\)",
    "run(name='mine')": "name= is only for a live object, .* and none is given; leave out name=$",
    "run(out='x', in_process=True)": "writes no folder of records, but out= is given; give only one of",
    "run(model=nn.LazyLinear(3), inputs=X)": "lazy parameters without a shape; call it once before",
    "run(model=Net().to('meta'), inputs=X)": "of the model is on the meta device, .* on meta, call model.to_empty",
    "run(model=Net(), inputs=X, lr=1e-3)": r"no argument .lr.; give optimizer=lambda .*AdamW\(parameters, lr=0.001",
    "run(RunConfig(), repeats=3)": r"no argument 'repeats'; measure a RunConfig by sweep",
    "run(model=Net(), inputs=X, checkpoint=True)": "checkpoint is True; it must be the text 'none', or a plan such as",
    "run(RunConfig(strategy='ddp_bucketed:comm_dtype=bf16', world_size=2))": (
        r"strategy 'ddp_bucketed:comm_dtype=bf16' has a colon after .* as strategy_args, such as strategy_args="
    ),
    "run(RunConfig(strategy='mine.py:S', world_size=2))": "file 'mine.py' .* does not exist; correct the path",
    "RunConfig(checkpoint=True)": "checkpoint is True; it must be the text 'none', or a plan such as 'every:1'",
    "cs_systems.frame('runs/x')": r"records is the path 'runs/x'; give the result of read_records\(path\)\[0\]",
    "cs_systems.diagnose(['runs/x'])": r"records is a list that contains 'runs/x'; give RunRecords, such as",
    "cs_systems.diagnose(None)": "records is None; give RunRecords",
    "run(model=Net(), inputs=X, loss=lambda: 3)": r"loss\(\) has other arguments; write loss\(outputs\) or loss\(out",
    "run(model=Net(), inputs=X, forward=lambda batch: 3)": r"forward\(batch\) has other .* write forward\(model, b",
    "run(model=Net(), batches=X)": r"batches is a tensor, which is one batch; give it as batch \(in run\(\) as inputs",
    "run(model=Net(), batches=5)": "batches is 5; give a list or DataLoader of batches, or a single batch as batch",
    "RunConfig(preset('tiny'))": r"workload is a ModelConfig; write RunConfig\(model=preset\('small'\)\)",
    "run(model=Net(), inputs=X, loss=3)": "loss is 3; give a function",
    "sweep([Net()])": r"configs has a Net; .* a model by run\(model=…, .* or name the object as RunConfig",
    "sweep(RunConfig())": r"configs is a single RunConfig; give a list, or measure it with run\(config\)",
    "sweep(3)": "configs has 3; give a list of RunConfigs",
    "preflight(RunConfig())": "configs is a single RunConfig; give a list",
    "sweep([], repeat=2)": "sweep has no argument 'repeat'; did you mean repeats",
    "sweep([])": "configs is empty; give at least one RunConfig$",
    "sweep([RunConfig()], out='')": "out is ''; give the folder of the records$",
    "sweep([], out=3)": "out is 3; give the folder of the records",
    "sweep([], repeats='2')": "repeats is '2'; it must be a whole number of at least 1",
    "sweep([], fresh=1)": "fresh is 1; give True or False",
    "sweep([], on_progress=3)": "on_progress is 3; give a function that takes a Progress, or leave it out",
    "grid(precision=RunConfig().precision)": r"'fp32'; give a list of values, such as precision=\['fp32'\]$",
    "grid(batch_size=4)": r"batch_size is 4; give a list of values, such as batch_size=\[4\]",
    "grid(size=[])": "size has no value; give at least one$",
    "grid(size=['tiny'], heads=[4])": (
        r"heads is a setting of an attention call, but the workload is train_step; use num_heads, or give RunConfig\("
    ),
    "grid(['small'])": "base is a list; give a RunConfig, and the axes by name",
    "grid(model=['small'], d_ff=[8])": "model is 'small'; it must be a ModelConfig",
    "preset(3)": "size is 3; choose among tiny, small",
    "preset('small', d_modl=3)": "ModelConfig has no argument 'd_modl'; did you mean d_model",
    "preset('small', 'large')": "preset takes only name by position; give the others by name",
    "RunConfig('train_step', workload='toy')": "RunConfig has workload twice, by position and by name; give it once",
    "RunConfig(precison='bf16')": "RunConfig has no argument 'precison'; did you mean precision",
    "RunConfig(strategy_args='a=1')": r"strategy_args is 'a=1'; give a tuple of texts, such as \('comm_dtype=bf16',\)",
    "RunConfig(parts=('fused_rmsnorm', 3))": "parts has the element 3; each must be a text, such as 'fused_rmsnorm'",
    "TrainingSetup()": "TrainingSetup requires model; its arguments are model, batch",
    "TrainingSetup(Net(), X, clip_norm='1')": "clip_norm is '1'; it must be a number above 0",
    "TrainingSetup(Net(), X, optimizer=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Net().parameters()), 1))": (
        "optimizer is a StepLR; give a class such as torch.optim.AdamW, .* or a torch.optim.Optimizer of this model"
    ),
    "TrainingSetup(Net(), X, optimizer='adam')": "optimizer is 'adam'; give a class such as torch.optim.AdamW",
    "Recorder(out='x', device='gpu')": "device is 'gpu'; give cpu, cuda or cuda:N, or a torch.device",
    "Recorder(out='x', stes=3)": "Recorder has no argument 'stes'; did you mean steps",
    "Recorder(Net())": "Recorder requires out; its arguments are model, optimizer",
    "Recorder([], out='x')": "model is an empty list; give a torch Module, or leave out model$",
    "Recorder(out='x', clock='x')": "clock is 'x'; give a function that returns seconds$",
    "Recorder(out='')": "out is ''; give the folder of the records$",
    "Recorder(out=3)": "out is 3; give the folder of the records",
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_argument_is_a_config_error_with_the_remedy(case: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[case]):
        eval(case, {**globals(), **{name: getattr(cs_systems, name) for name in cs_systems.__all__}})


@pytest.mark.parametrize("context", [torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)])
def test_context_that_would_change_the_step_is_refused(context: Callable[[], Any]) -> None:
    with context(), pytest.raises(ConfigError, match="call it outside"):
        cs_systems.run(model=Net(), inputs=X, **QUICK)


def test_loss_function_of_torch_is_refused_with_the_form_to_use() -> None:
    labels = torch.zeros(len(X), dtype=torch.int64)
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        record = cs_systems.run(model=Net(), inputs=(X, labels), loss=loss, **QUICK)
        assert record.status == "error"
        assert "takes (outputs, target), but a loss is called with (outputs, batch); write loss=" in str(record.reason)


@pytest.mark.parametrize(("mode", "trains"), [("forward", False), ("forward-backward", True)])
def test_forward_alone_keeps_eval(mode: str, trains: bool) -> None:
    seen: set[bool] = set()
    model = Net().eval()
    model.register_forward_hook(lambda module, *_: seen.add(module.training))
    cs_systems.run(model=model, inputs=X, mode=mode, **QUICK)
    assert seen == {trains}
    assert not model.training


def test_scheduler_of_another_optimizer_is_refused() -> None:
    model = Net()
    own, other = (torch.optim.SGD(net.parameters(), 0.1) for net in (model, Net()))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ConfigError) as refused:
        cs_systems.run(model=model, inputs=BATCH, optimizer=own, scheduler=scheduler, **QUICK)
    assert str(refused.value) == (
        "the scheduler changes an optimizer (SGD) that is not the one that steps; give that SGD as "
        "optimizer=, or give scheduler=lambda optimizer: …"
    )
    made_anew = (
        "the scheduler changes an optimizer (SGD) that never steps, because the step makes an optimizer of its own; "
        "give that SGD as optimizer=, or give scheduler=lambda optimizer: …"
    )
    for options in ({}, {"optimizer": torch.optim.SGD}):
        with pytest.raises(ConfigError) as refused:
            cs_systems.run(model=model, inputs=BATCH, scheduler=scheduler, **options, **QUICK)
        assert str(refused.value) == made_anew
    setup = cs_systems.TrainingSetup(model, BATCH, optimizer=own, scheduler=torch.optim.lr_scheduler.StepLR(own, 1))
    assert cs_systems.run(workload=setup, **QUICK).status == "ok"
    record = cs_systems.run(RunConfig(optimizer="adamw"), workload=setup, **QUICK)  # replaces the setup's
    assert (record.status, record.reason) == (
        "error",
        "optimizer adamw of the configuration replaces the SGD that the scheduler changes; leave out optimizer adamw, "
        "or give scheduler=lambda optimizer: …",
    )


def test_scheduler_may_be_a_class() -> None:
    scheduler = torch.optim.lr_scheduler.ConstantLR
    record = cs_systems.run(model=Net(), inputs=X, loss=lambda out: out.sum(), scheduler=scheduler, **QUICK)
    assert (record.status, record.reason) == ("ok", None)


def test_model_without_parameters_has_no_training_step() -> None:
    record = cs_systems.run(model=nn.Identity(), inputs=X, loss=lambda out: out.sum(), **QUICK)
    assert record.reason == "the model has no parameter that an optimizer could change; use mode forward"


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=2),
    st.sampled_from([object(), torch.ones(2), numpy.ones(2), Net, {"a": 1}, Path("x"), 1j]),
)  # fmt: skip
RECORDER = ("model", "optimizer", "out", "name", "warmup", "steps", "profile", "profile_steps", "snapshot", "tokens")
TARGETS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "RunConfig": (RunConfig, tuple(RunConfig.__dataclass_fields__)),
    "ModelConfig": (cs_systems.ModelConfig, tuple(cs_systems.ModelConfig.__dataclass_fields__)),
    "AttentionShape": (cs_systems.AttentionShape, tuple(cs_systems.AttentionShape.__dataclass_fields__)),
    "TrainingSetup": (cs_systems.TrainingSetup, tuple(cs_systems.TrainingSetup.__dataclass_fields__)),
    "run": (  # refused in the end, because a live step has no timeout
        partial(cs_systems.run, workload=step, timeout_s=1),
        ("config", "model", "inputs", "loss", "optimizer", "name", "out", "in_process", "accumulate", "mode", "seed"),
    ),
    "grid": (cs_systems.grid, ("base", "size", "model", "shape", "batch_size", "d_ff", "heads", "mode")),
    "preset": (cs_systems.preset, ("name", "d_ff", "vocab_size", "rope_theta")),
    "Recorder": (cs_systems.Recorder, (*RECORDER, "device", "patience_s")),
    "sweep": (
        lambda configs=(), **rest: cs_systems.sweep(configs, **rest),
        ("configs", "out", "repeats", "timeout_s", "fresh", "skip_oom", "interleave", "shuffle_seed", "on_progress"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_argument_value_raises_an_unexpected_error(target: str, data: st.DataObject) -> None:
    function, names = TARGETS[target]
    arguments = data.draw(st.dictionaries(st.one_of(st.sampled_from(names), st.text(max_size=4)), ANY, max_size=3))
    try:
        function(**arguments)
    except ConfigError:
        return


@pytest.fixture(scope="module")
def record() -> RunRecord:
    return cs_systems.run(model=nn.Sequential(nn.Linear(16, 3)), inputs=X, name="<b>&co</b>", **QUICK)


def test_record_is_displayed_as_text_and_as_escaped_html(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, html = repr(record), record._repr_html_()
    assert len(text.splitlines()) < 24
    assert max(map(len, text.splitlines())) <= 80
    for shown in ("live <b>&co</b> on", "p10 … p90", "samples/s", "few-samples (1 cell): 2 timed steps are too few"):
        assert shown in text, shown
    assert "<b>" not in html
    for shown in ("live &lt;b&gt;&amp;co&lt;/b&gt; on", "samples/s</th>", "step (", "<li>few-samples (1 cell)"):
        assert shown in html, shown
    step = record.frame().query("phase == 'step'").iloc[0]
    assert f">{units.significant(step['samples_per_s'])}</td>" in html


def test_record_without_a_table_is_displayed(record: RunRecord) -> None:
    broken = replace(record, config={})
    assert "no table: KeyError: 'workload'" in repr(broken)
    assert "<table>" not in broken._repr_html_()


def test_sweep_displays_its_records_and_run_reuses_them(tmp_path: Path) -> None:
    cells = cs_systems.grid(RunConfig(model=cs_systems.preset("tiny"), **QUICK), attention=["naive", "sdpa_math"])
    records = cs_systems.sweep(cells, out=tmp_path)
    assert (
        repr(records)
        == "0 of 2 cells measured in this sweep; iterate over it, or call .finish(), to measure the others"
    )
    first = next(records)
    assert records.records == [first]
    assert "1 of 2 cells measured in this sweep; iterate" in repr(records)
    assert records.finish() is records
    html = records._repr_html_()
    assert "2 of 2 cells measured in this sweep</p>" in html
    assert html.count("<tr><td") == 2
    again = cs_systems.run(model=cs_systems.preset("tiny"), attention="naive", out=tmp_path, **QUICK)
    assert again == first, "recorded, so not measured again"
    assert {*records.frame()["attention"]} == {"naive", "sdpa_math"}
    assert {"tokens/s", "naive", "sdpa_math"} <= {*repr(records).replace("\n", " ").split()}
    resumed = cs_systems.sweep(cells, out=tmp_path).finish()
    assert (
        repr(resumed)
        == "0 of 2 cells measured in this sweep; the others were recorded before, and cs_systems.load(out) reads all"
    )


def test_interrupted_sweep_prints_how_to_resume() -> None:
    def measured() -> Iterator[RunRecord]:
        raise KeyboardInterrupt
        yield

    records = Records(2, measured())
    with pytest.raises(KeyboardInterrupt):
        records.finish()
    assert records.finish().records == []
    assert repr(records) == (
        "0 of 2 cells measured in this sweep; it was interrupted; call sweep() again to measure the others"
    )


def test_grid_shows_only_fields_that_vary() -> None:
    cells = cs_systems.grid(size=["tiny", "small"], precision=["fp32", "bf16"], batch_size=[2])
    assert cells == list(cells)
    assert repr(cells).splitlines() == [
        "4 cells; constant: batch 2 · naive · train-step",
        "size   ctx  precision",
        "─────────────────────",
        "tiny    64  fp32",
        "tiny    64  bf16",
        "small  512  fp32",
        "small  512  bf16",
    ]
    assert cells._repr_html_().count("<tr><td") == 4
    assert repr(cs_systems.grid(seed=range(50))).endswith("and 30 more cells")
    assert "small ctx 512" in repr(cs_systems.grid())
    assert repr(type(cells)()) == "no cell"


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": "cuda"},
        {"device": "cuda", "precision": "bf16-pure"},
        {"device": "cuda", "memory_limit_bytes": 8 << 30},
        {"device": "cuda", "profiler": "memory_snapshot"},
    ],
    ids=str,
)
def test_model_returns_to_its_device_with_its_values(options: dict[str, Any], home: str) -> None:
    model = Net().to(home)
    of_process = torch.cuda.get_per_process_memory_fraction(), torch.cuda.get_rng_state().tolist()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = cs_systems.run(model=model, inputs=BATCH, **({"warmup": 1, "steps": 2} | options))
    assert record.status == "ok", record.reason
    assert record.environment is not None
    assert record.environment.device == ("cuda:0" if options else home)
    for name, value in model.state_dict().items():
        assert (value.device, value.dtype) == (before[name].device, before[name].dtype), name
        assert torch.equal(value, before[name]), name
    assert (torch.cuda.get_per_process_memory_fraction(), torch.cuda.get_rng_state().tolist()) == of_process


@pytest.mark.parametrize(
    ("dtype", "precision", "peak"),
    [(torch.float32, "fp32", 67e12), (torch.bfloat16, "bf16-pure", 989.5e12), (torch.float64, "float64", None)],
    ids=str,
)
def test_precision_is_read_from_the_parameters(
    dtype: torch.dtype, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.Device, "name", "NVIDIA H200")
    model = nn.Linear(4, 4).to(dtype)
    record = cs_systems.run(model=model, inputs=torch.ones(2, 4, dtype=dtype), device="cpu", warmup=0, steps=1)
    assert record.results["ran"][0]["precision"] == precision
    assert [row["peak_flops_per_s"] for row in record.results.get("ceiling", [])] == [peak] * (peak is not None)
    assert {*cs_systems.frame([record])["precision"]} == {precision}


def test_another_model_of_one_class_needs_a_name(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    options: dict[str, Any] = {"inputs": x, "warmup": 0, "steps": 1, "out": tmp_path}
    records = [cs_systems.run(model=nn.Linear(4, 4), **options) for _ in range(2)]
    assert [record.repeat for record in records] == [0, 1]
    message = "has a record of Linear with 20 parameters, and this Linear has 10; tell them apart with name='…'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        cs_systems.run(model=nn.Linear(4, 2), **options)
    assert cs_systems.run(model=nn.Linear(4, 2), name="narrow", **options).repeat == 0


class Broken(Net):
    """Model with a forward that raises, as by a user's mistake."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        raise ValueError("mine")


def test_mistake_of_the_call_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    record = cs_systems.run(model=Net(), batches=[], **QUICK)
    text = (
        "there is no batch: the list or DataLoader is empty, or a generator has ended; give a list or DataLoader with "
        "at least one batch"
    )
    assert (record.status, record.reason) == ("error", text)
    assert capsys.readouterr().err == f"{text}\n"


def test_traceback_of_a_users_model_begins_at_its_own_frame(capsys: pytest.CaptureFixture[str]) -> None:
    record = cs_systems.run(model=Broken(), inputs=torch.randn(4, 16), **QUICK)
    assert (record.status, record.reason) == ("error", "ValueError: mine")
    begin, frame, *_, last = capsys.readouterr().err.splitlines()
    assert begin == "Traceback (most recent call last):"
    assert frame.startswith(f'  File "{__file__}", line ')
    assert last == "ValueError: mine"
