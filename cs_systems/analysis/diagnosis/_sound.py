"""Rows of tables that rules can rely on: those with every column that a rule reads, of the right type."""

from __future__ import annotations

import math

from cs_systems.core.tables import Row, Tables

# The columns that rules read of each table. A record may come from any program: other rows are left out.
_TEXTS = {
    "gaps": ("cause",),
    "host_gaps": ("host",),
    "waits": ("call", "within"),
    "phases": ("phase", "family"),
    "families": ("family",),
    "kernels": ("kernel", "family"),
    "attention": ("part", "family"),
    "ranges": ("range",),
    "graph_breaks": ("reason",),
    "cost": ("phase",),
    "memory_phases": ("phase",),
    "memory_forecast": ("phase", "component"),
    "experiments": ("experiment", "instead", "stands_for"),
    "own_python": ("phase", "function", "place"),
    "unsampled": ("reason", "remedy"),
    "growth": ("quantity",),
    "padding": ("basis", "shape"),
    "whole_loop": ("kind",),
    "updates": ("optimizer",),
    "unused_gradients": ("first",),
    "repeated_calls": ("model",),
    "hooks": ("module",),
    "own_tools": ("tool",),
    "late_rank": ("work", "phase"),
    "loop_exchange": ("wrapper",),
}
_NUMBERS = {
    "steps": ("device", "wall_s"),
    "gaps": ("device", "time_s"),
    "host_gaps": ("time_s",),
    "waits": ("time_s", "calls_per_step"),
    "phases": ("time_s", "calls_per_step"),
    "families": ("time_s",),
    "kernels": ("time_s",),
    "attention": ("time_s",),
    "overlap": ("exposed_s",),
    "ranges": ("total_s",),
    "ranks": ("rank",),
    "graph_breaks": ("count",),
    "ceiling": ("peak_flops_per_s",),
    "memory_forecast": ("step", "peak_bytes"),
    "own_python": ("time_s", "share", "samples"),
    "slow_steps": ("steps", "median_s", "usual_s", "extra_s", "total_s", "sampled"),
    "garbage_collection": ("steps", "collections", "time_s", "in_steps", "longest_s", "total_s"),
    "growth": ("steps", "first", "last", "per_step"),
    "slow_start": ("steps", "timed", "each_s", "later_s", "extra_s", "total_s"),
    "padding": ("share", "steps"),
    "iterators": ("steps", "with_new"),
    "forward_operators": ("operators", "arithmetic_s"),
    "repeated_forward": ("backward_share",),
    "whole_loop": ("steps", "median_s", "total_s", "share"),
    "updates": (
        *("parameters", "steps", "again", "stale", "cleared", "missing", "zero"),
        *("compared_steps", "compared", "changed"),
    ),
    "unused_passes": ("passes", "unused"),
    "unused_gradients": ("parameters", "elements", "share"),
    "repeated_calls": ("steps", "of_steps", "calls", "used", "of_calls"),
    "hooks": ("steps", "first", "last", "per_step"),
    "anomaly_detection": ("passes", "with_detection"),
    "double_precision": ("parameters", "of_parameters", "flops", "flops_per_s", "float32_flops_per_s"),
    "own_tools": ("steps", "of_steps", "with_s", "total_s"),
    "loop_ranks": ("rank", "steps", "step_s", "waiting_s", "other_s"),
    "late_rank": ("rank", "share", "extra_share"),
    "loop_exchange": (
        *("transfer_share", "pairwise_share", "passes", "reduces", "early", "early_share"),
        *("small", "small_bytes", "small_share", "marked", "search_share", "marks_share"),
    ),
}
_MAY_BE_UNKNOWN = {
    "steps": ("busy_share",),
    "gaps": ("longest_s",),
    "phases": ("ceiling_share",),
    "overlap": ("share", "step_s", "transfer_s"),
    "cost": ("hardware_flops", "bytes"),
    "ranks": ("wait_s",),
    "experiments": ("time_s", "low_s", "high_s", "baseline_s"),
    "ceiling": ("peak_bytes_per_s",),
    "overhead": ("not_recorded_s",),
    "memory_phases": ("reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes"),
    "slow_steps": ("every", "place_share"),
    "outcome": ("skipped_steps", "optimizer_steps"),
    "own_tools": ("without_s",),
    "late_rank": ("batch_times", "received_times"),
    "loop_exchange": ("unused",),
}


def sound(tables: Tables) -> Tables:
    """Return the tables that rules read, with the rows that have every column that rules read of them."""
    names = {*_TEXTS, *_NUMBERS, *_MAY_BE_UNKNOWN}
    kept = {
        name: [row for row in rows if _is_sound(name, row)] if name in names else rows
        for name, rows in tables.items()
        if name in names or name == "ran"
    }
    return {name: rows for name, rows in kept.items() if rows}


def _is_sound(table: str, row: Row) -> bool:
    texts = (row.get(name) for name in _TEXTS.get(table, ()))
    numbers = [row.get(name) for name in _NUMBERS.get(table, ())]
    numbers += [v for name in _MAY_BE_UNKNOWN.get(table, ()) if (v := row.get(name)) is not None]
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers
    )
