"""Table of a profile by operator and input shapes: host time, time of the launched kernels, FLOPs, callers.

A kernel belongs to the operators that were open on the launching thread when its launch began. The FLOPs are those of
`formulas.operator_flops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.places import NOTHING_OPEN, main_timeline
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.tables import NO_COSTS, Costs
from cs_systems.core.range_names import general
from cs_systems.core.tables import Column, Row, table
from cs_systems.core.units import percent
from cs_systems.formulas.operator_flops import MAY_HIDE, Work, operator_work
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Ints, Ranges, distinct
from cs_systems.readers.forms.operators import Operators, of_ranges, shapes_text
from cs_systems.readers.forms.trace import Trace, steps_of


class OperatorRow(TypedDict):
    """Operator with the shapes of its inputs, in `operators`.

    Columns of kernels are None in a trace without kernels. Self time excludes nested operators.
    """

    operator: Annotated[str, Column(beside=60)]
    shapes: str | None  # None if not recorded
    calls_per_step: Annotated[float, Column("calls", drop=8)]
    host_s: Annotated[float, Column("CPU", drop=2)]
    host_self_s: Annotated[float, Column("CPU self", drop=5)]
    host_share: Annotated[float, Column("of wall", drop=3)]  # self time as a share of the step's wall time
    kernels_per_step: float | None  # launched by the operator itself
    device_s: Annotated[float | None, Column("GPU", drop=1)]  # time of the kernels launched in it
    device_self_s: Annotated[float | None, Column("GPU self")]
    share: Annotated[float | None, Column(drop=9)]  # self time as a share of all kernel time
    flops: float | None  # None if no formula is known
    formula: str | None
    # By the kernels' time; without kernels, by the host's.
    achieved_flops_per_s: Annotated[float | None, Column("rate", drop=6)]
    # The innermost range around the operator; of several, the one with the most time.
    caller: Annotated[str | None, Column("called in", beside=60, drop=4)]
    callers: int


def operators_of(trace: Trace) -> Operators | None:
    """Return the operators that the profiler recorded, or that emit_nvtx marked; None if there are none."""
    return trace.operators or of_ranges(trace.ranges)


def _by_host(trace: Trace) -> bool:
    """Return whether operators computed on the host; with a GPU, their host time is only that of launches."""
    return not trace.kernels and not trace.devices


@table(
    "operators by input shapes, with the kernels launched in them, per step",
    "operator shapes calls_per_step device_self_s device_s share host_self_s host_s host_share achieved_flops_per_s "
    "caller",
    most=15,
)
def operators(profile: Profile, costs: Costs = NO_COSTS) -> list[OperatorRow]:
    """Return one row for each operator and input shapes, per step, the longest first: by kernel time, else by host."""
    trace, steps, by_host = profile.trace, len(profile.steps), _by_host(profile.trace)
    if (ops := operators_of(trace)) is None:
        return []
    in_step = steps_of(ops.start_s, profile.steps)[1]
    kernels, kernel_s = _launched(profile, ops)
    device_s, host_s = ops.inclusive(kernel_s), ops.end_s - ops.start_s
    works = [_work(ops, code) for code in range(len(ops.signature.values))]
    group, names = _grouped(ops)
    caller, callers = _callers(ops, trace.ranges)
    # an operator nested in one of the same group is included in the outer one's time
    outer = in_step & ~ops.within_equal(group)

    def summed(values: Floats, where: Ints) -> list[float]:
        sums: list[float] = (np.bincount(group[where], values[where], len(names)) / steps).tolist()
        return sums

    every, outermost = np.flatnonzero(in_step), np.flatnonzero(outer)
    flops = np.array([np.nan if work is None else work.flops for work in works])[ops.signature.codes]
    columns = {
        "calls_per_step": summed(np.ones(len(ops)), every),
        "host_s": summed(host_s, outermost),
        "host_self_s": summed(ops.exclusive(host_s), every),
        "kernels_per_step": summed(kernels, every),
        "device_s": summed(device_s, outermost),
        "device_self_s": summed(kernel_s, every),
        "flops": summed(flops, outermost),
    }
    called = _most(group[every], caller[every], (device_s if trace.kernels else host_s)[every], len(names))
    formulas = dict(zip(ops.signature.codes.tolist(), group.tolist(), strict=True))
    formula = {formulas[code]: work.formula for code, work in enumerate(works) if work and code in formulas}
    wall_s = sum(step.end_s - step.start_s for step in profile.steps) / steps
    rows: list[OperatorRow] = []
    for number, ((name, shapes), (by, count)) in enumerate(zip(names, called, strict=True)):
        row = {column: values[number] for column, values in columns.items()}
        if not row["calls_per_step"]:
            continue
        known = None if np.isnan(row["flops"]) else row["flops"]
        took_s = row["host_s"] if by_host else row["device_s"]
        rows.append(
            {
                "operator": name,
                "shapes": shapes,
                "calls_per_step": row["calls_per_step"],
                "host_s": row["host_s"],
                "host_self_s": row["host_self_s"],
                "host_share": row["host_self_s"] / wall_s,
                "kernels_per_step": row["kernels_per_step"] if trace.kernels else None,
                "device_s": row["device_s"] if trace.kernels else None,
                "device_self_s": row["device_self_s"] if trace.kernels else None,
                "share": row["device_self_s"] / profile.time_s * steps if trace.kernels else None,
                "flops": known,
                "formula": formula.get(number),
                "achieved_flops_per_s": known / took_s if known and took_s else None,
                "caller": None if by == UNKNOWN else callers[by],
                "callers": count,
            }
        )
    return sorted(rows, key=lambda row: (-(row["device_self_s"] or 0.0), -row["host_self_s"]))


def flops_of_outermost(ops: Operators) -> Floats:
    """Return the FLOPs of each operator with a formula; 0 for others, and for operators inside one with a formula."""
    works = [_work(ops, code) for code in range(len(ops.signature.values))]
    flops = np.array([0.0 if work is None else float(work.flops) for work in works])[ops.signature.codes]
    return np.where(ops.within(flops > 0), 0.0, flops)


def _work(ops: Operators, code: int) -> Work | None:
    name, shapes, arguments = ops.signature.values[code]
    return None if shapes is None else operator_work(name, shapes, arguments)


def _launched(profile: Profile, ops: Operators) -> tuple[Floats, Floats]:
    """Return (number of kernels, their time) that each operator itself launched in the steps."""
    kernels = profile.trace.kernels
    which = np.flatnonzero(steps_of(kernels.launched_s, profile.steps)[1] & ~np.isnan(kernels.launch_start_s))
    by = ops.at(kernels.thread[which], kernels.launch_start_s[which])
    which, by = which[by != UNKNOWN], by[by != UNKNOWN]
    times = kernels.end_s[which] - kernels.start_s[which]
    count, time_s = (np.bincount(by, values, len(ops)).astype(np.float64) for values in (np.ones(len(by)), times))
    return count, time_s


def _grouped(ops: Operators) -> tuple[Ints, list[tuple[str, str | None]]]:
    """Return the number of each operator's row, and the (name, shapes) of each row."""
    numbers: dict[tuple[str, str | None], int] = {}
    of_signature = [
        numbers.setdefault((name, None if shapes is None else shapes_text(shapes)), len(numbers))
        for name, shapes, _ in ops.signature.values
    ]
    return np.array(of_signature, np.int64)[ops.signature.codes], list(numbers)


