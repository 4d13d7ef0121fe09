"""`advise -- train.py`: search for an unedited script, and the answer as a diff and environment variables."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.core.printable import command_line, plain, visible

MAY_FORK = sys.platform == "linux"
OF_PATCH = 0.2  # share of the budget for the diff in a copy of the folder, with --apply-patch
VERSION = "version.txt"  # file in the folder of a search with the hash of the script's files

if TYPE_CHECKING:
    from cs_systems.advise.answer import Answer
    from cs_systems.advise.scripts import ScriptBench
    from cs_systems.advise.search import Search
    from cs_systems.advise.sources import Source


@dataclass(frozen=True)
class Asked:
    """Options of the command that apply to a script."""

    words: tuple[str, ...]
    goal: str
    memory_bytes: int | None
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
    from cs_systems.advise.ranks import split
    from cs_systems.advise.scripts import ScriptBench, changed_files, git_status
    from cs_systems.advise.search import Search, Unmeasurable
    from cs_systems.advise.sources import sources
    from cs_systems.cli._advice import announce, check_memory, say
    from cs_systems.cli._document import add, failed
    from cs_systems.cli._output import Interrupted
    from cs_systems.cli._sweep import EXIT_NOTHING
    from cs_systems.cli.run import titles
    from cs_systems.report.advice import TO_TRY
    from cs_systems.report.tables import document

    launcher, words = split(asked.words)
    script = _script(words)
    files = sources(script)
    every = all_levers()
    if of_cells := [name for name in asked.levers if every[name].script is None]:
        raise ConfigError(f"{', '.join(of_cells)}: not for scripts; leave it out, or give cells in place of the script")
    chosen = {name: lever for name, lever in every.items() if lever.script and name in (asked.levers or every)}
    machine = cells.machine("auto")
    check_memory(asked.goal, asked.memory_bytes, machine.device)
    situation = Situation(
        ScriptPlan(),
        machine,
        goal=asked.goal,
        memory_bytes=asked.memory_bytes,
        texts=tuple(each.text for each in files),
        has_ranks=bool(launcher),
    )
    budget = f"{asked.budget} ({OF_PATCH:.0%} for the diff)" if asked.apply_patch else asked.budget
    if asked.out is not None:
        refuse_other_version(asked.out, files)
    started = command_line(*asked.words)
    to_try = announce(situation, chosen, budget, asked.budget_s, started, is_answer=asked.dry_run)
    if asked.dry_run:
        add(document.table(TO_TRY, to_try))
        return 0
    folder = asked.out or Path(tempfile.mkdtemp(prefix=f"cs-systems-advise-{script.stem}-"))
    check_version(folder, files)
    before = git_status(folder)
    recorder = {"name": titles(words)[1], "stop": True, "profile": "none"}
    options = recorder | {"warmup": asked.warmup, "steps": asked.steps}
    command = partial(recording_command, launcher)
    of_patch_s = OF_PATCH * asked.budget_s if asked.apply_patch else 0.0
    search_s, may_fork = asked.budget_s - of_patch_s, not launcher and MAY_FORK
    bench = ScriptBench(words, every, folder, command, options, search_s, sources=files, may_fork=may_fork)
    search = Search(situation, chosen, bench, say)
    try:
        try:
            search.run()
        finally:
            if search.situation.history:
                _deliver(search, bench, folder, asked.words)
        if asked.apply_patch:
            bench.extend(of_patch_s)
            _try_patch(search, bench)
    except KeyboardInterrupt:
        raise Interrupted(folder) from None
    except Unmeasurable as reason:
        return failed(f"the script cannot be measured as it is: {reason}", EXIT_NOTHING)
    finally:
        bench.close()
        if changed := changed_files(before, git_status(folder)):
            say(f"the script itself changed files of this repository: {' '.join(changed)}")
    return 0


def check_version(folder: Path, files: Sequence[Source]) -> None:
    """Write the hash of the script's files into the folder. Raises ConfigError if its trials are of other files."""
    refuse_other_version(folder, files)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VERSION).write_text(f"{_digest(files)}\n")


def _digest(files: Sequence[Source]) -> str:
    return sha256("".join(each.text for each in files).encode()).hexdigest()


def refuse_other_version(folder: Path, files: Sequence[Source]) -> None:
    """Raise ConfigError if the trials in the folder are of other texts of the script's files."""
    file = folder / VERSION
    is_measured = any(folder.glob("*/records.jsonl"))
    if is_measured and file.exists() and file.read_text().strip() != _digest(files):
        raise ConfigError(
            f"the trials in {folder} are of another version of the script or of a module that it imports; "
            "choose another --out, or undo the edit"
        )


