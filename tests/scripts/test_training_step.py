"""Benchmark of the training step: its ablation, and what a peer's library changes and undoes."""

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
    assert all(found[name] is weight for name, weight in weights.items())  # those that the optimizer has
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


def test_table_of_products_sets_torch_beside_the_fastest_and_slowest_algorithm(script: Any) -> None:
    page = importlib.import_module("_training_step_power")

    def row(by: str, seconds: float, **more: Any) -> dict[str, Any]:
        asked = {"device": "NVIDIA H200", "size": "small", "context": 512, "product": "qkv, forward", "algorithms": 40}
        measured = {"seconds": seconds, "flops_per_s": 1e12 / seconds, "sm_clock_hz": 1.5e9, "power_w": 690.4}
        return asked | measured | {"by": by} | more

    rows = [row("torch", 2e-3), row("cublasLt", 4e-3, cluster="2x1"), row("cublasLt", 1.6e-3, cluster="1x2")]
    rows += [row("torch", 2.5e-3), row("torch", 0.02, product="block"), row("torch", 0.03, product="block")]
    rows += [row("torch", 0.04, product="block"), row("fastest", 0.01, product="block")]
    lines = [*page.products(rows)]
    assert "of up to 40" in lines[0]
    assert lines[4] == "| qkv, forward | 500, 400 | 625 | 1x2 | 250 | 690 | 1,500 | 77% |"
    assert "20.00 to 40.00 ms by torch, 10.00 to 10.00 ms with the fastest" in lines[-1]
    assert lines[-1].endswith("medians 30.00 and 10.00 ms.")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("update_weights", "update in products"),
        ("gated_backward", "SwiGLU in products, backward"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "other products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64>", "other products"),
        ("attend_finish", "attention"),
        ("norm_sum_rows_kernel", "norms"),
        ("embedding_gradient_kernel", "rest"),
        ("Memset (Device)", "rest"),
    ],
)
def test_kernels_of_a_step_have_kinds(script: Any, kernel: str, kind: str) -> None:
    assert importlib.import_module("step_kernels").kind_of(kernel) == kind


def test_time_in_which_a_kernel_ran_counts_overlaps_once(script: Any) -> None:
    kernels = [("b", 3.0, 5.0), ("a", 1.0, 4.0), ("inside", 1.5, 2.0), ("c", 7.0, 8.0)]
    assert importlib.import_module("step_kernels").busy_s(kernels) == 5.0


@pytest.mark.parametrize("size", ["small", "2.7B"])
def test_flops_of_the_kinds_are_those_of_the_step(script: Any, size: str) -> None:
    step_kernels = importlib.import_module("step_kernels")
    config = step_kernels.fast(size, 512)
    model, tokens = config.model, 4 * 512
    d, f, layers = model.d_model, model.d_ff, model.num_layers
    found = step_kernels.model_flops(config)
    assert sum(found.values()) == script.step_flops(config)
    in_blocks = (4 * 3 + 4) * tokens * d * d + (2 + 4) * tokens * d * f  # qkv, output; w2 forward, w1 and w3 backward
    assert found["other products"] == layers * in_blocks + 6 * tokens * d * model.vocab_size


def test_counters_of_ncu_become_shares_and_means_weighted_by_time(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_kernels = importlib.import_module("step_kernels")
    sm, l2, dram = (step_kernels.COUNTERS[name] for name in step_kernels.SHARES)
    output = f"""\
==PROF== Connected to process 7
"ID","Kernel Name","{sm}","{dram}","gpu__time_duration.sum","{l2}"
"","","%","%","us","%"
"0","attend_forward","10","40","1,000.0","20"
"1","attend_backward","30","0","3,000.0","60"
"""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first, second = step_kernels.counters("small", 512)
    assert first == {
        "kernel": "attend_forward", "seconds": 1e-3, "sm_share": 0.1, "l2_share": 0.2, "dram_share": 0.4
    }  # fmt: skip
    assert step_kernels.mean([first, second]) == pytest.approx({"sm_share": 0.25, "l2_share": 0.5, "dram_share": 0.1})
    assert step_kernels.mean([]) == {"sm_share": None, "l2_share": None, "dram_share": None}


def test_table_of_kernels_has_rates_for_what_has_flops(script: Any) -> None:
    page = importlib.import_module("_training_step_kernels")
    shares = {"sm_share": 0.361, "l2_share": 0.5, "dram_share": 0.25}
    kinds = [
        {"kind": "attention", "calls": 48.0, "seconds": 2e-3, "flops": 10**12} | shares,
        {"kind": "norms", "calls": 75.0, "seconds": 5e-4, "flops": None} | shares,
        {"kind": "rest", "calls": 1.0, "seconds": 5e-4, "flops": None} | dict.fromkeys(shares),
    ]
    cell = {"size": "small", "context": 512, "step_s": 4e-3, "step_p10_s": 3.5e-3, "step_p90_s": 5e-3, "kinds": kinds}
    lines = [*page.kernels([cell])]
    assert lines[2] == "### Kernels of small, context 512: 4.00 ms (3.50–5.00)"
    assert lines[-3] == "| attention | 48 | 2.00 | 50% | 500 | 36% | 50% | 25% |"
    assert lines[-2] == "| norms | 75 | 0.50 | 12% |  | 36% | 50% | 25% |"
    assert lines[-1] == "| rest | 1 | 0.50 | 12% |  | – | – | – |"


def test_no_switch_of_the_fast_recipe_costs_time_where_it_was_measured(script: Any) -> None:
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


def test_fast_of_the_benchmark_is_the_recipe(script: Any) -> None:
    options = RECIPES["fast"].of("train-step")
    fast = script.VARIANTS["fast"]
    assert set(fast["parts"]) == set(options["parts"])
    assert {name: value for name, value in fast.items() if name != "parts"} == {
        name: value for name, value in options.items() if name != "parts"
    }
