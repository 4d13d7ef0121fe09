"""Comparison of `ab`: its question, the processes of both sides, the table with the verdict, and the exit status."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

from cs_systems.cli import _ab_sides
from cs_systems.cli._ab_options import Ab
from cs_systems.cli._options import parse_seconds
from cs_systems.cli._output import check_outputs, deliver, terminal_width
from cs_systems.cli._sweep import EXIT_NOTHING
from cs_systems.cli._tables import table_text
from cs_systems.cli.compare import EXIT_FAILED_ON, UNKNOWN
from cs_systems.cli.run import parse_steps
from cs_systems.config import ConfigError
from cs_systems.core.printable import visible
from cs_systems.core.sequential import ASKED, SequentialTest, Standing
from cs_systems.core.statistics import quantile
from cs_systems.core.tables import Column, Table
from cs_systems.core.units import counted, human
from cs_systems.core.validation import shown
from cs_systems.formulas.rounding import FP32
from cs_systems.measure.runtime import program
from cs_systems.measure.runtime.pairs import SIDES, Interleaved, Ran
from cs_systems.measure.runtime.program import Program, Trial
from cs_systems.report.tables import document
from cs_systems.report.tables.formats import text_width


class SideRow(TypedDict):
    """Processes of one side: the row of the printed table."""

    side: str
    program: Annotated[str, Column(beside=60)]
    processes: int
    failed: int
    median_s: Annotated[float | None, Column(own_unit=True)]
    range: Annotated[str, Column("p10 … p90")]
    loss: Annotated[str, Column(drop=2)]
    step_j: Annotated[float | None, Column("energy", own_unit=True, drop=1)]


COMPARED = Table("compared", SideRow, "durations, A and B in turn, each in a new process")


class ProcessRow(TypedDict):
    """One process of a side."""

    side: str
    pair: Annotated[int, Column(note="number of its pair; 0 for the first process of each side, which does not count")]
    place: Annotated[int, Column(note="place in its pair")]
    time_s: float | None
    loss: float | None
    step_j: float | None
    reason: Annotated[str | None, Column(note="why it failed")]


class VerdictRow(TypedDict):
    """Verdict with its interval; `find` is the difference to find or to exclude."""

    verdict: Annotated[str, Column(note="slower, faster, no difference or undecided")]
    sentence: str
    ended: Annotated[str, Column(note="why no further pair ran")]
    compared: Annotated[str, Column(note="steps or process")]
    ratio: Annotated[float | None, Column(note="time of B over that of A")]
    ratio_low: Annotated[float | None, Column("ratio, low end")]
    ratio_high: Annotated[float | None, Column("ratio, high end")]
    resolution: Annotated[float | None, Column(note="smallest slowdown that could have been seen")]
    find: float
    pairs: int


ROUNDED_ULPS = 10  # a sum over a batch, added up in another order, differs by a few units in the last place
PROCESSES = Table("processes", ProcessRow, "processes in the order in which they ran")
VERDICT = Table("verdict", VerdictRow, "B compared with A")


class Question(NamedTuple):
    """Difference to find, the slowdown that fails the command, and whether a missing verdict fails it."""

    find: float
    fails_above: float | None
    fails_undecided: bool


@dataclass
class Compared:
    """Everything that was asked for and measured."""

    sides: tuple[Program, Program]
    test: SequentialTest
    measures: str  # "steps" or "process"
    why: str = ""  # why whole processes are measured, although steps would do as well; empty if nothing prevented steps
    ended: str = ""
    longer: str = ""  # options with which further pairs fit, if they did not suffice for a verdict
    ran: list[Ran] = field(default_factory=list)

    def trials(self, side: str) -> list[Trial]:
        """Return the trials of a side, without those before the first pair."""
        return [ran.trial for ran in self.ran if ran.side == side and ran.pair]


def compare(args: Ab) -> int:
    """Run the comparison, print its result, and return the exit status."""
    args = _with_sides(args)
    question, budget_s = _question(args), parse_seconds(args.budget, "--budget")
    parse_steps(args.steps)
    if args.max_pairs < 1:
        raise ConfigError(f"--max-pairs is {args.max_pairs}; give at least 1")
    kind = _ab_sides.kind_of(args.a, args.b, args.rest)
    if kind != "revisions" and (args.setup is not None or args.link):
        option = "--link" if args.setup is None else "--setup"
        raise ConfigError(f"{option} requires two revisions and -- SCRIPT; leave it out")
    check_outputs({"--output": args.output})
    asks = ASKED if question.fails_above is None else ("slower",)
    test = SequentialTest(question.find, asks=asks)
    scratch = Path(tempfile.mkdtemp(prefix="cs-systems-ab-"))
    try:
        with _ended_by_signals() as signals, _sides(args, kind, scratch) as sides:
            if args.dry_run:
                _print_plan(args, sides, question, budget_s)
                return 0
            compared = Compared(sides, test, args.measure)
            _measure(args, compared, scratch, budget_s, signals)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    standing = test.standing()
    _deliver(args, compared, standing)
    if signals:
        return 128 + signals[0]
    return _status(test, standing, question) if standing.pairs else EXIT_NOTHING


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt once, and yield the list that receives the signal's number.

    Later signals are ignored, so that the clean-up is not interrupted.
    """
    received = list[int]()

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sides(args: Ab, kind: str, scratch: Path) -> AbstractContextManager[tuple[Program, Program]]:
    if kind == "files":
        return nullcontext(_ab_sides.of_files(args.a, args.b, args.rest))
    if kind == "commands":
        return nullcontext(_ab_sides.of_commands(args.a, args.b))
    return _ab_sides.of_revisions((args.a, args.b), args.rest, scratch, args.setup, args.link)


