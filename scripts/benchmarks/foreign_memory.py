"""Compare the predicted peak memory of models of many families with the measured one, as a markdown table.

The prediction runs a training step on fake tensors; the measurement is `torch.cuda.max_memory_allocated` of the same
step, eager, with AdamW. A family that fails is listed with the reason. It takes under three minutes on one H200:

    python3 scripts/benchmarks/foreign_memory.py > profiles/foreign_memory/table.md
    python3 scripts/benchmarks/foreign_memory.py resnet unet lstm --precision tf32

The families of `_held_out_families.py` are predicted first, on a machine without a GPU, and measured later:

    cd profiles/foreign_memory
    python3 ../../scripts/benchmarks/foreign_memory.py --freeze frozen.json
    python3 ../../scripts/benchmarks/foreign_memory.py --measure frozen.json > measured.jsonl
    python3 ../../scripts/benchmarks/foreign_memory.py --compare frozen.json measured.jsonl > held_out.md
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems.config import RunConfig
from cs_systems.formulas import sdpa
from cs_systems.machine.device import Device, resolve, set_float32_matmul
from cs_systems.measure.runtime.execute import build
from cs_systems.measure.runtime.forecast import STEPS, forecast
from cs_systems.measure.workloads import Cell

MIB = 2**20
HELD_OUT = Path(__file__).with_name("_held_out_families.py")
# Explanation of the kinds of rows in a frozen file, on the page of --compare.
KINDS = (
    "The predictions were made without a GPU, and committed before the measurement.\n"
    "`held out`: no rule was changed for the family.\n"
    "`mended before`: an earlier prediction was wrong or missing, and a rule was corrected.\n"
    "[table.md](table.md) holds the families that were measured before."
)
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


def measured(config: RunConfig, device: Device) -> dict[str, Any]:
    """Return the peaks of the last training step in bytes, and a description of it. Raises the model's errors."""
    set_float32_matmul(config.precision)
    workload = build(Cell(config), device)
    peaks: dict[str, int] = {}
    for _ in range(STEPS):
        workload.prepare()
        peaks = {}
        for phase, run in workload.step():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            peaks[phase] = max(torch.cuda.max_memory_allocated(), peaks.get(phase, 0))
    kernels = _Kernels()
    with contextlib.suppress(Exception):  # only a comment on the peaks, which are known by now
        workload.prepare()
        for _, run in workload.step():
            with kernels:
                run()
    return {
        "peak_bytes": max(peaks.values()),
        "phases": peaks,
        "kernels": sorted(kernels.found),
        "structure": structure(workload.model),  # type: ignore[attr-defined]
    }


class _Kernels(TorchDispatchMode):
    """Mode that collects the names of the scaled_dot_product_attention kernels that run within it, in `found`."""

    NAMES = {f"_scaled_dot_product_{name}_attention": name for name in sdpa.KERNELS} | {"_safe_softmax": sdpa.MATH}

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {self.NAMES[name]} if (name := func.overloadpacket.__name__) in self.NAMES else set()
        return func(*args, **(kwargs or {}))


def structure(model: nn.Module) -> dict[str, Any]:
    """Return the number of parameters and a hash of their shapes, which two versions of a library may change."""
    shapes = sorted(tuple(parameter.shape) for parameter in model.parameters())
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "shapes": digest}


def _config(name: str, precision: str, file: Path = Path(__file__)) -> RunConfig:
    return RunConfig(workload=f"{file.resolve()}:{name}", precision=precision, device="cuda")


def freeze(path: Path, precisions: list[str]) -> None:
    """Write the predictions of the held-out families, with the versions that made them."""
    import _held_out_families as held_out

    git = ["git", "log", "-1", "--format=%s"]  # the subject: the hash changes when a branch moves
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "torch-geometric")}
    rows = []
    for name in (*held_out.NEW, *held_out.MENDED):
        config = _config(name, precisions[0], HELD_OUT)
        shapes = structure(getattr(held_out, name)(config, resolve("cpu"))[0])
        for precision in precisions:
            kernels: set[str] = set()
            with patch.object(sdpa, "chosen", _noting(kernels)):
                row = forecast(_config(name, precision, HELD_OUT))
            rows.append(
                {
                    "family": name,
                    "kind": "held out" if name in held_out.NEW else "mended before",
                    "precision": precision,
                    "peak_bytes": row["peak_bytes"],
                    "phases": {p["phase"]: sum(p["peak_components"].values()) for p in row["phases"]},
                    "reason": row["reason"],
                    "caveats": row["caveats"],
                    "kernels": sorted(kernels),
                    "structure": shapes,
                }
            )
            print(name, precision, _mib(row["peak_bytes"]), row["reason"] or "", sorted(kernels), flush=True)
    made = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "batch_size": RunConfig().batch_size,
        **versions,
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"made": {json.dumps(made)}, "rows": [\n{lines}\n]}}\n')


def _noting(kernels: set[str]) -> Callable[..., str | None]:
    choose = sdpa.chosen

    def noted(*args: Any) -> str | None:
        kernels.add((kernel := choose(*args)) or "none")
        return kernel

    return noted


