"""Memory saved and time added by sharding the optimizer's state.

Question: what does each of two ranks hold after building, forward, backward and the step, with sharding and without,
    and do the formulas give the same?
Method: medium and xl in fp32 on 2 ranks, batch 4 and context 256 each: averaged gradients alone, with whole-parameter
    owners of the state (ours and PyTorch's ZeroRedundancyOptimizer), and with flat shards (ZeRO stage 1); each timed,
    and apart from that what parameters, gradients and state take read after each stage of the first step.
Output: steps, and bytes by component and stage next to the formula: Ψ of parameters, Ψ of gradients, 2Ψ of state, or
    half of these bytes where they are split.
Why: Measured bytes can be trusted where a formula gives the same number, so each stands next to its formula.

    python scripts/studies/sharded_optimizer.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell, place
from _numerics import not_measured
from _parallel import MEMORY_TABLES, Told, cells, groups, off_formula, on_a_cpu, tables, under
from _study import Study, run

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.config import RunConfig, grid, preset
from cs_systems.core.units import human
from cs_systems.record import RunRecord

STRATEGIES: list[Told] = [
    ("ddp_bucketed", {}),
    ("ddp_bucketed+zero1", {}),
    ("zero1_flat", {}),
    ("ddp_bucketed+torch_zero", {}),
]
FULL = RunConfig(attention="sdpa_efficient", warmup=3, steps=10)
SMALL = RunConfig(model=preset("tiny"), device="cpu", warmup=1, steps=3)


def full() -> list[RunConfig]:
    bases = grid(FULL, size=("medium", "xl"), context_length=(256,))
    timed = [cell for base in bases for cell in cells(base, STRATEGIES, [2])]
    return [*timed, *under("rank_memory", timed)]


def small() -> list[RunConfig]:
    timed = cells(SMALL, STRATEGIES[1:3], [2])
    return [*timed, *under("rank_memory", timed)]


def study_tables(found: list[Cell], format: str) -> list[str]:
    steps = ("steps", parallel.steps)
    return [*not_measured(found, format), *tables(found, format, steps, *MEMORY_TABLES)]


def explain(found: list[Cell]) -> list[str]:
    notes = []
    for group in groups(found):
        notes += [*_saved(group), *off_formula(group)]
    return [*notes, *on_a_cpu(found)]


def _saved(group: Sequence[RunRecord]) -> list[str]:
    """Return sentences on the bytes of state saved against averaging alone, and on the time."""
    title = group[0].run_config.model.label
    state = {row["strategy"]: row for row in parallel.stages(group) if row["component"] == "optimizer state"}
    steps = {row["strategy"]: row["step_s"] for row in parallel.steps(group) if row["ranks"] > 1}
    plain = next((name for name in ("ddp_bucketed", "single") if name in state), None)
    notes = []
    for name, row in state.items():
        if plain is None or name in ("single", plain):
            continue
        saved = state[plain]["optimizer_bytes"] - row["optimizer_bytes"]
        cost = ""
        if steps.get(plain) and steps.get(name):
            cost = f", for {steps[name] / steps[plain] - 1:+.1%} of the step"
        notes.append(f"{title}, {name}: {human(saved, 'bytes')} less state on a rank than {plain}{cost}")
    return notes


def answer(found: list[Cell]) -> str:
    notes = [sentence for group in groups(found) for sentence in _saved(group) if "zero1_flat" in sentence]
    notes = notes or [sentence for group in groups(found) for sentence in _saved(group)]
    return f"{place(found)}: {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "What does sharding the optimizer's state save, and what does it cost?",
    full,
    small,
    study_tables,
    explain,
    answer,
    figure="phases",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
