"""Tests of predicting the memory of a user's own model by a step on fake tensors."""

from __future__ import annotations

import importlib.util
import re
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems.cli._forecasts import print_fits
from cs_systems.config import ConfigError, RunConfig, preset
from cs_systems.core.plugins import is_foreign
from cs_systems.formulas.memory.allocator import MIB, CachingAllocator
from cs_systems.formulas.memory.fit import CONTEXT_BYTES, algorithm_of, largest
from cs_systems.formulas.memory.model import step_memory
from cs_systems.instrument.like_cuda import like_cuda
from cs_systems.instrument.storages import StorageTracker
from cs_systems.measure.runtime.forecast import forecast
from cs_systems.record import Measurement, RunRecord
from tests.analysis.memory.caching_allocator import CachingAllocator as Simulated

ROOT = Path(__file__).resolve().parents[3]
USER_CODE = """
import torch
from torch import nn
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training.losses import cross_entropy

def own(config, device):
    tokens = torch.randint(100, (config.batch_size, config.tokens_per_sequence))
    return BasicTransformerLM(config.model, config.attention), tokens, lambda logits: cross_entropy(logits, tokens)
def convolutions(config, device):
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(config.batch_size, 8, 32, 32)
def recurrent(config, device):
    return nn.LSTM(8, 8), torch.randn(4, config.batch_size, 8), lambda output: output[0].square().mean()
def mlp(config, device):
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(64 * config.batch_size, 64)
def loader(config, device):
    data = torch.randn(64 * config.batch_size, 64)
    return nn.Linear(64, 64), torch.utils.data.DataLoader(data, batch_size=config.batch_size)
def closure(config, device):
    target = torch.randn(config.batch_size, 64)
    return nn.Linear(64, 64), {"input": target, "unused": target}, lambda y: (y - target - TABLE[0]).square().mean()
TABLE = torch.zeros(1000, 64)
def half(config, device):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    return model.to(torch.bfloat16), torch.randn(config.batch_size, 64).bfloat16()
def llama(config, device):
    from transformers import LlamaConfig, LlamaForCausalLM
    ids = torch.randint(64, (config.batch_size, 32))
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
    return model, {"input_ids": ids, "labels": ids}
class Routed(nn.Linear):
    def forward(self, x): return super().forward(x[x[:, 0] > 0])
def routed(config, device): return Routed(4, 4), torch.randn(8, 4)
def step(config, device): return lambda: None
def plain_step(): return torch.ones(2).sum()
class Silent(nn.Linear):
    def forward(self, x): raise AssertionError
def silent(config, device): return Silent(4, 4), torch.randn(8, 4)
"""
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(USER_CODE)
    return path


