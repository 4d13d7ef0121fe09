"""Compare the predicted peak memory of models of many families with the measured one, as a markdown table.

The prediction runs a training step on fake tensors; the measurement is `torch.cuda.max_memory_allocated` of the same
step, eager, with AdamW. A family that fails is listed with the reason. It takes under three minutes on one H200:

    python3 scripts/benchmarks/foreign_memory.py > profiles/foreign_memory/table.md
    python3 scripts/benchmarks/foreign_memory.py resnet unet lstm --precision tf32
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cs_systems.config import RunConfig
from cs_systems.machine.device import Device, resolve, set_float32_matmul
from cs_systems.runtime.execute import build
from cs_systems.runtime.forecast import STEPS, forecast

MIB = 2**20
LAYERS = 8
HIDDEN = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16}


def _tokens(config: RunConfig, length: int = 512, words: int = 32000) -> torch.Tensor:
    return torch.randint(3, words, (config.batch_size, length))


def llama(config: RunConfig, device: Device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = _tokens(config)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, **HIDDEN)), {"input_ids": ids, "labels": ids}


def lora(config: RunConfig, device: Device) -> Any:
    from peft import LoraConfig, get_peft_model

    model, batch = llama(config, device)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=8)), batch


def gpt2(config: RunConfig, device: Device) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _tokens(config)
    made = GPT2Config(vocab_size=32000, n_positions=512, n_embd=1024, n_layer=LAYERS, n_head=16)
    return GPT2LMHeadModel(made), {"input_ids": ids, "labels": ids}


def bert(config: RunConfig, device: Device) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    ids = _tokens(config)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return BertForMaskedLM(BertConfig(vocab_size=32000, **HIDDEN)), batch


def t5(config: RunConfig, device: Device) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    made = T5Config(
        vocab_size=32000, d_model=1024, d_kv=64, d_ff=4096, num_layers=LAYERS, num_heads=16, decoder_start_token_id=0
    )
    ids = _tokens(config)
    return T5ForConditionalGeneration(made), {"input_ids": ids, "labels": ids}


def mixtral(config: RunConfig, device: Device) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    made = MixtralConfig(
        vocab_size=32000, num_local_experts=4, num_key_value_heads=16, **{**HIDDEN, "num_hidden_layers": 4}
    )
    ids = _tokens(config)
    return MixtralForCausalLM(made), {"input_ids": ids, "labels": ids}


def vit(config: RunConfig, device: Device) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    images = torch.randn(4 * config.batch_size, 3, 224, 224)
    model = ViTForImageClassification(ViTConfig(num_labels=1000, **HIDDEN))
    return model, {"pixel_values": images, "labels": torch.arange(len(images))}


def mamba(config: RunConfig, device: Device) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    ids = _tokens(config, 64)
    return MambaForCausalLM(MambaConfig(vocab_size=32000, hidden_size=768, num_hidden_layers=4)), {
        "input_ids": ids,
        "labels": ids,
    }


def _own(name: str) -> Callable[[RunConfig, Device], Any]:
    def make(config: RunConfig, device: Device) -> Any:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.families import models

        if name == "lstm":
            ids = torch.randint(models.WORDS, (64 * config.batch_size, 128))
            return models.Tagger(512), ids, _loss_of_tokens
        images = torch.randn(8 * config.batch_size, 3, 128, 128)
        if name == "unet":
            return models.UNet(64), images
        return models.ResNet(64, (3, 4, 6, 3), 1000), (images, torch.arange(len(images))), _loss_of_classes

    return make


def _loss_of_classes(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, batch[1])


def _loss_of_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch)


def gru(config: RunConfig, device: Device) -> Any:
    sequences = torch.randn(64 * config.batch_size, 128, 512)
    return nn.GRU(512, 512, 2, bidirectional=True, batch_first=True), sequences, lambda out: out[0].square().mean()


def decoder(config: RunConfig, device: Device) -> Any:
    layers = [
        nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.Conv2d(64, 64, 3, padding=1, groups=4), nn.ReLU())
        for _ in range(4)
    ]
    return nn.Sequential(*layers), torch.randn(8 * config.batch_size, 64, 8, 8)


resnet, unet, lstm = _own("resnet"), _own("unet"), _own("lstm")
FAMILIES = (
    "llama",
    "lora",
    "gpt2",
    "bert",
    "t5",
    "mixtral",
    "vit",
    "mamba",
    "resnet",
    "unet",
    "lstm",
    "gru",
    "decoder",
)


def measured(config: RunConfig, device: Device) -> int:
    """Return the peak of the last training step in bytes. Raises whatever the model raises."""
    set_float32_matmul(config.precision)
    workload = build(config, device)
    for _ in range(STEPS):
        workload.prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _, run in workload.step():
            run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"default: {' '.join(FAMILIES)}")
    parser.add_argument("--precision", nargs="*", default=("fp32", "bf16"), help="default: fp32 bf16")
    parser.add_argument("--budget-s", type=float, default=170, help="start no further family after this time")
    args = parser.parse_args()
    device = resolve("auto")
    started = time.perf_counter()
    print(f"{device.name}, torch {torch.__version__}; batch 4; MiB\n")
    print("| family | precision | predicted | measured | predicted / measured | at the peak | note |")
    print("| --- | --- | --: | --: | --: | --- | --- |")
    for name in args.families:
        for precision in args.precision:
            if time.perf_counter() - started > args.budget_s:
                print(f"| {name} | {precision} | | | | | not reached within {args.budget_s:g} s |", flush=True)
                continue
            print(_line(name, precision, device), flush=True)


def _line(name: str, precision: str, device: Device) -> str:
    config = RunConfig(workload=f"{Path(__file__).resolve()}:{name}", precision=precision, device="cuda")
    row, peak, notes = forecast(config), None, []
    if row["reason"]:
        notes.append(f"not predicted: {row['reason']}")
    if device.is_cuda:
        try:
            device.release_memory()
            peak = measured(config, device)
        except Exception as error:  # the other families go on
            notes.append(f"not measured: {type(error).__name__}: {error}")
        gc.collect()
    else:
        notes.append("not measured: no GPU")
    predicted, at = row["peak_bytes"], ""
    if row["phases"]:
        at = max(row["phases"], key=lambda phase: sum(phase["peak_components"].values()))["phase"]
    ratio = f"{predicted / peak:.3f}" if predicted and peak else ""
    cells = [name, precision, _mib(predicted), _mib(peak), ratio, at, "; ".join(notes)]
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split())[:160] for cell in cells) + " |"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
