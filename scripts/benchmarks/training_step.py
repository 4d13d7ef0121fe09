"""Training step of our recipes beside Hugging Face's Llama of the same shape, in one run on one GPU.

    python3 scripts/benchmarks/training_step.py --sizes small 2.7B --contexts 512 --json step.json

Question: how far is each recipe from the stock stack and from the floor? Method: each row is a training step (forward,
loss, backward, AdamW) of the same shapes, batch 4, bfloat16 products; warm-up, then timed steps, each measured by CUDA
events and by the host's clock around a synchronised step. The floor is the model FLOPs at the measured rate of a large
bfloat16 product, plus the bytes of the optimizer's step at the measured rate of a large copy. Output: a table, and the
rows as JSON. A row that fails says why, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from cs_systems.config import Mode, Phase, Precision, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.formulas import cost
from cs_systems.machine.device import Device, resolve
from cs_systems.runtime.timing import measure
from cs_systems.workloads.train_step import TrainStep

PEAK_FLOPS = 989e12  # of bfloat16 on an H100 or H200, dense (data sheet)
BASE: dict[str, Any] = {"compile": "default", "compile_scope": "block", "attention": "sdpa_flash"}
# In the order in which they are added up. A part's name stands for the part.
SWITCHES: dict[str, dict[str, Any]] = {
    "attention": {"attention": "flash_cuda"},
    "graph": {"graph": "step"},
    "master": {"precision": Precision.BF16_PURE, "optimizer": "adamw_master"},
    "fused_cross_entropy": {},
    "joined_projections": {},
    "update_in_backward": {},
    "fused_swiglu": {},
    "fused_rmsnorm": {},
    "fused_rotary": {},
    "fused_embedding_gradient": {},
    "fused_weight_update": {},
    "fused_feed_forward": {},
    "bf16 state": {"optimizer": "adamw_bf16_state"},
    "fp8_linear": {},
}
INEXACT = ("bf16 state", "fp8_linear")
BY_CUBLASLT = "fast by cublasLt"  # torch's products by another library of NVIDIA
FAST = tuple(name for name in SWITCHES if name not in INEXACT)
NEEDS = {"update_in_backward": "master", "fused_weight_update": "master", "bf16 state": "master"}
TAKES_THE_PLACE = {"fused_weight_update": "update_in_backward", "fused_feed_forward": "fused_swiglu"}
# Bytes of a token, layer and unit of width in bfloat16: width, moved by Inductor's kernels, moved by the part's.
POINTWISE = {
    "fused_swiglu": ("d_ff", 18, 16),
    "fused_rmsnorm": ("d_model", 36, 28),
    "fused_rotary": ("d_model", 16, 16),
}
INDUCTOR_RATE, KERNEL_RATE = 2.6e12, 4.0e12  # bytes/s: measured in the step of 2.7B at 2048 tokens; expected


def switched(*names: str) -> dict[str, Any]:
    """Return the options of the block-compiled step with some switches on."""
    replaced = {TAKES_THE_PLACE[name] for name in names if name in TAKES_THE_PLACE}
    if "fp8_linear" in names:  # both replace the linear layers
        names, replaced = tuple(name for name in names if name not in TAKES_THE_PLACE), set()
    names = tuple(name for name in names if name not in replaced)
    options = dict(BASE)
    for name in SWITCHES:
        if name in names:
            options |= SWITCHES[name]
    return options | {"parts": tuple(name for name in names if name in plugins.names("training.parts"))}


def variants() -> dict[str, dict[str, Any]]:
    """Return the options of each row by its name."""
    found = {"eager": {"attention": "sdpa_flash"}, "compiled": switched()}
    found |= {f"alone: {name}": switched(name) for name in SWITCHES if name not in NEEDS}
    found |= {f"up to: {name}": switched(*[*SWITCHES][: n + 1]) for n, name in enumerate(SWITCHES)}
    for left_out in FAST:
        found[f"without: {left_out}"] = switched(*(n for n in FAST if left_out not in (n, NEEDS.get(n))))
    found |= {"fast": switched(*FAST), BY_CUBLASLT: switched(*FAST)}
    return found | {"fast in fp8": switched(*FAST, "fp8_linear")}


VARIANTS = variants()
GROUPS = {
    "cumulative": ["compiled", *(name for name in VARIANTS if name.startswith("up to"))],
    "each": [name for name in VARIANTS if name.startswith(("alone", "without"))],
    "fused kernels": ["up to: update_in_backward", *(f"{how}: {n}" for how in ("up to", "without") for n in POINTWISE)],
    "embedding": [
        *("compiled", "alone: fused_embedding_gradient"),
        *("up to: fused_rotary", "up to: fused_embedding_gradient"),
    ],
}


class LlamaStep:
    """Training step of transformers' LlamaForCausalLM: SDPA, bfloat16 autocast, fused AdamW.

    mode: of torch.compile; None: eager.
    """

    def __init__(self, config: RunConfig, device: Device, mode: str | None) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape, length = config.model, config.tokens_per_sequence
        with device.torch:
            self.model: nn.Module = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=shape.vocab_size, hidden_size=shape.d_model, intermediate_size=shape.d_ff,
                    num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
                    num_key_value_heads=shape.num_heads, max_position_embeddings=length, tie_word_embeddings=False,
                    use_cache=False, rms_norm_eps=1e-5, attn_implementation="sdpa",
                )
            )  # fmt: skip
            self.tokens = torch.randint(shape.vocab_size, (config.batch_size, length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.mode, self.call = mode, self.model
        if mode is None:
            return
        if shape.num_layers <= 24 and length <= 512:
            self.call = torch.compile(self.model, mode=mode, dynamic=False)  # type: ignore[assignment]
        else:
            for layer in self.model.model.layers:  # type: ignore[union-attr]
                layer.compile(mode=mode, dynamic=False)  # type: ignore[union-attr]

    def prepare(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        yield Phase.BACKWARD, lambda: self.loss.backward()
        yield Phase.OPTIMIZER, self.optimizer.step

    def _forward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            self.loss = self.call(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss

    def cost(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {}


@contextmanager
def products_by(library: str) -> Iterator[None]:
    """Let torch compute its matrix products by a library, cublas or cublaslt."""
    kept = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(kept)


@contextmanager
def liger(model: nn.Module) -> Iterator[None]:
    """Give a Llama the norms, SwiGLU, rotation and fused loss of Liger, by its own function; undo what is global."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    kept = {name: getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")}
    try:
        apply_liger_kernel_to_llama(model=model)
        yield
    finally:
        for name, original in kept.items():
            setattr(modeling_llama, name, original)


