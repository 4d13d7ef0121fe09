"""Effect of warm-up steps on the timed steps, and the causes of a slow first step.

Question: with 0, 1, 2 or 5 warm-up steps before 10 timed ones, how far is the mean from what a step takes once all is
    warm?
Method: small, medium, large at context 256, forward and backward, each cell in a process of its own: what one cell
    has loaded, tuned or allocated would warm up the next. Every step from the first is kept, with what happened in
    it: compiling, cudaMalloc calls, the clock.
Output: mean and median of forward and backward, the first timed step and the cause of its excess; the curve as a
    figure.
Why: In a mean without a spread, one slow step looks like a slow model. Median and mean stand side by side, with the
    cause of the slow step.

    python scripts/studies/warmup_steps.py
"""

from __future__ import annotations

from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.analysis.comparison.warmup import warmup_curve
from cs_systems.config import Mode, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.record import Measurement, Row
from cs_systems.report.tables.records import render

BASE = RunConfig(mode=Mode.FORWARD_BACKWARD, steps=10)
WARMUPS = (0, 1, 2, 5)
# both mean and median, because one alone hides a slow step
COLUMNS = (
    *("size", "warmup", "forward.mean_ms", "forward.median_ms", "backward.mean_ms", "backward.median_ms"),
    *("mean_ms", "median_ms", "spread", "note"),
)


def full() -> list[RunConfig]:
    return grid(BASE, size=("small", "medium", "large"), context_length=(256,), warmup=WARMUPS)


def small() -> list[RunConfig]:
    return grid(BASE, size=("tiny",), warmup=(0, 5))


def first_timed(measurement: Measurement) -> Row:
    """Return the first timed step, as a row of the warm-up curve."""
    return next(row for row in warmup_curve(measurement) if not row["warmup"])


def first_steps(cells: list[Cell]) -> list[Row]:
    rows = []
    for cell in cells:
        if cell.record.measurement and cell.measured:
            curve = warmup_curve(cell.record.measurement)
            rows.append(
                {
                    "size": cell["size"],
                    "warmup": cell["warmup"],
                    "step_1_s": curve[0]["wall_s"],
                    "why step 1": curve[0]["cause"] or "steady",
                    "first_timed_s": (first := first_timed(cell.record.measurement))["wall_s"],
                    "why first timed": first["cause"] or "steady",
                    "steady_s": cell["median_s"],
                }
            )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "the very first step, the first that is timed, and the median of the timed ones"
    return [
        render([cell.record for cell in cells], format, COLUMNS),
        *row_table(first_steps(cells), caption, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    by = index(cells, "size", "warmup")
    for (size, warmup), cell in by.items():
        first = first_timed(cell.record.measurement)  # type: ignore[arg-type]
        sentence = f"{size}, warm-up {warmup}: mean {human(cell['mean_s'], 's')}, median {human(cell['median_s'], 's')}"
        if first["cause"]:
            excess, times = human(first["excess_s"], "s"), first["wall_s"] / cell["median_s"]
            sentence += f"; the first timed step took {excess} more ({times:.1f} times the median): {first['cause']}"
        notes.append(sentence)
    for size in dict.fromkeys(size for size, _ in by):
        medians = {warmup: cell["median_s"] for (s, warmup), cell in by.items() if s == size}
        if len(medians) > 1:
            spread = max(medians.values()) / min(medians.values()) - 1
            notes.append(
                f"{size}: the medians of warm-up {', '.join(map(str, medians))} lie within {spread:.1%} of each other"
            )
    return notes


def answer(cells: list[Cell]) -> str:
    by = index(cells, "size", "warmup")
    cold = [first_timed(cell.record.measurement)["wall_s"] / cell["median_s"] for (_, n), cell in by.items() if n == 0]  # type: ignore[arg-type]
    warm = {n for _, n in by if n}
    if not cold or not warm:
        return ""
    least = min(warm)
    causes = [first_timed(cell.record.measurement)["cause"] for (_, n), cell in by.items() if n == 0]  # type: ignore[arg-type]
    kinds = dict.fromkeys(_kind(cause) for text in causes if text for cause in text.split("; "))
    why = f", because of {' and '.join(kinds)}" if kinds else ""
    off = max(abs(cell["mean_s"] / cell["median_s"] - 1) for (_, n), cell in by.items() if n == least)
    return (
        f"{place(cells)}, without warm-up the first timed step takes {min(cold):.1f} to {max(cold):.1f} times the "
        f"median{why}; after {least} warm-up steps the mean is within {off:.1%} of the median."
    )


def _kind(cause: str) -> str:
    """Return a cause without its count, and with its details in brackets."""
    name, _, details = cause.lstrip("0123456789 ").partition(": ")
    return f"{name} ({details})" if details else name


STUDY = Study(
    __file__,
    __doc__,
    "What do warm-up steps change, and what makes the first step slow?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="warmup",
    drawn=lambda cell: cell["warmup"] == max(WARMUPS),
    fresh_process=True,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
