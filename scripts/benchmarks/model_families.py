"""Attribution and FLOPs of models of many families on one GPU, eager and compiled: a table and a JSON file.

    python3 scripts/benchmarks/model_families.py --json families.json

Models come from configurations with random weights; a model whose package is missing is skipped with the reason. For
each the script times a training step, records three more with torch.profiler, counts the FLOPs of one, and prints:

- in modules: share of the kernel time of forward and backward that belongs to a module
- sum: time of the outermost module compared with forward and backward
- FLOPs: the model FLOPs of the record's cost, and the ratio of the executed ones to FlopCounterMode's around the same
  step; above 1 where the step runs operators of `flop_counter.EXTRA`, which FlopCounterMode leaves out, and below 1
  where a fused attention leaves hidden tiles out
- time, MFU (of the data sheet's peak), peak memory, and the class with the largest own time
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cs_systems.analysis.attribution import module_tables
from cs_systems.analysis.attribution.profile import profile
from cs_systems.config import Phase
from cs_systems.formulas.peaks import peak_flops
from cs_systems.instrument.annotate import STEP, annotate
from cs_systems.instrument.module_costs import MeasuredCost, measured_cost
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.profilers import kineto
from cs_systems.measure.profilers._torch_profiler import trace_path
from cs_systems.readers import read

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.families.models import Gan, ResNet, UNet

WARMUP, RECORDED = 4, 3
Loss = Callable[[Any], Tensor]
Row = dict[str, Any]
# (hidden size, layers, heads, sequence, batch) of a medium model, and of a tiny one to try the script without a GPU
SIZES = {"medium": (1024, 12, 16, 1024, 16), "tiny": (32, 2, 2, 16, 2)}
VOCABULARY = {"medium": 32_000, "tiny": 64}


class Case:
    """Model with its inputs, for a batch size."""

    def __init__(self, model: nn.Module, inputs: Row, loss_of: Loss | None = None) -> None:
        self.model, self.inputs = model, inputs
        self.loss_of: Loss = loss_of or (lambda output: output.loss)


def common(size: str) -> tuple[dict[str, int], int, int, int]:
    width, layers, heads, length, batch = SIZES[size]
    shared = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip
    return shared, VOCABULARY[size], length, batch


def of_tokens(model: nn.Module, words: int, length: int, batch: int) -> Case:
    tokens = torch.randint(3, words, (batch, length))
    return Case(model, {"input_ids": tokens, "labels": tokens})


def llama(size: str, batch: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    shared, words, length, _ = common(size)
    config = LlamaConfig(vocab_size=words, num_key_value_heads=shared["num_attention_heads"], **shared)
    return of_tokens(LlamaForCausalLM(config), words, length, batch)


def lora(size: str, batch: int) -> Case:
    from peft import LoraConfig, get_peft_model

    case = llama(size, batch)
    return Case(get_peft_model(case.model, LoraConfig(target_modules=["q_proj", "v_proj"], r=8)), case.inputs)


def gpt2(size: str, batch: int) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    shared, words, length, _ = common(size)
    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=shared["hidden_size"], n_layer=shared["num_hidden_layers"],
        n_head=shared["num_attention_heads"], bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return of_tokens(GPT2LMHeadModel(config), words, length, batch)


def bert(size: str, batch: int) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    shared, words, length, _ = common(size)
    return of_tokens(
        BertForMaskedLM(BertConfig(vocab_size=words, max_position_embeddings=length, **shared)), words, length, batch
    )


def t5(size: str, batch: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    shared, words, length, _ = common(size)
    width, heads = shared["hidden_size"], shared["num_attention_heads"]
    config = T5Config(
        vocab_size=words, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=shared["num_hidden_layers"],
        num_heads=heads, decoder_start_token_id=0,
    )  # fmt: skip
    return of_tokens(T5ForConditionalGeneration(config), words, length // 2, batch)


def mixtral(size: str, batch: int) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    shared, words, length, _ = common(size)
    heads = shared["num_attention_heads"]
    config = MixtralConfig(vocab_size=words, num_key_value_heads=heads, num_local_experts=4, **shared)
    return of_tokens(MixtralForCausalLM(config), words, length, batch)


def vit(size: str, batch: int) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    shared, *_ = common(size)
    pixels = 224 if size == "medium" else 32
    model = ViTForImageClassification(ViTConfig(image_size=pixels, patch_size=16, num_labels=10, **shared))
    images = 4 * batch
    return Case(model, {"pixel_values": torch.randn(images, 3, pixels, pixels), "labels": torch.randint(10, (images,))})


def clip(size: str, batch: int) -> Case:
    from transformers import CLIPConfig, CLIPModel

    shared, words, *_ = common(size)
    pixels = 224 if size == "medium" else 32
    text = {"vocab_size": words, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1, **shared}
    config = CLIPConfig(text_config=text, vision_config={"image_size": pixels, "patch_size": 16, **shared})
    tokens, images = torch.randint(3, words, (4 * batch, 77)), torch.randn(4 * batch, 3, pixels, pixels)
    return Case(CLIPModel(config), {"input_ids": tokens, "pixel_values": images, "return_loss": True})


def whisper(size: str, batch: int) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    shared, words, length, _ = common(size)
    both = {
        "layers": shared["num_hidden_layers"] // 2, "attention_heads": shared["num_attention_heads"],
        "ffn_dim": shared["intermediate_size"],
    }  # fmt: skip
    config = WhisperConfig(
        vocab_size=words, d_model=shared["hidden_size"], num_mel_bins=80, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, max_source_positions=length, max_target_positions=length,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()},
    )  # fmt: skip
    audio = torch.randn(batch, 80, 2 * length)
    labels = torch.randint(3, words, (batch, length // 4))
    return Case(WhisperForConditionalGeneration(config), {"input_features": audio, "labels": labels})


def mamba(size: str, batch: int) -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    shared, words, length, _ = common(size)
    layers = max(2, shared["num_hidden_layers"] // 4)
    config = MambaConfig(vocab_size=words, hidden_size=shared["hidden_size"], num_hidden_layers=layers)
    return of_tokens(MambaForCausalLM(config), words, min(length, 128), batch)  # its scan in Python is slow


def resnet(size: str, batch: int) -> Case:
    pixels, count = (224, 4 * batch) if size == "medium" else (8, 2)
    model = ResNet(*((64, (3, 4, 6, 3), 10) if size == "medium" else (4, (2, 1), 10)))
    targets = torch.randint(10, (count,))
    images = torch.randn(count, 3, pixels // 2, pixels // 2)
    return Case(model, {"x": images, "targets": targets}, None)


def unet(size: str, batch: int) -> Case:
    pixels, width, count = (256, 64, 2 * batch) if size == "medium" else (8, 4, 2)
    return Case(UNet(width), {"x": torch.randn(count, 3, pixels, pixels)}, lambda out: out.float().square().mean())


def gan(size: str, batch: int) -> Case:
    pixels, width, count = (64, 64, 16 * batch) if size == "medium" else (8, 4, 2)
    inputs = {"noise": torch.randn(count, width), "images": torch.randn(count, 3, pixels, pixels)}
    return Case(Gan(width, pixels), inputs, sum)


class Tagger(nn.Module):
    """LSTM between an embedding and a classifier."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.classifier = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.lstm(self.embedding(tokens))[0])
        return out


