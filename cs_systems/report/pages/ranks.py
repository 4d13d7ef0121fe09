"""Self-contained HTML page of the ranks of one job: `render(view, title, texts, answer) -> str`.

All ranks stand on one timeline, drawn by ranks_page.js from the view's data; below are the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from cs_systems.analysis.comparison.rank_timeline import RanksView
from cs_systems.analysis.diagnosis import NO_ANSWER, Answer
from cs_systems.core.units import counted, human
from cs_systems.report.diagnoses import sentences
from cs_systems.report.pages import _templates, plan
from cs_systems.report.pages._packing import packed


def render(view: RanksView, title: str, texts: Sequence[str], answer: Answer = NO_ANSWER) -> str:
    """Render the page.

    view: from `rank_timeline.view`. texts: sections below the timeline, as `pages.tables.sections` makes them, or
    `formats.paragraph` in format html. answer: shown at the start of the page.
    """
    joined_s = view["joined_ns"] * 1e-9
    limits = [f"Pauses of computation up to {human(joined_s, 's')} are not drawn."] if joined_s else []
    if hidden := view["hidden_calls"]:
        limits.append(f"The timeline ends before {counted(hidden, 'call')} of collectives; the tables have all.")
    values = {
        "title": title,
        "diagnoses": sentences(answer),
        "plan": plan.picture(answer),
        "clocks": view["clocks"],
        "limits": limits,
        "data": packed(view),
        "sections": [Markup(text) for text in texts],
    }
    return _templates.render("ranks.html.jinja", values)
