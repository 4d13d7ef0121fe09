"""Kernels that take the most time of forward, of forward and backward, and of a training step.

Question: the share of matrix products falls from inference to training; from how much to how much, and what grows?
Method: large at context 256, naive attention, batch 4: forward alone, forward and backward, the training step, each
    timed and a second time under torch.profiler; 32 layers in fp32, the preset's 36 in fp32 and bf16.
    Every kernel is classed by its name into a family; what one kernel takes and what all of its family take stand
    side by side.
Output: the time by family and pass, the matrix products' kernels counted, the top kernels of each pass; a figure of
    the families; an explanation.
Why: cuBLAS has one kernel for each shape and layout, and backward's products run in others than forward's. The
    largest kernel alone therefore understates what matrix products take.

    python scripts/studies/top_kernels.py
"""

from __future__ import annotations

from _cells import Cell, place
from _kernels import clean, family_times, kernel_rows, profiled, unknown
from _study import Study, index, row_table, run
from step_time import LARGE_OF_32_LAYERS, PRECISIONS

from cs_systems.analysis.attribution.kernel_families import FAMILIES, short_name
from cs_systems.config import Mode, Precision, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(warmup=3, steps=10)
PASSES = (Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP)
CONTEXT = 256
TOP = 5
MATMUL = "matmul"
ANSWERED_SHARE = 0.2  # a family with less of every pass is left out of the answer


def full() -> list[RunConfig]:
    fixed = {"context_length": (CONTEXT,), "mode": PASSES}
    clocked = [
        *grid(BASE, model=[LARGE_OF_32_LAYERS], precision=[Precision.FP32], **fixed),
        *grid(BASE, size=["large"], precision=PRECISIONS, **fixed),
    ]
    return [*clocked, *profiled(clocked, "kineto")]


def small() -> list[RunConfig]:
    return grid(BASE, size=["tiny"], context_length=(64,), precision=PRECISIONS, mode=PASSES)


def recorded(cells: list[Cell]) -> list[Cell]:
    """Return the profiled cells that have kernels, pass by pass."""
    found = [cell for cell in cells if cell.profiled and cell.measured and cell.record.results.get("kernels")]
    order = [mode.value for mode in PASSES]
    return sorted(found, key=lambda cell: (cell["size"], cell["precision"] != "fp32", order.index(cell["mode"])))


def shares(cell: Cell) -> dict[str, float]:
    """Return the share of the kernel time by family."""
    times = family_times(cell)
    return {family: time / sum(times.values()) for family, time in times.items()}


def _pass(cell: Cell) -> Row:
    return {"size": cell["size"], "precision": cell["precision"], "pass": cell["mode"]}


def by_family(cells: list[Cell]) -> list[Row]:
    """Return one row per pass: the time of its kernels, and each family's share."""
    found = recorded(cells)
    clocked = index(cells, "size", "precision", "mode")
    families = [family for family in FAMILIES if any(family in family_times(cell) for cell in found)]
    return [
        {
            **_pass(cell),
            "kernels": round(sum(row["calls_per_step"] for row in kernel_rows(cell))),
            "kernels_s": sum(family_times(cell).values()),
            "clock_s": (by_clock := clocked.get((cell["size"], cell["precision"], cell["mode"])))
            and by_clock["median_s"],
            "GPU busy": by_clock and f"{by_clock['busy_share']:.0%}",
            **{family: f"{shares(cell).get(family, 0):.1%}" for family in families},
        }
        for cell in found
    ]


def matmuls(cells: list[Cell]) -> list[Row]:
    """Return one row per pass: the largest kernel of its matrix products, and all of them together."""
    rows = []
    for cell in recorded(cells):
        if products := kernel_rows(cell, MATMUL):
            rows.append(
                {
                    **_pass(cell),
                    "distinct kernels": len(products),
                    "calls": round(sum(row["calls_per_step"] for row in products)),
                    "largest alone": f"{products[0]['share']:.1%}",
                    "all": f"{sum(row['share'] for row in products):.1%}",
                    "the largest": short_name(products[0]["kernel"]),
                }
            )
    return rows


