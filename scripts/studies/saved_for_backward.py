"""Tensors that a block keeps for its backward, eager and compiled.

Question: which tensors stay alive between forward and backward, in an RMSNorm and in a whole block, and what does
    torch.compile leave out?
Method: hooks on saved tensors around one step of a model of one block (xl-2026, context 512, batch 4, naive
    and sdpa_flash, fp32 and bf16), eager and under torch.compile; each memory counts once, parameters cost nothing.
Output: the five largest with their share, the norm's own, the sum of a block next to the closed form; the MiB of the
    residual stream.
Why: The list of saved tensors stands next to the formula that predicts its sum.

    python scripts/studies/saved_for_backward.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from _cells import Cell, place
from _study import Study, row_table, run

from cs_systems.config import Mode, Precision, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = RunConfig(mode=Mode.FORWARD_BACKWARD, profiler="residuals", warmup=0, steps=1)
TOP = 5
NORM = "layers.*.ln1"
COLUMNS = ("size", "attention", "precision", "compile", "peak_allocated_mib", "predicted_peak_mib", "note")
NAMES = ("size", "attention", "precision", "compile")


def full() -> list[RunConfig]:
    return grid(
        BASE,
        size=("2.7B",),
        num_layers=(1,),
        context_length=(512,),
        attention=("naive", "sdpa_flash"),
        precision=(Precision.FP32, Precision.BF16),
        compile=("none", "default"),
    )


def small() -> list[RunConfig]:
    """Return cells with aot_eager, which keeps the same tensors; generating code for a CPU takes too long."""
    axes = {"precision": (Precision.FP32, Precision.BF16), "compile": ("none", "aot_eager")}
    return grid(BASE, size=("tiny",), num_layers=(1,), **axes)


def largest(cells: Sequence[Cell], only: str = "") -> list[Row]:
    """Return the five largest kept tensors of each cell, only of the module `only` if given."""
    rows = []
    for cell in cells:
        found = [r for r in cell.record.results.get("residuals", ()) if not only or r["module"] == only]
        for row in [r for r in found if r["total_bytes"]][:TOP]:
            rows.append(
                {name: cell[name] for name in NAMES}
                | {name: row[name] for name in ("module", "operation", "shape", "dtype")}
                | {"kept_bytes": row["total_bytes"], "of all": f"{row['share']:.1%}"}
            )
    return rows


def sums(cells: Sequence[Cell]) -> list[Row]:
    """Return the bytes kept in total, and by the block compared with the closed form for eager code."""
    rows = []
    for cell in cells:
        blocks = cell.record.results.get("residual_blocks", ())
        if blocks:
            block = next((row for row in blocks if row["block"] == "block 0"), None)
            stream = next(iter(cell.record.results.get("residual_stream", ())), {})
            rows.append(
                {name: cell[name] for name in NAMES}
                | {
                    "all_bytes": sum(row["bytes"] for row in blocks),
                    "block_bytes": block and block["bytes"],
                    "predicted_bytes": block and block["predicted_bytes"],
                    "residual_stream_bytes": stream.get("bytes"),
                }
            )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    return [
        render([cell.record for cell in cells], format, COLUMNS),
        *row_table(sums(cells), "kept for backward: in all, by the block, by the closed form of the block", format),
        *row_table(largest(cells), "the five largest of each, with their share of all", format),
        *row_table(largest(cells, NORM), "an RMSNorm's own (eager)", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    rows = sums(cells)
    eager = {(r["size"], r["attention"], r["precision"]): r for r in rows if r["compile"] == "none"}
    for row in rows:
        key = (row["size"], row["attention"], row["precision"])
        if row["compile"] != "none" and key in eager:
            less = 1 - row["all_bytes"] / eager[key]["all_bytes"]
            notes.append(
                f"{' '.join(key)}: compiled, {human(row['all_bytes'], 'bytes')} are kept, {less:.0%} less than eager"
            )
    known = [r for r in rows if r["block_bytes"] and r["predicted_bytes"]]
    if known:
        off = max(abs(r["predicted_bytes"] / r["block_bytes"] - 1) for r in known)
        notes.append(f"the closed form of a block is within {off:.2%} of what the hooks count, in {len(known)} cells")
        first = known[0]
        ratio = first["block_bytes"] / first["residual_stream_bytes"]
        notes.append(
            f"{first['size']} {first['attention']} {first['precision']}: a block keeps {ratio:.0f} times the residual "
            f"stream's {human(first['residual_stream_bytes'], 'bytes')}"
        )
    unlisted = sum(cell.measured and not cell.record.results.get("residuals") for cell in cells)
    return notes + ([f"{unlisted} cells hold no list of what they keep"] if unlisted else [])


def answer(cells: list[Cell]) -> str:
    rows = sums(cells)
    eager = [row for row in rows if row["compile"] == "none" and row["block_bytes"] and row["residual_stream_bytes"]]
    if not eager:
        return ""
    text = ", ".join(f"{human(row['block_bytes'], 'bytes')} ({row['attention']} {row['precision']})" for row in eager)
    stream = ", ".join(dict.fromkeys(human(row["residual_stream_bytes"], "bytes") for row in eager))
    of_eager = [
        f"{row['all_bytes'] / other['all_bytes']:.2f} ({row['attention']} {row['precision']})"
        for row in rows
        if row["compile"] != "none"
        for other in rows
        if other["compile"] == "none" and all(row[k] == other[k] for k in NAMES[:3])
    ]
    compiled = (
        f"; compiled, the whole model keeps this fraction of its eager bytes: {', '.join(of_eager)}" if of_eager else ""
    )
    (first, *_) = eager
    top = [row for row in largest(cells) if all(row[name] == first[name] for name in NAMES)]
    share = sum(row["kept_bytes"] for row in top) / first["all_bytes"]
    tensors = ", ".join(
        " of ".join(filter(None, (row["operation"], row["module"].removeprefix("layers.*.")))) for row in top
    )
    return (
        f"{place(cells)}, a block of {first['size']} keeps {text} for backward{compiled}; {share:.0%} of all, in "
        f"{first['attention']} {first['precision']}, is in the tensors of {tensors}. The block's residual "
        f"stream is {stream}."
    )


def draw(cells: list[Cell]) -> Figure:
    """Draw the bytes that each cell keeps for backward, eager and compiled, with the closed form of the block."""
    from matplotlib.figure import Figure

    from cs_systems.report.figures.drawing import COLORS, WIDTH, with_legend

    rows = sums(cells)
    drawn = Figure(figsize=(WIDTH, 1.4 + 0.32 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    labels = [" ".join(str(row[name]) for name in NAMES[1:]) for row in rows]
    bars = (
        ("all that is kept", "all_bytes"),
        ("the block's", "block_bytes"),
        ("the block's, predicted", "predicted_bytes"),
    )
    for number, (title, column) in enumerate(bars):
        heights = [y + 0.25 * (number - 1) for y in range(len(rows))]
        kept = [(row[column] or 0) / 2**20 for row in rows]
        axes.barh(heights, kept, height=0.25, color=COLORS[number], label=title)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("MiB kept for backward")
    drawn.suptitle("Kept for backward, eager (none) and compiled", x=0.01, ha="left", fontsize=11)
    return with_legend(drawn, axes)


STUDY = Study(
    __file__,
    __doc__,
    "What does a block keep for its backward, eager and compiled, and which five tensors are most of it?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="memory",
    draw=draw,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
