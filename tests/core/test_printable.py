"""Sanitizing and folding of text for a terminal."""

import ast
import io
import json
import shlex
from pathlib import Path

import pytest

import cs_systems
from cs_systems.core.printable import LEGIBLE, encodable, labelled_command
from cs_systems.report.tables import latex

WORDS = ("cs-systems", "report", "--format", "html", "--open")


@pytest.mark.parametrize(
    ("folder", "shown"),
    [
        ("runs/a", ["report:  cs-systems report runs/a --format html --open"]),
        (
            f"/home/someone/{'x' * 50}",
            [
                "report:  cs-systems report \\",
                f"           /home/someone/{'x' * 50} \\",
                "           --format html --open",
            ],
        ),
        (
            "runs/a folder of about fifty characters, with spaces in it",
            [
                "report:  cs-systems report \\",
                "           'runs/a folder of about fifty characters, with spaces in it' \\",
                "           --format html --open",
            ],
        ),
    ],
)
def test_long_command_is_folded_between_words_and_stays_copyable(folder: str, shown: list[str]) -> None:
    words = (*WORDS[:2], folder, *WORDS[2:])
    found = labelled_command("report:", words, 80)
    assert found.splitlines() == shown
    assert max(map(len, shown)) <= 80
    assert shlex.split(found.removeprefix("report:").replace("\\\n", " ")) == [*words]


def in_ascii(text: str) -> str:
    return text.encode("ascii", LEGIBLE).decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    {
        "─" * 80: "-" * 80,
        "(p90 − p10) – median": "(p90 - p10) - median",
        "1.5 µs, 1.9× → “fast” ‘one’": "1.5 us, 1.9x -> \"fast\" 'one'",
        "flash_fwd…_kernel 0.1 … 0.2 (run(model=…), …)": "flash_fwd~_kernel 0.1 ~ 0.2 (run(model=...), ...)",
        "warm-up step 1/2, then …": "warm-up step 1/2, then ~",
        "σ ≤ 3, seq_q ≠ seq_k, α + n/β, R²": "s <= 3, seq_q != seq_k, a + n/b, R2",
    }.items(),
)
def test_ascii_has_similar_characters(text: str, shown: str) -> None:
    assert in_ascii(text) == shown


@pytest.mark.parametrize("name", ["é", "модель", "模型", "🔥", "\udc80"])
def test_other_characters_are_escaped_as_in_json(name: str) -> None:
    assert json.loads(f'"{in_ascii(name)}"') == name


def lost_of(text: str) -> set[str]:
    """Return the characters without a replacement in ASCII."""
    return {c for c in {*text} if not c.isascii() and "\\u" in in_ascii(c)}


def test_every_character_of_the_package_has_a_replacement() -> None:
    """Docstrings of commands are their help. The table of characters for LaTeX is not printed."""
    files = {*Path(cs_systems.__file__).parent.rglob("*.py")} - {Path(latex.__file__)}
    for file in files:
        if not (lost := lost_of(source := file.read_text())):
            continue
        tree = ast.parse(source)
        own = (
            {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)} if "cli" not in str(file) else {}
        )
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in own}
        lost &= {c for text in texts if isinstance(text, str) for c in text}
        assert not lost, f"{file}: add {lost} to the replacements of core/printable.py"


def test_characters_that_a_stream_cannot_encode_are_replaced() -> None:
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("ascii", "latin-1", "utf-8")}
    assert {name: encodable("µ → é", stream) for name, stream in streams.items()} == {
        "ascii": "u -> \\u00e9", "latin-1": "µ -> é", "utf-8": "µ → é",
    }  # fmt: skip
    assert encodable("→", io.StringIO()) == "→"