def _measure(args: Ab, compared: Compared, scratch: Path, budget_s: float, signals: list[int]) -> None:
    """Run the processes and print each pair; Ctrl-C ends the loop and keeps the pairs measured so far."""
    first, last = parse_steps(args.steps)
    by_name = dict(zip(SIDES, compared.sides, strict=True))

    def trial(side: str) -> Trial:
        if compared.measures == "process":
            return program.timed(by_name[side], args.timeout_s)
        out = (args.out or scratch) / side
        found, _ = program.recorded(
            by_name[side], out, name="ab", warmup=first, steps=last - first, timeout_s=args.timeout_s
        )
        return found

    try:
        began_s = time.monotonic()
        is_warm = _choose(compared, trial)
        if compared.ended:
            return
        spent_s = time.monotonic() - began_s
        pairs = Interleaved(
            trial, compared.test, most_pairs=args.max_pairs, budget_s=budget_s, first=not is_warm, spent_s=spent_s
        )
        for ran in pairs:
            _take(args, compared, ran)
            if (ran.pair, ran.place) == (1, len(SIDES)) and (longer := _longer(args, compared.test, pairs)):
                print(f"even a large difference takes about {longer}", file=sys.stderr)
            if signals:  # the exception may be lost in a callback
                raise KeyboardInterrupt
        compared.ended, compared.longer = pairs.ended, _longer(args, compared.test, pairs)
    except KeyboardInterrupt:
        compared.ended = "interrupted"


def _longer(args: Ab, test: SequentialTest, pairs: Interleaved) -> str:
    """Return how many pairs a verdict takes, with the options that allow them; "" if these allow as many."""
    fewest, needed_s = test.fewest_pairs, (test.fewest_pairs + 1) * pairs.longest_s  # one pair is not counted
    options = []
    if len(test.pairs) + pairs.room() < fewest:
        options.append(f"--budget {math.ceil(needed_s / 60)}m")
    if args.max_pairs < fewest:
        options.append(f"--max-pairs {2 * fewest}")
    return f"{fewest} pairs: give {' and '.join(options)}, or more" if options else ""


def _choose(compared: Compared, trial: Callable[[str], Trial]) -> bool:
    """Decide whether steps or processes are compared, from one recorded process per side.

    Return True if both gave steps.
    """
    for name, side in zip(SIDES, compared.sides, strict=True):
        if side.python is None and compared.measures != "process":
            why = f"{name} runs no Python script"
            if compared.measures == "steps":
                raise ConfigError(f"--measure steps cannot be applied, because {why}; use --measure process")
            compared.measures, compared.why = "process", why
    if compared.measures == "process":
        return False
    for place, name in enumerate(SIDES, 1):
        ran = Ran(name, 0, place, trial(name))
        if ran.trial.value is None:
            compared.ran.append(ran)
            if ran.trial.has_failed or compared.measures == "steps":
                compared.ended = f"{name} failed: {ran.trial.reason}"
                return False
            compared.measures, compared.why = "process", f"{name} has no steps: {ran.trial.reason}"
            return False
        compared.ran.append(ran)
    compared.measures = "steps"
    return True


