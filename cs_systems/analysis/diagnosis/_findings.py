"""Parts of an answer: diagnoses with their numbers, and questions that stay open.

Every number in a sentence has a basis: `expected` from a measurement or a replay, `at_best` from a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict, cast

from cs_systems.core.tables import Column, Row, Table
from cs_systems.core.units import SCALES, best_unit, significant

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis._evidence import Evidence
    from cs_systems.analysis.replay import Change

WORTH = 0.05  # share of the step or the peak; less is within the noise of most machines
WORTH_IF_FREE = 0.02  # the same of a remedy that only leaves something out
SMALL = 0.1  # share; smaller causes come after those outside of the usual steps
EXPLAINS = 0.5  # share of a general cause that a more specific one must explain
ON_TOP = "then, on top of that"  # `Diagnosis.then` of a remedy of the plan after the first
MOST = 3  # largest number of sentences at the start of a page or an output


class DiagnosisRow(TypedDict):
    """Diagnosis as plain data: in seconds if it is about time, in bytes if about memory, neither if about training."""

    code: Annotated[str, Column("rule", "name of the rule that found the cause")]
    cause: Annotated[str, Column(note="what takes the time or the memory, in a sentence")]
    subject: Annotated[str, Column("steps", "the steps that the numbers are from; empty for all")]
    where: Annotated[str, Column("place", "place in the program, and the cells of a run")]
    share: Annotated[float, Column(note="share of the step or the peak that the remedy saves, or at most saves")]
    remedy: Annotated[str, Column(note="change to make; after `then` if it follows those before it")]
    sure: Annotated[
        str | None, Column("basis", "what the numbers rest on: measured, replayed, forecast, or only a bound")
    ]
    now_s: NotRequired[Annotated[float, Column("now", "time of the step without the remedy")]]
    expected_s: NotRequired[Annotated[float | None, Column("expected", "time of the step after the remedy")]]
    expected_low_s: NotRequired[Annotated[float | None, Column("expected, low end", "low end of its range")]]
    expected_high_s: NotRequired[Annotated[float | None, Column("expected, high end", "high end of its range")]]
    at_best_s: NotRequired[Annotated[float | None, Column("bound", "time below which the remedy cannot go")]]
    now_bytes: NotRequired[Annotated[float, Column("now", "peak memory without the remedy")]]
    expected_bytes: NotRequired[Annotated[float | None, Column("expected", "peak memory after the remedy")]]
    expected_low_bytes: NotRequired[Annotated[float | None, Column("expected, low end", "low end of its range")]]
    expected_high_bytes: NotRequired[Annotated[float | None, Column("expected, high end", "high end of its range")]]
    at_best_bytes: NotRequired[Annotated[float | None, Column("bound", "memory below which the remedy cannot go")]]
    evidence: Annotated[list[Row], Column(note="rows of the tables that the numbers come from")]


DIAGNOSES = Table("diagnoses", DiagnosisRow, "causes of lost time or memory, the largest first")


LEAST_BOUND = 0.02  # share of `now`; a smaller bound is within the error of the measurement, and is not shown


@dataclass(frozen=True)
class Expected:
    """Duration of the step, or peak, that is expected after the remedy, between `low` and `high`.

    how: the number's basis, a measurement of the same program or a replay of its recorded step.
    """

    value: float
    low: float
    high: float
    how: Literal["measured", "replayed", "forecast"]


@dataclass(frozen=True)
class Diagnosis:
    """Cause of lost time or memory that one rule found.

    Attributes:
        cause: the cause with its number: "72% of the step the GPU waits for kernel launches".
        remedy: the change to make.
        now: the duration of the step, or the peak memory.
        at_best: lower bound of the step or the peak after the remedy; None without one.
        unit: "s" or "bytes", the unit of all numbers; "share" for a share of a training.
        evidence: the rows that the numbers come from.
        subject: the steps that the numbers are from, such as "steps 3–14 of 15"; "" for all.
        where: the place in the program, such as "evaluate() at train.py:88".
        expected: the expected result of the remedy; None if only an experiment can show it.
        takes: the time or the bytes of the cause; None means all above `at_best`.
        try_it: the command that measures the remedy.
        code: the rule's name.
        cells: the affected cells of a run, if there are several.
        comes_last: whether all others come first.
        is_of_recording: its numbers are of the whole recording, not only of the judged steps.
        is_outside: the cause is outside of the usual steps.
        is_last_resort: it names no cause, only a distance from a ceiling, and is left out where a cause is found.
        is_free: its remedy only leaves out what is known not to be needed, so that a smaller gain is worth it.
        options: the fields of a cell that carry out the remedy, with the values; a run with such a cell has measured
            the remedy.
        weight: share of a loop's time that its usual steps take, if `now` is a usual step; it only sets the order.
        change: the remedy as a change that a replay can apply to the recorded step; None without one.
        then: the phrase for a remedy that follows others, where `now` is the step after those; "" for the first.
        recorded: the step as a profiler recorded it, if `now` excludes the profiler's usual slowdown.
        refines: the codes of causes that this one explains in part or whole.
        precedes: the codes of causes that this one comes before unless it takes little.
        unprofiled: lower and upper bound of `now` without the profiler, if only a profiled step is known.
    """

    cause: str
    remedy: str
    now: float
    at_best: float | None = None
    unit: Literal["s", "bytes", "share"] = "s"
    evidence: tuple[Row, ...] = ()
    subject: str = ""
    where: str = ""
    expected: Expected | None = None
    takes: float | None = None
    try_it: str = ""
    code: str = ""
    cells: str = ""
    comes_last: bool = False
    is_of_recording: bool = False
    is_outside: bool = False
    is_last_resort: bool = False
    is_free: bool = False
    options: Mapping[str, Collection[Any]] = field(default_factory=dict)
    weight: float = 1.0
    change: Change | None = None
    then: str = ""
    unprofiled: tuple[float, float] | None = None
    recorded: float | None = None
    refines: tuple[str, ...] = ()
    precedes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the step or the peak that the remedy saves, is known to save at most, or that the cause takes."""
        if self.now <= 0:
            return 0.0
        left = self.expected.value if self.expected else self.at_best
        taken = self.takes if self.takes is not None and not self.expected else self.now - (left or 0.0)
        return max(0.0, min(1.0, taken / self.now))

    @property
    def sentence(self) -> str:
        where = "; ".join(filter(None, [self.where, self.subject, self.cells]))
        then = f"{self.then}: " if self.then else ""
        return f"{then}{self.cause}{f' ({where})' if where else ''}: {self.remedy}{self._gain()}"

    def _gain(self) -> str:
        """Return the numbers after the remedy with their basis; without numbers, how to find out."""
        try_it = f"; try it: {self.try_it}" if self.try_it else ""
        if self.expected:
            value, low, high, now = self._written(self.expected.value, self.expected.low, self.expected.high, self.now)
            spread = "" if low == high else f" ({low} … {high})"
            verb = "measured" if self.expected.how == "measured" else "expected"
            about = "about " if self.recorded else ""
            recorded = f", recorded {self._written(self.recorded)[0]}" if self.recorded else ""
            return f"; {verb}: {value}{spread} instead of {about}{now}{recorded}"
        if self.at_best is None or self.at_best < LEAST_BOUND * self.now:
            return try_it
        if self.unprofiled:
            least, low, high, now = self._written(self.at_best, *self.unprofiled, self.now)
            about = f"{low} … {high}" if low != high else f"about {low}"
            return f"; not below {least}, recorded {now}, {about} without the profiler{try_it}"
        least, now = self._written(self.at_best, self.now)
        return (f"; not below {least}, now {now}" if least != now else "") + try_it

    def _written(self, *values: float) -> list[str]:
        """Return the low, expected and high value in one unit, with three digits if two would look equal."""
        unit = best_unit(SCALES[f"_{self.unit}"], [self.now])
        in_unit = [value / unit.factor for value in values]
        texts = [significant(value, 2) for value in in_unit]
        if texts[0] == texts[-1]:
            texts = [significant(value, 3) for value in in_unit]
        return [f"{texts[0]} {unit.label}", *texts[1:-1], f"{texts[-1]} {unit.label}"]

    def row(self) -> DiagnosisRow:
        """Return the diagnosis as plain data, for JSON."""
        value, low, high, sure = None, None, None, "bound" if self.at_best is not None else None
        if self.expected:
            value, low, high, sure = (getattr(self.expected, name) for name in ("value", "low", "high", "how"))
        names = ("now", "expected", "expected_low", "expected_high", "at_best")
        numbers = zip(names, (self.now, value, low, high, self.at_best), strict=True)
        found = {
            "code": self.code,
            "cause": self.cause,
            "subject": self.subject,
            "where": "; ".join(filter(None, [self.where, self.cells])),
            "share": self.share,
            "remedy": ": ".join(filter(None, [self.then, self.remedy])),
            "sure": sure,
            **({} if self.unit == "share" else {f"{name}_{self.unit}": each for name, each in numbers}),
            "evidence": [dict(row) for row in self.evidence],
        }
        return cast("DiagnosisRow", found)


