"""Speed of a training step in fp32, bf16 and fp8, and the causes that limit the gain.

Question: of small to 8B at context 256, what do bf16 autocast and fp8 linear layers gain over fp32, and where is the
    rest of what a tensor core could gain?
Method: the training step in fp32, under bf16 autocast, and under that with the blocks' linear layers in fp8; naive
    attention, batch 4, each timed in five rounds, in turn, and a second time under torch.profiler. The gain is of the
    clean times, with its interval over the rounds; the kernels are classed by family: matrix products, which gain;
    copies, which hold the casts; all others, which stay, and to which fp8 adds the search for its scales; and the part
    of the step in which the device waited for launches. One size after the other, the most telling first; 8B by the
    clock alone, and without 10B, whose training state of 16 bytes a parameter does not fit one H200.
Output: times, gains with their intervals, the time by family in each, a sentence for each size and precision; a figure
    of the families. Each row says whether fp32's products ran as TF32.
Why: A step that waits for kernel launches cannot gain from a lower precision, and casts cost time.

    python scripts/studies/precision_speed.py
"""

from __future__ import annotations

from dataclasses import replace

from _cells import Cell, place
from _kernels import BY_KERNEL_AND_LAYER, clean, profiled, unknown
from _numerics import not_measured
from _study import Study, bounded, row_table, run

from cs_systems.analysis.comparison.precision import TIMED, by_cell, gains, interval, name_of
from cs_systems.analysis.comparison.precision_causes import explained, sentence
from cs_systems.config import Precision, RunConfig, grid
from cs_systems.record import Row
from cs_systems.report.tables.records import render

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP8)
SIZES = ("small", "large", "2.7B", "xl", "medium", "8B")  # 8B last: building it takes longest
UNPROFILED = "8B"  # left out: a minute of the device, for the same result on matrix products as 2.7B
CONTEXT = 256
ROUNDS = 5
BASE = RunConfig(warmup=5, steps=30)


def full() -> list[RunConfig]:
    timed = bounded(grid(BASE, size=SIZES, context_length=(CONTEXT,), precision=PRECISIONS))
    return [*in_rounds(timed), *profiled([c for c in timed if c.model.name != UNPROFILED], "kineto")]


def small() -> list[RunConfig]:
    return in_rounds(grid(RunConfig(warmup=2, steps=10), size=["tiny"], context_length=(32, 64), precision=PRECISIONS))


def in_rounds(configs: list[RunConfig]) -> list[RunConfig]:
    return [replace(config, rounds=min(ROUNDS, config.steps)) for config in configs]


def gained(cells: list[Cell]) -> list[Row]:
    """Return one row per size and precision: the step, the gain over fp32, and the precision of fp32's products."""
    records = [cell.record for cell in cells]
    matmul = {r.config["precision"]: r.environment.float32_matmul for r in records if r.environment and r.measurement}
    return [
        {
            "cell": name_of(cell),
            "precision": row["precision"],
            "step_s": row["step_s"],
            "gain": row["speedup"] and f"{row['speedup']:.2f}×",
            "95% interval": interval(row),
            "verdict": row["verdict"],
            "fp32 products": matmul.get(row["precision"]),
        }
        for cell, found in by_cell(records, TIMED).items()
        for row in gains(found)
        if row["step_s"]
    ]


def decomposed(cells: list[Cell]) -> list[Row]:
    """Return one row per size and precision: the kernels of a step, compared with fp32, by family."""
    return [
        {
            "cell": row["cell"],
            "precision": row["precision"],
            "fp32 kernels_s": row["a_kernel_s"],
            "kernels_s": row["b_kernel_s"],
            "fp32 products_s": row["a_products_s"],
            "products_s": row["b_products_s"],
            "casts, more_s": row["casts_s"],
            "fp32 others_s": row["a_rest_s"],
            "others_s": row["b_rest_s"],
            "launch-bound": f"{row['launch_bound_share']:.0%}",
        }
        for row in explained([cell.record for cell in cells])
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    return [
        render([cell.record for cell in clean(cells)], format),
        *row_table(gained(cells), "gain over fp32: fp32's step over this one's", format),
        *row_table(
            decomposed(cells),
            "kernels of a step in fp32 and in a lower precision; launch-bound: of the latter's step",
            format,
        ),
        *not_measured(cells, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    return [*map(sentence, explained([cell.record for cell in cells])), *_gains(cells), *unknown(cells)]


def _gains(cells: list[Cell]) -> list[str]:
    """Return sentences on the gains by the clock alone."""
    return [
        f"{row['cell']}: {row['precision']} is {row['gain']} as fast as fp32"
        + (f" ({row['95% interval']})" if row["95% interval"] != row["verdict"] else "")
        + f": {row['verdict']}; its fp32 products ran as {row['fp32 products'] or 'unknown'}"
        for row in gained(cells)
        if row["gain"]
    ]


def answer(cells: list[Cell]) -> str:
    found: dict[str, dict[str, float]] = {}
    for cell, rows in by_cell([cell.record for cell in cells], TIMED).items():
        for row in gains(rows):
            if row["speedup"] and row["verdict"] in ("faster", "slower"):
                found.setdefault(row["precision"], {})[cell.model.label] = row["speedup"]
    notes = []
    for precision, by_size in found.items():
        low, high = min(by_size, key=lambda size: by_size[size]), max(by_size, key=lambda size: by_size[size])
        notes.append(f"{precision} is {by_size[low]:.2f} ({low}) to {by_size[high]:.2f} ({high}) times as fast as fp32")
    if not notes:
        return ""
    waiting: dict[str, list[float]] = {}
    for row in explained([cell.record for cell in cells]):
        waiting.setdefault(row["precision"], []).append(row["launch_bound_share"])
    bound = " and ".join(f"{min(of):.0%} to {max(of):.0%} in {precision}" for precision, of in waiting.items())
    limit = f"; the share of the profiled steps that is launch-bound is {bound}" if bound else ""
    return f"{place(cells)}, where the rounds decide, a training step in {' and in '.join(notes)}{limit}."


STUDY = Study(
    __file__,
    __doc__,
    "How much faster is a training step in bf16 and in fp8 than in fp32, and what keeps it from being more?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="families",
    drawn=lambda cell: cell.profiled,
    interleave=True,
    drops=BY_KERNEL_AND_LAYER,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
