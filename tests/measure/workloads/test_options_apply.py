"""Options apply to a workload from outside the package, or the cell is unavailable and names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import cs_systems
from cs_systems.config import PRESETS, Mode, RunConfig, preset
from cs_systems.measure.workloads._observed import observed
from cs_systems.record import RunRecord

WORKLOADS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x + self.fc(x).tanh()
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
built = []
def module(config, device):
    built.append(Stack())
    return built[-1], torch.rand(2, 4)
def flat(config, device): return nn.Linear(4, 4), torch.ones(2, 4)
def step(): pass
def reads_batch(config, device):
    size = config.batch_size
    return lambda: size
def reads_length(config, device):
    length = config.tokens_per_sequence
    return lambda: length
def reads_misnamed_length(config, device): return lambda: config.context_length
def reads_misspelled(config, device): return config.model.num_layer
def reads_width_of_run(config, device): return config.d_model
def reads_batch_of_model(config, device): return config.model.batch_size
def reads_in_step(config, device): return lambda: config.attention
def reads_width(config, device): return nn.Linear(config.model.d_model, 2), torch.ones(2, config.model.d_model)
class Workload:
    def __init__(self, config, device): pass
    def prepare(self): pass
    def step(self): yield "forward", step
    def cost(self): return None
    def describe(self): return {"tokens": None}
def random(config, device):
    value = float(torch.rand(()))
    class Seeded(Workload):
        def describe(self): return {"tokens": None, "value": value}
    return Seeded(config, device)
"""

Measure = Callable[..., RunRecord]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    source = tmp_path / "own.py"
    source.write_text(WORKLOADS)

    def run(name: str, **fields: Any) -> RunRecord:
        config = RunConfig(workload=f"{source}:{name}", warmup=0, steps=2, device="cpu")
        return cs_systems.run(replace(config, **fields), in_process=True)

    return run


@pytest.mark.parametrize(
    ("name", "fields", "options"),
    [
        ("module", {"attention": "sdpa_flash"}, "attention"),
        ("module", {"batch_size": 8}, "batch_size"),
        ("module", {"model": preset("xl")}, "size"),
        ("module", {"model": replace(preset("small"), d_ff=64)}, "d_ff"),
        ("module", {"model": replace(preset("small"), context_length=128)}, "context_length"),
        ("step", {"compile": "default"}, "compile"),
        ("step", {"precision": "bf16"}, "precision"),
        ("Workload", {"strategy": "torch_ddp"}, "strategy"),
        ("Workload", {"mode": "forward"}, "mode"),
        ("reads_batch", {"batch_size": 8, "checkpoint": "every:1"}, "checkpoint"),
        ("reads_width", {"model": replace(preset("small"), d_model=96, vocab_size=7)}, "vocab_size"),
    ],
)
def test_option_without_effect_makes_the_cell_unavailable(
    measure: Measure, name: str, fields: dict[str, Any], options: str
) -> None:
    if fields.get("strategy"):
        record = next(iter(cs_systems.sweep([replace(measure(name).run_config, **fields)])))
    else:
        record = measure(name, **fields)
    assert record.status == "unavailable", record.reason
    assert f":{name} does not use {options}; read config." in (record.reason or "")
    assert (record.reason or "").endswith(f" in a factory (config, device), or leave out {options}")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("module", {"precision": "bf16", "mode": "forward", "optimizer": "default", "keep_graph": True}),
        ("reads_batch", {"batch_size": 8}),
        ("reads_length", {"model": replace(preset("small"), context_length=128)}),
        ("reads_in_step", {"attention": "sdpa_flash"}),
        ("reads_width", {"model": preset("tiny")}),
        ("step", {"seed": 3}),
    ],
)
def test_option_with_an_effect_is_measured(measure: Measure, name: str, fields: dict[str, Any]) -> None:
    record = measure(name, **fields)
    assert (record.status, record.reason) == ("ok", None)


