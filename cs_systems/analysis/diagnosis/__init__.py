"""Diagnoses of lost time or memory in a step: the cause, the remedy, and the largest possible gain.

A rule is a module that exports one constant, `RULE`; the file's name, with dashes, is the code of its diagnoses. A rule
reads the numbers of an `Evidence`, from records, a trace or a snapshot, and returns None if they do not show its cause.
`apply_rules` ranks the results by their gain, which is an upper limit: no remedy gains more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from cs_systems.config import RunConfig, describe, same_fields
from cs_systems.core import plugins
from cs_systems.core.tables import Row
from cs_systems.core.units import SCALES, best_unit, significant

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis._evidence import Evidence
    from cs_systems.record import RunRecord

WORTH = 0.05  # share of the step or the peak; what gains less is within the noise of most machines
MOST = 3  # sentences that a page or a command begins with
_OPTIONS = re.compile(r" \(--[^();]*\)|; --[^();]*(?=\))")  # alone in parentheses, or behind PyTorch's own names
NOTHING = f"nothing found that would save more than {WORTH:.0%}"


class DiagnosisRow(TypedDict):
    """Diagnosis as plain data; bytes are None in a diagnosis of time, seconds in one of memory."""

    code: str
    sentence: str
    share: float  # of the step or the peak that can be gained at most
    now_s: float | None
    at_best_s: float | None
    now_bytes: float | None
    at_best_bytes: float | None
    evidence: list[Row]


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis that one rule found.

    Attributes:
        cause: the cause with its number: "72% of the step the GPU waits for kernel launches".
        remedy: the change to make.
        now: the step's duration or the peak memory.
        at_best: the least possible duration or peak after the remedy.
        unit: "s" or "bytes", the unit of both.
        evidence: the rows that the numbers come from.
        code: the rule's name.
        cells: the affected cells of a run, if there are several.
        is_last_resort: it names no cause, and is shown only without any other diagnosis.
    """

    cause: str
    remedy: str
    now: float
    at_best: float
    unit: Literal["s", "bytes"] = "s"
    evidence: tuple[Row, ...] = ()
    code: str = ""
    cells: str = ""
    is_last_resort: bool = False

    @property
    def share(self) -> float:
        """Upper limit of the gain as a share of the step or the peak."""
        return (self.now - self.at_best) / self.now if self.now > 0 else 0.0

    @property
    def sentence(self) -> str:
        scale = SCALES[f"_{self.unit}"]
        unit = best_unit(scale, [self.now])
        shown = [[significant(value / unit.factor, digits) for value in (self.now, self.at_best)] for digits in (2, 3)]
        gain = next((f"; at best {best} {unit.label} instead of {now}" for now, best in shown if now != best), "")
        where = f" ({self.cells})" if self.cells else ""
        return f"{self.cause}: {self.remedy}{gain}{where}"

    def row(self) -> DiagnosisRow:
        """Return the diagnosis as plain data, for JSON."""
        in_s, in_bytes = self.unit == "s", self.unit == "bytes"
        return {
            "code": self.code,
            "sentence": self.sentence,
            "share": self.share,
            "now_s": self.now if in_s else None,
            "at_best_s": self.at_best if in_s else None,
            "now_bytes": self.now if in_bytes else None,
            "at_best_bytes": self.at_best if in_bytes else None,
            "evidence": [dict(row) for row in self.evidence],
        }


@dataclass(frozen=True)
class Rule:
    """Rule for one cause of lost time or memory: a function that finds it in the evidence, or returns None.

    is_last_resort: the rule is used only if no other rule finds anything.
    """

    find: Callable[[Evidence], Diagnosis | None]
    is_last_resort: bool = False


def apply_rules(evidence: Evidence) -> list[Diagnosis] | None:
    """Return the rules' diagnoses that are worth a change, the largest gain first; None without data to judge."""
    if evidence.is_empty:
        return None
    found: list[Diagnosis] = []
    for name in plugins.names("diagnosis"):
        rule: Rule = plugins.get("diagnosis", name)
        if answer := rule.find(evidence):
            at_best = min(max(answer.at_best, 0), answer.now)
            takes_options = evidence.config is not None and not evidence.is_loop
            remedy = answer.remedy if takes_options else without_options(answer.remedy)
            code = name.replace("_", "-")
            found.append(replace(answer, remedy=remedy, at_best=at_best, code=code, is_last_resort=rule.is_last_resort))
    return ranked(found)


def without_options(remedy: str) -> str:
    """Return a remedy without its options in parentheses, for a trace, a snapshot or a loop of another program."""
    return _OPTIONS.sub("", remedy)


def diagnose(records: RunRecord | Iterable[RunRecord]) -> list[Diagnosis] | None:
    """Return the diagnoses of a record or a run, one per rule: in the cell with the largest gain.

    A cell that was timed and profiled is judged by both together. None if no record has data to judge.

    Raises ConfigError for anything that is not a record.
    """
    from cs_systems.analysis.comparison.precision_causes import computation
    from cs_systems.analysis.diagnosis._evidence import of_records
    from cs_systems.record import as_records

    cells: dict[Any, list[RunRecord]] = {}
    for record in as_records(records):
        if record.status == "ok":
            cells.setdefault(computation(record), []).append(record)
    judged = [(of_cell[-1].run_config, apply_rules(of_records(of_cell))) for of_cell in cells.values()]
    if all(found is None for _, found in judged):
        return None
    by_code: dict[str, list[tuple[Diagnosis, RunConfig]]] = {}
    for config, found in judged:
        for diagnosis in found or ():
            by_code.setdefault(diagnosis.code, []).append((diagnosis, config))
    configs = [config for config, _ in judged]
    most = [(max(alike, key=lambda one: one[0].share), len(alike)) for alike in by_code.values()]
    return ranked(replace(worst, cells=_where(config, count, configs)) for (worst, config), count in most)


def _where(config: RunConfig, count: int, configs: Sequence[RunConfig]) -> str:
    """Return the cell by its differences from the others, and the number of cells with the same diagnosis."""
    if len(configs) < 2:
        return ""
    name = describe(config, same_fields(configs) | {"profiler"}) or describe(config, {"profiler"})
    return f"{name}; {count} of {len(configs)} cells have this cause" if count > 1 else name


def ranked(found: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return the diagnoses that are worth a change, the largest gain first; last resorts only without others."""
    worth = sorted((d for d in found if d.share >= WORTH), key=lambda d: -d.share)
    return [d for d in worth if not d.is_last_resort] or worth
