"""Models of each family, and with each kind of adapter, are after a live measurement what they were before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cs_systems
from tests.families.conftest import Made
from tests.families.models import llama
from tests.pictured import picture

QUICK: dict[str, Any] = {"warmup": 0, "steps": 2, "device": "cpu"}


def check(model: nn.Module, **parts: Any) -> None:
    for trains, mode in ((False, "train-step"), (True, "forward")):
        model.train(trains)
        before, numbers = picture(model, parts), torch.get_rng_state().tolist()
        record = cs_systems.run(model=model, mode=mode, **parts, **QUICK)
        assert record.status == "ok", record.reason
        assert "not-restored" not in [caveat.code for caveat in record.warnings]
        assert picture(model, parts) == before
        assert torch.get_rng_state().tolist() == numbers


@pytest.fixture
def as_it_is(made: Made) -> Iterator[Made]:
    yield made
    made.model.train()


def test_model_of_each_family_is_unchanged_after_measuring(as_it_is: Made) -> None:
    made = as_it_is
    check(made.model, inputs=torch.zeros(1), forward=lambda *_: made.forward(), loss=made.loss_of)


QUERY = {"target_modules": ["q_proj"]}
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "two of LoRA": lambda peft: peft.LoraConfig(r=2, lora_dropout=0.1, **QUERY),
    "DoRA": lambda peft: peft.LoraConfig(r=2, use_dora=True, **QUERY),
    "IA3": lambda peft: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "AdaLoRA": lambda peft: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, **QUERY),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "VeRA": lambda peft: peft.VeraConfig(r=2, **QUERY),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_model_with_adapters_is_unchanged_after_measuring(kind: str) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the library
        base: Any = llama()[0]
        base.generation_config.max_length = 9
        model = peft.get_peft_model(base, ADAPTERS[kind](peft))
        if kind == "two of LoRA":
            model.add_adapter("second", peft.LoraConfig(r=3, **QUERY))
    tokens = torch.randint(3, 64, (2, 8))
    check(model, inputs={"input_ids": tokens, "labels": tokens})