def test_misnamed_field_is_an_error_with_the_right_name(measure: Measure) -> None:
    reason = measure("reads_misnamed_length").reason or ""
    assert "no field 'context_length'; the length of a sequence is config.tokens_per_sequence" in reason
    assert "no field 'num_layer'; did you mean num_layers" in (measure("reads_misspelled").reason or "")
    reason = measure("reads_width_of_run").reason or ""
    assert "config has no field 'd_model'; use config.model.d_model" in reason
    reason = measure("reads_batch_of_model").reason or ""
    assert "config.model has no field 'batch_size'; use config.batch_size" in reason


def test_only_used_fields_are_columns(measure: Measure) -> None:
    row = measure("reads_width", model=preset("tiny")).frame().iloc[-1]
    assert (row["size"], row["d_model"], row["precision"], row["mode"]) == ("tiny", 64, "fp32", "train-step")
    for unused in ("batch_size", "attention", "vocab_size", "d_ff", "l2"):
        assert pd.isna(row[unused]), unused
    row = measure("step").frame().iloc[-1]
    for unused in ("size", "batch_size", "precision", "mode"):
        assert pd.isna(row[unused]), unused


def test_seed_applies_to_any_factory(measure: Measure) -> None:
    values = [measure("random", seed=seed).results["ran"][0]["value"] for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_checkpoint_recomputes_the_blocks_of_any_model(measure: Measure, tmp_path: Path) -> None:
    from cs_systems.core import plugins

    # Two timed steps, and one that counts FLOPs.
    for plan, calls in (("none", 3), ("every:1", 6), ("blocks:0", 6)):
        record = measure("module", checkpoint=plan)
        assert record.status == "ok", record.reason
        built = plugins.get("workloads", f"{tmp_path / 'own.py'}:built")
        assert built[-1].layers[0].calls == calls
        assert built[-1].layers[2].calls == (6 if plan == "every:1" else 3)


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        (
            "module",
            "every:2",
            "checkpoint every:2 joins several blocks, which works for the built-in model only",
        ),
        (
            "flat",
            "every:1",
            "every:1 requires repeated blocks, and Linear has no ModuleList or Sequential of several blocks",
        ),
        ("module", "blocks:5", "names block 5, which does not exist; choose among blocks 0 to 2"),
    ],
)
def test_impossible_checkpoints_are_named(measure: Measure, name: str, plan: str, reason: str) -> None:
    record = measure(name, checkpoint=plan)
    assert record.status == "unavailable"
    assert reason in (record.reason or "")


@pytest.mark.parametrize("built_in", [False, True])
def test_checkpoints_without_backward_are_unavailable(measure: Measure, built_in: bool) -> None:
    own: dict[str, Any] = {"workload": "train_step", "model": PRESETS["tiny"], "batch_size": 1} if built_in else {}
    record = measure("module", mode=Mode.FORWARD, checkpoint="every:1", **own)
    assert record.status == "unavailable"
    assert record.reason == (
        "checkpoint every:1 changes nothing in mode forward, which keeps no tensors for backward; "
        "use mode forward-backward, keep_graph, or checkpoint none"
    )
    assert measure("module", mode=Mode.FORWARD, checkpoint="every:1", keep_graph=True, **own).status == "ok"


def test_losses_with_and_without_checkpoints_are_equal(measure: Measure) -> None:
    losses = [measure("module", checkpoint=plan).results["ran"][0]["loss"] for plan in ("none", "every:1")]
    assert losses[0] == losses[1]


def test_observed_config_records_which_fields_are_read() -> None:
    config = RunConfig(batch_size=3)
    watched, read = observed(config)
    assert isinstance(watched, RunConfig)
    assert read == set()
    assert (watched.batch_size, watched.model.d_model) == (3, 768)
    assert read == {"batch_size", "model", "model.d_model"}
    assert watched.tokens_per_sequence == config.tokens_per_sequence
    assert read >= {"seq_len", "model.context_length"}
    assert watched.to_dict() == config.to_dict()
    assert replace(watched, batch_size=4).batch_size == 4
