"""Search: tries one lever after the other, compared with the best cell so far, and keeps those that are proved.

The option with the largest expected gain per cost is tried first; without an expectation, its usual gain counts. Each
is measured in a process of its own and compared with the best cell, then in further pairs of alternating order (B A, A
B) until its interval shows a gain or excludes one, or its median shows none. Where processes vary, an option whose
first pair shows no large gain waits. The search comes back to options that a few pairs could not decide, the most
promising first: as soon as the gain that they showed is worth more than that of the options not tried yet. If the step
waits for launches, an option is also tried together with a lever that relieves the host, and options without a gain are
tried again once the step no longer waits. Options that are kept have passed the check of their numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from cs_systems.advise.answer import CHANGED, ENDED, FURTHER, NOT_AGAIN, Answer, filled, in_words, row_of
from cs_systems.advise.judge import (
    FEW_PAIRS,
    GOALS,
    LEAST_GAIN,
    MANY_PAIRS,
    OF_ENERGY,
    PROOF_LEVEL,
    PROOF_PAIRS,
    Judgement,
    Seen,
    level_after,
    peak_bytes,
    why_missing,
)
from cs_systems.advise.lever import (
    CODE,
    Cell,
    Lever,
    Proposal,
    ScriptPlan,
    Situation,
    batch_of,
    is_launch_bound,
    proposals,
    together,
)
from cs_systems.advise.numerics import UNCHECKED, Check
from cs_systems.config import RunConfig
from cs_systems.core.statistics import student_t
from cs_systems.core.units import counted, human
from cs_systems.record import RunRecord
from cs_systems.report.advice import REPLACED, TrialRow

AGAIN = 0.05  # least expected gain, as a share, for which an option without gain is tried again on another best cell
HOPED = 2.0  # times the gain that a few pairs showed, which all pairs of a trial may show
LARGE_GAIN = 0.1  # share; on a host, an option gets no further pair if the interval excludes this gain
KNOWN_S = 0.05  # longest time to read a record; a process takes longer
CLOSE_ENDS = 1.06  # high over low end of the whole gain's interval; below it, no further pair is needed
OWN_PAIRS = 5  # of the proof, from which on only these show how much processes vary, and their interval may end it


class Bench(Protocol):
    """Interface of the bench that measures cells or scripts."""

    def measure(self, cell: Cell, number: int) -> RunRecord:
        """Return the record of process `number` of the cell; it is measured unless the record exists."""

    def sampled(self) -> RunRecord | None:
        """Return a record of the start in which the stack was sampled; None if there is none."""

    def check(self, cell: Cell) -> Check:
        """Return how the cell changes the numerics compared with the start."""

    def left_s(self) -> float:
        """Return the time left for the search, in s."""

    def process_s(self) -> float:
        """Return how long a process usually takes, in s."""

    def proof_s(self, is_kept: bool) -> float:
        """Return the time in s that the last comparison of start and best needs."""

    def spent_s(self) -> float:
        """Return the time since the search began."""


class Unmeasurable(RuntimeError):
    """Error for a start that cannot be measured; the message is the reason."""


@dataclass(eq=False)
class _Compared:
    """Records of a cell and of the cell that it is compared with, in pairs of processes.

    of_base: records of the other cell. pairs: those of both that were measured one right after the other.
    """

    base: Cell
    cell: Cell
    records: list[RunRecord] = field(default_factory=list)
    of_base: list[RunRecord] = field(default_factory=list)
    pairs: list[tuple[RunRecord, RunRecord]] = field(default_factory=list)


@dataclass(eq=False)
class _Trial:
    """Option compared with the best cell so far.

    ratio, row: what its pairs of processes showed. is_promising: whether twelve pairs may prove that.
    """

    option: Proposal
    compared: _Compared
    ratio: float = 1.0
    row: TrialRow | None = None
    is_promising: bool = True

    @property
    def worth(self) -> float:
        """Share of the step that its pairs showed as saved, per process of a further pair."""
        return (1 - self.ratio) / 2


@dataclass
class Search:
    """Search from one cell.

    Attributes:
        situation: the start, and then the best cell so far.
        say: called with a line of progress before and after each trial.
    """

    situation: Situation
    levers: Mapping[str, Lever]
    bench: Bench
    say: Callable[[str], object] = lambda line: None
    rows: list[TrialRow] = field(default_factory=list)
    _tried: set[tuple[str, str]] = field(default_factory=set)
    _hidden: set[tuple[str, str]] = field(default_factory=set)  # tried while the step waited for launches
    _earlier: dict[tuple[str, str], TrialRow | None] = field(default_factory=dict)  # rows of options to try anew
    _open: list[_Trial] = field(default_factory=list)  # undecided on the best cell so far
    _kept: set[str] = field(default_factory=set)
    _looked: set[str] = field(default_factory=set)
    _numbers: Counter[Cell] = field(default_factory=Counter)
    _records: dict[Cell, list[RunRecord]] = field(default_factory=dict)
    comparisons: list[_Compared] = field(default_factory=list)
    _latest: Cell | None = None
    _new: int = 0  # processes since the last record that was there already, of a search that goes on
    _whole: Judgement | None = None
    _is_interrupted: bool = False

    def __post_init__(self) -> None:
        self.start = self.situation.cell

    @property
    def best(self) -> Cell:
        return self.situation.cell

    def run(self) -> None:
        """Try options until none or no time is left. Raises Unmeasurable."""
        try:
            self._run()
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise

    def _run(self) -> None:
        first = self._measure(self.best)
        if first.measurement is None or not first.is_timing or self._now(first) is None:
            raise Unmeasurable(first.reason or why_missing(self.situation.goal, first))
        self.situation = replace(self.situation, history=(first,), sampled=self.bench.sampled())
        if cause := next(iter(self.situation.diagnoses), None):
            self.say(f"what takes the time of the start: {cause.sentence}")
        if not self._has_time() and self.bench.left_s() >= self.bench.process_s():
            self.say("measuring the start again, because a first process also reads its libraries and compiles")
            self._measure(self.best)
        if not self._has_time() and _options(self.situation, self.levers):
            needed_s, left_s = self._proof_s + self.bench.process_s(), max(0.0, self.bench.left_s())
            self.say(
                f"the budget leaves {human(left_s, 's')}, and one trial with its proof takes {human(needed_s, 's')}; "
                "give a longer --budget"
            )
        while True:
            option, trial = self._next(), self._undecided()
            if trial and (option is None or (trial.is_promising and trial.worth > self._worth(option))):
                self._try(trial)
            elif option is not None:
                self._try(_Trial(option, self._comparison(self.best, option.cell)))
            else:
                break
            self._look()
        if self._kept:
            self._prove()

    def _has_time(self, cost: float = 1.0) -> bool:
        """Return whether the time is enough for a trial of this cost, and then for the proof of the whole gain."""
        return self.bench.left_s() >= self._proof_s + cost * self.bench.process_s()

    @property
    def _proof_s(self) -> float:
        return self.bench.proof_s(bool(self._kept))

    def answer(self) -> Answer:
        """Return the results so far, with the levers that do not apply and the options that were not tried."""
        left = [*self._not_tried()]
        unfit = {row["lever"]: row["reason"] for row in left if not row["change"]}
        rows = [*(self._with_end(row, unfit) for row in self.rows), *left]
        now = self.situation
        what = self.start, self.best, now.history, tuple(rows), now.goal, self._whole
        return Answer(*what, self._is_interrupted, tuple(now.diagnoses))

    def _with_end(self, row: TrialRow, unfit: Mapping[str, str]) -> TrialRow:
        """Return the row of a trial, with the reason why further pairs did not decide it.

        unfit: levers that do not apply to the best cell, with the reason.
        """
        for trial in self._open:
            if row is trial.row:
                hardly = f"{MANY_PAIRS} pairs would hardly prove it"
                return row | {"reason": f"{row['reason']}; {FURTHER if self._may_go_on(trial) else hardly}"}
        if any(row is other for other in self._earlier.values()):
            return row | {"reason": f"{row['reason']}; {unfit.get(row['lever'], NOT_AGAIN)}"}
        return row

    def _next(self) -> Proposal | None:
        """Return the option to try: the one with the largest gain per cost, as expected or usual."""
        now = self._best_now
        found = [
            one
            for one in _options(self.situation, self.levers)
            if self._is_open(one, now) and self._fits(one) is None and self._has_time(one.cost)
        ]
        return max(found, key=self._worth, default=None)

    def _worth(self, option: Proposal) -> float:
        """Return the share of the step that an option saves per cost, as expected or usual."""
        return option.gain(self._best_now) / option.cost

    @property
    def _best_now(self) -> float:
        """Number of the best cell's record that the goal reduces."""
        now = self._now(self.situation.history[-1])
        assert now is not None
        return now

    def _is_open(self, option: Proposal, now: float) -> bool:
        """Return whether a trial may show a gain: if one is expected, or there is no expectation and no trial yet."""
        if option.expected is None:
            return option.key not in self._tried or (option.key in self._hidden and self.situation.is_captured)
        least = AGAIN if option.key in self._tried or self._kept.intersection(option.levers) else LEAST_GAIN
        return option.gain(now) > least and (option.lever, str(option.cell)) not in self._tried

    def _fits(self, option: Proposal) -> str | None:
        """Return why the expected peak is too large; None if it is not, or is unknown."""
        limit, expected = self.situation.memory_bytes, self.situation.forecast(**option.fields)
        if limit is None or expected is None or expected.value <= limit:
            return None
        return f"its expected peak is {human(expected.value, 'bytes')}, more than {human(limit, 'bytes')}"

    def _undecided(self) -> _Trial | None:
        """Return the trial on the best cell that shows the largest gain, which its pairs could not prove yet.

        One that more pairs hardly prove is the last, and only if nothing is kept, whose proof takes the time that is
        left.
        """
        found = filter(self._may_go_on, self._open)
        return (
            min(found, key=lambda one: (not one.is_promising, one.ratio), default=None) if self._has_time(2) else None
        )

    def _may_go_on(self, trial: _Trial) -> bool:
        return trial.is_promising or not self._kept

    def _try(self, trial: _Trial) -> None:
        """Measure an option in a few further pairs, compared with the best cell; keep it if it gains and passes."""
        option, records = trial.option, trial.compared.records
        earlier = trial.row or self._earlier.get(option.key)
        now = self._now(self._records[self.best][-1])  # on a host, the latest process is as loaded as this trial's
        assert now is not None
        expected = f", expected {human(option.expected.value, self._unit)}" if option.expected else ""
        self.say(f"trying {option.lever}: {option.words}{expected}, now {human(now, self._unit)}")
        before, began_s = sum(self._numbers.values()), self.bench.spent_s()
        if not records:
            trial.compared.of_base = self._known()
        status, reason, found, check = self._judged(trial)
        self._earlier.pop(option.key, None)
        self._open = [other for other in self._open if other is not trial]
        self._tried |= {option.key, (option.lever, str(option.cell))}
        self._hidden -= {option.key}
        if status == "rejected" and records and is_launch_bound(records[0]):
            self._hidden.add(option.key)
        row = row_of(option.lever, option.words, status, reason)
        if option.expected:
            row["expected_bytes" if self.situation.goal == "memory" else "expected_s"] = option.expected.value
        if records:
            row = filled(row, self._typical(records), self.situation.history[0])
            row["code"] = "; ".join(one["code"] for one in CODE.of(records[0].results) if one["lever"] == option.lever)
        if found:
            low, high = (1 / end if end else None for end in (found.high, found.low))
            row |= {"gain": 1 / found.ratio, "gain_low": low, "gain_high": high}
        took_s = self.bench.spent_s() - began_s
        row |= {"processes": sum(self._numbers.values()) - before, "numbers": check.saw, "took_s": took_s}
        if earlier:
            processes, before_s = earlier["processes"], earlier["took_s"] or 0.0
            row |= {"processes": row["processes"] + processes, "took_s": took_s + before_s}
            self.rows = [other for other in self.rows if other is not earlier]
        self.rows.append(row)
        if found and found.is_gain is None and not self._is_hopeless(found) and self._may_gain(found, len(records)):
            trial.ratio, trial.row, trial.is_promising = found.ratio, row, _is_promising(found, len(records))
            self._open.append(trial)
        after = self._now(records[-1]) if records else None
        measured = "" if after is None else f", {human(after, self._unit)}"
        if status == "kept" and found:
            reason = f"{in_words(found, GOALS[self.situation.goal].word)}, side by side"
        word = "undecided" if trial in self._open else status
        self.say(f"  {word}{measured}{f': {reason}' if reason else ''}; {human(took_s, 's')}")
        if status == "kept":
            self._keep(option, self._typical(records))

    def _typical(self, records: list[RunRecord]) -> RunRecord:
        """Return the record with the median of the number that the goal reduces."""
        return sorted(records, key=lambda record: self._now(record) or 0.0)[len(records) // 2]

    def _keep(self, option: Proposal, record: RunRecord) -> None:
        """Make an option the best, and drop the other options of its lever with a smaller expected gain."""
        if option.expected:
            for other in _options(self.situation, self.levers):
                if other.lever == option.lever and other.expected and other.expected.value > option.expected.value:
                    self._tried.add(other.key)
                    reason = f"expected {human(other.expected.value, self._unit)}, more than the option that is kept"
                    self.rows.append(row_of(other.lever, other.words, "not tried", reason))
        if isinstance(option.cell, ScriptPlan):
            self._mark_replaced(option.cell)
        for trial in self._open:  # they are tried anew, on what is best now
            self._tried -= {trial.option.key, (trial.option.lever, str(trial.option.cell))}
            self._earlier[trial.option.key] = trial.row
        self._open.clear()
        self._kept |= {*option.levers}
        self.situation = replace(self.situation, cell=option.cell, history=(*self.situation.history, record))

    def _mark_replaced(self, plan: ScriptPlan) -> None:
        """Mark the kept levers that a lever of this plan replaces."""
        replaced = {row["lever"] for row in self.rows if row["status"] == "kept"} - {*plan.levers}
        for row in self.rows:
            if row["lever"] in replaced:
                row |= {"status": REPLACED, "change": f"{row['change']}, replaced below"}
        self._kept -= replaced

    def _look(self) -> None:
        """Measure the step without its CUDA graph once, if its experiments can predict the gain of options."""
        cell, goal = self.best, self.situation.goal
        if not isinstance(cell, RunConfig) or not self.situation.is_captured or cell.compile != "none":
            return
        asking = {
            one.lever
            for one in _options(self.situation, self.levers)
            if one.expected is None and one.lever in self.levers and self.levers[one.lever].experiment
        }
        asking -= self._kept | self._looked
        if asking and goal == "time" and self._has_time():
            self._looked |= asking
            self.say("measuring the step as the host launches it: its experiments tell what other options give")
            self.situation = replace(
                self.situation, seen=(*self.situation.seen, self._measure(replace(cell, graph="none")))
            )

    def _judged(self, trial: _Trial) -> tuple[str, str, Judgement | None, Check]:
        """Return (status, reason, judgement, check of the numerics); add the new records to the trial."""
        option, records, found = trial.option, trial.compared.records, None
        is_first, most = not records, min(len(records) + FEW_PAIRS, MANY_PAIRS)
        for answer in self._pairs(trial.compared):
            if isinstance(answer, str):
                return "failed", answer, None, UNCHECKED
            found = answer
            if found.is_gain is not None or self._is_hopeless(found) or len(records) >= most:
                break
            if not self._may_gain(found, len(records)):
                break
            if (len(records) >= FEW_PAIRS or not is_first) and not self._has_time(2):
                break
            if len(records) == 1 and self._can_wait(found):
                break
        assert found is not None
        if not found.is_gain:
            return "rejected", why_not(found, len(records)), found, UNCHECKED
        check = self.bench.check(option.cell) if option.numbers else UNCHECKED
        self._latest = self._latest if check is UNCHECKED else None  # other processes came between
        if check.passed:
            return "kept", "", found, check
        return "rejected", CHANGED if check.is_comparable else check.saw, found, check

    def _is_hopeless(self, found: Judgement) -> bool:
        """Return whether no further pair is worth its time: the median shows no gain, and noise hides no large one.

        On a GPU, launches hide it at most, and such an option is tried again under a CUDA graph.
        """
        excludes = found.low is not None and found.low > 1 / (1 + LARGE_GAIN) and found.is_sure
        return found.ratio > 1 - LEAST_GAIN and (self._is_model_on_gpu or excludes)

    def _can_wait(self, found: Judgement) -> bool:
        """Return whether one pair shows no large gain, so that options with more promise come first."""
        return not self._is_model_on_gpu and found.ratio > 1 / (1 + LARGE_GAIN)

    @staticmethod
    def _may_gain(found: Judgement, pairs: int) -> bool:
        """Return whether further pairs may show a gain: after few of them noise may still hide it."""
        return pairs < FEW_PAIRS or (found.ratio < 1 - LEAST_GAIN and pairs < MANY_PAIRS)

    @property
    def _is_model_on_gpu(self) -> bool:
        return self.situation.on_gpu and isinstance(self.best, RunConfig)

    @property
    def _is_steady(self) -> bool:
        """Flag of processes that hardly vary: the model's own if they wait for a GPU, and not for the host."""
        return self._is_model_on_gpu and not any(map(is_launch_bound, self._records.get(self.best, ())))

    def _known(self) -> list[RunRecord]:
        """Return the records of the best cell that need not be measured again for the first pair of a trial.

        On a GPU earlier records are valid; on a host only those of the last minute, because its speed varies.
        """
        records = self._records[self.best]
        if self._is_steady:
            return [*records]
        return records[-1:] if self._latest == self.best else []

    def _comparison(self, base: Cell, cell: Cell) -> _Compared:
        """Return a new comparison; its pairs show other comparisons how much processes vary."""
        self.comparisons.append(found := _Compared(base, cell))
        return found

    def _pairs(self, compared: _Compared, *, proves: bool = False) -> Iterator[Judgement | str]:
        """Compare two cells, and yield the judgement, or the reason for none, after each further pair of processes.

        Records of the base that are there at the beginning are its side of the first pairs. proves: each interval is
        one of `PROOF_LEVEL`, and not one of several looks.
        """
        records, of_base = compared.records, compared.of_base
        times, is_known = batch_of(compared.cell) / batch_of(compared.base), bool(of_base)
        for pair in range(len(records), PROOF_PAIRS if proves else MANY_PAIRS):
            turns = [(compared.base, of_base), (compared.cell, records)]
            if pair == 0 and is_known:
                turns = turns[1:]
            for one, found in turns if pair % 2 == 0 else reversed(turns):
                record = self._measure(one)
                if record.measurement is None or not record.is_timing:
                    yield _why(record)
                    return
                found.append(record)
            if (peak := peak_bytes(records[-1])) and (limit := self.situation.memory_bytes) and peak > limit:
                yield f"its peak is {human(peak, 'bytes')}, more than {human(limit, 'bytes')}"
                return
            if not self._is_steady and self._new > 1 and (len(turns) == 2 or len(of_base) == 1):
                compared.pairs.append((of_base[-1], records[-1]))
            is_alone = proves and pair + 1 >= OWN_PAIRS
            seen = Seen(
                of_base,
                records,
                times,
                [] if is_alone else self._others(*of_base, *records),
                compared.pairs,
                [] if is_alone else [other.pairs for other in self.comparisons if other is not compared],
                PROOF_LEVEL if proves else level_after(pair + 1),
            )
            judged = GOALS[self.situation.goal].judge(seen)
            yield judged if judged.is_sure or self._is_steady else judged._replace(is_gain=None)

    def _others(self, *compared: RunRecord) -> list[list[RunRecord]]:
        """Return the other records of all cells, which show how much processes vary here."""
        known = {id(record) for record in compared}
        return [[record for record in found if id(record) not in known] for found in self._records.values()]

    def _prove(self) -> None:
        """Measure the start and the best cell again, in alternating processes."""
        self.say("measuring the start again, in turn with the best")
        self._whole = self.compared_with_start(self.best)

    def compared_with_start(self, cell: Cell) -> Judgement | None:
        """Return the judgement of a cell compared with the start, in as many pairs as the time allows.

        None if one fails. The pairs of its trial do not count: it was kept because of them. The time or the width of
        the interval ends it, and not where the interval lies: in profiles/advised_scripts/simulated.md it holds the
        true ratio in 98% of the searches.
        """
        whole, began_s = None, self.bench.spent_s()
        for pair, found in enumerate(self._pairs(self._comparison(self.start, cell), proves=True), 1):
            if isinstance(found, str):
                return whole
            whole = found
            pair_s = (self.bench.spent_s() - began_s) / pair
            is_close = found.low is not None and found.high is not None and found.high / found.low < CLOSE_ENDS
            if (is_close and pair >= OWN_PAIRS) or self.bench.left_s() < pair_s:
                break
        return whole

    def _measure(self, cell: Cell) -> RunRecord:
        began_s = self.bench.spent_s()
        record = self.bench.measure(cell, self._numbers[cell])
        self._numbers[cell] += 1
        is_new = self.bench.spent_s() - began_s > KNOWN_S
        self._latest, self._new = cell, self._new + 1 if is_new else 0
        if record.measurement is not None and record.is_timing:
            self._records.setdefault(cell, []).append(record)
        return record

    def _now(self, record: RunRecord) -> float | None:
        return GOALS[self.situation.goal].value(record, (*self.situation.history, record)[0])

    @property
    def _unit(self) -> str:
        return GOALS[self.situation.goal].column

    def _not_tried(self) -> Iterator[TrialRow]:
        now = self._now(self.situation.history[-1]) if self.situation.history else None
        for found in proposals(self.situation, self.levers):
            if isinstance(found, tuple):
                lever, reason = found
                if lever not in self._kept:
                    yield row_of(lever, "", "not tried", reason)
            elif found.key not in {*self._tried, *self._earlier} and now is not None:
                expected = found.expected
                if too_large := self._fits(found):
                    yield row_of(found.lever, found.words, "not tried", too_large)
                elif expected and not self._is_open(found, now):
                    other = "the option that is kept" if found.lever in self._kept else "now"
                    text = f"expected {human(expected.value, self._unit)}, no gain compared with {other}"
                    yield row_of(found.lever, found.words, "not tried", text)
                else:
                    yield row_of(found.lever, found.words, "not tried", ENDED)


def _is_promising(found: Judgement, pairs: int) -> bool:
    """Return whether as many pairs as a trial may have narrow its interval down to the gain that it may have.

    The width falls with the root of their number, and with Student's t, as more of them show the variation.
    """
    if pairs < FEW_PAIRS or found.high is None:
        return True
    few, many = (student_t((1 + level_after(each)) / 2, each - 1) / math.sqrt(each) for each in (pairs, MANY_PAIRS))
    return many / few * math.log(found.high / found.ratio) < HOPED * -math.log(found.ratio)


def why_not(found: Judgement, pairs: int) -> str:
    """Return why pairs of processes that proved no gain were not enough to keep an option."""
    least = f"no gain of {LEAST_GAIN:.0%}"
    if found.is_gain is False:
        return f"{least} or more"
    if found.ratio > 1 - LEAST_GAIN:
        return f"{least} shown by {counted(pairs, 'pair')} of processes"
    return f"{counted(pairs, 'pair')} of processes cannot prove a gain of {1 / found.ratio - 1:.0%}"


def planned(situation: Situation, levers: Mapping[str, Lever]) -> list[Proposal]:
    """Return the options that apply to the start before it is measured, the most promising first."""
    return sorted(_options(situation, levers), key=lambda one: -one.usual)


def _options(situation: Situation, levers: Mapping[str, Lever]) -> list[Proposal]:
    alone = [one for one in proposals(situation, levers) if isinstance(one, Proposal)]
    found = [*alone, *together(situation, levers)]
    if situation.goal not in OF_ENERGY or situation.step_s is None:
        return found
    # No energy is expected; a shorter step usually takes less of it.
    now = situation.step_s
    return [replace(one, expected=None, usual=one.gain(now)) if one.expected else one for one in found]


def _why(record: RunRecord) -> str:
    """Return why a record has no number, as one line."""
    if record.measurement is not None:
        return "; ".join(caveat.message for caveat in record.warnings) or "its times are not valid"
    if record.status == "timeout":
        return "it took longer than a trial may; give a longer --budget"
    return f"{record.status}: {record.reason}"
