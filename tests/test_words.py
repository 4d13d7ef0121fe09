"""Plain words: no docstring opens as a fragment or a question, and no text has a plural in parentheses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("cs_systems", "scripts", "tests", "examples")
FRAGMENTS = {"What", "Who", "Whose", "Whether", "Which", "Of", "As", "How", "Where"}
# Text of every file with a fragment; parsing the other files takes seconds.
SUSPECT = re.compile(rf"""["']\s*(?:{"|".join(FRAGMENTS)})\b|\?\s*(?:["']|\n\s*\n)""")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, those of attributes included."""
    waiting: list[Any] = [tree]
    while waiting:  # ast.walk would visit expressions, too
        node = waiting.pop()
        inside = [each for name in ("body", "orelse", "finalbody", "handlers", "cases") for each in _list(node, name)]
        waiting += inside
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before: ast.stmt | None = None
        for statement in node.body:
            is_documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if is_documented and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text
            before = statement


def _list(node: Any, name: str) -> list[Any]:
    found = getattr(node, name, ())
    return found if isinstance(found, list) else []


def fragments(source: str) -> list[int]:
    """Return the lines of the docstrings that open with a word of FRAGMENTS or with a question."""
    found = []
    for line, text in docstrings(ast.parse(source)) if SUSPECT.search(source) else ():
        first = text.split(maxsplit=1)[0].rstrip(",:;.") if text.strip() else ""
        if first in FRAGMENTS or text.split("\n\n")[0].rstrip().endswith("?"):
            found.append(line)
    return sorted(found)


def test_no_docstring_opens_as_a_fragment() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in fragments(file.read_text())]
    assert found == [], "start these docstrings with a verb or a noun:\n" + "\n".join(found)


def test_docstrings_that_open_like_a_question_are_fragments() -> None:
    assert fragments('"""Time of a step.\n\nQuestion: what does it take?\n"""\n') == []
    assert fragments('"""What does a step take?\n\nMethod: a clock."""\n') == [1]
    assert fragments('"""A step."""\ndef f():\n    """Is a step\n    long?"""\n') == [3]


def test_fragments_of_every_kind_are_found() -> None:
    source = '"""Of it."""\nx = 1\n"""Whose x."""\nclass A:\n    """How."""\n    def f():\n        """As told."""\n'
    assert fragments(source) == [1, 3, 5, 7]
    assert fragments('"""Return whether x."""\ndef f():\n    """Whatever it is."""\n    """What else."""\n') == []


def test_no_text_has_a_plural_in_parentheses() -> None:
    """`1 cell(s)` is written by `counted`, as `1 cell` or `2 cells`."""
    files = [file for kind in ("py", "js", "jinja") for file in sorted((ROOT / "cs_systems").rglob(f"*.{kind}"))]
    plural = re.compile(r"""[ }][A-Za-z]+\((?:e?s|ies)\)[^"'`\n]*["'`]""")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if plural.search(line) and "=>" not in line
    ]
    assert found == [], "use core.units.counted:\n" + "\n".join(found)
    assert plural.search('f"{count} cell(s) only in A"')


def test_changelog_has_one_short_sentence_for_each_change() -> None:
    """A reader looks for what is new: a version took 6,000 words once."""
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(version.split()) < 1500, version.split("\n")[0]
        long = [entry for entry in re.split(r"\n- ", version)[1:] if len(entry.split("\n\n")[0].split()) > 35]
        assert long == [], "say it in one sentence of at most 35 words"
