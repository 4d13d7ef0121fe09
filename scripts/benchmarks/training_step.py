"""Training step of our recipes compared with Hugging Face's Llama of the same shape, in one run on one GPU.

    python3 scripts/benchmarks/training_step.py --sizes small 2.7B --contexts 512 --json step.json

Question: how far is each recipe from the stock stack and from the floor? Method: each row is a training step (forward,
loss, backward, AdamW) of the same shapes, batch 4, bfloat16 products; warm-up, then timed steps, each measured by CUDA
events and by the host's clock around a synchronised step. The floor is the model FLOPs at the measured rate of a large
bfloat16 product, plus the bytes of the optimizer's step at the measured rate of a large copy. The ablation has each
switch of fast alone, added up and left out, with a prediction made before it runs. For some rows the step then runs for
three seconds more, while NVML reads clock, power and what lowers the clock. Output: a table, and the rows as JSON. A
row that fails says why, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from cs_systems.config import Mode, ModelConfig, Phase, Precision, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.formulas import cost
from cs_systems.machine import environment
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.train_step import TrainStep

PEAK_FLOPS = 989e12  # peak FLOP/s in bfloat16 on an H100 or H200, dense (data sheet)
BASE: dict[str, Any] = {"compile": "default", "compile_scope": "block", "attention": "sdpa_flash"}
# In the order in which they are added up. A part's switch has the part's name.
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
BY_CUBLASLT = "fast by cublasLt"  # PyTorch's matrix products by NVIDIA's other library, cuBLASLt
FAST = tuple(name for name in SWITCHES if name not in INEXACT)
NEEDS = {"update_in_backward": "master", "fused_weight_update": "master", "bf16 state": "master"}
TAKES_THE_PLACE = {"fused_weight_update": "update_in_backward", "fused_feed_forward": "fused_swiglu"}
# Bytes per token, layer and unit of width in bfloat16: (width, bytes moved by Inductor's kernels, by the part's).
POINTWISE = {
    "fused_swiglu": ("d_ff", 18, 16),
    "fused_rmsnorm": ("d_model", 36, 28),
    "fused_rotary": ("d_model", 16, 16),
}
# bytes/s: measured in the step of 2.7B at 2048 tokens; expected of our kernels
INDUCTOR_RATE, KERNEL_RATE = 2.6e12, 4.0e12
SUSTAINED_S = 3.0


def switched(*names: str) -> dict[str, Any]:
    """Return the options of the block-compiled step with these switches on."""
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
    found = {"eager": {"attention": "sdpa_flash"}, "compiled": switched(), "fast": switched(*FAST)}
    found |= {f"alone: {name}": switched(name) for name in SWITCHES if name not in NEEDS}
    found |= {f"up to: {name}": switched(*[*SWITCHES][: n + 1]) for n, name in enumerate(SWITCHES)}
    for left_out in FAST:
        found[f"without: {left_out}"] = switched(*(n for n in FAST if left_out not in (n, NEEDS.get(n))))
    return found | {"fast in fp8": switched(*FAST, "fp8_linear"), BY_CUBLASLT: switched(*FAST)}


VARIANTS = variants()


def measured_as(name: str) -> str:
    """Return the first variant with the same options: its row is measured for all of them."""
    return next(first for first, options in VARIANTS.items() if options == VARIANTS[name])


ABLATION = [
    *("eager", "compiled"),
    # "up to: fp8_linear" also leaves out the fused products, so it adds nothing to bf16 state.
    *dict.fromkeys(
        measured_as(n) for n in VARIANTS if n.startswith(("alone", "up to", "without")) and n != "up to: fp8_linear"
    ),
    "fast in fp8",
]
GROUPS = {"ablation": ABLATION}
QUEUED = ("compiled", "alone: attention")  # rows that are also measured with a CUDA graph
SUSTAINED = ("llama compiled", "llama cudagraphs", "compiled", "fast", "up to: bf16 state", "fast in fp8")


class LlamaStep:
    """Training step of transformers' LlamaForCausalLM: SDPA, bfloat16 autocast, fused AdamW.

    mode: torch.compile's mode; None: eager.
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
    """Let torch compute its matrix products with one library, "cublas" or "cublaslt"."""
    kept = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(kept)


