"""Diagnoses of lost time or memory in a step: the cause, the remedy, and the gain as far as it is known.

A rule is a module that exports one constant, `RULE`; the file's name, with dashes, is the code of its diagnoses. A rule
reads the numbers of an `Evidence`, from records, a trace or a snapshot, and returns None if they do not show its cause.
`apply_rules` asks every rule about one step; `diagnose` answers for a run, in which cells may have measured each
other's remedies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.diagnosis._findings import (
    DIAGNOSES,
    MOST,
    NO_ANSWER,
    WORTH,
    Answer,
    Diagnosis,
    DiagnosisRow,
    Expected,
    Rule,
    Unknown,
    ranked,
)
from cs_systems.config import RunConfig, describe, same_fields
from cs_systems.core import plugins

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis._evidence import Evidence
    from cs_systems.record import RunRecord

__all__ = [
    "DIAGNOSES",
    "MOST",
    "NO_ANSWER",
    "WORTH",
    "Answer",
    "Diagnosis",
    "DiagnosisRow",
    "Expected",
    "Rule",
    "Unknown",
    "apply_rules",
    "diagnose",
    "without_options",
]
# A loop's rest keeps at least this share without the cause, and becomes shorter by up to this share of the cause. Of
# its first COLD_S at least a third remains, but no more goes than the cause takes: what a cause leaves in the caches
# slows down calls of a few µs.
FASTER_REST, OF_CAUSE, OF_COLD, COLD_S = 0.9, 0.05, 1 / 3, 3e-3
AFTER_HOST = "then, when the GPU no longer waits for the host"
_OPTIONS = re.compile(r" \(--[^();]*\)|; --[^();]*(?=\))")  # options in parentheses, alone or after PyTorch's own names


def apply_rules(evidence: Evidence) -> Answer:
    """Return the findings of all rules for the numbers of one step, the largest cause first."""
    if evidence.is_empty:
        return Answer(unknowns=evidence.unknowns, not_judged=evidence.not_judged)
    from cs_systems.analysis.diagnosis._longest import longest_line
    from cs_systems.analysis.diagnosis._plan import planned
    from cs_systems.analysis.diagnosis._unseen import unseen

    found, unknowns = find_all(evidence)
    if evidence.replay is not None:
        found = planned(found, evidence.replay, evidence.busy_s or 0.0)
    causes = ranked(found)
    if not unknowns and all(one.is_outside for one in causes) and (question := unseen(evidence)):
        unknowns = [question]
    return Answer(
        causes,
        (*evidence.unknowns, *unknowns),
        evidence.judged,
        evidence.not_judged,
        longest=longest_line(evidence),
        least=evidence.least or WORTH,
    )


def find_all(evidence: Evidence) -> tuple[list[Diagnosis], list[str]]:
    """Return (the diagnoses of all rules, what they cannot tell), without a replay of the remedies."""
    takes_options = evidence.config is not None and not evidence.is_loop
    found: list[Diagnosis] = []
    unknowns = list[str]()
    for name in plugins.names("diagnosis"):
        rule: Rule = plugins.get("diagnosis", name)
        is_second = rule.shortens_kernels and evidence.is_host_bound
        judged = evidence.of_device if is_second else evidence
        match rule.find(judged) if judged is not None else None:
            case Diagnosis() as one:
                one = _bounded(one, evidence)
                remedy = one.remedy if takes_options else without_options(one.remedy)
                subject = "" if one.is_of_recording else one.subject or evidence.subject
                code = name.replace("_", "-")
                if is_second:
                    one = replace(one, cause=one.cause.replace("of the step", "of the kernels' time"), then=AFTER_HOST)
                known = replace(
                    one,
                    remedy=remedy,
                    subject=subject,
                    code=code,
                    refines=one.refines or rule.refines,
                    precedes=one.precedes or rule.precedes,
                )
                found.append(replace(known, weight=1.0 if rule.judges_loop else evidence.usual_share))
            case Unknown(text):
                unknowns.append(text)
    return found, unknowns


def _bounded(one: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Return a diagnosis whose bound is between 0 and `now`, and allows for a faster rest of a loop.

    The rest of a loop's step gets faster when its cause is gone, as its data stay in the caches, and part of it is the
    recording's own work. In profiles/diagnosis_truth/followed.md, the step of csv_generator takes 0.97 ms without its
    lists of numbers, 7% of 13 ms.
    """
    if one.at_best is None:
        return one
    left = min(max(one.at_best, 0), one.now)
    if one.unit != "s" or not evidence.is_loop:
        return replace(one, at_best=left)
    takes = one.now - left
    rest = max(0.0, left - _around_calls_s(evidence)) if one.now == evidence.step_s else left
    cold = min(takes, (1 - OF_COLD) * min(rest, COLD_S))
    least = max(0.0, min(FASTER_REST * rest, rest - OF_CAUSE * takes, rest - cold))
    return replace(one, at_best=least, takes=takes if one.takes is None else one.takes)