def lstm(size: str, batch: int) -> Case:
    shared, words, length, _ = common(size)
    tokens = torch.randint(words, (batch, length))
    return Case(Tagger(words, shared["hidden_size"]), {"tokens": tokens}, lambda out: out.float().square().mean())


FAMILIES: dict[str, tuple[Callable[[str, int], Case], str | None]] = {
    "llama": (llama, "transformers"), "lora": (lora, "peft"), "gpt2": (gpt2, "transformers"),
    "bert": (bert, "transformers"), "t5": (t5, "transformers"), "mixtral": (mixtral, "transformers"),
    "vit": (vit, "transformers"), "clip": (clip, "transformers"), "whisper": (whisper, "transformers"),
    "mamba": (mamba, "transformers"), "resnet": (resnet, None), "unet": (unet, None), "lstm": (lstm, None),
    "gan": (gan, None),
}  # fmt: skip


class Step:
    """Training step in bf16 with AdamW: its phases as a workload yields them."""

    def __init__(self, case: Case, device: Device) -> None:
        self.model = case.model.to(device.torch, torch.bfloat16).train()
        self.inputs = {name: _placed(value, device) for name, value in case.inputs.items()}
        self.targets = self.inputs.pop("targets", None)
        self.loss_of = case.loss_of if self.targets is None else self._cross_entropy
        self.run: nn.Module = self.model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.is_cuda)

    def _cross_entropy(self, output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.float(), self.targets)

    def phases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        found: Row = {}
        self.optimizer.zero_grad(set_to_none=True)
        yield Phase.FORWARD, lambda: found.update(output=self.run(**self.inputs))
        yield Phase.LOSS, lambda: found.update(loss=self.loss_of(found["output"]))
        yield Phase.BACKWARD, lambda: found["loss"].backward()
        yield Phase.OPTIMIZER, self.optimizer.step

    def __call__(self) -> None:
        with annotate(STEP):
            for name, phase in self.phases():
                with annotate(name):
                    phase()


def _placed(value: Any, device: Device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device.torch, torch.bfloat16 if value.is_floating_point() else value.dtype)


def timed(step: Step, device: Device, steps: int) -> float:
    times = []
    for _ in range(steps):
        device.synchronize()
        began = time.perf_counter()
        step()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def flops(step: Step) -> tuple[MeasuredCost, int]:
    cost = measured_cost(step.model, step.phases())
    with FlopCounterMode(display=False) as counter:
        for _, phase in step.phases():
            phase()
    return cost, counter.get_total_flops()


