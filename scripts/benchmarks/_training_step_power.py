"""Clock and power of training steps, and the rates of their products at the power limit, from committed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from _training_step_ablation import LOW, first_of
from training_step import PEAK_FLOPS

Rows = Sequence[dict[str, Any]]

FLOPS_PER_CYCLE = 132 * 4096  # multiprocessors of an H100 or H200, dense bfloat16 FLOPs of each


def powers(ablation: Rows, names: Mapping[str, str]) -> Iterable[str]:
    """Yield the table of clock and power of the rows that ran on for three seconds; names: variant → title."""
    yield (
        "The rows above on the same card, steps one after another for three seconds; NVML was read in the second half, "
        "4 to 21 times. The board's limit is 700 W, its highest clock 1,980 MHz. *Capped*: the share of readings in "
        "which NVML named the power limit as what lowers the clock. *Peak*: of the tensor cores at that clock; *of "
        "it*: model FLOPs in the time above."
    )
    yield ""
    yield "| size, context | step | W | MHz | capped | peak, TFLOP/s | of it |"
    yield "| :--- | :--- | ---: | ---: | ---: | ---: | ---: |"
    for row in ablation:
        cell = row["size"], row["context"]
        if "power_w" not in row or row is not first_of(ablation, cell, row["variant"]):
            continue
        clock, peak = row["sm_clock_hz"], FLOPS_PER_CYCLE * row["sm_clock_hz"]
        capped = row["throttle_reasons"].get("power cap", 0) / row["readings"]
        of_peak = f"{peak / 1e12:,.0f} | {row['mfu'] * PEAK_FLOPS / peak:.0%}" if row["variant"] != LOW else "|"
        yield (
            f"| {cell[0]}, {cell[1]} | {names.get(row['variant'], 'blocks compiled')} | {row['power_w']:.0f} "
            f"| {clock / 1e6:,.0f} | {capped:.0%} | {of_peak} |"
        )


def products(rows: Rows) -> Iterable[str]:
    """Yield what the products of a block reach back to back, by torch and by the algorithms of cublasLt."""
    first, (by_torch, by_fastest) = rows[0], (block(rows, by) for by in ("torch", "fastest"))
    tried = max(row["algorithms"] for row in rows if "algorithms" in row)
    yield (
        f"The twelve products of a block of {first['size']} at {first['context']}, random numbers in bfloat16, each "
        f"back to back for 0.7 seconds on one {first['device']}, by `scripts/benchmarks/product_power.py`. *torch*: "
        "the algorithm that it chooses, in two runs. *Fastest*, *slowest*: of at most nine algorithms and clusters of "
        f"cublasLt, those of up to {tried} that single calls found within 15% of their fastest. *Of peak*: of the "
        "tensor cores at the clock of the fastest."
    )
    yield ""
    yield "| product | torch, TFLOP/s | fastest | cluster | slowest | W | MHz | of peak |"
    yield "| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in dict.fromkeys(row["product"] for row in rows if row["product"] != "block"):
        of_it = [row for row in rows if row["product"] == name]
        others = sorted((row for row in of_it if row["by"] != "torch"), key=lambda row: row["seconds"])
        fastest, chosen = others[0], [f"{row['flops_per_s'] / 1e12:.0f}" for row in of_it if row["by"] == "torch"]
        clock, slowest = fastest["sm_clock_hz"], others[-1]["flops_per_s"]
        yield (
            f"| {name} | {', '.join(chosen)} | {fastest['flops_per_s'] / 1e12:.0f} | {fastest['cluster']} "
            f"| {slowest / 1e12:.0f} | {fastest['power_w']:.0f} | {clock / 1e6:,.0f} "
            f"| {fastest['flops_per_s'] / FLOPS_PER_CYCLE / clock:.0%} |"
        )
    yield ""
    yield (
        f"All twelve in turn, two seconds a run, three runs of each: {milliseconds(by_torch)} ms by torch, "
        f"{milliseconds(by_fastest)} ms with the fastest of each, torch's own among them; medians "
        f"{1e3 * median(by_torch):.2f} and {1e3 * median(by_fastest):.2f} ms."
    )


def block(rows: Rows, by: str) -> list[float]:
    """Return seconds of the products of a block in turn, of each run."""
    return [row["seconds"] for row in rows if row["product"] == "block" and row["by"] == by]


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f}"
