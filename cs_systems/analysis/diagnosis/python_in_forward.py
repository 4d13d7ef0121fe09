"""Rule for a program's own Python inside forward or the loss: functions that compute with numbers, without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cs_systems.analysis.attribution.host_work import HostWork, host_work
from cs_systems.analysis.comparison.loop_findings import INNER_LINES, InnerLineRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.config import Phase

NOTABLE = 0.10  # share of the step
LEAST = 0.02  # share of the step; below it, a further function is not named
FEWEST = 5  # samples of the stack
WORKS = {"deepcopy", "save", "dump", "dumps", "savefig", "sleep", "fsync"}  # no operator on tensors is named so
PLAIN = HostWork(
    "computes without tensors",
    "compute it by operators on whole tensors, or once: keep what does not change in a buffer (register_buffer)",
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own functions without tensors inside the model's phases, by samples of the stack."""
    by_work: dict[HostWork, list[InnerLineRow]] = {}
    for row in INNER_LINES.of(evidence.tables):
        work = work_of(row) or (PLAIN if row["is_plain"] else None)
        if work is not None and not row["place"].startswith("<"):
            by_work.setdefault(work, []).append(row)
    longest = max(by_work, key=lambda each: sum(row["time_s"] for row in by_work[each]), default=PLAIN)
    rows = by_work.get(longest, [])
    return of_lines(rows, evidence, f"is Python {_where(rows, evidence)}, which {longest.words}", longest.remedy)


def work_of(row: InnerLineRow) -> HostWork | None:
    """Return the work of a line that calls one of WORKS; its operators on tensors are part of it."""
    return host_work(row["method"]) if row["method"] in WORKS else None


def _where(rows: Sequence[InnerLineRow], evidence: Evidence) -> str:
    """Return in words where the time is; backward is named if its share of the step is worth naming."""
    times_s: Counter[str] = Counter()
    for row in rows:
        times_s[row["phase"]] += row["time_s"]  # type: ignore[assignment]
    before_s, least_s = times_s[Phase.FORWARD] + times_s[Phase.LOSS], LEAST * (evidence.step_s or 0.0)
    is_after = times_s[Phase.LOSS] > MOSTLY * before_s
    if times_s[Phase.BACKWARD] < least_s:
        return "between the model and backward" if is_after else "inside the model"
    if before_s < least_s:
        return "inside backward"
    return "between the model and backward, and inside backward" if is_after else "inside forward and backward"


def of_lines(
    rows: Sequence[InnerLineRow],
    evidence: Evidence,
    what: str,
    remedy: str,
    notable: float = NOTABLE,
    *,
    is_known: bool = True,
) -> Diagnosis | None:
    """Return the diagnosis of own lines inside the model's phases, with the places of most of their time.

    notable: the least share of the step. is_known: a remedy removes at most their time, which gives the bound.
    """
    step_s = evidence.step_s
    if not evidence.is_loop or step_s is None or sum(row["samples"] for row in rows) < FEWEST:
        return None
    lasted_s = min(step_s, sum(row["time_s"] for row in rows))
    if lasted_s < notable * step_s:
        return None
    cause = f"{lasted_s / step_s:.0%} of the step {what}: {places(rows, step_s)}"
    if is_known:
        return Diagnosis(cause, remedy, step_s, step_s - lasted_s, evidence=tuple(rows))
    return Diagnosis(cause, remedy, step_s, evidence=tuple(rows), takes=lasted_s)


def places(rows: Sequence[InnerLineRow], step_s: float, most: int = 2) -> str:
    """Return the functions with the most time, each with its line of most time and its share of the step."""
    by_function: dict[tuple[str, str], list[InnerLineRow]] = {}
    for row in rows:
        by_function.setdefault((row["function"], row["place"].partition(":")[0]), []).append(row)
    times_s = {key: sum(row["time_s"] for row in alike) for key, alike in by_function.items()}
    named: list[str] = []
    for key in sorted(times_s, key=lambda each: -times_s[each])[:most]:
        if named and times_s[key] < LEAST * step_s:
            break
        line = max(by_function[key], key=lambda row: row["time_s"])
        where = f"{key[0]}() at {line['place']}" if key[0] else line["place"]
        named.append(f"{where} ({times_s[key] / step_s:.0%})")
    return ", ".join(named)


RULE = Rule(find)