def _around_calls_s(evidence: Evidence) -> float:
    """Return the time of a step at the calls that begin its phases, but in no phase: mostly the recording's hooks."""
    from cs_systems.analysis.comparison.loop_findings import CALLS, OWN_PYTHON

    return sum(row["time_s"] for row in OWN_PYTHON.of(evidence.tables) if row["function"] == CALLS)


def without_options(remedy: str) -> str:
    """Return a remedy without cs-systems options in parentheses, for a trace, snapshot or loop of another program."""
    return _OPTIONS.sub("", remedy)


def diagnose(records: RunRecord | Iterable[RunRecord]) -> Answer:
    """Return the answer about a record or a run: a diagnosis per rule, of the cell in which its share is largest.

    If a cell was timed and profiled, both are used. If the run has a cell that carries out a remedy, its measured time
    is the expected one, and a remedy without a gain is left out.

    Raises ConfigError for anything that is not a record.
    """
    from cs_systems.analysis.comparison.loop_findings import NEVER_STEPPED
    from cs_systems.analysis.diagnosis._evidence import of_records
    from cs_systems.analysis.diagnosis._measured import timed_cells, with_measured
    from cs_systems.record import as_records, computation

    records = as_records(records)
    cells: dict[Any, list[RunRecord]] = {}
    for record in records:
        if record.status == "ok" or NEVER_STEPPED.name in record.results:
            cells.setdefault(computation(record), []).append(record)
    judged = [(of_cell[-1].run_config, apply_rules(of_records(of_cell))) for of_cell in cells.values()]
    by_code: dict[str, list[tuple[Diagnosis, RunConfig]]] = {}
    refuted: list[str] = []
    configs = [config for config, _ in judged]
    timed = timed_cells(records)
    same = same_fields(configs) if configs else set()
    for config, answer in judged:
        for diagnosis in answer.diagnoses:
            told = with_measured(diagnosis, config, timed, same)
            if isinstance(told, str):
                refuted.append(told)
            else:
                by_code.setdefault(diagnosis.code, []).append((told, config))
    most = [(max(alike, key=lambda one: one[0].share), len(alike)) for alike in by_code.values()]
    return Answer(
        ranked(replace(worst, cells=_where(config, count, configs)) for (worst, config), count in most),
        tuple(dict.fromkeys(text for _, answer in judged for text in answer.unknowns)),
        next((answer.judged for _, answer in judged if answer.judged), ""),
        next((answer.not_judged for _, answer in judged if answer.not_judged), ""),
        tuple(dict.fromkeys(refuted)),
        next((answer.longest for _, answer in judged if answer.longest), ""),
        max((answer.least for _, answer in judged), default=WORTH),
    )


def _where(config: RunConfig, count: int, configs: Sequence[RunConfig]) -> str:
    """Return a cell's differences from the others as text, and the number of cells with this diagnosis."""
    if len(configs) < 2:
        return ""
    name = describe(config, same_fields(configs) | {"profiler"}) or describe(config, {"profiler"})
    return f"{name}; {count} of {len(configs)} cells have this cause" if count > 1 else name