def recorded(step: Step, device: Device) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell"
        with kineto.region(out, device, step.run):
            for _ in range(RECORDED):
                step()
                device.synchronize()
        seen = profile(read(trace_path(out)))
    if not seen.trace.kernels:
        return {"note": "no kernels in the trace: without a GPU only times and FLOPs are measured"}
    whole, inside, forward_or_backward = 0.0, 0.0, (Phase.FORWARD, Phase.BACKWARD)
    for (_, place), total in seen.groups.items():
        if place.phase in forward_or_backward and place.layer != Phase.LOSS:
            whole += total.time_s
            inside += total.time_s if place.module is not None else 0.0
    root = module_tables.modules(seen)[0]
    classes = module_tables.classes(seen)
    return {
        "in_modules": inside / whole,
        "sum_of_modules": (root["forward_s"] + root["backward_s"]) * len(seen.steps) / whole,
        "fused_share": seen.fused_share,
        "in_phases": seen.phase_coverage,
        "kernels_per_step": sum(k.calls for k in seen.by_step.values()) / len(seen.steps),
        "top": classes[0]["class"] if classes else None,
        "top_share": classes[0]["share"] if classes else None,
        "why": module_tables.why_nothing(seen),
    }


def measured(name: str, how: str, size: str, steps: int, device: Device) -> Row:
    """Return the row of a family; its batch is halved until it fits."""
    make, needs = FAMILIES[name]
    row: Row = {"family": name, "how": how}
    if needs is not None and importlib.util.find_spec(needs) is None:
        return row | {"skipped": f"needs the package {needs}"}
    batch = SIZES[size][-1]
    while batch:
        try:
            with device.torch:  # random weights are made on the GPU, in a tenth of the time
                case = make(size, batch)
            return row | {"batch": batch} | one(case, how, steps, device)
        except torch.OutOfMemoryError:
            batch //= 2
        except Exception as error:
            traceback.print_exc()
            return row | {"batch": batch, "skipped": f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"}
        finally:
            gc.collect()
            torch._dynamo.reset()
            device.release_memory()
    return row | {"skipped": "out of memory with one row"}


def one(case: Case, how: str, steps: int, device: Device) -> Row:
    torch.manual_seed(0)
    step = Step(case, device)
    cost, counted = flops(step)
    if how != "eager":
        step.run = torch.compile(step.model)  # type: ignore[assignment]
    device.reset_peaks()
    for _ in range(WARMUP):
        step()
    step_s, peak = timed(step, device, steps), device.peak_allocated_bytes()
    around: Any = nullcontext()
    if how != "eager":
        from cs_systems.instrument.compiled_ranges import marked_code

        around = marked_code()  # compiles again, with marks
    with around:
        if how != "eager":
            step.run = torch.compile(step.model)  # type: ignore[assignment]
        for _ in range(WARMUP):
            step()
        seen = recorded(step, device)
    model = sum(phase.model_flops or 0 for phase in cost.phases.values())
    executed = sum(phase.hardware_flops or 0 for phase in cost.phases.values())
    of_peak = peak_flops(device.name, "bf16")
    return seen | {
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "modules": len(cost.modules),
        "flops": model,
        "counter_flops": counted,
        "flops_to_counter": executed / counted if counted else None,
        "step_s": step_s,
        "mfu": model / step_s / of_peak.per_s if of_peak else None,
        "peak_bytes": peak,
    }


def markdown(rows: list[Row]) -> str:
    heads = ("family", "how", "batch", "parameters", "in modules", "sum", "FLOPs", "÷ counter", "step", "MFU", "memory")
    lines = [f"| {' | '.join((*heads, 'top class'))} |", f"|{' --- |' * (len(heads) + 1)}"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"| {row['family']} | {row['how']} | skipped: {row['skipped']} |{' |' * (len(heads) - 2)}")
            continue
        cells = (
            row["family"], row["how"], row["batch"], f"{row['parameters'] / 1e6:.0f} M", share(row.get("in_modules")),
            share(row.get("sum_of_modules")), f"{row['flops'] / 1e12:.3g} T",
            "" if row["flops_to_counter"] is None else f"{row['flops_to_counter']:.4f}",
            f"{row['step_s'] * 1e3:.1f} ms",
            share(row["mfu"]), "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB",
            f"{row.get('top') or ''} {share(row.get('top_share'))}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--how", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--size", default="medium", choices=[*SIZES])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, rows = resolve("auto"), []
    for name in given.families:
        for how in given.how:
            rows.append(measured(name, how, given.size, given.steps, device))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.json:  # written after each row, so that results remain if the next row ends the process
                given.json.write_text(json.dumps({"device": device.name, "size": given.size, "rows": rows}, indent=1))
    print(f"{device.name}, torch {torch.__version__}, {given.size} models, bf16 parameters, AdamW\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
