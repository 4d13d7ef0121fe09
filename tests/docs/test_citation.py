"""The citation names the version of the package."""

from pathlib import Path

import cs_systems

ROOT = Path(__file__).parents[2]


def test_citation_has_the_version_of_the_package() -> None:
    cff = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    bibtex = (ROOT / "docs" / "guides" / "paper.md").read_text().partition("@software")[2]
    assert cff["version"] == cs_systems.__version__
    assert f"version = {{{cs_systems.__version__}}}" in bibtex
    assert f"title   = {{{cff['title'].strip(chr(34))}}}" in bibtex
