"""Ratio of the time of backward to that of forward, at every model size.

Question: each product of forward has two of its size in backward, so that 1 : 2 is expected; where is it not, and
    why?
Method: forward and backward of every size at context 128, naive attention, fp32 and bf16; batch 4, and
    batch 16, which gives the device four times the work for the same launches. Batch 4 of small to xl a second time
    under torch.profiler, for the time of the kernels alone.
Output: the ratio by events, next to the ratio by kernels and of the FLOPs, the host's submission and the device's
    lag; an explanation.
Why: Each row says whether the device waited for the host. The larger batch shows the ratio that is left without the
    waiting, and the kernels' own time shows it where no batch is large enough.

    python scripts/studies/forward_backward_ratio.py
"""

from __future__ import annotations

from _cells import Cell, place
from _kernels import BY_KERNEL_AND_LAYER, STEPS, clean, profiled, unknown
from _study import Study, bounded, index, row_table, run
from step_time import (
    LARGE_OF_32_LAYERS,
    NEAR_TWO,
    NO_LAG,
    PRECISIONS,
    PROFILED_SIZES,
    SIZES,
    kernels_say,
    launch_bound_share,
    ratio,
    why_the_ratio,
)

from cs_systems.config import Mode, RunConfig, grid, preset
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(mode=Mode.FORWARD_BACKWARD, warmup=3, steps=10)
BATCHES = (4, 16)


def full() -> list[RunConfig]:
    models = [preset(name) for name in SIZES]
    models.insert(SIZES.index("large"), LARGE_OF_32_LAYERS)
    twice = grid(BASE, size=PROFILED_SIZES, context_length=(128,), precision=PRECISIONS, batch_size=BATCHES[:1])
    return [
        *bounded(grid(BASE, model=models, context_length=(128,), precision=PRECISIONS, batch_size=BATCHES)),
        *profiled(twice, "kineto"),
    ]


def small() -> list[RunConfig]:
    return grid(BASE, size=["tiny"], context_length=(32,), precision=PRECISIONS, batch_size=BATCHES, steps=(6,))


def ratios(cells: list[Cell]) -> list[Row]:
    return [
        {
            "size": cell["size"],
            "precision": cell["precision"],
            "batch": cell["batch_size"],
            "forward_s": cell["forward.median_s"],
            "backward_s": cell["backward.median_s"],
            "ratio": ratio(cell),
            "ratio by kernels": cell["kernel_ratio"],
            "ratio of FLOPs": cell["backward.model_flops"] / cell["forward.model_flops"],
            "forward_submit_s": cell["forward.submit_median_s"],
            "forward_lag_s": cell["forward.lag_median_s"],
            "launch-bound": None if (share := launch_bound_share(cell)) is None else f"{share:.0%}",
            "forward_kernels_s": cell["forward.kernel_s"],
            "backward_kernels_s": cell["backward.kernel_s"],
            "GPU busy": None if (busy := cell["busy_share"]) is None else f"{busy:.0%}",
        }
        for cell in cells
        if cell.measured
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    cells = clean(cells)
    caption = (
        "backward over forward, by events; launch-bound: share of the time in phases that wait for the host; kernels: "
        f"of {STEPS} steps under torch.profiler, empty where the cell was not profiled too; GPU busy: all kernels over "
        "the step by the clock"
    )
    return [render([cell.record for cell in cells], format), *row_table(ratios(cells), caption, format)]


def explain(cells: list[Cell]) -> list[str]:
    by = index(cells, "size", "precision", "batch_size")
    notes = [NO_LAG] if by and launch_bound_share(next(iter(by.values()))) is None else []
    for (size, precision, batch), cell in by.items():
        more = by.get((size, precision, BATCHES[-1]))
        beside = ""
        if more and batch != BATCHES[-1]:
            beside = f"; at batch {BATCHES[-1]} it is {ratio(more):.2f} times"
        if not more or batch != BATCHES[-1]:
            notes.append(f"{size} {precision} batch {batch}: {why_the_ratio(cell)}{beside}")
    notes += kernels_say(clean(cells), "batch_size")
    near = sum(is_near_two(cell) for cell in by.values())
    return [*notes, f"{near} of {len(by)} cells are within a tenth of 1 : 2 by the clock", *unknown(cells)]


def is_near_two(cell: Cell) -> bool:
    return NEAR_TWO[0] <= ratio(cell) <= NEAR_TWO[1]


def answer(cells: list[Cell]) -> str:
    measured = [cell for cell in clean(cells) if cell.measured]
    if not measured:
        return ""
    clock = sorted(map(ratio, measured))
    near = sum(map(is_near_two, measured))
    text = (
        f"{place(cells)}, backward is twice as long as forward, within a tenth, in {near} of {len(measured)} cells by "
        f"the clock, where the ratio is {clock[0]:.2f} to {clock[-1]:.2f}"
    )
    if kernels := sorted(cell["kernel_ratio"] for cell in measured if cell["kernel_ratio"]):
        text += f"; the kernels alone have {kernels[0]:.2f} to {kernels[-1]:.2f}, over {len(kernels)} profiled cells"
    return f"{text}."


STUDY = Study(
    __file__,
    __doc__,
    "Is backward twice as long as forward, at every model size?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
    drops=BY_KERNEL_AND_LAYER,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