def _callers(ops: Operators, ranges: Ranges) -> tuple[Ints, list[str]]:
    """Return for each operator the innermost range that was open when it began, as an index in the list of names.

    It is a range of the operator's thread; where none was open there, of the main thread. UNKNOWN if there is neither.
    """
    main, names = main_timeline(ranges), dict[str, int]()
    found = np.full(len(ops), UNKNOWN)
    for thread in np.unique(ops.thread).tolist():
        mine = np.flatnonzero(ops.thread == thread)
        line = ranges.timelines.get(thread, NOTHING_OPEN)
        first, codes = distinct(line.index(ops.start_s[mine]), main.index(ops.start_s[mine]))
        here, there = line.index(ops.start_s[mine[first]]), main.index(ops.start_s[mine[first]])
        opened = [line.stacks[own] or main.stacks[other] for own, other in zip(here, there, strict=True)]
        of_pair = [names.setdefault(general(stack[-1]), len(names)) if stack else UNKNOWN for stack in opened]
        found[mine] = np.array(of_pair)[codes]
    return found, list(names)


def _most(group: Ints, caller: Ints, time_s: Floats, groups: int) -> list[tuple[int, int]]:
    """Return for each group (the caller with the most time, the number of callers); (UNKNOWN, 0) without any."""
    known = caller != UNKNOWN
    group, caller, time_s = group[known], caller[known], time_s[known]
    found = [(UNKNOWN, 0)] * groups
    if not len(group):
        return found
    first, codes = distinct(group, caller)
    total = np.bincount(codes, time_s)
    counts = np.bincount(group[first], minlength=groups)
    for pair in np.argsort(total, kind="stable").tolist():  # the last assignment wins
        number = int(group[first[pair]])
        found[number] = int(caller[first[pair]]), int(counts[number])
    return found


MOST = 50  # rows that a record and a page hold


def largest(profile: Profile, costs: Costs = NO_COSTS) -> tuple[list[OperatorRow], list[str]]:
    """Return (rows, notes) of the operators with the most time, for a record and a page."""
    rows = operators(profile, costs)
    said = notes(profile, rows)
    return rows[:MOST], [*said, f"{len(rows) - MOST} more operators"] if rows[MOST:] else said


def notes(profile: Profile, rows: Sequence[Row]) -> list[str]:
    """Return the notes under the table: what an operator's times include, and what is missing in the trace."""
    trace = profile.trace
    if not rows:
        return [_why_nothing(trace)]
    said = ["self time is without the operators inside; rows of nested operators must not be added"]
    if trace.operators is None:
        said.append(f"{trace.profiler} records no operators: these are the ranges of {_EMIT}")
    if trace.kernels:
        share = sum(row["share"] for row in rows)
        said.append(f"{percent(share)} of the kernel time was launched in an operator")
    if all(row["shapes"] is None for row in rows):
        said.append(
            "input shapes were not recorded: the rows are by name, without FLOPs; "
            f"record with {_RECORD if trace.knows_operators else f'{_EMIT}(record_shapes=True)'}"
        )
    elif any(row["flops"] for row in rows):
        said.append("FLOPs: model FLOPs by input shapes; causal attention counts half; unfused scores count in full")
        if any(row["formula"] and row["formula"].endswith(MAY_HIDE) for row in rows):
            said.append("attention counts in full where the trace does not hold what its mask hides (column formula)")
        if _by_host(trace):
            said.append("rates are by the host's time: right for operators that compute on the CPU")
    return said


_RECORD, _EMIT = "torch.profiler.profile(record_shapes=True)", "torch.autograd.profiler.emit_nvtx"


def _why_nothing(trace: Trace) -> str:
    if (ops := operators_of(trace)) is not None:
        return f"none of the {len(ops)} operators in the trace began in a step"
    if not trace.knows_operators:
        run = f"run the steps in {_EMIT}(record_shapes=True)"
        return f"{trace.profiler} records no operators; {run}, or record with torch.profiler"
    return "the trace holds no operators; record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