@contextmanager
def torchao_fp8(model: nn.Module) -> Iterator[None]:
    """Give a Llama torchao's linear layers in fp8, one scale per tensor, but for lm_head; undo its patch of Inductor.

    The layers keep their parameters, and the patch is for what is compiled after it.
    """
    from torch._inductor.codegen.triton import TritonOverrides
    from torchao.float8 import _inductor_patch, convert_to_float8_training

    kept = {name: vars(TritonOverrides)[name] for name in ("minimum", "maximum")}
    try:
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
        yield
    finally:
        for name, original in kept.items():
            setattr(TritonOverrides, name, original)
        _inductor_patch._PATCHED = False


# name → the mode of torch.compile, and what another library changes; both take effect at the first step
PEERS: dict[str, tuple[str | None, Callable[[nn.Module], AbstractContextManager[None]]]] = {
    "llama compiled": ("default", nullcontext),
    "llama cudagraphs": ("reduce-overhead", nullcontext),
    "llama liger": (None, liger),
    "llama liger compiled": ("default", liger),
    "llama torchao fp8": ("default", torchao_fp8),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large", "2.7B"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--variants", nargs="+", default=["fast"], choices=[*VARIANTS, *GROUPS])
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=[*PEERS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=500.0, help="rows that would start later are left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="measure nothing; write table.md from the JSON files in DIR"
    )
    args = parser.parse_args()
    if args.report:
        from _training_step_page import write

        write(args.report)
        return 0
    device, began = resolve("cuda"), time.monotonic()
    rates = measured_rates(device)
    print(
        f"{device.name}, torch {torch.__version__}: product {rates[0] / 1e12:.0f} TFLOP/s, "
        f"copy {rates[1] / 1e12:.2f} TB/s"
    )
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        for size in args.sizes:
            base = RunConfig(model=replace(preset(size), context_length=context), precision=Precision.BF16)
            for name in (*args.peers, *chain.from_iterable(GROUPS.get(name, [name]) for name in args.variants)):
                if name == "llama cudagraphs" and size not in ("small", "medium"):
                    continue  # does not help where a step is not launch-bound
                if time.monotonic() - began > args.budget_s:
                    print(f"{size} {context} {name}: left out, the time is spent")
                    continue
                rows.append(row_of(name, base, device, args.steps, rates) | {"size": size, "context": context})
                print(line(rows[-1]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured_rates(device: Device) -> tuple[float, float]:
    """Return FLOP/s of a large bfloat16 product on random numbers, and bytes/s, read and written, of a large copy."""
    a = torch.randn(8192, 8192, device=device.torch, dtype=torch.bfloat16)
    x = torch.empty(1 << 32, device=device.torch, dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * 8192**3 / timed(lambda: a @ a, device), 2 * x.nbytes / timed(lambda: y.copy_(x), device)


def step_flops(config: RunConfig) -> int:
    shape = config.batch_size, config.tokens_per_sequence
    phases = cost.step_cost(config.model, *shape, Mode.TRAIN_STEP, cost.FULL_MATRIX, Precision.BF16)
    flops = cost.total(phases.values()).model_flops
    assert flops is not None
    return flops


def predicted(name: str, config: RunConfig, rates: tuple[float, float]) -> float | None:
    """Return the time that the last switch of a row saves by the bytes it no longer moves; None: no prediction.

    master: autocast reads and writes 6 bytes for each cast weight and 6 for its gradient, AdamW 28 instead of 26. Loss:
    28 bytes for each logit (casts, log-softmax and its backward) instead of 8. Update in backward: all of the update,
    which is a limit. Fused kernels: POINTWISE, at the rate of Inductor's kernels and at the one expected of ours.
    Embedding gradient: torch's kernels read and write the table again for each token, 4 bytes an element.
    """
    switch = name.partition(": ")[2]
    if switch in POINTWISE:
        width, before, after = POINTWISE[switch]
        rows = config.batch_size * config.tokens_per_sequence * config.model.num_layers * getattr(config.model, width)
        return float(rows * (before / INDUCTOR_RATE - after / KERNEL_RATE))
    parameters = cost.parameter_count(config.model)
    logits = config.batch_size * config.tokens_per_sequence * config.model.vocab_size
    moved = {
        "master": 14 * parameters,
        "fused_cross_entropy": 20 * logits,
        "update_in_backward": 26 * parameters,
        "fused_embedding_gradient": 4 * config.batch_size * config.tokens_per_sequence * config.model.d_model,
        "bf16 state": 8 * parameters,
    }.get(switch)
    return None if moved is None else moved / rates[1]


def timed(run: Callable[[], Any], device: Device) -> float:
    times = []
    for _ in range(12):
        start = device.mark()
        run()
        end = device.mark()
        device.synchronize()
        times.append(device.between_s(start, end))
    return median(times[2:])


def row_of(name: str, base: RunConfig, device: Device, steps: int, rates: tuple[float, float]) -> dict[str, Any]:
    device.release_memory()
    device.reset_peaks()
    torch._dynamo.reset()
    started = time.monotonic()
    flops = step_flops(base)
    floor_s = flops / rates[0] + 28 * cost.parameter_count(base.model) / rates[1]
    row: dict[str, Any] = {"variant": name, "floor_s": floor_s, "predicted_s": predicted(name, base, rates)}
    library = ExitStack()
    try:
        library.enter_context(products_by("cublaslt" if name == BY_CUBLASLT else "cublas"))
        if name in PEERS:
            mode, changed = PEERS[name]
            workload: Any = LlamaStep(base, device, mode)
            library.enter_context(changed(workload.model))
        else:
            config = replace(base, warmup=6, steps=steps, **VARIANTS[name])
            row["config"] = config.to_dict()
            workload = TrainStep(config, device)
        samples = []
        for sample in measure(workload, device, warmup=6, steps=steps):
            samples.append(sample)
            if len(samples) == 1:
                row["first_step_s"] = time.monotonic() - started
        timed_ = [s for s in samples if not s.warmup]
        row |= spread("wall", [s.wall_s for s in timed_]) | spread("device", [sum(s.phases_s.values()) for s in timed_])
        row["submit_s"] = median(sum(s.submit_s.values()) for s in timed_)
        row |= {"mfu": flops / row["wall_s"] / PEAK_FLOPS, "peak_bytes": device.peak_allocated_bytes()}
        row["loss"] = float(workload.loss.detach())
        row["phases_s"] = {n: median(s.phases_s[n] for s in timed_) for n in timed_[0].phases_s}
        row["took_s"] = time.monotonic() - started
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        library.close()
    workload = None
    gc.collect()
    return row


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    tenths = quantiles(seconds, n=10)
    return {f"{name}_s": median(seconds), f"{name}_p10_s": tenths[0], f"{name}_p90_s": tenths[-1]}


def line(row: dict[str, Any]) -> str:
    head = f"{row['size']:>6} {row['context']:>5} {row['variant']:<20}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    phases = " ".join(f"{name} {1e3 * value:.2f}" for name, value in row["phases_s"].items())
    return (
        f"{head} {1e3 * row['wall_s']:8.2f} ms ({1e3 * row['wall_p10_s']:.2f}–{1e3 * row['wall_p90_s']:.2f}) device "
        f"{1e3 * row['device_s']:8.2f} floor {1e3 * row['floor_s']:7.2f} MFU {100 * row['mfu']:.1f}% "
        f"{row['peak_bytes'] / 2**30:.1f} GiB loss {row['loss']:.3f} [{phases}] host {1e3 * row['submit_s']:.1f} "
        f"first {row['first_step_s']:.0f} s all {row['took_s']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
