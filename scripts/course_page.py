"""The tasks in docs/guides/course.md, written from cs_systems/core/course.toml and the outputs in profiles/course.

    python scripts/course_page.py    # or: make readme

A task's section has what it asks, its commands at the handout's sizes, the tables that answer it or the beginning of
what they printed (where profiles/course has it), what to look at, what a good answer says, and the usual mistakes.
The rest of the page is written by hand. tests/docs compares the page with what this script would write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from cs_systems.core.course import Task, tasks
from cs_systems.core.printable import command_line
from cs_systems.report.tables.rows import NO_DATA

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "guides" / "course.md", ROOT / "profiles" / "course"
BEGIN, END = "<!-- tasks: made by `make readme` from cs_systems/core/course.toml -->", "<!-- /tasks -->"
WIDTH, WHOLE_LINES, MOST_LINES = 108, 40, 24  # an output of more than WHOLE_LINES ends after MOST_LINES
NEEDS = {0: "", 1: "# needs a GPU\n", 2: "# needs two GPUs\n"}


def page(text: str) -> str:
    """Return the text of the page with its list of tasks written again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def generated() -> str:
    """Return the Markdown of the tasks."""
    rows = [f"| [{task.name}](#{task.name}) | {task.asks} |" for task in tasks().values()]
    table = "\n".join(["| task | what it asks |", "| --- | --- |", *rows])
    return "\n\n".join(["", table, *(part for task in tasks().values() for part in section(task)), ""]).strip("\n")


def section(task: Task) -> Iterator[str]:
    yield f"## {task.name}"
    yield task.asks
    words = ["course", task.name, *(["--code", "PATH:NAME"] if task.code else [])]
    lines = [words, *task.commands(task.full, f"runs/course/{task.folder or task.name}")]
    yield f"```console\n{NEEDS[task.gpus]}{''.join(map(shown, lines))}```" if task.gpus else _plain(lines)
    for number in task.shows:
        if printed := excerpt(task, number):
            yield f"```text\n{printed}\n```"
    yield f"**Look at:** {task.look}"
    yield f"**A good answer:** {task.good}"
    yield f"**Usual mistakes:** {' '.join(task.mistakes)}"
    if links := [f"[{name}](../../profiles/{name}/table.md)" for name in task.studies]:
        yield f"Further: {', '.join(links)}."


def _plain(lines: list[list[str]]) -> str:
    """Return commands that also run on a CPU as a block that the tests of the pages skip."""
    return f"```text\n{''.join(map(shown, lines))}```"


def shown(words: list[str]) -> str:
    """Return a command as a line with `$ `, continued by backslashes where it is long."""
    lines, line = [], "$ cs-systems"
    for word in map(command_line, words):
        if len(line) + len(word) > WIDTH:
            lines.append(line + " \\")
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line]) + "\n"


def excerpt(task: Task, number: int) -> str:
    """Return the first lines that a step of a task printed; "" where it was not run, or measured something else.

    A task by formula has one output, without a command.
    """
    file = RESULTS / (task.folder or task.name) / f"{task.name}.txt"
    if not file.is_file():
        return ""
    first, *rest = re.split(r"^\$ cs-systems (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    outputs = rest[1::2] if task.steps else [first]
    if number > len(outputs):
        return ""
    if task.steps:
        now = task.commands(task.full, f"runs/course/{task.folder or task.name}")[number - 1]
        if not is_part_of(options(shlex.split(rest[2 * number - 2])), options(now)):
            return ""
    output = outputs[number - 1].strip("\n")
    tables = "\n\n".join(answering(output, task.answers)) if task.answers else output
    lines = [line.rstrip() for line in tables.splitlines()]
    count = max(1, len(task.answers))
    return "\n".join([*lines[: MOST_LINES * count], "…"] if len(lines) > WHOLE_LINES * count else lines)


def options(words: Sequence[str]) -> dict[str, set[str]]:
    """Return the values of each option of a command, without those that have none."""
    found: dict[str, set[str]] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word
        elif option:
            found.setdefault(option, set()).add(word)
    return found


def is_part_of(printed: dict[str, set[str]], now: dict[str, set[str]]) -> bool:
    """Return whether a command that printed something measured only what the present one measures."""
    return all(values <= now.get(option, set()) for option, values in printed.items())


def answering(output: str, captions: Sequence[str]) -> Iterator[str]:
    """Yield the first table for each of the captions' words. Tables of an output stand between empty lines."""
    tables = [table for table in output.split("\n\n") if f"\n{NO_DATA}" not in table]
    for words in captions:
        yield from [table for table in tables if words in " ".join(table.partition("───")[0].split())][:1]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if (new := page(text)) != text:
        PAGE.write_text(new, encoding="utf-8")
        print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
