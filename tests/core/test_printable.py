"""Sanitizing and folding of text for a terminal."""

import shlex

import pytest

from cs_systems.core.printable import labelled_command

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
