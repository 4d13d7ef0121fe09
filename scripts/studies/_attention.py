"""Shared parts of the studies of attention alone: the compared backends, and sentences about cells.

`naive` is attention over the whole score matrix, `sdpa_flash` FlashAttention-2 as torch ships it, `flash_attn` the
package, where it is installed, and `flash_triton` this repository's own kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from statistics import fmean, linear_regression
from typing import Any

from _cells import Cell
from _study import bounded, index

from cs_systems.config import AttentionShape, Mode, Precision, RunConfig
from cs_systems.core.units import human
from cs_systems.record import Row

PYTORCH, FLASH2 = "naive", "sdpa_flash"
BACKENDS = (PYTORCH, FLASH2, "flash_attn", "flash_triton")
BASE = RunConfig(workload="attention", mode=Mode.FORWARD_BACKWARD, precision=Precision.FP16, warmup=5, steps=30)
QUICK: dict[str, Any] = {"warmup": 2, "steps": 8}  # a size that two CPU cores measure in seconds
COLUMNS = (
    *("forward.median_ms", "backward.median_ms", "median_ms", "range_s"),
    *("forward.model_tflops_per_s", "backward.model_tflops_per_s", "peak_allocated_mib", "predicted_peak_mib", "note"),
)


def calls(shapes: Sequence[AttentionShape], backends: Sequence[str] = BACKENDS, **fields: Any) -> list[RunConfig]:
    """Return each shape with each backend: forward and backward in one step, each timed."""
    base = replace(BASE, **fields)
    return bounded([replace(base, shape=shape, attention=name) for shape in shapes for name in backends])


def executed_rows(cells: Sequence[Cell], *names: str) -> list[Row]:
    """Return credited and executed FLOPs of forward, with the head size that the kernel computes with."""
    return [
        {
            **{name: cell[name] for name in names},
            "d_head": cell["d_head"],
            "executed d_head": cell["executed_d_head"],
            "forward_s": cell["forward.median_s"],
            "credited_flops": cell["forward.model_flops"],
            "executed_flops": cell["forward.hardware_flops"],
            "credited_flops_per_s": cell["forward.model_flops_per_s"],
            "executed_flops_per_s": cell["forward.hardware_flops_per_s"],
        }
        for cell in cells
        if cell.measured
    ]


def by_backend(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Return the measured cells of each backend, in order."""
    names = dict.fromkeys(cell["attention"] for cell in cells if cell.measured)
    return {name: [c for c in cells if c.measured and c["attention"] == name] for name in names}


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return n of the power law y ~ xⁿ that fits best, by least squares on logarithms."""
    return linear_regression([log(x) for x in xs], [log(y) for y in ys]).slope


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent n of y ~ c + xⁿ, from the slopes between neighbouring points, so that c drops out.

    Where y does not grow from one to the next there is no slope to take; 0 where it grows in fewer than two places.
    """
    points = pairwise(zip(xs, ys, strict=True))
    slopes = {x_b: (y_b - y_a) / (x_b - x_a) for (x_a, y_a), (x_b, y_b) in points if y_b > y_a}
    return 1 + exponent([*slopes], [*slopes.values()]) if len(slopes) > 1 else 0.0


def rate(cell: Cell, kind: str = "model") -> str:
    return human(cell[f"forward.{kind}_flops_per_s"], "flops_per_s")


def speed_up(cells: Sequence[Cell], *names: str) -> list[str]:
    """Return the time of each backend relative to `naive` over the same calls, as a range."""
    by = index(cells, "attention", *names)
    notes = []
    for name in by_backend(cells):
        ratios = [
            by[PYTORCH, *rest]["median_s"] / cell["median_s"]
            for (backend, *rest), cell in by.items()
            if backend == name != PYTORCH and (PYTORCH, *rest) in by
        ]
        if ratios:
            low, high = 1 / max(ratios), 1 / min(ratios)
            notes.append(f"{name} takes {low:.2f} to {high:.2f} of {PYTORCH}'s time over forward and backward")
    return notes


def one_bad_sample(cell: Cell) -> Row:
    """Return the first step's time and the mean if that step had been one of the samples."""
    assert cell.record.measurement
    first, timed = cell.record.measurement.samples[0], cell.record.measurement.durations_s("step")
    return {"first_s": first.wall_s, "mean_with_it_s": fmean([first.wall_s, *timed[1:]])}