@dataclass(frozen=True)
class Unknown:
    """Question that the data cannot answer, the reason, and how to record the missing data."""

    text: str


@dataclass(frozen=True)
class Rule:
    """Rule for one cause of lost time or memory: a function that finds it in the evidence, or returns None.

    shortens_kernels: its remedy only shortens kernels, so it gains nothing while the host limits the step.
    judges_loop: its causes are about a whole loop, not about a usual step. refines: the codes of more general
    rules: this rule comes before them if it explains half of their time or memory. precedes: the codes of rules
    that it comes before unless its share is small: their remedies cost time or precision and its own does not, or
    they are about time and it is about a wrong training.
    """

    find: Callable[[Evidence], Diagnosis | Unknown | None]
    shortens_kernels: bool = False
    judges_loop: bool = False
    refines: tuple[str, ...] = ()
    precedes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Everything that the rules found.

    Attributes:
        diagnoses: the causes that are worth a change, the largest first.
        unknowns: open questions, and how to record the missing data.
        judged: the judged steps: "the step", "steps 1–14 of 15"; empty if none were.
        least: the least share that the rules looked for.
        not_judged: why nothing was judged, and the remedy.
        refuted: remedies that the same run measured, without a gain.
        longest: the line of a loop with the most time, with its share; "" if none has a notable one.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    unknowns: tuple[str, ...] = ()
    judged: str = ""
    not_judged: str = ""
    refuted: tuple[str, ...] = ()
    longest: str = ""
    least: float = WORTH

    @property
    def nothing(self) -> str:
        """Return the sentence for an answer without a cause in the usual steps; "" if there is a cause."""
        if any(not diagnosis.is_outside for diagnosis in self.diagnoses):
            return ""
        if self.unknowns:
            return ""
        if not self.judged:
            return f"nothing was judged: {self.not_judged}" if self.not_judged else ""
        where = f"; {self.longest}" if self.longest else ""
        return f"nothing found that would save more than {self.least:.0%} of {self.judged}{where}"

    @property
    def causes(self) -> list[str]:
        """Return the sentences of at most three causes."""
        return [diagnosis.sentence for diagnosis in self.diagnoses[:MOST]]

    @property
    def plan(self) -> tuple[Diagnosis, ...]:
        """Return the first cause with a known outcome of its remedy, and the remedies on top of it."""
        known = [one for one in self.diagnoses if one.expected and not one.is_outside]
        first = next((one for one in known if not one.then), None)
        return (first, *(one for one in known if one.then == ON_TOP and one.unit == first.unit)) if first else ()

    @property
    def verdict(self) -> str:
        """Return the first sentence, that there is nothing to gain, if every cause found comes last; else ""."""
        return self.nothing if self.diagnoses and all(one.comes_last for one in self.diagnoses) else ""

    @property
    def others(self) -> list[str]:
        """Return the refuted remedies, the open questions, and whether there is nothing else to gain."""
        unknown = (f"cannot be told: {text}" for text in self.unknowns)
        return [*self.refuted, *unknown, *filter(None, [self.nothing if not self.verdict else ""])]


NO_ANSWER = Answer()


def ranked(found: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that are worth a change, the largest first; those marked `comes_last` after all others.

    Causes that outweigh the usual steps come before causes inside them.
    """
    worth = [diagnosis for diagnosis in found if diagnosis.share >= (WORTH_IF_FREE if diagnosis.is_free else WORTH)]
    causes = [diagnosis for diagnosis in worth if not diagnosis.is_last_resort] or worth
    order = sorted(causes, key=_rank)
    for one in [*order]:
        later = [at for at, other in enumerate(order) if _comes_before(one, other)]
        if later and later[0] < (at := order.index(one)):
            order.insert(later[0], order.pop(at))
    return tuple(order)


def _rank(one: Diagnosis) -> tuple[bool, bool, bool, bool, float]:
    """Return the sort key: causes outside of the usual steps come last, but before small causes inside them."""
    is_small = one.share < SMALL and not one.comes_last
    return is_small, one.comes_last, not one.is_outside, bool(one.then), -one.share * one.weight


def _comes_before(one: Diagnosis, other: Diagnosis) -> bool:
    explains = other.code in one.refines and one.share >= EXPLAINS * other.share
    return explains or (other.code in one.precedes and one.share >= SMALL)
