"""Peers of the benchmark of the training step: what another library changes, and that it is undone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


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