def measure(frozen: Path, device: Device, budget_s: float) -> None:
    """Print a line of JSON for each frozen prediction: the measured peaks, or the reason why there are none."""
    started = time.perf_counter()
    versions = {name: _version(name) for name in ("torch", "transformers", "torch-geometric")}
    print(json.dumps({"device": device.name, "cudnn": torch.backends.cudnn.version(), **versions}), flush=True)
    for row in json.loads(frozen.read_text())["rows"]:
        found: dict[str, Any] = {"family": row["family"], "precision": row["precision"], "error": None}
        began = time.perf_counter()
        if began - started > budget_s:
            found["error"] = f"not reached within {budget_s:g} s"
        else:
            try:
                device.release_memory()
                found |= measured(_config(row["family"], row["precision"], HELD_OUT), device)
            except Exception as error:  # continue with the other families
                found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            gc.collect()
        print(json.dumps(found | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compared(frozen: Path, measurement: Path) -> str:
    """Return the page of frozen predictions and measurements: their differences, and every row."""
    predicted = json.loads(frozen.read_text())
    machine, *lines = [json.loads(line) for line in measurement.read_text().splitlines() if line.startswith("{")]
    found = {(line["family"], line["precision"]): line for line in lines}
    table = [
        "| family | kind | precision | predicted | measured | error | attention | note |",
        "| --- | --- | --- | --: | --: | --: | --- | --- |",
    ]
    errors: dict[str, list[tuple[float, str]]] = {}
    for row in predicted["rows"]:
        line = found.get((row["family"], row["precision"]), {"error": "not measured"})
        notes = [f"not predicted: {row['reason']}"] * bool(row["reason"])
        notes += [line["error"]] * bool(line["error"])
        peak, error = line.get("peak_bytes"), ""
        if peak and line["structure"] != row["structure"]:
            notes.append("another model than predicted: " + str(line["structure"]["parameters"]) + " parameters")
        elif peak and row["peak_bytes"]:
            share = row["peak_bytes"] / peak - 1
            errors.setdefault(row["kind"], []).append((share, f"{row['family']} {row['precision']}"))
            error = f"{share:+.1%}"
        ran = line.get("kernels", row["kernels"])
        if ran != row["kernels"]:
            notes.append(f"predicted with {', '.join(row['kernels']) or 'no attention'}")
        attention = ", ".join(ran)
        cells = [row["family"], row["kind"], row["precision"], _mib(row["peak_bytes"]), _mib(peak), error, attention]
        table.append("| " + " | ".join([*cells, "; ".join(notes).replace("|", "/")]) + " |")
    families = len({row["family"] for row in predicted["rows"]})
    made = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in predicted["made"].items())
    versions = ", ".join(f"{name} {value}" for name, value in machine.items())
    paragraphs = [
        f"# Memory of {families} families, predicted before it was measured",
        "\n".join(map(_summary, errors, errors.values())),
        KINDS,
        f"Predicted: {made}.\nMeasured: {versions}. MiB.",
        "\n".join(table),
    ]
    return "\n\n".join(paragraphs)


def _summary(kind: str, errors: list[tuple[float, str]]) -> str:
    worst, name = max(errors, key=lambda pair: abs(pair[0]))
    median = statistics.median(abs(share) for share, _ in errors)
    within = sum(abs(share) <= 0.05 for share, _ in errors)
    return f"- {kind}: {within} of {len(errors)} within 5%, median error {median:.1%}, worst {worst:+.1%} ({name})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"default: {' '.join(FAMILIES)}")
    parser.add_argument("--precision", nargs="*", default=("fp32", "bf16"), help="default: fp32 bf16")
    parser.add_argument("--budget-s", type=float, default=170, help="start no further family after this time")
    parser.add_argument("--freeze", type=Path, metavar="FILE", help="write predictions of held-out families")
    parser.add_argument("--measure", type=Path, metavar="FROZEN", help="measure what was predicted, as lines of JSON")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("FROZEN", "MEASURED"), help="print the page of both")
    args = parser.parse_args()
    if args.freeze:
        freeze(args.freeze, args.precision)
    elif args.compare:
        print(compared(*args.compare))
    elif args.measure:
        measure(args.measure, resolve("auto"), args.budget_s)
    else:
        _predict_and_measure(args.families, args.precision, args.budget_s)


def _predict_and_measure(families: list[str], precisions: list[str], budget_s: float) -> None:
    device, started = resolve("auto"), time.perf_counter()
    print(f"{device.name}, torch {torch.__version__}; batch 4; MiB\n")
    print("| family | precision | predicted | measured | predicted / measured | at the peak | note |")
    print("| --- | --- | --: | --: | --: | --- | --- |")
    for name in families:
        for precision in precisions:
            if time.perf_counter() - started > budget_s:
                print(f"| {name} | {precision} | | | | | not reached within {budget_s:g} s |", flush=True)
                continue
            print(_line(name, precision, device), flush=True)


def _line(name: str, precision: str, device: Device) -> str:
    config = _config(name, precision)
    row, peak, notes = forecast(config), None, []
    if row["reason"]:
        notes.append(f"not predicted: {row['reason']}")
    if device.is_cuda:
        try:
            device.release_memory()
            peak = measured(config, device)["peak_bytes"]
        except Exception as error:  # continue with the other families
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