def _config(source: Path, name: str, **fields: object) -> RunConfig:
    config = RunConfig(workload=f"{source}:{name}", **fields)  # type: ignore[arg-type]
    assert is_foreign(config.workload)
    return config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "convolutions",
        "loader",
        pytest.param("llama", marks=pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")),
    ],
)
def test_step_on_fake_tensors_needs_the_bytes_of_a_real_one(source: Path, name: str, precision: str) -> None:
    config = _config(source, name, precision=precision, device="cpu")
    fake, real = forecast(config), forecast(config, fake=False)
    assert (fake["reason"], real["reason"]) == (None, None)
    assert fake["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.02)
    assert fake["flops"] == real["flops"]
    assert "batch_size" in fake["reads"]
    assert [row["components"].get("batch") for row in fake["phases"]] == [
        row["components"].get("batch") for row in real["phases"]
    ]
    last = fake["phases"][-1]["components"]
    assert last["optimizer_state"] >= 2 * last["gradients"]


def test_batches_of_a_loader_are_counted_but_not_its_data(source: Path) -> None:
    row = forecast(_config(source, "loader", device="cpu", batch_size=8))
    assert [phase["components"].get("batch", 0) for phase in row["phases"][:2]] == [0, 8 * 64 * 4]


def test_tensors_that_the_loss_refers_to_are_counted_once(source: Path) -> None:
    row = forecast(_config(source, "closure", device="cpu", batch_size=8))
    assert {phase["components"]["batch"] for phase in row["phases"]} == {4 * 64 * (8 + 1000)}


def test_model_converted_while_it_is_built_keeps_its_tied_weights(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cs_systems.measure.runtime.forecast._make_fake", None)  # it must not be built on real tensors
    row = forecast(_config(source, "half", device="cpu"))
    assert row["reason"] is None
    assert row["phases"][0]["components"]["parameters"] == 2 * (64 * 64 + 2 * 64)


def _workspace(run: Any) -> int:
    tracker = StorageTracker("cpu", like_cuda=True, tf32=True)
    with tracker, tracker.phase(1, "forward"):
        run()
    return max(row["peak_components"].get("workspace", 0) for row in tracker.rows)


@pytest.mark.parametrize(
    ("groups", "layout", "copied"),
    [
        (1, torch.contiguous_format, True),
        (2, torch.contiguous_format, True),
        (8, torch.contiguous_format, False),  # PyTorch's own kernel
        (1, torch.channels_last, False),
    ],
)
def test_convolution_with_tf32_needs_its_tensors_again_in_channels_last(
    groups: int, layout: torch.memory_format, copied: bool
) -> None:
    x = torch.randn(4, 8, 32, 32).to(memory_format=layout)
    layer = torch.nn.Conv2d(8, 16, 3, padding=1, groups=groups)
    copies = 4 * (8 + 16) * 32 * 32 * 4 + layer.weight.nbytes if copied else 0
    assert _workspace(lambda: layer(x)) == pytest.approx(copies, abs=512)  # the allocator rounds sizes
    y = layer(x.requires_grad_())
    assert _workspace(lambda: y.sum().backward()) == pytest.approx(copies, abs=512)


MEASURED = [
    (family, precision, int(measured.replace(",", "")) * MIB)
    for family, precision, measured in re.findall(
        r"^\| (unet|resnet|lstm|gru|decoder) \| (\w+) \| [\d,]+ \| ([\d,]+)",
        (ROOT / "profiles/foreign_memory/table.md").read_text(),
        re.M,
    )
]


@pytest.mark.parametrize(("family", "precision", "measured_bytes"), MEASURED)
def test_prediction_is_within_5_percent_of_an_h200_s_measurement(
    family: str, precision: str, measured_bytes: int
) -> None:
    row = forecast(_config(ROOT / "scripts/benchmarks/foreign_memory.py", family, precision=precision, device="cuda"))
    assert row["peak_bytes"] == pytest.approx(measured_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("convolutions", {}, ["where it decides otherwise than predicted, the prediction is wrong"]),
        ("convolutions", {"precision": "tf32"}, ["copied to channels last"]),
        ("recurrent", {"precision": "bf16"}, ["the prediction is a lower bound"]),
        ("mlp", {}, []),
        ("convolutions", {"device": "cpu"}, []),
    ],
)
def test_prediction_says_in_which_direction_a_workspace_may_err(
    source: Path, name: str, fields: dict[str, Any], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(source, name, **{"device": "cuda", **fields})
    caveats = forecast(config)["caveats"]
    assert len(caveats) == len(said)
    for caveat, part in zip(caveats, said, strict=True):
        assert part in caveat
    if config.device == "cuda":
        print_fits(config, 2**40, forecast, None)
        printed = " ".join(capsys.readouterr().out.split())
        assert all(" ".join(caveat.split()) in printed for caveat in caveats)


@pytest.mark.parametrize("options", [{}, {"weight": torch.arange(1.0, 6)}, {"ignore_index": 2}, {"reduction": "sum"}])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 3)])
def test_cross_entropy_like_cuda_equals_torchs(shape: tuple[int, ...], label_smoothing: float, options: Any) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(shape), torch.randint(5, (shape[0], *shape[2:]))
    right = torch.nn.functional.cross_entropy(logits, target, label_smoothing=label_smoothing, **options)
    with like_cuda(), torch.autocast("cpu", torch.bfloat16):
        found = torch.nn.functional.cross_entropy(logits, target, label_smoothing=label_smoothing, **options)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("precision", "checkpoint"), [("fp32", "none"), ("bf16", "none"), ("bf16", "every:1")])
def test_prediction_for_cuda_agrees_with_the_closed_form(source: Path, precision: str, checkpoint: str) -> None:
    model = replace(preset("small"), num_layers=2)
    fields = {"precision": precision, "checkpoint": checkpoint, "model": model, "device": "cuda", "batch_size": 2}
    formula = step_memory(plain := RunConfig(**fields), algorithm_of(plain))  # type: ignore[arg-type]
    found = forecast(_config(source, "own", **fields))
    assert found["reason"] is None
    assert found["peak_bytes"] == pytest.approx(formula.peak_bytes, rel=0.03)
    assert found["reserved_bytes"] >= found["peak_bytes"]  # type: ignore[operator]
    assert found["stacks"] == {"layers": model.num_layers}


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("routed", {}, "Routed.forward (mine.py, line "),
        ("step", {}, "runs the step itself, which a prediction cannot follow; name a function (config, device)"),
        ("plain_step", {}, "runs the step itself, which a prediction cannot follow; name a function (config, device)"),
        ("silent", {}, "the step fails in Silent.forward (mine.py, line "),
        ("convolutions", {"compile": "default"}, "leave out compile"),
        ("convolutions", {"attention": "flex"}, "does not use attention"),
    ],
)
def test_unpredictable_cell_has_a_reason(source: Path, name: str, fields: dict[str, str], reason: str) -> None:
    row = forecast(_config(source, name, **fields))
    assert reason in (row["reason"] or "")
    assert row["peak_bytes"] is None


