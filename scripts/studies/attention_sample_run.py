"""Time, TFLOP/s and memory of one published attention call, causal and not causal.

Question: what does one named call take, and was a published one causal?
Method: fp16, forward and backward by the device's clock, 30 samples; FlashAttention as torch ships it, the package
    where it is installed, this repository's kernel, and the naive one; each with the mask and without.
Output: times, TFLOP/s and peak memory, with every input in the row.
Why: Rate × time is the number of FLOPs that a published result credits, which shows whether its call was causal. A
    published run (7.10 and 18.88 ms, 38.7 and 36.4 TFLOP/s) is checked against the formula.

    python scripts/studies/attention_sample_run.py
"""

from __future__ import annotations

from _attention import COLUMNS, FLASH2, QUICK, calls, executed_rows, rate
from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.core.units import human
from cs_systems.formulas.cost import credited_attention_flops
from cs_systems.report.tables.records import render

SHAPE = AttentionShape(batch=32, heads=32, seq=1024, d_head=64)
PUBLISHED = {"forward": (7.10e-3, 38.7e12), "backward": (18.88e-3, 36.4e12)}  # seconds, FLOP/s


def full() -> list[RunConfig]:
    return calls([AttentionShape(32, 32, 1024, 64, causal) for causal in (False, True)])


def small() -> list[RunConfig]:
    return calls([AttentionShape(1, 4, 256, 64, causal) for causal in (False, True)], **QUICK)


def tables(cells: list[Cell], format: str) -> list[str]:
    rows = executed_rows(cells, "attention", "causal")
    return [
        render([cell.record for cell in cells], format, ("attention", "causal", *COLUMNS)),
        *row_table(rows, "forward: credited by formula (causal halved) beside executed", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = [was_it_causal()]
    by = index(cells, "attention", "causal")
    for (name, causal), cell in by.items():
        if not causal and (masked := by.get((name, True))):
            phases = ("forward.median_s", "backward.median_s")
            times = [" and ".join(human(c[phase], "s") for phase in phases) for c in (cell, masked)]
            notes.append(
                f"{name}: forward and backward take {times[0]} without the mask, {times[1]} with it; forward's rate by "
                f"credit is {rate(cell)} and {rate(masked)}"
            )
    flash = by.get((FLASH2, False))
    if flash and flash.record.config["shape"]["batch"] == SHAPE.batch:
        seconds, _ = PUBLISHED["forward"]
        times = seconds / flash["forward.median_s"]
        notes.append(f"the published forward took {times:.1f} times as long as {FLASH2} does here")
    return notes


def was_it_causal() -> str:
    """Return the FLOPs that the published time and rate credit, and whether the call was therefore causal."""
    seconds, per_s = PUBLISHED["forward"]
    whole = credited_attention_flops(SHAPE)
    share = seconds * per_s / whole
    return (
        f"the published forward, {human(per_s, 'flops_per_s')} for {human(seconds, 's')}, credits {share:.2f} of the "
        f"unmasked call's {human(whole, 'flops')}: it was {'not causal' if share > 0.75 else 'causal'}"
    )


def answer(cells: list[Cell]) -> str:
    by = index(cells, "attention", "causal")
    notes = []
    for name in dict.fromkeys(name for name, _ in by):
        if (name, False) in by and (name, True) in by:
            times = [human(by[name, causal]["median_s"], "s") for causal in (False, True)]
            notes.append(f"{name} {times[0]} and {times[1]}")
    if not notes:
        return ""
    return f"{place(cells)}, forward and backward take, without a causal mask and with it: {'; '.join(notes)}."


STUDY = Study(
    __file__,
    __doc__,
    "What does one attention call take: batch 32, length 1024, 32 heads, embedding 2048, causal and not?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
