"""Kernels built on product.cuh alone, beside cuBLAS products and the separate kernels that they take the place of.

    python3 scripts/benchmarks/product_kernels.py --json products.json

Question: what does an update, or SwiGLU, inside a product cost beside the product and a kernel of its own? Method: the
weights and the tokens of one block (several, where they share a launch), bfloat16, random numbers; both sides in one
process, each called again and again for about 20 ms a sample, so that the board is at its power limit as in a training
step; medians of 10 samples by CUDA events. Output: a line a case, and the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ModelConfig, preset
from cs_systems.machine.device import Device, resolve
from cs_systems.model.training.master_adamw import MasterAdamW
from cs_systems.model.training.parts import fused_feed_forward, fused_swiglu, fused_weight_update

SAMPLE_S = 0.02
SAMPLES = 12  # the first two are not counted
ASSUMED_FLOPS = 700e12  # per second, to choose the calls of a sample


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large", "2.7B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = resolve("cuda"), list[dict[str, Any]]()
    print(f"{device.name}, torch {torch.__version__}: medians in µs (p10–p90)")
    for size in args.sizes:
        for tokens in args.tokens:
            for case in (CASES[name] for name in args.cases):
                rows.append(measured(case, preset(size), tokens, device) | {"size": size, "tokens": tokens})
                print(line(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    return 0


Case = tuple[int, dict[str, Callable[[], Any]]]
"""FLOPs of the products, and what is measured by its name."""


def update(model: ModelConfig, tokens: int) -> Case:
    """Return the gradients of the weights of a block, and AdamW, of as many blocks as share a launch."""
    d, f = model.d_model, model.d_ff
    block = [(3 * d, d), (d, d), (2 * f, d), (d, f)]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = block * fused_weight_update.blocks_together(block, processors)
    weights = [nn.Parameter(random(*shape)) for shape in shapes]
    optimizer = MasterAdamW(weights)
    group = optimizer.param_groups[0]
    optimizer.advance(group)
    d_outs, xs = [random(tokens, rows) for rows, _ in shapes], [random(tokens, columns) for _, columns in shapes]
    gradients = [torch.empty_like(w) for w in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient

    def products() -> None:
        for d_out, x, gradient in zip(d_outs, xs, gradients, strict=True):
            torch.mm(d_out.T, x, out=gradient)

    def separate() -> None:
        products()
        optimizer.update(weights, group)

    settings = torch.tensor([1e-3, 0.1, 1e-3, 1e-8, 0.01], device="cuda")
    tensors = [t for d_out, x, w in zip(d_outs, xs, weights, strict=True) for t in (d_out, x, *optimizer.tensors_of(w))]
    fused = partial(fused_weight_update.update_pass(len(weights)).run, [*tensors, settings, group["progress"]], ())
    flops = 2 * tokens * sum(rows * columns for rows, columns in shapes)
    return flops, {"products": products, "separate": separate, "fused": fused}


def forward(model: ModelConfig, tokens: int) -> Case:
    """Return the product of gate and value, and the activation."""
    d, f = model.d_model, model.d_ff
    x, w13, both, h = random(tokens, d), random(2 * f, d), random(tokens, 2 * f), random(tokens, f)

    def separate() -> None:
        torch.mm(x, w13.T, out=both)
        fused_swiglu._FORWARD.run(both.chunk(2, dim=-1), (h,))

    fused = partial(fused_feed_forward._FORWARD.run, (x, w13), (both, h))
    return 4 * tokens * d * f, {"products": lambda: torch.mm(x, w13.T, out=both), "separate": separate, "fused": fused}


def backward(model: ModelConfig, tokens: int) -> Case:
    """Return the product that makes the activation's gradient, and the gradients of gate and value."""
    d, f = model.d_model, model.d_ff
    d_out, w2, both = random(tokens, d), random(d, f), random(tokens, 2 * f)
    d_h, d_both = random(tokens, f), torch.empty_like(both)

    def separate() -> None:
        torch.mm(d_out, w2, out=d_h)
        fused_swiglu._BACKWARD.run((*both.chunk(2, dim=-1), d_h), d_both.chunk(2, dim=-1))

    fused = partial(fused_feed_forward._BACKWARD.run, (d_out, w2, both), (d_both,))
    return 2 * tokens * d * f, {"products": lambda: torch.mm(d_out, w2, out=d_h), "separate": separate, "fused": fused}


CASES = {"update": update, "forward": forward, "backward": backward}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def measured(
    make: Callable[[ModelConfig, int], Case], model: ModelConfig, tokens: int, device: Device
) -> dict[str, Any]:
    flops, runs = make(model, tokens)
    calls = max(1, round(SAMPLE_S * ASSUMED_FLOPS / flops))
    row: dict[str, Any] = {"case": make.__name__, "flops": flops, "calls": calls}
    for name, run in runs.items():
        seconds = samples(run, calls, device)
        tenths = quantiles(seconds, n=10)
        row |= {f"{name}_s": median(seconds), f"{name}_p10_s": tenths[0], f"{name}_p90_s": tenths[-1]}
    return row


def samples(run: Callable[[], Any], calls: int, device: Device) -> list[float]:
    """Return seconds a call of some samples."""
    found = []
    for _ in range(SAMPLES):
        start = device.mark()
        for _ in range(calls):
            run()
        end = device.mark()
        device.synchronize()
        found.append(device.between_s(start, end) / calls)
    return found[2:]


def line(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{name} {1e6 * row[f'{name}_s']:.1f} ({1e6 * row[f'{name}_p10_s']:.1f}–{1e6 * row[f'{name}_p90_s']:.1f})"
        for name in ("products", "separate", "fused")
    )
    faster = row["separate_s"] / row["fused_s"]
    return f"{row['size']:>6} {row['tokens']:>5} {row['case']:<8} {times}: fused is {faster:.2f} times as fast"


if __name__ == "__main__":
    sys.exit(main())