def top(cells: list[Cell]) -> list[Row]:
    """Return the longest kernels of each pass."""
    return [
        {
            **_pass(cell),
            "kernel": short_name(row["kernel"]),
            "family": row["family"],
            "calls": round(row["calls_per_step"]),
            "time_s": row["time_s"],
            "mean_s": row["mean_s"],
            "of all": f"{row['share']:.1%}",
        }
        for cell in recorded(cells)
        for row in kernel_rows(cell)[:TOP]
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    families = "shares of each pass's kernel time by family; GPU busy: kernels over the step by the clock"
    return [
        render([cell.record for cell in clean(cells)], format),
        *row_table(by_family(cells), families, format),
        *row_table(matmuls(cells), "kernels of matrix products, in shares of each pass's kernel time", format),
        *row_table(top(cells), f"the {TOP} longest kernels of each pass, per step", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    found = recorded(cells)
    for size, precision in dict.fromkeys((cell["size"], cell["precision"]) for cell in found):
        same = [cell for cell in found if (cell["size"], cell["precision"]) == (size, precision)]
        notes += [f"{size} {precision}: {sentence}" for sentence in (*_matmuls(same), *_growth(same))]
    return [*notes, *_fp32_against_bf16(found), *unknown(cells)]


def _matmuls(cells: list[Cell]) -> list[str]:
    """Return sentences on the shares of the largest kernel and of all matrix products."""
    rows = matmuls(cells)
    if not rows:
        return []
    counted = "; ".join(
        f"{row['pass']} {row['distinct kernels']} kernels, the largest alone {row['largest alone']}, all {row['all']}"
        for row in rows
    )
    notes = [f"matrix products: {counted}"]
    first, last = rows[0], rows[-1]
    if len(rows) > 1:
        notes.append(
            f"from {first['pass']} to {last['pass']} the largest kernel of matrix products goes from "
            f"{first['largest alone']} to {last['largest alone']} of the kernel time, all of them together from "
            f"{first['all']} to {last['all']}"
        )
    return notes


def _growth(cells: list[Cell]) -> list[str]:
    """Return a sentence on the shares that grow from the smallest pass to the largest."""
    if len(cells) < 2:
        return []
    first, last = cells[0], cells[-1]
    before, after = shares(first), shares(last)
    grown = [
        f"{family} {before.get(family, 0):.1%} to {share:.1%} ({human(family_times(last)[family], 's')})"
        for family, share in after.items()
        if share > before.get(family, 0) + 0.001
    ]
    if not grown:
        return []
    return [f"the share that grows from {first['mode']} to {last['mode']}: {', '.join(grown)}"]


def _fp32_against_bf16(cells: list[Cell]) -> list[str]:
    """Return for the training step the times of kernels that bf16 shortens, leaves or adds."""
    by = {(cell["size"], cell["mode"], cell["precision"]): cell for cell in cells}
    notes = []
    for (size, mode, precision), cell in by.items():
        other = by.get((size, mode, Precision.BF16.value))
        if precision != Precision.FP32 or mode != Mode.TRAIN_STEP or other is None:
            continue
        full, half = family_times(cell), family_times(other)
        products, rest = full.get(MATMUL, 0), sum(full.values()) - full.get(MATMUL, 0)
        fewer, others = half.get(MATMUL, 0), sum(half.values()) - half.get(MATMUL, 0)
        notes.append(
            f"{size} {mode}: from fp32 to bf16 the matrix products go from {human(products, 's')} to "
            f"{human(fewer, 's')}, all other kernels from {human(rest, 's')} to {human(others, 's')} (copies, which "
            f"hold the casts, from {human(full.get('copy', 0), 's')} to {human(half.get('copy', 0), 's')})"
        )
    return notes


def answer(cells: list[Cell]) -> str:
    notes = []
    for precision in PRECISIONS:
        same = [shares(cell) for cell in recorded(cells) if (cell["size"], cell["precision"]) == ("large", precision)]
        if len(same) == len(PASSES):
            most = [family for family in FAMILIES if max(of.get(family, 0) for of in same) >= ANSWERED_SHARE]
            named = (f"{family} ({', '.join(f'{of.get(family, 0):.1%}' for of in same)})" for family in most)
            notes.append(f"in {precision.value} {', '.join(named)}")
    if not notes:
        return ""
    return (
        f"{place(cells)}, most of the kernel time of large in forward, in forward and backward, and in a training step "
        f"is that of these families: {'; '.join(notes)}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Which kernels take the time of a forward pass, of forward and backward, and of a whole training step?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="families",
    drawn=lambda cell: cell.profiled,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
