"""Run the commands that the pages of docs/ show, and write what they print below them.

    python scripts/docs_commands.py [PAGE ...]                 # all pages by default
    python scripts/docs_commands.py --reproducible [PAGE ...]  # measure nothing: only what each run prints alike

A command is a line that starts with `$ ` in a fenced block of kind `console`; a line that ends with a backslash
continues in the next line. A block that starts with `# needs ...` (a GPU, Slurm) is left as it is. The commands of one
page run in order in one temporary folder, which shows the repository's examples, profiles, scripts and tests. What is
printed to standard error is shown only where nothing else was printed. tests/docs runs the same commands, and compares
what the reproducible ones print with the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.MULTILINE)
_PROGRAM = re.compile(
    r"(?:cs-systems|-m cs_systems|\S+/multi_node\.sbatch \S+|\S+/sweep_array\.sbatch \S+)\s+([a-z].*)"
)


@dataclass(frozen=True)
class Block:
    """Fenced block of commands, with its text and its special requirements on the machine."""

    text: str
    needs: str | None

    @property
    def commands(self) -> list[str]:
        """Commands of the block, each in one line."""
        return [re.sub(r"\\\n\s*", "", found[2:]) for found in _COMMAND.findall(self.text)]

    @property
    def shown(self) -> list[str]:
        """Output that the page shows below each command."""
        return [part.removeprefix("\n") for part in _COMMAND.split(self.text)[1:]]


def blocks(markdown: str) -> list[Block]:
    """Return the blocks of commands of a page."""
    found = []
    for text in _BLOCK.findall(markdown):
        first = text.partition("\n")[0]
        found.append(Block(text, first.removeprefix("# needs ") if first.startswith("# needs ") else None))
    return found


def own_words(command: str) -> list[str] | None:
    """Return the words after cs-systems in a command, up to a pipe or the next command; None for another program."""
    if not (match := _PROGRAM.search(command)):
        return None
    words = shlex.split(match[1], comments=True)
    ends = [index for index, word in enumerate(words) if word in ("|", "&&", ">", ";")]
    return words[: min(ends, default=len(words))]


def is_reproducible(command: str) -> bool:
    """Return True if a command prints the same in each run, because it reads the repository's files or predicts."""
    if (words := own_words(command)) is None:
        return command.split()[0] in ("gunzip", "head")
    committed = any(word.startswith(("profiles/", "tests/data/")) for word in words)
    reads_study = words[0] in ("compare", "report") and committed
    return words[0] in ("analyze", "schema", "snapshot") or reads_study or "--fits" in words or "--show" in words


def prepare(folder: Path) -> dict[str, str]:
    """Show the repository's folders in `folder`, and return the environment for commands that run there."""
    for name in ("examples", "profiles", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".programs"
    programs.mkdir()
    for name, words in {"cs-systems": "-m cs_systems", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    return environment | {"CUDA_VISIBLE_DEVICES": ""}


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command and return its output. Raises RuntimeError if it failed."""
    line = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{command!r} failed with exit status {done.returncode}; correct the command on its page, or what it runs\n"
            f"{done.stdout}{done.stderr}"
        )
    text = done.stdout if done.stdout.strip() else done.stderr
    return "".join(f"{line.rstrip()}\n" for line in text.replace(f"{folder}/", "").splitlines())


def outputs(
    markdown: str, run: Callable[[str, Path, dict[str, str]], str] = run, measured: bool = True
) -> Iterator[tuple[Block, list[str]]]:
    """Yield each block of a page that runs here, and the outputs of its commands, which `run` runs.

    Without `measured`, commands of cs-systems that are not reproducible are left out, with the output that the page
    shows.
    """
    with tempfile.TemporaryDirectory() as name:
        environment = prepare(Path(name))
        for block in blocks(markdown):
            if block.needs is None:
                yield (
                    block,
                    [
                        run(command, Path(name), environment) if measured or is_reproducible(command) else shown
                        for command, shown in zip(block.commands, block.shown, strict=True)
                    ],
                )


def main(words: list[str]) -> None:
    measured, pages = "--reproducible" not in words, [word for word in words if word != "--reproducible"]
    for page in map(Path, pages) if pages else PAGES:
        text = page.read_text()
        try:
            for block, printed in outputs(text, measured=measured):
                commands = _COMMAND.findall(block.text)
                new = "".join(f"{command}\n{out}" for command, out in zip(commands, printed, strict=True))
                text = text.replace(block.text, new)
        except RuntimeError as error:
            sys.exit(f"{page}: {error}")
        if text != page.read_text():
            page.write_text(text)
            print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
