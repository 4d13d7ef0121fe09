"""Comparison of the loss curves of the recipes over the same data.

    python3 scripts/benchmarks/recipe_curves.py --size small --steps 200 --out profiles/training_step

Question: is the loss of `fast` that of `eager`, within the spread of two seeds? Method: the workload training_curve
trains each recipe on the same batches, with the seeds 0 and 1. The distance of two curves is the mean of their absolute
difference over the second half, each smoothed over 10 steps. Output: curves.json with every loss, curves.svg, and the
distances. On a CPU the recipes run without a CUDA graph and with naive attention, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.config import RunConfig, preset
from cs_systems.core.recipes import RECIPES
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.workloads.training_curve import TrainingCurve
from cs_systems.report.figures import plot
from cs_systems.report.figures.drawing import COLORS, one_panel

SEEDS = (0, 1)
SMOOTHED = 10  # steps
WITHOUT_GPU: dict[str, Any] = {"graph": "none", "attention": "naive"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipes", nargs="+", default=["eager", "fast"], choices=[*RECIPES])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = resolve("auto")
    model = replace(preset(args.size), context_length=args.context)
    rows: list[dict[str, Any]] = []
    for recipe in args.recipes:
        options = RECIPES[recipe].of("train-step") | ({} if device.is_cuda else WITHOUT_GPU)
        for seed in SEEDS:
            config = RunConfig(
                workload="training_curve", model=model, seed=seed, steps=args.steps, device=device.torch.type, **options
            )
            rows.append({"recipe": recipe, "seed": seed, "config": config.to_dict(), "losses": losses(config, device)})
            print(f"{recipe}, seed {seed}: {rows[-1]['losses'][0]:.4f} to {rows[-1]['losses'][-1]:.4f}", flush=True)
    of_recipes, of_seeds = distances(rows)
    print(f"{device.name}: largest distance of two recipes with one seed {of_recipes:.5f}, of two seeds {of_seeds:.5f}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"device": device.name, "between_recipes": of_recipes, "between_seeds": of_seeds, "rows": rows}
    (args.out / "curves.json").write_text(json.dumps(found))
    plot.write(partial(drawing, rows), args.out / "curves.svg")
    return 0


def losses(config: RunConfig, device: Device) -> list[float]:
    curve = TrainingCurve(replace(config, warmup=5), device)  # a graph is captured after three steps
    for _ in range(config.steps):
        curve.prepare()
        for _, run in curve.step():
            run()
    return [round(row["loss"], 6) for row in curve.rows]


def smoothed(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the second half of a curve, each point the mean of SMOOTHED steps."""
    losses = np.convolve(row["losses"], np.full(SMOOTHED, 1 / SMOOTHED), "valid")
    return losses[len(losses) // 2 :]


def distances(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the largest distance of two recipes with one seed, and of two seeds with one recipe."""
    pairs = [(a, b) for n, a in enumerate(rows) for b in rows[:n]]
    apart = [(a, b, float(np.abs(smoothed(a) - smoothed(b)).mean())) for a, b in pairs]
    return (
        max(d for a, b, d in apart if a["seed"] == b["seed"]),
        max(d for a, b, d in apart if a["recipe"] == b["recipe"]),
    )


def drawing(rows: list[dict[str, Any]]) -> Any:
    """Return the figure: the loss of each recipe and seed by step."""
    drawn, axes = one_panel(3.6)
    recipes = [*dict.fromkeys(row["recipe"] for row in rows)]
    for row in rows:
        color, style = COLORS[recipes.index(row["recipe"])], "-" if row["seed"] == SEEDS[0] else ":"
        axes.plot(row["losses"], style, color=color, linewidth=1.2, label=f"{row['recipe']}, seed {row['seed']}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.grid(axis="y")
    return drawn


if __name__ == "__main__":
    sys.exit(main())
