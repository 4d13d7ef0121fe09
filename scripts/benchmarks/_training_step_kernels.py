"""Kernels of the step and their counters, from the committed rows of step_kernels.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from step_kernels import SHARES

Rows = Sequence[dict[str, Any]]

INTRODUCTION = (
    "fast on one H100, by `scripts/benchmarks/step_kernels.py`: the time of each kind of kernel inside the captured "
    "step, by torch.profiler; *of step*: that time as a share of the step's, which can add up to more than 100% where "
    "kernels overlap. *TFLOP/s*: model FLOPs in that time, half of attention's masked. *SM*, *L2*, *DRAM*: by ncu, how "
    "much of what each can sustain a kernel uses alone, on cold caches, mean over the kernels of a kind; for products "
    "SM is the tensor cores, at the clock of that kernel. *Update in products* has the weights of the blocks' linear "
    "layers."
)


def kernels(rows: Rows) -> Iterable[str]:
    """Yield a table for each cell, a row for each kind of kernel."""
    yield INTRODUCTION
    for row in rows:
        low, high = (f"{1e3 * row[f'step_{what}_s']:.2f}" for what in ("p10", "p90"))
        yield ""
        yield f"### Kernels of {row['size']}, context {row['context']}: {1e3 * row['step_s']:.2f} ms ({low}–{high})"
        yield ""
        yield "| kernels | calls | ms | of step | TFLOP/s | SM | L2 | DRAM |"
        yield f"| :--- |{' ---: |' * 7}"
        for kind in row["kinds"]:
            rate = f"{kind['flops'] / kind['seconds'] / 1e12:.0f}" if kind["flops"] else ""
            shares = ["–" if kind[name] is None else f"{kind[name]:.0%}" for name in SHARES]
            yield (
                f"| {kind['kind']} | {kind['calls']:.0f} | {1e3 * kind['seconds']:.2f} "
                f"| {kind['seconds'] / row['step_s']:.0%} | {rate} | {' | '.join(shares)} |"
            )
