"""Rule for time of the host: the GPU is idle while the host makes no CUDA call, for over a millisecond at a time."""

from __future__ import annotations

from collections.abc import Iterable

from cs_systems.analysis.attribution.host_gaps import NO_CALL, HostGapRow
from cs_systems.analysis.attribution.host_work import HostWork, host_work
from cs_systems.analysis.attribution.tables import host_gaps
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.replay import HostScaled
from cs_systems.core.range_names import LOADER
from cs_systems.core.tables import Row
from cs_systems.core.units import human

MOST_NAMED = 2
NO_CALLS = "makes no CUDA call"
REMEDY = "move this work out of the step, or into another process"
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
    where = ", ".join(f"{row['time_s'] / whole_s:.0%} in {row['host']}" for row in named[:MOST_NAMED])
    evidence_rows: tuple[Row, ...] = tuple(rows)
    remedy = work.remedy if work else REMEDY if named else UNNAMED if evidence.uses_torch else UNNAMED_PLAIN
    is_one = bool(named) and named[0]["time_s"] >= MOSTLY * whole_s  # else the replay of one range tells nothing of all
    change = HostScaled(0.0, named[0]["host"]) if is_one else None
    return Diagnosis(cause, remedy, step_s, step_s - silent_s, evidence=evidence_rows, where=where, change=change)


def _work(rows: Iterable[HostGapRow], whole_s: float) -> HostWork | None:
    """Return the kind of work that takes most of the time; None if no name shows it."""
    times: dict[HostWork, float] = {}
    for row in rows:
        if work := host_work(row["host"]):
            times[work] = times.get(work, 0.0) + row["time_s"]
    most = max(times, key=lambda work: times[work], default=None)
    return most if most is not None and times[most] >= MOSTLY * whole_s else None


RULE = Rule(find)