def _take(args: Ab, compared: Compared, ran: Ran) -> None:
    """Keep the result of a process; if it completes a pair, print the pair to standard error."""
    compared.ran.append(ran)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "processes.jsonl").open("a") as file:
            print(json.dumps(_process(ran)), file=file)
    if ran.place < len(SIDES):
        return
    both = sorted((each.side, each.trial) for each in compared.ran[-len(SIDES) :])
    texts = [
        f"{side} failed: {trial.reason}" if trial.value is None else f"{side} {human(trial.value, 's')}"
        for side, trial in both
    ]
    place = f"pair {ran.pair}" if ran.pair else "first"
    print(visible(f"{place}: {', '.join(texts)}"), file=sys.stderr)


def _process(ran: Ran) -> ProcessRow:
    trial = ran.trial
    return {
        "side": ran.side,
        "pair": ran.pair,
        "place": ran.place,
        "time_s": trial.value,
        "loss": trial.loss,
        "step_j": trial.step_j,
        "reason": trial.reason,
    }


def _deliver(args: Ab, compared: Compared, standing: Standing) -> None:
    rows = [_row(compared, name, side) for name, side in zip(SIDES, compared.sides, strict=True)]
    what = "steps of recorded loops" if compared.measures == "steps" else "whole processes"
    if args.format == "json":
        deliver(_pieces(compared, standing, rows), "json", args.output)
        return
    notes = [f"compared: {what}{f', because {compared.why}' if compared.why else ''}"]
    notes += _failures(compared)
    if text := _losses(compared):
        notes.append(text)
    sentence = visible(_sentence(compared, standing))
    texts = [table_text(COMPARED, rows, notes, args.format, args.output)]
    if args.format in ("terminal", "markdown"):
        width = text_width(terminal_width(args.output))
        is_text = args.format == "terminal"
        texts.append(f"{textwrap.fill(sentence, width, break_on_hyphens=False) if is_text else sentence}\n")
    else:
        print(sentence, file=sys.stderr)
    deliver("\n".join(texts), args.format, args.output)


def _pieces(compared: Compared, standing: Standing, rows: list[SideRow]) -> str:
    """Return the verdict, the sides and all processes, for a JSON document."""
    verdict: VerdictRow = {
        "verdict": standing.verdict,
        "sentence": _sentence(compared, standing),
        "ended": compared.ended,
        "compared": compared.measures,
        "ratio": standing.ratio,
        "ratio_low": standing.low,
        "ratio_high": standing.high,
        "resolution": standing.resolution,
        "find": compared.test.find,
        "pairs": standing.pairs,
    }
    ran = [_process(one) for one in compared.ran]
    return document.table(VERDICT, [verdict]) + document.table(COMPARED, rows) + document.table(PROCESSES, ran)


def _row(compared: Compared, name: str, side: Program) -> SideRow:
    trials = compared.trials(name)
    times = [trial.value for trial in trials if trial.value is not None]
    joules = [trial.step_j for trial in trials if trial.step_j is not None]
    losses = sorted(trial.loss for trial in trials if trial.loss is not None)
    return {
        "side": name,
        "program": side.title,
        "processes": len(times),
        "failed": sum(trial.value is None for trial in trials),
        "median_s": quantile(times, 0.5) if times else None,
        "range": f"{human(quantile(times, 0.1), 's')} … {human(quantile(times, 0.9), 's')}" if times else "",
        "loss": f"{quantile(losses, 0.5):.5g}" if losses else "",
        "step_j": quantile(joules, 0.5) if joules else None,
    }


def _failures(compared: Compared) -> Iterator[str]:
    """Yield the reasons of failed processes, each once."""
    reasons = {(ran.side, ran.trial.reason) for ran in compared.ran if ran.trial.has_failed}
    yield from (f"{side} failed: {reason}" for side, reason in sorted(reasons, key=str))


def _losses(compared: Compared) -> str:
    """Return a sentence that compares the last losses of the two sides; "" without losses."""
    a, b = ([t.loss for t in compared.trials(name) if t.loss is not None] for name in SIDES)
    if not a or not b:
        return ""
    if max(min(a), min(b)) <= min(max(a), max(b)):
        return "loss: A and B differ no more than processes of one side do"
    of_a, of_b = quantile(a, 0.5), quantile(b, 0.5)
    change = of_b - of_a
    if abs(change) <= ROUNDED_ULPS * FP32.ulp(max(abs(of_a), abs(of_b))):
        return f"loss: A's and B's are equal within the rounding of fp32: they differ by {abs(change):.2g}"
    return f"loss: B's is {abs(change):.2g} {'higher' if change > 0 else 'lower'}, outside the range of A's processes"


