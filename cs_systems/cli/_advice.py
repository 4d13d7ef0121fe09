"""Output of advise, for cells and for scripts: what will be tried, progress, and the answer."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs_systems.config import ConfigError
from cs_systems.core.printable import labelled_command, plain
from cs_systems.core.units import human

if TYPE_CHECKING:
    from cs_systems.advise.answer import Answer
    from cs_systems.advise.lever import Lever, Situation
    from cs_systems.analysis.diagnosis import Answer as DiagnosisAnswer
    from cs_systems.record import Environment, RunRecord
    from cs_systems.report.advice import ToTryRow

SCRIPT = "YOUR_SCRIPT.py"
RECORD_BYTES = 20_000  # most bytes of a record of one process
SHORT_S = 120.0  # budget below which the start, which is measured whatever time it takes, may take longer


def try_command(
    answer: DiagnosisAnswer, cell: Sequence[str] = (), script: Sequence[str] = (), record: RunRecord | None = None
) -> list[str]:
    """Return the command that tries the first remedy of an answer, as words; empty if no lever carries the remedy out.

    Args:
        answer: the diagnosis.
        cell: the options of the cell that was judged.
        script: the words of the script, instead of a cell.
        record: the script's record, for levers that apply only to some scripts.
    """
    from cs_systems.advise.lever import all_levers

    if record is not None and any(caveat.code == "forward-only" for caveat in record.warnings):
        return []  # a search refuses a script that trains nothing
    fit = {name: lever for name, lever in all_levers().items() if (lever.script if script else lever.options)}
    if script and record is not None and record.environment is not None:
        fit = _applying(fit, script, record, record.environment)
    for diagnosis in answer.diagnoses:
        levers = [name for name, lever in fit.items() if diagnosis.code in lever.remedies]
        if levers:
            goal = ["--goal", "memory"] if diagnosis.unit == "bytes" else []
            return ["cs-systems", "advise", *cell, *goal, "--levers", *levers, *(["--", *script] if script else [])]
    return []


def _applying(
    levers: Mapping[str, Lever], script: Sequence[str], record: RunRecord, machine: Environment
) -> dict[str, Lever]:
    """Return the levers that apply to a script; all of them if its text cannot be read."""
    from cs_systems.advise.lever import ScriptPlan, Situation
    from cs_systems.advise.ranks import split
    from cs_systems.advise.sources import sources

    try:
        launcher, words = split(script)
        texts = tuple(each.text for each in sources(Path(words[0])))
    except (ConfigError, OSError, ValueError, SyntaxError):
        return {**levers}
    situation = Situation(ScriptPlan(), machine, (record,), texts=texts, has_ranks=bool(launcher))
    return {name: one for name, one in levers.items() if one.script and one.script.unfit(situation) is None}


def try_after_trace(answer: DiagnosisAnswer, record: RunRecord | None) -> list[str]:
    """Return the words of `try_command` for a trace: for its cell or script if a record names it, else for SCRIPT.

    record: the record that names the file of the trace.
    """
    from cs_systems.advise.answer import command_words
    from cs_systems.core.fields import Subject

    if record is None:
        return try_command(answer, script=(SCRIPT,))
    cell = record.run_config
    if cell.subject is not Subject.LOOP:
        return [] if cell.is_distributed else try_command(answer, command_words(cell.of_any_measurement)[2:])
    command = shlex.split(record.origin.command or "") if record.origin else []
    script = command[command.index("--") + 1 :] if "--" in command else []
    return try_command(answer, script=script, record=record) if script[:1] not in ([], ["-m"]) else []


def check_memory(goal: str, limit_bytes: int | None, device: str) -> None:
    """Raise ConfigError if an option needs the peak memory of a step, which is not measured on this device."""
    option = "--goal memory" if goal == "memory" else "--memory" if limit_bytes else ""
    if option and device == "cpu":
        raise ConfigError(f"{option} requires a GPU, because the memory of a CPU's step is not measured")


def say(line: str) -> None:
    """Print a line of progress to standard error, wrapped on a terminal."""
    from cs_systems.cli._output import terminal_width

    text = f"  {plain(line)}" if line.startswith(" ") else plain(line)
    if width := terminal_width(stream=sys.stderr):
        text = textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)
    print(text, file=sys.stderr, flush=True)


def announce(
    situation: Situation,
    levers: Mapping[str, Lever],
    budget: str,
    budget_s: float,
    start: str,
    *,
    is_answer: bool,
) -> list[ToTryRow]:
    """Print what will be tried, how long it may take, and how much disk space it takes; return what will be tried.

    budget: the time as it was given, with what it is for. is_answer: print it to standard output, because the command
    runs nothing.
    """
    from cs_systems.advise.judge import MANY_PAIRS
    from cs_systems.advise.lever import proposals
    from cs_systems.advise.search import planned

    rows: list[ToTryRow] = [{"lever": one.lever, "change": one.words} for one in planned(situation, levers)]
    options = [f"{row['lever']} ({row['change']})" for row in rows]
    tell = _print if is_answer else say
    tell(f"start: {start} on {situation.environment.device_name}")
    reasons = [found for found in proposals(situation, levers) if isinstance(found, tuple)]
    nothing = f"nothing, because no lever applies: {'; '.join(f'{name} ({why})' for name, why in reasons)}"
    tell(f"to try: {'; '.join(options) or nothing}")
    longer = " (longer if the start alone takes longer)" if budget_s < SHORT_S else ""
    tell(
        f"at most {budget}{longer}, each option 1 to {2 * MANY_PAIRS} processes; later options follow from those that "
        f"are kept; about {human(RECORD_BYTES, 'bytes')} of records per process"
    )
    return rows


def _print(line: str) -> None:
    """Print a sentence of the answer to standard output."""
    from cs_systems.cli._output import terminal_width
    from cs_systems.report.tables.formats import text_width

    width = text_width(terminal_width())
    print(textwrap.fill(plain(line), width, subsequent_indent="  ", break_on_hyphens=False))


def print_answer(answer: Answer) -> None:
    """Print the result, the waterfall, the rejected changes, and the results of the check of numbers."""
    from cs_systems.cli._output import print_table, terminal_width
    from cs_systems.report.advice import OTHERS, waterfall_table
    from cs_systems.report.tables.formats import text_width

    width = text_width(terminal_width())
    for sentence in answer.sentences():
        print(textwrap.fill(plain(sentence), width, break_on_hyphens=False))
    print()
    if answer.waterfall:
        print_table(waterfall_table(answer.goal, answer.waterfall), answer.waterfall)
    if answer.others:
        print_table(OTHERS, answer.others)
    for line in _lines(answer):
        _print(line)


def print_report(folder: Path) -> None:
    """Print the command that shows the answer with its waterfall as a page."""
    from cs_systems.cli._output import terminal_width
    from cs_systems.report.tables.formats import text_width

    words = ("cs-systems", "report", folder, "--format", "html", "--open")
    print(labelled_command("report:", words, text_width(terminal_width())))


def print_continuation(answer: Answer, folder: Path) -> None:
    """Print the command that goes on with a search that its budget ended; after Ctrl-C the command line prints it."""
    from cs_systems.cli._output import Interrupted, terminal_width
    from cs_systems.core import origin
    from cs_systems.report.tables.formats import text_width

    command = origin.command()
    if answer.tried and answer.is_unfinished and not answer.is_interrupted and command:
        words = shlex.split(Interrupted(folder).command(shlex.split(command)[1:]))
        print(labelled_command("go on:", words, text_width(terminal_width())))


def _lines(answer: Answer) -> Iterator[str]:
    """Yield each kept lever's effect on the numbers and its form in a program, then levers that do not apply."""
    from cs_systems.advise.lever import TOGETHER, all_levers

    levers = all_levers()
    for row in answer.kept:
        for name in row["lever"].split(TOGETHER):
            saw = f"; {row['numbers']}" if row["numbers"] else ""
            what = levers[name].numbers or "changes no number"
            yield f"{name}: {what}{saw}; in your own program: {row['code'] or levers[name].lines}"
    if answer.unfit:
        yield f"does not apply: {'; '.join(answer.unfit)}"
