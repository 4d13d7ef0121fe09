"""Time of each phase under nsys, compared with the clock and with the sum of its kernels.

Question: a profile names a time for each phase; may it be quoted as a timing, and where not, what is the difference?
Method: small, medium and large (32 layers; the preset's 36 next to it at context 256, fp32) at contexts
    128 and 256, fp32 and bf16, naive attention, batch 4: a training step timed by the device's events, and the same
    under nsys. Two values under nsys: the phase by the same events, which differs by what recording costs, and the
    sum of its kernels, which differs by the time in which the GPU stood idle. Two values agree where they lie
    within 5% of the clock's median.
Output: by phase the clock's median with n and p10 to p90 next to both values of nsys with theirs; the idle time of
    the recorded step by cause; an explanation.
Why: One sample of each method cannot tell a difference of method from noise. The difference is
    shown with the spread of the steps by the clock, and with the reasons why no kernel ran under nsys.

    python scripts/studies/nsys_and_clock.py
"""

from __future__ import annotations

from _cells import Cell, place
from _kernels import (
    BY_KERNEL_AND_LAYER,
    STEPS,
    clean,
    idle_shares,
    phase_times,
    profiled,
    step_median,
    twin,
    twins,
    unknown,
)
from _study import Study, row_table, run
from step_time import LARGE_OF_32_LAYERS, PRECISIONS

from cs_systems.config import Precision, RunConfig, grid, preset
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(warmup=3, steps=20)
CONTEXTS = (128, 256)
PHASES = ("forward", "backward", "optimizer")
TOLERANCE = 0.05  # tolerance as a share of the clock's median


def full() -> list[RunConfig]:
    models = [preset("small"), preset("medium"), LARGE_OF_32_LAYERS]
    clocked = [
        *grid(BASE, model=models, context_length=CONTEXTS, precision=PRECISIONS),
        *grid(BASE, size=["large"], context_length=CONTEXTS[-1:], precision=[Precision.FP32]),
    ]
    return [*clocked, *profiled(clocked, "nsys")]


def small() -> list[RunConfig]:
    return grid(BASE, size=["tiny"], context_length=(32, 64), precision=PRECISIONS)


def pairs(cells: list[Cell]) -> list[tuple[Cell, Cell | None]]:
    """Return each clean cell with its twin under nsys."""
    found = twins(cells)
    return [(cell, twin(cell, found)) for cell in clean(cells) if cell.measured]


def agrees(value: float | None, clock: float) -> bool | None:
    return None if value is None else abs(value / clock - 1) <= TOLERANCE


def by_phase(cells: list[Cell]) -> list[Row]:
    """Return one row per cell and phase: the clock with its spread, and both values under nsys."""
    rows = []
    for cell, other in pairs(cells):
        for phase in PHASES:
            if (clock := cell[f"{phase}.median_s"]) is None:
                continue
            events = other and other[f"{phase}.median_s"]
            kernels = phase_times(other).get(phase) if other else None
            rows.append(
                {
                    "size": cell["size"],
                    "ctx": cell["seq_len"],
                    "precision": cell["precision"],
                    "phase": phase,
                    "n": cell[f"{phase}.n"],
                    "clock_s": clock,
                    "p10_s": cell[f"{phase}.p10_s"],
                    "p90_s": cell[f"{phase}.p90_s"],
                    "nsys n": other and other[f"{phase}.n"],
                    "under_nsys_s": events,
                    "nsys : clock": events and events / clock,
                    "nsys agrees": agrees(events, clock),
                    "kernels_s": kernels,
                    "kernels : clock": kernels and kernels / clock,
                    "kernels agree": agrees(kernels, clock),
                }
            )
    return rows


