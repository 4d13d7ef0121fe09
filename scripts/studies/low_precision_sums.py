"""Errors of sums in low precision, explained by the rounding of each addition.

Question: fp32 + fp32, fp16 + fp16, fp32 + fp16 and fp32 + (fp16 → fp32) give 10.0001, 9.9531, 10.0021 and 10.0021.
    Where does each error come from, what do longer sums and bf16 give, and how does the error grow with the length when
    one adds one after the other, pairwise, or as Kahan does?
Method: 0.01 added 1000, 10,000 and 100,000 times on the device; the same by arithmetic on units in the last place,
    binade by binade, which must give the same sum to the bit. Then 64 sums of 16 to 65,536 uniform numbers, each by
    five ways of adding, against float64.
Output: every sum with the ulp that explains it; error against length.
Why: A rounded sum looks arbitrary until each rounding is counted. Each sum stands with its reason, computed without
    the sum itself.

    python scripts/studies/low_precision_sums.py
"""

from __future__ import annotations

from _cells import Cell, place
from _numerics import not_measured
from _study import Study, declared_table, run

from cs_systems.analysis.comparison.numerics import accumulated, first_bad, summed, ulps, unexplained, where
from cs_systems.config import Precision, RunConfig, grid

STATED = {"fp32 + fp32": 10.0001, "fp16 + fp16": 9.9531, "fp32 + fp16": 10.0021, "fp32 + (fp16 → fp32)": 10.0021}
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)
LONGEST = 65_536  # terms of the longest sums
ROUNDOFFS = 4.0  # a sum with an error of more unit roundoffs than this was not added up well enough


def cells() -> list[RunConfig]:
    """Return the cells, the same on every machine, since they take seconds."""
    return grid(RunConfig(workload="accumulation", warmup=0, steps=1), precision=PRECISIONS)


def tables(cells: list[Cell], format: str) -> list[str]:
    records = [cell.record for cell in cells]
    return [
        *not_measured(cells, format),
        *declared_table(accumulated, accumulated(records), "0.01 added again and again", format),
        *declared_table(
            ulps, ulps(records), "1000 × 0.01 in one dtype, while the sum is between two powers of 2", format
        ),
        *declared_table(
            summed,
            summed(records),
            "sums of uniform numbers in [0, 1): relative error, in the median of 64, by number of terms",
            format,
        ),
    ]


def explain(cells: list[Cell]) -> list[str]:
    rows = [row for cell in cells for row in cell.record.results.get("accumulation", ())]
    short = {row["variant"]: row["sum"] for row in rows if row["count"] == 1000}
    same = [name for name, value in STATED.items() if name in short and abs(short[name] - value) < 1e-4]
    notes = where([cell.record for cell in cells])
    if short:
        notes.append(f"{len(same)} of the four sums that the question states come out the same here")
    if rows:
        wrong = len(unexplained([cell.record for cell in cells]))
        notes.append(f"arithmetic on ulps gives {len(rows) - wrong} of {len(rows)} sums to the bit")
    return notes + [sentence for cell in cells for sentence in growth(cell)]


def growth(cell: Cell) -> list[str]:
    """Return sentences on the length from which each way of adding is too inexact."""
    rows = cell.record.results.get("summation", ())
    notes = []
    for method in dict.fromkeys(row["method"] for row in rows):
        if length := first_bad(rows, method, ROUNDOFFS):
            last = [row for row in rows if row["method"] == method][-1]
            notes.append(
                f"{cell['precision']}, {method}: more than {ROUNDOFFS:g} unit roundoffs off from {length:,} terms on; "
                f"at {last['length']:,} the sum is {100 * last['median_relative_error']:.2g}% off"
            )
    good = [m for m in dict.fromkeys(row["method"] for row in rows) if first_bad(rows, m, ROUNDOFFS) is None]
    if good:
        notes.append(f"{cell['precision']}: at most {ROUNDOFFS:g} unit roundoffs at any length: {', '.join(good)}")
    return notes


def answer(cells: list[Cell]) -> str:
    rows = [row for cell in cells for row in cell.record.results.get("accumulation", ())]
    short = {row["variant"]: row["sum"] for row in rows if row["count"] == 1000 and row["variant"] in STATED}
    long = {
        cell["precision"]: row["median_relative_error"]
        for cell in cells
        for row in cell.record.results.get("summation", ())
        if row["method"] == "sequential" and row["length"] == LONGEST
    }
    if not short or not long:
        return ""
    sums = ", ".join(f"{value:.4f} ({variant})" for variant, value in short.items())
    errors = ", ".join(f"{100 * error:.2g}% ({precision})" for precision, error in long.items())
    return (
        f"{place(cells)}, each addition rounds to the accumulator's dtype, so that 0.01 added 1000 times gives {sums}; "
        f"sequential sums of {LONGEST:,} terms are off by {errors}, so those in fp16 and bf16 need a wider accumulator."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Why is 1000 × 0.01 not 10 in low precision, and which sums need a wider accumulator?",
    cells,
    cells,
    tables,
    explain,
    answer,
    figure="sums",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
