"""Answer of a search: the waterfall of kept levers, the options that were not kept, and the search's own error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cs_systems.advise.judge import GOALS, Judgement, peak_bytes, step_j, step_s, tokens_per_j
from cs_systems.advise.lever import Cell, batch_of
from cs_systems.analysis.diagnosis import Diagnosis
from cs_systems.config import FIELDS, LEAVES, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.core.units import counted
from cs_systems.record import RunRecord
from cs_systems.report.advice import STEPS, TrialRow

ENDED = "the search ended before it"  # reason why an option was not tried
FURTHER = "the search ended before further pairs"  # end of the reason of an option that its pairs did not decide
NOT_AGAIN = "not tried again on what was kept later"  # the same, of one that another best cell would compare anew
CHANGED = "the numbers change too much"
GO_ON = "to go on, repeat the command with --out and this folder"
CLOSE = 0.25  # largest relative error of an expectation that counts as close


@dataclass(frozen=True)
class Answer:
    """Results of a search so far.

    Attributes:
        start, best: the first and the best cell.
        history: one record of each kept cell; the first is of the start.
        trials: a row for each option, whether tried or not, in the order of the search.
        goal: a name of judge.GOALS.
        whole: the best cell compared with the start, measured again at the end; None if nothing was kept, or before the
            end.
        is_interrupted: whether Ctrl-C ended the search.
        diagnoses: what the diagnosis says of the best cell.
    """

    start: Cell
    best: Cell
    history: tuple[RunRecord, ...]
    trials: tuple[TrialRow, ...]
    goal: str
    whole: Judgement | None = None
    is_interrupted: bool = False
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def kept(self) -> list[TrialRow]:
        return [row for row in self.trials if row["status"] == "kept"]

    @property
    def others(self) -> list[TrialRow]:
        """Rows of the options that were not kept."""
        return [row for row in self.trials if row["status"] not in STEPS and row["change"]]

    @property
    def tried(self) -> int:
        """Number of options with at least one process."""
        return sum(row["processes"] > 0 for row in self.trials)

    @property
    def is_unfinished(self) -> bool:
        """Flag of a search that ended too early: before an option, before further pairs of one, or by Ctrl-C."""
        return self.is_interrupted or bool(self._waiting or self._undecided)

    @property
    def _waiting(self) -> int:
        return sum(row["reason"] == ENDED for row in self.trials)

    @property
    def _undecided(self) -> int:
        return sum(row["reason"].endswith((FURTHER, NOT_AGAIN)) for row in self.trials)

    @property
    def unfit(self) -> list[str]:
        """Levers that do not apply, with the reason."""
        found: dict[str, list[str]] = {}
        for row in self.trials:
            if not row["change"]:
                found.setdefault(row["reason"], []).append(row["lever"])
        return [f"{', '.join(levers)} ({reason})" for reason, levers in found.items()]

    @property
    def waterfall(self) -> list[TrialRow]:
        """Rows of the levers that were kept, also of those that a later one replaced, below a row for the start."""
        if not self.kept:
            return []
        steps = (row for row in self.trials if row["status"] in STEPS)
        return [filled(row_of("start"), self.history[0], self.history[0]), *steps]

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data for JSON."""
        return {
            "goal": self.goal,
            "start": _plain(self.start),
            "best": _plain(self.best),
            "command": command_words(self.best) if isinstance(self.best, RunConfig) else None,
            "whole": self.whole and self.whole._asdict(),
            "start_s": step_s(self.history[0]) if self.history else None,
            "best_s": step_s(self.history[-1], self.history[0]) if self.history else None,
            "device": self.history[0].environment.device_name if self.history and self.history[0].environment else None,
            "waterfall": [dict(row) for row in self.waterfall],
            "trials": [dict(row) for row in self.trials],
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the result, what the search left, and the errors of the expectations."""
        return [*filter(None, [self._result(), self._left(), self._error()])]

    def _result(self) -> str:
        if not self.tried and self.is_interrupted:
            return f"nothing was tried: the search was interrupted before its first trial ended; {GO_ON}"
        if not self.tried and self._waiting:
            return "nothing was tried: a trial and its proof take longer than the time left; give a longer --budget"
        if not self.tried and not self.others:
            return "nothing was tried, because no lever applies"
        if not self.tried:
            return "nothing was tried, because no option that applies is expected to gain"
        if not self.kept:
            return f"nothing was kept{' so far' if self.is_unfinished else ''}: {self._why_none()}"
        count = f"{len(self.kept)} of {self.tried} options kept"
        if self.whole is None:
            return f"{count}; the whole gain was not measured side by side"
        per = " per token" if batch_of(self.best) != batch_of(self.start) else ""
        return f"{in_words(self.whole, GOALS[self.goal].word)}{per} as the start, measured side by side; {count}"

    def _why_none(self) -> str:
        tried = [row for row in self.others if row["processes"]]
        if {row["status"] for row in tried} == {"failed"}:
            return "each option that was tried failed"
        if any(row["status"] == "rejected" and row["numbers"] for row in tried):  # checked, because they gain
            return "no option showed a sure gain and passed the check of the numbers"
        return "no option showed a sure gain"

    def _left(self) -> str:
        """Return which options a search that ended too early left, and how to go on; "" if it left none."""
        if not self.tried or not self.is_unfinished:
            return ""
        ended = "the search was interrupted" if self.is_interrupted else "the budget ended"
        go_on = GO_ON if self.is_interrupted else f"{GO_ON}, or also a longer --budget"
        further = f"further pairs of {counted(self._undecided, 'option')}" if self._undecided else ""
        if self._waiting:
            verb = "was" if self.tried == 1 else "were"
            count = f"{self.tried} of {self.tried + self._waiting} options {verb} tried"
            rest = f" and before {further}" if further else ""
            return f"{count}; {ended} before the other{'s' * (self._waiting > 1)}{rest}; {go_on}"
        return f"{ended}{f' before {further}' if further else ''}; {go_on}"

    def _error(self) -> str:
        off = errors(self.trials)
        if not off:
            return f"no trial had an expected step, because {self._why_unexpected()}" if self.kept else ""
        close = sum(error <= CLOSE for error in off)
        return f"expected against measured: {close} of {len(off)} within {CLOSE:.0%}, median off by {median(off):.0%}"

    def _why_unexpected(self) -> str:
        if not isinstance(self.start, RunConfig):
            return "only a trial shows what an option gives a script"
        environment = self.history[0].environment if self.history else None
        on_gpu = environment is not None and environment.device != "cpu"
        return "nothing measured predicts these options" if on_gpu else "expectations require a GPU"


def row_of(lever: str, change: str = "", status: str = "", reason: str = "") -> TrialRow:
    """Return the row of an option without numbers."""
    return {
        "lever": lever,
        "change": change,
        "status": status,
        "expected_s": None,
        "step_s": None,
        "expected_bytes": None,
        "peak_bytes": None,
        "step_j": None,
        "tokens_per_j": None,
        "gain": None,
        "gain_low": None,
        "gain_high": None,
        "processes": 0,
        "took_s": None,
        "numbers": "",
        "code": "",
        "reason": reason,
    }


def filled(row: TrialRow, record: RunRecord, start: RunRecord) -> TrialRow:
    """Return a row with the numbers of a record, of the same kind as the search's start has."""
    return row | {
        "step_s": step_s(record, start),
        "peak_bytes": peak_bytes(record),
        "step_j": step_j(record),
        "tokens_per_j": tokens_per_j(record),
    }


def in_words(found: Judgement, word: str = "fast") -> str:
    """Return how many times as fast something is, with its interval, and whether the gain is certain."""
    low, high = (1 / end if end else None for end in (found.high, found.low))
    times = f"{1 / found.ratio:.2f}"
    if not found.is_sure and not found.is_gain:  # its interval is of other programs' processes
        return f"no sure gain: in too few processes for an interval, {times} times as {word}"
    spread = f" ({low:.2f} … {high:.2f})" if low and high and low != high else ""
    is_loss = high is not None and high < 1
    return f"{'' if found.is_gain else 'a loss: ' if is_loss else 'no sure gain: '}{times}{spread} times as {word}"


def errors(trials: Sequence[TrialRow]) -> list[float]:
    """Return the relative error of each expectation, for trials with an expected and a measured number."""
    pairs = [(row[f"expected_{unit}"], row[name]) for row in trials for unit, name in _PAIRS]  # type: ignore[literal-required]
    return [abs(expected / measured - 1) for expected, measured in pairs if expected and measured]


def _plain(cell: Cell) -> dict[str, Any]:
    return cell.to_dict() if isinstance(cell, RunConfig) else asdict(cell)


def command_words(config: RunConfig) -> list[str]:
    """Return the command that times a cell, as words."""
    words = ["cs-systems", "time"]
    if config.subject is Subject.STEP:
        words += ["--size", config.model.name, "--context-length", str(config.tokens_per_sequence)]
        changed = config.model.changed()
        words += [word for name, value in changed.items() for word in (LEAVES[f"model.{name}"].option, str(value))]
    for name, each in FIELDS.items():
        value = getattr(config, name)
        if each.field.takes and name != "seq_len" and value != each.default:
            words += [each.option, *_values(value)]
    return words


def _values(value: object) -> list[str]:
    if isinstance(value, bool):
        return []
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


_PAIRS = (("s", "step_s"), ("bytes", "peak_bytes"))
