"""Self-contained HTML page of tables: `sections(tables)` makes a section of each, `page(title, texts)` the page.

Nothing is fetched; the templates escape every text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from markupsafe import Markup

from cs_systems.analysis.diagnosis import NO_ANSWER, Answer
from cs_systems.report.diagnoses import sentences
from cs_systems.report.pages import _templates, plan
from cs_systems.report.tables.formats import FORMATS
from cs_systems.report.tables.table import Table

Picture = tuple[str, str]  # caption, and <svg> element from `plot.svg`


def sections(tables: Sequence[Table]) -> str:
    """Return a section for each table: its caption, rows, legends of its columns, and notes."""
    named = [(f"table-{hashlib.sha256(table.caption.encode()).hexdigest()[:8]}", table) for table in tables]
    return _templates.render("sections.html.jinja", {"tables": named})


def _html(tables: Sequence[Table], width: int | None, color: bool) -> str:
    return sections(tables)


FORMATS["html"] = _html  # imported late, because only a command that makes a page needs it


def page(
    title: str,
    texts: Sequence[str],
    facts: Sequence[tuple[str, str]] = (),
    pictures: Sequence[Picture] = (),
    answer: Answer = NO_ANSWER,
    origin: Sequence[str] = (),
    opening: str = "",
) -> str:
    """Return the page.

    Args:
        title: heading of the page.
        texts: its sections, as `sections` makes them, or `formats.paragraph` in format html.
        facts: numbers to show first, by name.
        pictures: figures to show before the sections.
        answer: the sentences that the page begins with, and their plan.
        opening: a sentence before them.
        origin: sentences at its end: when, by which commands and where its records were made.
    """
    values = {
        "title": title,
        "facts": facts,
        "diagnoses": sentences(answer, opening),
        "plan": plan.picture(answer),
        "sections": [Markup(text) for text in texts],
        "origin": origin,
        "pictures": [(caption, Markup(svg)) for caption, svg in pictures],
    }
    return _templates.render("tables.html.jinja", values)
