"""Cells and tables that the studies of parallel strategies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from _cells import Cell
from _study import row_table

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.config import RunConfig
from cs_systems.core.units import human
from cs_systems.record import Row, RunRecord

STEPS, MEMORY_STEPS = 3, 2  # steps that are recorded
Told = tuple[str, dict[str, Any]]  # strategy → the config's fields that it needs


def cells(base: RunConfig, strategies: Iterable[Told], worlds: Sequence[int]) -> list[RunConfig]:
    """Return the configs of the baseline on one rank and of each strategy on each number of ranks."""
    return [base, *(replace(base, strategy=s, world_size=n, **more) for n in worlds for s, more in strategies)]


def under(profiler: str, configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Return the same configs under a profiler.

    Memory is recorded from the first step on, because it allocates optimizer state.
    """
    if profiler == "rank_memory":
        return [replace(c, profiler=profiler, warmup=0, steps=MEMORY_STEPS, rounds=1) for c in configs]
    return [replace(c, profiler=profiler, steps=STEPS, rounds=1) for c in configs]


def has_streams(cell: Cell) -> bool:
    """Return True if a step was recorded, so that its streams can be drawn."""
    return bool(cell.record.results.get("streams"))


def groups(cells: Sequence[Cell]) -> list[list[RunRecord]]:
    """Return the training cells' records, in groups that differ in strategy and ranks alone."""
    of_training = [cell.record for cell in cells if cell.record.config["workload"] == "train_step"]
    return list(parallel.groups(of_training).values())


def tables(
    cells: Sequence[Cell], format: str, *asked: tuple[str, Callable[[Sequence[RunRecord]], list[Row]]]
) -> list[str]:
    """Return a table of each group for each (caption, rows of a group), without columns of unknowns."""
    made = []
    for group in groups(cells):
        config = group[0].run_config
        title = f"{config.model.label}, {config.precision.value}, batch {config.batch_size} a rank, context "
        title += str(config.tokens_per_sequence)
        for caption, rows_of in asked:
            rows = rows_of(group)
            known = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)] if rows else []
            notes = parallel.disturbance(group) if rows_of is parallel.steps else []
            shown = [{name: _share(name, row[name]) for name in known} for row in rows]
            made += row_table(shown, f"{title}: {caption}", format, notes)
    return made


def _share(name: str, value: Any) -> Any:
    shares = ("efficiency", "of_step", "exposed", "hidden", "off")
    return f"{value:.1%}" if name in shares and value is not None else value


STEP_TABLES = (
    (
        "steps; communication: by the clock, after backward until gradients are averaged, waiting included; exposed, "
        "hidden: communication alone and beside computation, as shares of a traced step",
        parallel.steps,
    ),
    (
        "communication; by difference: to the step of a rank alone; communication: in the traced step, of which in "
        "trace is exposed",
        parallel.communication,
    ),
    ("why a step is longer than alone", parallel.differences),
)
MEMORY_TABLES = (
    ("bytes sent and memory, of a rank", parallel.volumes),
    ("held after each stage of the first step", parallel.stages),
)


def fastest(group: Sequence[RunRecord]) -> str:
    """Return the shortest step of this package's strategies, PyTorch's and one rank alone, as part of a sentence."""
    rows = parallel.steps(group)
    alone = [row for row in rows if row["ranks"] == 1]
    several = [row for row in rows if row["ranks"] > 1]
    own = [row for row in several if not row["strategy"].startswith("torch_")]
    torchs = [row for row in several if row["strategy"].startswith("torch_")]
    best = [min(found, key=lambda row: float(row["step_s"])) for found in (own, torchs, alone) if found]
    named = [f"{human(row['step_s'], 's')} ({row['strategy']})" for row in best]
    title = f"{group[0].run_config.model.label} {group[0].run_config.precision.value}"
    return f"a step of {title} takes at least {', '.join(named)}" if own else ""


def best_and_torchs(group: Sequence[RunRecord]) -> list[str]:
    """Return a sentence on our and PyTorch's fastest strategy on the most ranks, and the time each exposes."""
    rows = [row for row in parallel.communication(group) if row["by_difference_s"] is not None]
    if not rows:
        return parallel.disturbance(group)
    most = max(row["ranks"] for row in rows)
    own = [row for row in rows if row["ranks"] == most and not row["strategy"].startswith("torch_")]
    torchs = [row for row in rows if row["ranks"] == most and row["strategy"].startswith("torch_")]
    notes = [_exposed(min(found, key=_longer)) for found in (own, torchs) if found]
    between = ""
    if own and torchs:
        gained = min(map(_longer, torchs)) - min(map(_longer, own))
        word = "less" if gained >= 0 else "more"
        between = f"; ours {human(abs(gained), 's')} {word}"
    return [f"on {most} ranks the smallest increase over one rank: {', '.join(notes)}{between}"]


def _longer(row: Row) -> float:
    return float(row["by_difference_s"])


def _exposed(row: Row) -> str:
    return f"{row['strategy']} by {human(row['by_difference_s'], 's')} ({row['of_step']:.1%} of its step)"


def waiting(group: Sequence[RunRecord]) -> list[str]:
    """Return sentences on the time in collectives, and the fraction of it spent waiting."""
    notes = []
    for row in parallel.communication(group):
        if row["waiting_s"] is not None and row["transfer_s"]:
            whole = row["waiting_s"] + row["transfer_s"]
            notes.append(
                f"{row['strategy']}: a rank is in its collectives for {human(whole, 's')} of a step, "
                f"{row['waiting_s'] / whole:.0%} of that waiting for a straggler"
            )
    return notes


def reconciled(group: Sequence[RunRecord]) -> list[str]:
    """Return sentences that split a step's extra time into causes, for each recorded strategy."""
    notes = []
    for row in parallel.differences(group):
        parts = {
            "exposed": row["exposed_s"],
            "slower computing": row["slower_compute_s"],
            "idling": row["waits_longer_s"],
        }
        listed = ", ".join(f"{name} {_signed(part)}" for name, part in parts.items())
        of_both = f"{_signed(row['difference_s'])} over one rank, {_signed(row['traced_difference_s'])} in the traces"
        notes.append(f"{row['strategy']}: {of_both}: {listed}")
    return notes


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{human(abs(seconds), 's')}"


def off_formula(group: Sequence[RunRecord]) -> list[str]:
    """Return sentences with the largest difference of measured bytes from the formulas."""
    rows = [row for row in parallel.stages(group) if row["off"] is not None]
    notes = []
    if rows:
        worst = max(rows, key=lambda row: float(row["off"]))
        notes.append(
            f"parameters, gradients and state of a rank are within {worst['off']:.2%} of the formula in "
            f"{len(rows)} components; the largest deviation is that of {worst['component']} of {worst['strategy']}"
        )
    sent = [row for row in parallel.volumes(group) if row.get("sent_bytes") and row.get("formula_sent_bytes")]
    if sent:
        off = max(abs(row["sent_bytes"] / row["formula_sent_bytes"] - 1) for row in sent)
        notes.append(f"bytes sent, counted where ours send, are within {off:.2%} of the formula in {len(sent)} cells")
    return notes


def on_a_cpu(cells: Sequence[Cell]) -> list[str]:
    ran_on = {cell.record.environment.device for cell in cells if cell.measured and cell.record.environment}
    if ran_on != {"cpu"}:
        return []
    return ["gloo ranks share a CPU's cores, so the exposed and hidden times do not apply to GPUs"]