def test_allocator_agrees_with_the_simulation_that_records_events() -> None:
    torch.manual_seed(0)
    ours, theirs, alive = CachingAllocator(), Simulated(), []
    for number in range(400):
        if number % 3 == 2:
            mine, other = alive.pop(int(torch.randint(len(alive), ())))
            ours.free(mine)
            theirs.free(other)
        else:
            size = int(2 ** (torch.rand(()) * 16 + 9))
            alive.append((ours.alloc(size), theirs.alloc(size)))
        assert ours.reserved == sum(block.size for block in theirs.blocks)
    assert ours.allocated == pytest.approx(theirs.allocated, abs=4 * MIB)  # addresses of equal blocks may differ


@pytest.mark.parametrize("limit", [0, 5, 1000, 10**6])
@pytest.mark.parametrize("start", [1, 64])
def test_largest_that_fits_is_found_in_few_tries(limit: int, start: int) -> None:
    tried: list[int] = []

    def needed(n: int) -> int:
        tried.append(n)
        return max(3 * n + 2, 5 * n - 400)

    found = largest(needed, limit, start)
    assert found == max(0, bisect_right(range(10**6), limit, key=lambda n: max(3 * n + 2, 5 * n - 400)) - 1)
    assert len(tried) <= 12


def test_fits_extrapolates_measured_peaks_where_fake_tensors_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    measured = []

    def measure(config: RunConfig) -> RunRecord:
        measured.append(config.batch_size)
        peak = 10 * MIB + 30 * MIB * config.batch_size
        return RunRecord("key", config.to_dict(), "ok", measurement=Measurement("cuda", (), 0.0, peak, None))

    refused: Any = {"reason": "the step fails on fake tensors (x); y", "peak_bytes": None, "reads": []}
    config = RunConfig(workload="mine.py:factory", batch_size=8)
    print_fits(config, CONTEXT_BYTES + 1000 * MIB, lambda config: refused, measure)
    printed = " ".join(capsys.readouterr().out.split())
    assert measured == [2, 4, 8]
    assert "largest that fits: batch 33" in printed
    assert "because the step fails on fake tensors (x): 70.0 MiB at batch 2, 130 MiB at batch 4" in printed
    assert "is at most 0.0% off" in printed
    with pytest.raises(ConfigError, match="the step fails on fake tensors"):
        print_fits(config, 1000 * MIB, lambda config: refused, None)


def test_stated_error_of_the_extrapolation_equals_the_fitted_line_s_error(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(config: RunConfig) -> RunRecord:
        peak = {1: 100, 2: 120, 4: 200}[config.batch_size] * MIB
        return RunRecord("key", config.to_dict(), "ok", measurement=Measurement("cuda", (), 0.0, peak, None))

    refused: Any = {"reason": "x", "peak_bytes": None, "reads": []}
    print_fits(RunConfig(workload="mine.py:factory"), 2**40, lambda config: refused, measure)
    assert re.search(r"is at most [5-9]\.\d% off", " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        ("oom", "CUDA out of memory", r"\(oom: CUDA out of memory\); use a GPU with more memory$"),
        ("unavailable", "it does not use batch_size; leave it out", r"does not use batch_size\); measure it by hand$"),
        ("error", "ValueError: y", r"\(error: ValueError: y\); correct the cause, then run the command again$"),
    ],
)
def test_failed_measurement_names_the_batch_and_a_remedy(status: str, reason: str, said: str) -> None:
    def measure(config: RunConfig) -> RunRecord:
        return RunRecord("key", config.to_dict(), status, reason=reason)

    refused: Any = {"reason": "x; measure it by hand", "peak_bytes": None, "reads": []}
    with pytest.raises(ConfigError, match=f"because x, and measuring it at batch 1 failed .*{said}"):
        print_fits(RunConfig(workload="mine.py:factory"), 2**40, lambda config: refused, measure)