@contextmanager
def liger(model: nn.Module) -> Iterator[None]:
    """Give a Llama the norms, SwiGLU, rotation and fused loss of Liger, by Liger's own function.

    Undo its global changes at the end.
    """
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
    """Give a Llama torchao's linear layers in fp8, one scale per tensor, except lm_head.

    Undo its patch of Inductor at the end.

    The layers keep their parameters, and the patch affects what is compiled after it.
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


# name → (torch.compile's mode, changes by another library); both take effect at the first step
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
    args = parser.parse_args()
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
            chosen = chain.from_iterable(GROUPS.get(name, [name]) for name in args.variants)
            rows_of_cell = dict.fromkeys((*args.peers, *chosen))
            of_attention = any(name.endswith(": attention") for name in rows_of_cell)
            attention_s = attention_gain_s(base, device) if of_attention else None
            for name in rows_of_cell:
                if name == "llama cudagraphs" and size not in ("small", "medium"):
                    continue  # does not help if the step is not launch-bound
                if time.monotonic() - began > args.budget_s:
                    print(f"{size} {context} {name}: left out, the time is spent")
                    continue
                guess = attention_s if name.endswith(": attention") else predicted(name, base, rates)
                row = row_of(name, base, device, args.steps, rates)
                rows.append(row | {"predicted_s": guess, "size": size, "context": context})
                print(line(rows[-1]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured_rates(device: Device) -> tuple[float, float]:
    """Return (FLOP/s of a large bfloat16 product of random numbers, bytes/s read and written by a large copy)."""
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


def attention_gain_s(config: RunConfig, device: Device) -> float | None:
    """Return the seconds that flash_cuda saves in all layers by its forward and backward; None if it cannot run."""
    shape = config.model
    like = {"device": device.torch, "dtype": torch.bfloat16, "requires_grad": True}
    sizes = (config.batch_size, shape.num_heads, config.tokens_per_sequence, shape.d_model // shape.num_heads)
    q, k, v = (torch.randn(sizes, **like) for _ in range(3))
    gradient, taken = torch.randn_like(q), {}
    for name in ("sdpa_flash", "flash_cuda"):
        backend = plugins.get("attention", name)

        def call(backend: Any = backend) -> None:
            torch.autograd.grad(backend(q, k, v, causal=True), (q, k, v), gradient)

        try:
            taken[name] = timed(call, device)
        except Exception as error:
            print(f"attention {name}: {type(error).__name__}: {error}")
            return None
    return shape.num_layers * (taken["sdpa_flash"] - taken["flash_cuda"])


def predicted(name: str, config: RunConfig, rates: tuple[float, float]) -> float | None:
    """Return the time that the last switch of a row saves by moving fewer bytes; None if there is no prediction.

    master: autocast reads and writes 6 bytes for each cast weight and 6 for its gradient, AdamW 28 instead of 26. Loss:
    28 bytes for each logit (casts, log-softmax and its backward) instead of 8. Update in backward, and inside the
    products of the blocks: all of the update, which is a limit. Joined projections: the sums of the gradients of their
    input, 12 bytes for each of its elements. Fused kernels: POINTWISE, at the rate of Inductor's kernels and at the one
    expected of ours; the fused feed-forward hides all bytes of the activation. Embedding gradient: torch's kernels read
    and write the table again for each token, 4 bytes an element. fp8: half of the time of the products in the blocks,
    less the bytes of quantizing.
    """
    how, _, switch = (f"up to: {FAST[-1]}" if name == "fast" else name).partition(": ")
    shape, tokens = config.model, config.batch_size * config.tokens_per_sequence
    parameters, rows = cost.parameter_count(shape), tokens * shape.num_layers
    if switch in POINTWISE:
        width, before, after = POINTWISE[switch]
        return float(rows * getattr(shape, width) * (before / INDUCTOR_RATE - after / KERNEL_RATE))
    if switch == "fused_feed_forward":
        hidden = 18 / INDUCTOR_RATE if how == "alone" else 16 / KERNEL_RATE
        return float(rows * shape.d_ff * hidden)
    if switch == "joined_projections":
        return float(rows * shape.d_model * 12 / INDUCTOR_RATE)
    if switch == "fp8_linear" or name == "fast in fp8":
        return fp8_gain_s(shape, tokens, rates[0])
    moved = {
        "master": 14 * parameters,
        "fused_cross_entropy": 20 * tokens * shape.vocab_size,
        "update_in_backward": 26 * parameters,
        "fused_weight_update": 28 * shape.num_layers * cost.block_parameter_count(shape),
        "fused_embedding_gradient": 4 * tokens * shape.d_model,
        "bf16 state": 8 * parameters,
    }.get(switch)
    return None if moved is None else moved / rates[1]


def fp8_gain_s(shape: ModelConfig, tokens: int, rate: float) -> float:
    """Return half of the time of the products in the blocks minus the time of quantizing at KERNEL_RATE.

    For each layer of n inputs and m outputs, x (tokens, n), its gradient (tokens, m) and the weight (m, n) are read in
    bfloat16 and written in fp8 twice, by rows and by columns: 4 bytes an element.
    """
    width, hidden = shape.d_model, shape.d_ff
    layers = [(width, width)] * 4 + [(width, hidden)] * 2 + [(hidden, width)]
    flops = sum(6 * tokens * n * m for n, m in layers)
    moved = sum(4 * (tokens * n + tokens * m + n * m) for n, m in layers)
    return shape.num_layers * (flops / rate / 2 - moved / KERNEL_RATE)


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
    row: dict[str, Any] = {"variant": name, "floor_s": floor_s}
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
            workload = TrainStep(Cell(config), device)
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
        if name in SUSTAINED:
            row |= sustained(workload, device, row["wall_s"])
        if name in QUEUED:
            workload.hides_launches = True
            row["queued_s"] = median(s.wall_s for s in measure(workload, device, warmup=2, steps=8) if not s.warmup)
        row["took_s"] = time.monotonic() - started
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        library.close()
    workload = None
    gc.collect()
    return row


def sustained(workload: Any, device: Device, step_s: float) -> dict[str, Any]:
    """Run steps back to back; return medians of SM clock and power, and the frequency of each throttle reason.

    NVML is read while steps wait in the GPU's queue. Readings of the first half are left out: the power that NVML
    reports is a mean over up to a second.
    """
    clocks: list[float] = []
    powers: list[float] = []
    reasons: Counter[str] = Counter()
    began, queued = time.monotonic(), max(1, round(0.1 / step_s))
    while (passed := time.monotonic() - began) < SUSTAINED_S:
        for _ in range(queued):
            workload.prepare()
            for _, run in workload.step():
                run()
        clock, power = environment.sm_clock_hz(device), environment.power_w(device)
        lowered_by = environment.throttle_reasons(device)
        device.synchronize()
        if passed > SUSTAINED_S / 2 and clock and power:
            clocks.append(clock)
            powers.append(power)
            reasons.update(lowered_by or ())
    if not clocks:
        return {}
    counted = {"readings": len(clocks), "throttle_reasons": dict(reasons)}
    return counted | {"sm_clock_hz": median(clocks), "power_w": median(powers)}


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    tenths = quantiles(seconds, n=10)
    return {f"{name}_s": median(seconds), f"{name}_p10_s": tenths[0], f"{name}_p90_s": tenths[-1]}


def line(row: dict[str, Any]) -> str:
    head = f"{row['size']:>6} {row['context']:>5} {row['variant']:<20}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    phases = " ".join(f"{name} {1e3 * value:.2f}" for name, value in row["phases_s"].items())
    power = f" {row['power_w']:.0f} W at {row['sm_clock_hz'] / 1e6:.0f} MHz" if "power_w" in row else ""
    return (
        f"{head} {1e3 * row['wall_s']:8.2f} ms ({1e3 * row['wall_p10_s']:.2f}–{1e3 * row['wall_p90_s']:.2f}) device "
        f"{1e3 * row['device_s']:8.2f} floor {1e3 * row['floor_s']:7.2f} MFU {100 * row['mfu']:.1f}% "
        f"{row['peak_bytes'] / 2**30:.1f} GiB loss {row['loss']:.3f} [{phases}] host {1e3 * row['submit_s']:.1f} "
        f"first {row['first_step_s']:.0f} s all {row['took_s']:.0f} s{power}"
    )


if __name__ == "__main__":
    sys.exit(main())
