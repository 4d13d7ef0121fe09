"""Tables of a profile: the columns to show, their headings and captions, and the step drawn beside means of all."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.core import units
from cs_systems.record import Row

# table → its columns for a person, with their headings; CSV has all columns, under their own names.
SHOWN = {
    "steps": {
        "step": "step", "device": "GPU", "kernels": "kernels", "wall_s": "wall clock", "event_s": "events",
        "gpu_span_s": "GPU span", "kernel_s": "sum of kernels", "busy_share": "GPU busy", "residual_s": "wall − span",
    },
    "ratio": {
        "measure": "measured by",
        "forward_s": "forward", "backward_s": "backward", "backward_to_forward": "backward : forward",
    },
    "phases": {
        "phase": "phase", "family": "family", "calls_per_step": "calls", "time_s": "time", "share": "share of time",
        "flops": "work", "achieved_flops_per_s": "rate", "achieved_bytes_per_s": "traffic", "ceiling": "bound by",
        "ceiling_share": "of ceiling",
    },
    "families": {"family": "family", "calls_per_step": "calls", "time_s": "time", "share": "share of time"},
    "kernels": {
        "kernel": "kernel", "calls_per_step": "calls", "time_s": "time", "mean_s": "mean", "share": "share",
        "grid": "grid", "registers": "regs", "shared_bytes": "shared",
    },
    "layers": {
        "layer": "layer", "forward_s": "forward", "backward_s": "backward", "calls_per_step": "calls",
        "time_s": "time", "share": "share of time",
    },
    "parts": {
        "part": "part of a block", "forward_s": "forward", "backward_s": "backward", "calls_per_step": "calls",
        "time_s": "time", "share": "share of time",
    },
    "attention": {
        "phase": "phase", "part": "part", "family": "family", "calls_per_step": "calls", "time_s": "time",
        "share": "of attention",
    },
    "gaps": {
        "device": "GPU", "cause": "cause", "gaps_per_step": "gaps", "time_s": "time", "share": "of wall time",
        "longest_s": "longest",
    },
    "overlap": {
        "device": "GPU", "collectives_per_step": "collectives", "communication_s": "communication",
        "hidden_s": "hidden", "exposed_s": "exposed", "hidden_share": "share hidden", "share": "exposed of wall time",
    },
    "ranges": {
        "phase": "phase", "range": "range", "calls_per_step": "calls", "total_s": "CPU time", "self_s": "self time",
        "share": "of wall time",
    },
    "range_tree": {
        "range": "range", "calls_per_step": "kernels", "time_s": "time", "self_s": "self time",
        "share": "share", "idle_s": "idle", "achieved_flops_per_s": "rate",
    },
    "operators": {
        "operator": "operator", "shapes": "shapes", "calls_per_step": "calls", "device_self_s": "GPU self",
        "device_s": "GPU", "share": "share", "host_self_s": "CPU self", "host_s": "CPU", "host_share": "of wall",
        "achieved_flops_per_s": "rate", "caller": "called in",
    },
}  # fmt: skip
# Columns that a narrow terminal may drop, in this order.
OPTIONAL = (
    *("device_s", "host_s", "host_share", "caller", "host_self_s", "registers", "shared_bytes", "mean_s", "residual_s"),
    *("self_s", "flops", "achieved_bytes_per_s", "achieved_flops_per_s", "gpu_span_s", "calls_per_step", "share"),
)
# Tables cut to --top rows, with the number by default.
LONG = {"kernels": 10, "steps": 10, "ranges": 10, "layers": 100, "range_tree": 30, "operators": 15}
CAPTIONS = {
    "steps": "steps: wall clock, GPU span and kernel time",
    "ratio": "backward time : forward time, per step (wall time: of the CPU's ranges)",
    "phases": "phases by kernel family, per step",
    "families": "kernel families, per step",
    "kernels": "kernels by time, per step",
    "layers": "layers and named modules, per step",
    "parts": "parts of a transformer block, sum over all blocks, per step",
    "attention": "inside attention, per step",
    "gaps": "GPU idle time by cause, per step",
    "overlap": "communication during computation (hidden) and alone (exposed), per step",
    "ranges": "ranges by CPU time, per step",
    "range_tree": "ranges by the time of the kernels launched in them, nested, per step",
    "operators": "operators by input shapes, with the kernels launched in them, per step",
}


def has_something(name: str, rows: Sequence[Row]) -> bool:
    """Return whether a table is worth showing: a single GPU, for example, has no communication."""
    return bool(rows) and (name != "overlap" or any(row["communication_s"] for row in rows))


def says_something(column: str, rows: Sequence[Row]) -> bool:
    """Return whether a column is worth showing: not if it is unknown throughout or numbers the only device."""
    values = {row[column] for row in rows}
    return values != {None} and not (column == "device" and len(values) == 1)


def mean_step_s(rows: Sequence[Row]) -> float | None:
    """Return the mean wall time of the recorded steps, from the rows of `steps`; None without any."""
    walls = {row["step"]: row["wall_s"] for row in rows}  # one row for each device
    return sum(walls.values()) / len(walls) if walls else None


def drawn_step(rows: Sequence[Row]) -> str:
    """Return the step that the page's timeline begins with, and the mean of all, from `steps`; "" if there is no other.

    It is the step with the median wall time (the shorter of two), as in `traces.timeline.median_step`.
    """
    walls = sorted({(row["wall_s"], row["step"]) for row in rows if row["kernels"]})
    mean_s, steps = mean_step_s(rows), len({row["step"] for row in rows})
    if not walls or mean_s is None or steps == 1:
        return ""
    wall_s, number = walls[(len(walls) - 1) // 2]
    opening = f"opens at step {number}, which took {units.human(wall_s, 's')}"
    return f"{opening}; the tables are means over {steps} steps of {units.human(mean_s, 's')} on average"
