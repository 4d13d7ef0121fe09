"""Tests of the benchmark of the training step: its ablation, and changes by peers' libraries that are undone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.core.recipes import RECIPES
from tests.scripts.conftest import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    return importlib.import_module("training_step")


@pytest.fixture
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).bfloat16()
    return model


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # torchao's own, when it is imported
def test_torchao_replaces_all_linear_layers_but_the_head_and_undoes_its_patch(script: Any, llama: nn.Module) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torch._inductor.codegen.triton import TritonOverrides

    before = {name: vars(TritonOverrides)[name] for name in ("minimum", "maximum")}
    weights = dict(llama.named_parameters())
    tokens = torch.arange(32)[None] % 64
    expected = llama(input_ids=tokens, labels=tokens).loss
    with script.torchao_fp8(llama):
        linear = {n: type(m).__name__ for n, m in llama.named_modules() if isinstance(m, nn.Linear)}
        assert {kind for n, kind in linear.items() if n != "lm_head"} == {"Float8Linear"}
        assert linear["lm_head"] == "Linear"
        assert len(linear) == 2 * 7 + 1
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
    assert {name: vars(TritonOverrides)[name] for name in before} == before
    assert loss != expected
    assert float(loss) == pytest.approx(float(expected), rel=0.02)
    found = dict(llama.named_parameters())
    assert all(found[name] is weight for name, weight in weights.items())  # rows that the optimizer has
    assert all(weight.grad is not None for weight in weights.values())


def test_ablation_measures_each_set_of_options_once(script: Any) -> None:
    options = [script.VARIANTS[name] for name in script.ABLATION]
    assert all(each not in options[:n] for n, each in enumerate(options))
    left_out = {"up to: fp8_linear", script.BY_CUBLASLT}
    assert all(each in options for name, each in script.VARIANTS.items() if name not in left_out)


def test_gains_of_the_ablation_compare_steps_of_one_run(script: Any) -> None:
    page = importlib.import_module("_training_step_ablation")

    def row(run: str, variant: str, wall_s: float) -> dict[str, Any]:
        return {"size": "small", "context": 512, "run": run, "variant": variant, "wall_s": wall_s, "predicted_s": 0.5}

    rows = [row("1", "compiled", 9.0), row("1", "alone: attention", 7.0), row("1", "up to: graph", 6.0)]
    rows += [row("1", "fast", 4.0), row("2", "fast", 5.0), row("2", "without: graph", 8.0)]
    found = page.positions(page.of_cell(rows, ("small", 512)))
    assert {how: each.gain_s for how, each in found["attention"].items()} == {"alone": 2.0, "up to": 2.0}
    assert {how: each.gain_s for how, each in found["graph"].items()} == {"up to": 1.0, "without": 3.0}
    assert found["graph"]["up to"].predicted_s == 0.5
    assert found["graph"]["without"].predicted_s is None


def test_no_switch_of_the_fast_recipe_costs_time_in_committed_measurements(script: Any) -> None:
    page = importlib.import_module("_training_step_ablation")
    rows = json.loads((ROOT / "profiles" / "training_step" / "ablation.json").read_text())
    cells = {(row["size"], row["context"]) for row in rows}
    measured = 0
    for cell in cells:
        runs = page.of_cell(rows, cell)
        spread_s = max(run["fast"]["wall_p90_s"] - run["fast"]["wall_p10_s"] for run in runs)
        for switch, at in page.positions(runs).items():
            if "without" in at and at["without"].gain_s is not None:
                measured += 1
                assert at["without"].gain_s > -spread_s, (cell, switch)
    assert measured >= 9 * len(cells)


def test_fast_variant_of_the_benchmark_equals_the_recipe(script: Any) -> None:
    options = RECIPES["fast"].of("train-step")
    fast = script.VARIANTS["fast"]
    assert set(fast["parts"]) == set(options["parts"])
    assert {name: value for name, value in fast.items() if name != "parts"} == {
        name: value for name, value in options.items() if name != "parts"
    }
