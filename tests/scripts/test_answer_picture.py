"""Test of README's picture of an answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_picture_shows_what_the_command_prints_today(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("answer_picture", ROOT / "scripts" / "answer_picture.py")
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert made.PICTURE.read_text() == made.picture(made.answer()), "run python scripts/answer_picture.py"


def test_first_page_is_short_and_shows_the_picture() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert any("docs/assets/answer.svg" in line for line in lines[:20])
