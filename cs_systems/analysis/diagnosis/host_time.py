"""Rule for time of the host: the GPU is idle while the host makes no CUDA call, for over a millisecond at a time."""

from __future__ import annotations

from collections.abc import Iterable

from cs_systems.analysis.attribution.host_gaps import NO_CALL, HostGapRow
from cs_systems.analysis.attribution.host_work import HostWork, host_work
from cs_systems.analysis.attribution.tables import host_gaps
from cs_systems.analysis.comparison.loop_findings import INNER_LINES, InnerLineRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.analysis.replay import HostScaled
from cs_systems.core.range_names import LOADER
from cs_systems.core.tables import Row
from cs_systems.core.units import human

MOST_NAMED = 2
FEWEST = 10  # samples of the stack in a function that is named
NO_CALLS = "makes no CUDA call"
REMEDY = "move this work out of the step, or into another process"
ON_CPU = (
    "if it computes with tensors on the CPU, make them on the GPU (device=), or once before the loop "
    f"(register_buffer); else {REMEDY}"
)
UNNAMED = "find what the program does there: record with with_stack=True, or mark it by record_function"
UNNAMED_PLAIN = "find what the program does there: mark its parts with NVTX ranges"  # for a program without PyTorch


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps without a CUDA call, and the work of the host in them; waiting for a batch has its own rule."""
    step_s, idle_s = evidence.step_s, evidence.silent_s
    rows = [row for row in host_gaps.of(evidence.tables) if not row["host"].startswith(LOADER)]
    silent_s = max(0.0, idle_s - evidence.input_s)
    if step_s is None or not silent_s or not rows:
        return None
    named = [row for row in rows if row["host"] != NO_CALL]
    longest = max(row["longest_s"] for row in rows)
    whole_s = sum(row["time_s"] for row in rows)
    work = _work(named, whole_s)
    cause = (
        f"{silent_s / step_s:.0%} of the step the GPU is idle while the host {work.words if work else NO_CALLS}, for "
        f"up to {human(longest, 's')}"
    )
    function = _function_in(named[0], named[0]["time_s"] / whole_s * silent_s, evidence) if named else None
    parts = [f"{row['time_s'] / whole_s:.0%} in {row['host']}" for row in named[:MOST_NAMED]]
    if function is not None:
        parts[0] += f", mostly in {function}"
    where = ("; " if function else ", ").join(parts)
    evidence_rows: tuple[Row, ...] = tuple(rows)
    of_named = ON_CPU if function else REMEDY if named else None
    remedy = work.remedy if work else of_named or (UNNAMED if evidence.uses_torch else UNNAMED_PLAIN)
    is_one = bool(named) and named[0]["time_s"] >= MOSTLY * whole_s  # else the replay of one range tells nothing of all
    is_replaced = work is not None and work.is_replaced
    return Diagnosis(
        cause,
        remedy,
        step_s,
        None if is_replaced else step_s - silent_s,
        evidence=evidence_rows,
        where=where,
        change=HostScaled(0.0, named[0]["host"]) if is_one and not is_replaced else None,
        takes=min(step_s, silent_s) if is_replaced else None,
    )


def _function_in(row: HostGapRow, silent_s: float, evidence: Evidence) -> str | None:
    """Return the own function in which most of a phase's idle time must be, with its line; None if none is known.

    silent_s: the idle time of a step in this phase. Two parts of a phase overlap by what they exceed it together.
    """
    alike: dict[tuple[str, str], list[InnerLineRow]] = {}
    for inner in INNER_LINES.of(evidence.tables):
        if inner["phase"] == row["host"].partition(", ")[0] and inner["function"]:
            alike.setdefault((inner["function"], inner["place"].partition(":")[0]), []).append(inner)
    for (function, _), lines in alike.items():
        time_s, samples = sum(each["time_s"] for each in lines), sum(each["samples"] for each in lines)
        overlap_s = time_s + silent_s - (evidence.phase_s(row["host"]) or 0.0)
        if samples >= FEWEST and overlap_s > silent_s / 2:
            return called_at(function, max(lines, key=lambda each: each["time_s"])["place"], None)
    return None


def _work(rows: Iterable[HostGapRow], whole_s: float) -> HostWork | None:
    """Return the kind of work that takes most of the time; None if no name shows it."""
    times: dict[HostWork, float] = {}
    for row in rows:
        if work := host_work(row["host"]):
            times[work] = times.get(work, 0.0) + row["time_s"]
    most = max(times, key=lambda work: times[work], default=None)
    return most if most is not None and times[most] >= MOSTLY * whole_s else None


RULE = Rule(find)