def _sentence(compared: Compared, standing: Standing) -> str:
    """Return the verdict in a sentence, with its interval and the smallest slowdown that would have been detected."""
    longer = f"; even a large difference takes about {compared.longer}" if compared.longer else ""
    if not standing.pairs:
        return f"nothing was compared: {compared.ended}{longer}"
    find = _percent(compared.test.find)
    limits = [UNKNOWN if limit is None else f"{limit:.3f}" for limit in (standing.low, standing.high)]
    interval = f" ({' … '.join(limits)})" if {*limits} != {UNKNOWN} else ""
    times = f"{standing.ratio:.3f}{interval} times as long as A"
    after = f"after {counted(standing.pairs, 'pair')}"
    seen = "no slowdown could have been seen yet"
    if standing.resolution is not None:
        seen = f"a slowdown of {standing.resolution:.1%} could have been seen"
    match standing.verdict:
        case "slower" | "faster":
            return f"B is {standing.verdict} than A: it takes {times}, {after}; {seen}"
        case "no difference":
            return f"no difference of {find} or more between A and B: B takes {times}, {after}; {seen}"
        case "undecided":
            return f"undecided: B takes {times}, {after}, when {compared.ended}; {seen}{longer}"
    return f"B is {standing.verdict} than A by {find} or more: it takes {times}, {after}; {seen}"


def _percent(share: float) -> str:
    return f"{round(100 * share, 3):g}%"


def _status(test: SequentialTest, standing: Standing, question: Question) -> int:
    """Return the exit status for CI."""
    if standing.verdict == "undecided":
        return EXIT_FAILED_ON if question.fails_undecided else 0
    if standing.verdict != "slower" or question.fails_above is None:
        return 0
    return 0 if test.is_excluded(1 + question.fails_above) else EXIT_FAILED_ON


def _print_plan(args: Ab, sides: tuple[Program, Program], question: Question, budget_s: float) -> None:
    """Print what would be compared."""
    for name, side in zip(SIDES, sides, strict=True):
        print(visible(f"{name}: {side.title}"))
    recordable = all(side.python is not None for side in sides) and args.measure != "process"
    what = "the steps of their loops, if they can be recorded" if recordable else "the whole processes"
    print(f"compared: {what}")
    print(f"to find: a difference of {_percent(question.find)}")
    print(f"at most {counted(args.max_pairs, 'pair')} of processes, in at most {budget_s:,.0f} s")


def _with_sides(args: Ab) -> Ab:
    """Return the options with A and B, which may follow --fail-if though it takes several values.

    Raises ConfigError if an option took a side that it cannot tell from its own values.
    """
    if args.a and args.b:
        return args
    others = [word for word in args.fail_if if not _is_condition(word)]
    if not args.a and len(others) == 2 and args.fail_if[-2:] == tuple(others):
        return replace(args, a=others[0], b=others[1], fail_if=args.fail_if[:-2])
    if others or args.link:
        option = "--fail-if" if others else "--link"
        raise ConfigError(f"A or B is missing, because {option} takes the words that follow it; write A B {option}")
    return args


def _is_condition(word: str) -> bool:
    """Return whether a word is a value of --fail-if."""
    return word == "undecided" or word.startswith("slower:")


def _question(args: Ab) -> Question:
    """Return what --find and --fail-if ask for. Raises ConfigError."""
    fails_above, fails_undecided = None, False
    for word in args.fail_if:
        if word == "undecided":
            fails_undecided = True
        elif word.startswith("slower:"):
            fails_above = _share(word.removeprefix("slower:"), "--fail-if")
        else:
            raise ConfigError(f"--fail-if is {shown(word)}; write slower:3% or undecided, or both")
    find = _share(args.find, "--find") if args.find is not None else fails_above or 0.03
    if fails_above is not None and find != fails_above:
        raise ConfigError("--find and --fail-if name different shares; leave out --find")
    return Question(find, fails_above, fails_undecided)


def _share(text: str, option: str) -> float:
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
        return float(found[1]) / 100
    raise ConfigError(f"{option} has {shown(text)}, which is not a share; write it as 3%")
