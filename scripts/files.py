"""List of the repository's files, each with the first line of its description.

    python3 scripts/files.py                    # all; or: make files
    python3 scripts/files.py readers tests/cli  # files with a word in their path; make files FOLDER=readers

A file's line is the first one of its docstring or, where it is not Python, the first sentence of its first comment.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("cs_systems", "scripts", "examples", "tests")
ENDINGS = {".py", ".js", ".css", ".jinja", ".toml", ".cu", ".cuh", ".c", ".sh"}
WIDTH = 116
# A file's beginning as a comment: lines of // or #, or one block.
_LINES = {".toml": "#", ".sh": "#"}
_BLOCK = re.compile(r"/\*(.*?)\*/|\{#-?(.*?)-?#\}", re.DOTALL)


def first_line(file: Path) -> str:
    """Return the first line of a file's description; "" if it has none."""
    text = file.read_text()
    if file.suffix == ".py":
        return _docstring(text).partition("\n")[0]
    mark = _LINES.get(file.suffix, "//")
    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    comment = [line.removeprefix(mark).strip() for line in takewhile(lambda line: line.startswith(mark), lines)]
    if block := _BLOCK.match(text):
        comment = (block[1] or block[2]).split("\n")
    paragraph = " ".join(" ".join(takewhile(bool, comment)).split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]


def _docstring(text: str) -> str:
    """Return the docstring of a module; read no further, because to parse the whole takes 50 times as long."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            return inspect.cleandoc(ast.literal_eval(token.string))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            break
    return ""


def listed(tree: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each folder below `tree`, with the names and lines of its files; empty files are left out."""
    root = ROOT / tree
    for folder in (root, *sorted(path for path in root.rglob("*") if path.is_dir())):
        files = [f for f in sorted(folder.iterdir()) if f.suffix in ENDINGS and f.is_file() and f.stat().st_size]
        if files:
            yield folder.relative_to(ROOT).as_posix(), [(file.name, first_line(file)) for file in files]


def markdown(tree: str) -> str:
    """Return a table of Markdown for each folder below `tree`."""
    parts = []
    for folder, files in listed(tree):
        rows = [f"| `{name}` | {line.replace('|', chr(92) + '|').replace('<', '&lt;')} |" for name, line in files]
        parts.append("\n".join([f"### {folder}/", "", "| file | what it is for |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def main(words: Collection[str]) -> int:
    for tree in TREES:
        for folder, files in listed(tree):
            for name, line in files:
                path = f"{folder}/{name}"
                if not words or any(word in path for word in words):
                    print(textwrap.fill(f"{path}: {line}", WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
