"""Tests of profiles/README.md and of the committed pages of the studies."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_studies import SCRIPTS

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "profiles"
NAMES = sorted(path.stem for path in SCRIPTS.glob("[a-z]*.py"))
PAGES = sorted(path for name in NAMES for path in (PROFILES / name).rglob("table.md"))
# The words report and assignment, and codes of questions such as C2, L3, A2, D7.
FORBIDDEN = re.compile(
    r"\b[Tt]he report(?:'s)?\b|\bassignment\b|(?<![\w.])[ACDH][1-9]\d?(?=[:,. ])|\bL[3-9]\b|scripts/[a-z]\d+_"
)
MEASURED = " --measured "  # a page with a command that names other folders
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)\)")


def test_committed_index_matches_generated_index(skeleton: Any) -> None:
    index = importlib.import_module("_index")
    made = index.index_page([*skeleton.ORDER, skeleton.APART], skeleton.PAGE_FILE, skeleton.FIGURE_FILE)
    assert (PROFILES / "README.md").read_text(encoding="utf-8") == made, "run scripts/studies/_study.py --index"


def test_index_lists_every_study_and_folder_with_links_that_resolve() -> None:
    links = LINK.findall((PROFILES / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not (PROFILES / link).is_file()] == []
    listed = {link.partition("/")[0] for link in links}
    assert set(NAMES) <= listed
    assert {path.name for path in PROFILES.iterdir() if path.is_dir()} == listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROFILES)))
def test_page_gives_answer_and_figure_before_its_tables(page: Path) -> None:
    title, _, answer, _, figure, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert title.endswith("?")
    assert re.match(r"(On .*|By formula, .*|Of the compiled tiles, .*)\d.*\.$", answer)
    (link,) = LINK.findall(figure)
    assert (page.parent / link).is_file()


def test_no_page_names_an_assignment_or_a_bare_code() -> None:
    pages = [*PAGES, PROFILES / "README.md", *SCRIPTS.glob("*.py")]
    found = [(page.name, match[0]) for page in pages for match in FORBIDDEN.finditer(page.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROFILES)))
def test_answer_of_page_is_computed_from_its_committed_records(skeleton: Any, page: Path) -> None:
    (study,) = (importlib.import_module(name).STUDY for name in page.relative_to(PROFILES).parts if name in NAMES)
    title, _, answer, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title == f"# {study.question}"
    if MEASURED in page.read_text(encoding="utf-8"):
        pytest.skip("is computed from the records of other studies too")
    records, _ = importlib.import_module("cs_systems.record").read_records(page.parent)
    assert skeleton.answered(study, skeleton.cells(records)) == answer


def test_records_without_the_needed_cells_give_no_answer(skeleton: Any) -> None:
    study = importlib.import_module("attention_heads").STUDY
    records, _ = importlib.import_module("cs_systems.record").read_records(PROFILES / study.name)
    assert skeleton.answered(study, skeleton.cells(records[:1])) == skeleton.UNANSWERED