def idle(cells: list[Cell]) -> list[Row]:
    """Return for each step under nsys its span, the GPU's busy share, and the causes of idle time."""
    known = [(cell, other) for cell, other in pairs(cells) if other]
    causes = dict.fromkeys(cause for _, other in known for cause in idle_shares(other))
    return [
        {
            "size": cell["size"],
            "ctx": cell["seq_len"],
            "precision": cell["precision"],
            "clock_s": cell["median_s"],
            "under_nsys_s": other["median_s"],
            "gpu_span_s": step_median(other, "gpu_span_s"),
            "kernels_s": step_median(other, "kernel_s"),
            "GPU busy": f"{step_median(other, 'busy_share'):.0%}",
            **{cause: f"{idle_shares(other).get(cause, 0):.1%}" for cause in causes},
        }
        for cell, other in known
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    phases = (
        f"by phase: the clock (n steps) beside {STEPS} steps under nsys, by the same events and by the sum of kernels; "
        f"agree: within {TOLERANCE:.0%} of the clock's median"
    )
    gaps = "the profiled step, from its first kernel to its last: idle time by cause, in shares of its wall time"
    return [
        render([cell.record for cell in clean(cells)], format),
        *row_table(by_phase(cells), phases, format),
        *row_table(idle(cells), gaps, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    return [*_spread(cells), *_agreement(cells), *_differences(cells), *unknown(cells)]


def _spread(cells: list[Cell]) -> list[str]:
    """Return a sentence on the difference between single samples of one cell."""
    spreads = sorted(cell["spread"] for cell in clean(cells) if cell.measured and cell["spread"] is not None)
    if not spreads:
        return []
    return [
        f"by the clock alone the middle 80% of a cell's steps span {spreads[0]:.1%} to {spreads[-1]:.1%} of their "
        "median: by so much two single samples of one thing may differ"
    ]


def _agreement(cells: list[Cell]) -> list[str]:
    rows = [row for row in by_phase(cells) if row["kernels_s"] is not None]
    if not rows:
        return []
    kept = [row["nsys : clock"] for row in rows if not row["nsys agrees"]]
    apart = [row["kernels : clock"] for row in rows if not row["kernels agree"]]
    events = f"the time under nsys lies within {TOLERANCE:.0%} of the clock in {len(rows) - len(kept)} of {len(rows)}"
    kernels = f"the sum of the kernels lies within {TOLERANCE:.0%} of it in {len(rows) - len(apart)} of {len(rows)}"
    idle = [value for value in apart if value < 1]
    return [
        f"{events} phases" + (f"; in the others it is {min(kept):.2f} to {max(kept):.2f} of it" if kept else ""),
        f"{kernels} phases"
        + (f"; in {len(idle)} it is {1 - max(idle):.1%} or more below: so long the GPU was idle" if idle else ""),
    ]


def _differences(cells: list[Cell]) -> list[str]:
    """Return for each cell its step's time by the clock and under nsys."""
    notes = []
    for cell, other in pairs(cells):
        if other is None:
            continue
        clock, recorded, kernels = cell["median_s"], other["median_s"], cell["kernel_s"]
        named = ", ".join(f"{cause} {share:.1%}" for cause, share in idle_shares(other).items() if share >= 0.005)
        notes.append(
            f"{cell['size']} ctx {cell['seq_len']} {cell['precision']}: a step takes {human(clock, 's')} by the clock "
            f"(n {cell['n']}), {human(recorded, 's')} under nsys (n {other['n']}), {recorded / clock:.2f} of it; its "
            f"kernels take {human(kernels, 's')}, {kernels / clock:.0%} of the clock; under nsys no kernel ran in "
            f"{1 - step_median(other, 'busy_share'):.0%} of the step{f' ({named})' if named else ''}"
        )
    return notes


def answer(cells: list[Cell]) -> str:
    rows = [row for row in by_phase(cells) if row["under_nsys_s"]]
    slower = sorted(other["median_s"] / cell["median_s"] for cell, other in pairs(cells) if other)
    if not rows or not slower:
        return ""
    events, kernels = (sum(bool(row[column]) for row in rows) for column in ("nsys agrees", "kernels agree"))
    return (
        f"{place(cells)}, of {len(rows)} phases timed by the clock, the time under nsys is within {TOLERANCE:.0%} in "
        f"{events} and the sum of the kernels in {kernels}. A step under nsys takes "
        f"{slower[0]:.2f} to {slower[-1]:.2f} times as long as without it."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Does a phase take as long under nsys as by the clock, and as long as its kernels?",
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
