"""`advise -- train.py`: search for an unedited script, and the answer as a diff and environment variables."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs_systems.config import ConfigError
from cs_systems.core.printable import command_line, plain, visible

if TYPE_CHECKING:
    from cs_systems.advise.answer import Answer
    from cs_systems.advise.scripts import ScriptBench
    from cs_systems.advise.search import Search


@dataclass(frozen=True)
class Asked:
    """Options of the command that apply to a script."""

    words: tuple[str, ...]
    levers: tuple[str, ...]
    warmup: int
    steps: int
    budget: str
    budget_s: float
    out: Path | None
    dry_run: bool
    apply_patch: bool


def searched(asked: Asked) -> int:
    """Run the search; return 0, or 3 if the script cannot be measured as it is."""
    from cs_systems.advise import cells
    from cs_systems.advise.lever import ScriptPlan, Situation, all_levers
    from cs_systems.advise.scripts import ScriptBench, git_status
    from cs_systems.advise.search import Search, Unmeasurable
    from cs_systems.cli._advice import announce, say
    from cs_systems.cli._output import Interrupted
    from cs_systems.cli._sweep import EXIT_NOTHING
    from cs_systems.cli.run import titles
    from cs_systems.measure.runtime.program import script_command

    script, source = _script(asked.words)
    every = all_levers()
    chosen = {name: lever for name, lever in every.items() if lever.script and name in (asked.levers or every)}
    situation = Situation(ScriptPlan(), cells.machine("auto"), source=source)
    announce(situation, chosen, asked.budget, command_line(*asked.words))
    if asked.dry_run:
        return 0
    before = git_status()
    folder = asked.out or Path(tempfile.mkdtemp(prefix=f"cs-systems-advise-{script.stem}-"))
    recorder = {"name": titles(asked.words)[1], "stop": True, "profile": "none"}
    options = recorder | {"warmup": asked.warmup, "steps": asked.steps}
    bench = ScriptBench(asked.words, every, folder, script_command, options, asked.budget_s)
    search = Search(situation, chosen, bench, say)
    try:
        search.run()
        _deliver(search, bench, folder, script, source)
        if asked.apply_patch:
            _try_patch(search, bench, script, source)
    except KeyboardInterrupt:
        _deliver(search, bench, folder, script, source)
        raise Interrupted(folder) from None
    except Unmeasurable as reason:
        say(f"the script cannot be measured as it is: {reason}")
        return EXIT_NOTHING
    finally:
        if (after := git_status()) != before:
            say(f"the script itself changed files of this repository: {' '.join((after or '').split())}")
    return 0


def _script(words: Sequence[str]) -> tuple[Path, str]:
    """Return the script's file and text. Raises ConfigError."""
    from cs_systems.cli.run import check_script

    check_script(words)
    if words[0] == "-m":
        raise ConfigError("advise takes a script, not a module, because it prints a diff; name its file")
    script = Path(words[0])
    try:
        source = script.read_text()
        compile(source, str(script), "exec")
    except (UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} cannot be read as Python: {error}; correct it") from None
    return script, source


def _deliver(search: Search, bench: ScriptBench, folder: Path, script: Path, source: str) -> None:
    """Print the answer, then how to apply it: environment variables, the diff, and lines to write by hand."""
    from cs_systems.advise.lever import ScriptPlan
    from cs_systems.advise.scripts import diff
    from cs_systems.cli._advice import print_answer, print_report
    from cs_systems.cli._output import terminal_width
    from cs_systems.report.advice import FILE
    from cs_systems.report.files import write_file
    from cs_systems.report.tables.formats import text_width

    answer, best = search.answer(), search.best
    assert isinstance(best, ScriptPlan)
    text, missing = bench.patched(best, source)
    patch = diff(script.as_posix(), source, text)
    data = answer.to_dict() | {"diff": patch, "environment": bench.environment(best)}
    write_file(folder / FILE, json.dumps(data, indent=1).encode())
    print_answer(answer)
    width = text_width(terminal_width())
    for sentence in left(answer):
        print(textwrap.fill(f"left for you: {plain(sentence)}", width, subsequent_indent="  ", break_on_hyphens=False))
    if variables := bench.environment(best):
        words = [f"{name}={value}" for name, value in variables.items()]
        print(visible(f"run it with: {command_line(*words)} {command_line('python', *bench.words)}"))
    for name in missing:
        line = f"write by hand, because the place was not found: {bench.levers[name].lines}"
        print(textwrap.fill(plain(line), width, subsequent_indent="  ", break_on_hyphens=False))
    print(visible(f"records: {folder}"))
    print_report(folder)
    if patch:
        write_file(folder / "advice.diff", patch.encode())
        print(visible(f"diff:    {folder / 'advice.diff'}\n\n{patch}"), end="")


def left(answer: Answer) -> list[str]:
    """Return the causes that the diagnosis names for the best step, with their remedies, unless a lever was tried."""
    from cs_systems.advise.lever import TOGETHER, all_levers
    from cs_systems.analysis.diagnosis import diagnose

    levers = all_levers()
    tried = {name for row in answer.trials if row["processes"] for name in row["lever"].split(TOGETHER)}
    codes = {code for name in tried for code in levers[name].remedies}
    return [one.sentence for one in diagnose(answer.history[-1:]).diagnoses if one.code not in codes]


def _try_patch(search: Search, bench: ScriptBench, script: Path, source: str) -> None:
    """Measure the script with the diff applied, in a copy of the folder, compared with the unchanged script."""
    from cs_systems.advise.answer import in_words
    from cs_systems.advise.lever import ScriptPlan
    from cs_systems.cli._advice import say

    best = search.best
    assert isinstance(best, ScriptPlan)
    text, _ = bench.patched(best, source)
    if text == source:
        print("\nthere is no diff to try")
        return
    with tempfile.TemporaryDirectory(prefix="cs-systems-patched-") as copy:
        bench.copied(script, text, Path(copy))
        say("trying the diff in a copy of the folder")
        found = search.compared_with_start(replace(best, is_patched=True))
    if found is None:
        print("\nthe diff does not run in a copy of the folder; see its log in the folder of the records")
        return
    print(f"\nthe diff, in a copy of the folder: {in_words(found)} as the script")