def recording_command(launcher: Sequence[str], options: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Return the command that records a script, once or as the ranks of a launcher."""
    from cs_systems.measure.runtime.program import script_command

    command = script_command(options, words)
    return [*launcher, *command[1:]] if launcher else command


def _script(words: Sequence[str]) -> Path:
    """Return the script's file. Raises ConfigError unless it can be edited."""
    from cs_systems.advise.sources import read
    from cs_systems.cli.run import check_script

    check_script(words, "advise")
    if words[0] == "-m":
        raise ConfigError("advise takes a script, not a module, because it prints a diff; name its file")
    script = Path(words[0])
    try:
        compile(read(script), str(script), "exec")
    except (UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} cannot be read as Python: {error}; correct it") from None
    return script


def _deliver(search: Search, bench: ScriptBench, folder: Path, words: Sequence[str]) -> None:
    """Print the answer, then how to apply it: environment variables, the diff, and lines to write by hand."""
    from cs_systems.advise.lever import ScriptPlan
    from cs_systems.advise.ranks import is_launcher
    from cs_systems.advise.sources import diff, shown_name
    from cs_systems.cli._advice import print_answer, print_continuation, print_report
    from cs_systems.cli._document import is_wanted
    from cs_systems.cli._output import terminal_width
    from cs_systems.report.advice import FILE
    from cs_systems.report.files import write_file
    from cs_systems.report.tables.formats import text_width

    answer, best = search.answer(), search.best
    assert isinstance(best, ScriptPlan)
    texts, missing = bench.patched(best)
    before = {each.path: each.text for each in bench.sources}
    patch = "".join(diff(shown_name(file), before[file], text) for file, text in texts.items())
    data = answer.to_dict() | {"diff": patch, "environment": bench.environment(best)}
    write_file(folder / FILE, json.dumps(data, indent=1).encode())
    print_answer(answer)
    width = text_width(terminal_width())
    for sentence in left(answer):
        print(textwrap.fill(f"left for you: {plain(sentence)}", width, subsequent_indent="  ", break_on_hyphens=False))
    if variables := bench.environment(best):
        assigned = [f"{name}={value}" for name, value in variables.items()]
        command = words if is_launcher(words) else ("python", *words)
        print(visible(f"run it with: {command_line(*assigned)} {command_line(*command)}"))
    partly = bench.partly(best)
    code = {row["lever"]: row["code"] for row in answer.kept}
    for name in missing:
        why = "the trial left some places as they are" if name in partly else "the place was not found"
        line = f"write by hand, because {why}: {code.get(name) or bench.levers[name].lines}"
        print(textwrap.fill(plain(line), width, subsequent_indent="  ", break_on_hyphens=False))
    print(visible(f"records: {folder}"))
    print_report(folder)
    print_continuation(answer, folder)
    if patch:
        write_file(folder / "advice.diff", patch.encode())
        print(visible(f"diff:    {folder / 'advice.diff'}"))
        if not is_wanted():  # else a note for each line
            print(visible(f"\n{patch}"), end="")


def left(answer: Answer) -> list[str]:
    """Return the causes that the diagnosis names for the best step, with the levers that did not help against each."""
    from cs_systems.advise.lever import all_levers

    levers, found = all_levers(), []
    tried = [row["lever"] for row in answer.others if row["processes"]]
    for one in answer.diagnoses:
        names = [name for name in tried if one.code in levers[name].remedies]
        found.append(one.sentence + (f" (tried, but not kept: {', '.join(names)})" if names else ""))
    return found


def _try_patch(search: Search, bench: ScriptBench) -> None:
    """Measure the script with the diff applied, in a copy of the folder, compared with the unchanged script."""
    from cs_systems.advise.answer import in_words
    from cs_systems.advise.lever import ScriptPlan
    from cs_systems.cli._advice import say

    best = search.best
    assert isinstance(best, ScriptPlan)
    texts, _ = bench.patched(best)
    if not texts:
        print("\nthere is no diff to try")
        return
    with tempfile.TemporaryDirectory(prefix="cs-systems-patched-") as copy:
        bench.copied(texts, Path(copy))
        say("trying the diff in a copy of the folder")
        found = search.compared_with_start(replace(best, is_patched=True))
    if found is None:
        print("\nthe diff does not run in a copy of the folder; see its log in the folder of the records")
        return
    print(f"\nthe diff, in a copy of the folder: {in_words(found)} as the script")
