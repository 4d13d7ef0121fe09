"""Sharded optimizer compared with ZeRO stage 1: bytes sent and step time.

Question: two ways to leave each rank the state of its part alone: owners of whole parameters that broadcast them after
    the step, or flat shards with reduce-scatter and all-gather (ZeRO stage 1). Which sends what, and holds what?
Method: medium in bf16 on 2 and 4 ranks, where there are as many devices: averaging alone, with owners, and flat shards.
    Bytes sent are counted where each collective starts, memory is read after each stage of the first step.
Output: bytes that a rank sends in a step, and memory by component, each next to its formula.
Why: Owners send 2Ψ(N−1)/N to average and Ψ(N−1)/N to broadcast. ZeRO stage 1 sends 2Ψ(N−1)/N in all, as averaging
    alone does. Both hold 1/N of the state, ZeRO's flat shards exactly, and 1/N of the averaged gradients too.

    python scripts/studies/zero_stage_1.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell, place
from _numerics import not_measured
from _parallel import MEMORY_TABLES, Told, cells, groups, off_formula, on_a_cpu, tables, under
from _study import Study, run

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.record import Row, RunRecord

STRATEGIES: list[Told] = [("ddp_bucketed", {}), ("ddp_bucketed+zero1", {}), ("zero1_flat", {})]
FULL = RunConfig(
    model=preset("medium", context_length=512), precision=Precision.BF16, attention="sdpa_flash", warmup=3, steps=10
)
SMALL = RunConfig(model=preset("tiny"), device="cpu", warmup=1, steps=3)


def full() -> list[RunConfig]:
    timed = cells(FULL, STRATEGIES, [2, 4])
    return [*timed, *under("rank_memory", timed)]


def small() -> list[RunConfig]:
    timed = cells(SMALL, STRATEGIES[1:], [2])
    return [*timed, *under("rank_memory", timed)]


def study_tables(found: list[Cell], format: str) -> list[str]:
    steps = ("steps", parallel.steps)
    return [*not_measured(found, format), *tables(found, format, *MEMORY_TABLES, steps)]


def explain(found: list[Cell]) -> list[str]:
    notes = []
    for group in groups(found):
        notes += [*_volumes(group), *off_formula(group)]
    return [*notes, *on_a_cpu(found)]


def _volumes(group: Sequence[RunRecord]) -> list[str]:
    rows = {(row["strategy"], row["ranks"]): row for row in parallel.volumes(group) if row["sent_bytes"]}
    steps = {(row["strategy"], row["ranks"]): row["step_s"] for row in parallel.steps(group)}
    notes = []
    for (name, ranks), row in rows.items():
        flat = rows.get(("zero1_flat", ranks))
        if flat is not None and name == "ddp_bucketed+zero1":
            more = row["sent_bytes"] / flat["sent_bytes"]
            notes.append(
                f"on {ranks} ranks a sharded optimizer ({name}) sends {more:.3f} times the bytes of ZeRO stage 1 "
                f"(zero1_flat), by formula {_formula(row) / _formula(flat):.3f}"
            )
            own, other = steps.get((name, ranks)), steps.get(("zero1_flat", ranks))
            if own and other:
                notes[-1] += f"; its step takes {own / other:.3f} times as long"
    return notes


def _formula(row: Row) -> float:
    return float(row["formula_sent_bytes"])


def answer(found: list[Cell]) -> str:
    notes = [sentence for group in groups(found) for sentence in _volumes(group)]
    return f"{place(found)}: {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "How does a sharded optimizer differ from ZeRO stage 1?",
    full,
    small,
    study_tables,
    explain,
    answer,
    figure="phases",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
