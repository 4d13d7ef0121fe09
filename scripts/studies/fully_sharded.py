"""Time and memory of full sharding, compared with data parallelism and ZeRO stage 1.

Question: what time and memory does a step of 3.4 billion parameters take on two ranks, and is communication hidden?
Method: xl-2026 in bf16 on 2 ranks, batch 4 and context 512 each: DDP, ZeRO stage 1 with flat shards, full sharding
    (ours, and PyTorch's FSDP2), next to one rank alone; each timed, and apart from that recorded on both ranks, and its
    memory read after each stage of the first step. Full sharding gathers, computes and scatters in bf16.
Output: steps, exposed and hidden communication by the recording and by the difference to one rank, bytes sent and
    memory by component next to the formulas. Figure: the streams of a step.
Why: A step, its memory and its streams show together whether communication hides behind computing.

    python scripts/studies/fully_sharded.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell, place
from _numerics import not_measured
from _parallel import (
    MEMORY_TABLES,
    STEP_TABLES,
    Told,
    best_and_torchs,
    cells,
    groups,
    has_streams,
    off_formula,
    on_a_cpu,
    reconciled,
    tables,
    under,
)
from _study import Study, run

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.core.units import human
from cs_systems.record import RunRecord

STRATEGIES: list[Told] = [("ddp_bucketed", {}), ("zero1_flat", {}), ("fsdp", {}), ("torch_fsdp2", {})]
FULL = RunConfig(
    model=preset("2.7B", context_length=512), precision=Precision.BF16, attention="sdpa_flash", warmup=3, steps=10
)
SMALL = RunConfig(model=preset("tiny"), device="cpu", warmup=1, steps=3)


def full() -> list[RunConfig]:
    timed = cells(FULL, STRATEGIES, [2])
    return [*timed, *under("overlap", timed), *under("rank_memory", timed)]


def small() -> list[RunConfig]:
    timed = cells(SMALL, [("fsdp", {}), ("torch_fsdp2", {})], [2])
    return [*timed, *under("overlap", timed[:2]), *under("rank_memory", timed[:2])]


def study_tables(found: list[Cell], format: str) -> list[str]:
    return [*not_measured(found, format), *tables(found, format, *STEP_TABLES, *MEMORY_TABLES)]


def explain(found: list[Cell]) -> list[str]:
    notes = []
    for group in groups(found):
        notes += [*best_and_torchs(group), *reconciled(group), *_beside_fsdp2(group), *off_formula(group)]
    return [*notes, *on_a_cpu(found)]


def _beside_fsdp2(group: Sequence[RunRecord]) -> list[str]:
    steps = {row["strategy"]: row["step_s"] for row in parallel.steps(group)}
    peaks = {row["strategy"]: row["peak_allocated_bytes"] for row in parallel.volumes(group)}
    if not (steps.get("fsdp") and steps.get("torch_fsdp2")):
        return []
    text = f"fsdp takes {steps['fsdp'] / steps['torch_fsdp2']:.3f} of FSDP2's step"
    if peaks.get("fsdp") and peaks.get("torch_fsdp2"):
        text += f" and {peaks['fsdp'] / peaks['torch_fsdp2']:.3f} of its peak, {human(peaks['fsdp'], 'bytes')}"
    return [text]


def answer(found: list[Cell]) -> str:
    notes = []
    for group in groups(found):
        peaks = {row["strategy"]: row["peak_allocated_bytes"] for row in parallel.volumes(group)}
        steps = {row["strategy"]: row["step_s"] for row in parallel.steps(group)}
        for name in ("single", "ddp_bucketed", "zero1_flat", "fsdp", "torch_fsdp2"):
            if steps.get(name):
                peak = f" with a peak of {human(peaks[name], 'bytes')}" if peaks.get(name) else ""
                notes.append(f"{name} {human(steps[name], 's')}{peak}")
    return f"{place(found)}, a step on two ranks, and on one (single), takes {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "What does full sharding cost and save, beside data parallelism and ZeRO stage 1?",
    full,
    small,
    study_tables,
    explain,
    answer,
    figure="streams",
    drawn=has_streams,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
