"""One self-contained HTML page of a memory snapshot: `render(view, tables, heading, title) -> str`.

It shows allocations over time, stacked by category, and the segments at the end, drawn by snapshot_page.js from the
view's data, and every table. Nothing is fetched; the template escapes names, and the data is parsed as JSON, never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.diagnosis import NO_ANSWER, Answer
from cs_systems.analysis.memory.tables import AT_END, moment, tables_at
from cs_systems.core import units
from cs_systems.core.tables import Row, Table
from cs_systems.report.diagnoses import sentences
from cs_systems.report.pages import _templates
from cs_systems.report.pages._packing import packed
from cs_systems.report.tables.rows import table_of

if TYPE_CHECKING:
    from cs_systems.analysis.memory.timeline import View

Tables = Mapping[str, tuple[Sequence[Row], Sequence[str]]]


def render(view: View, tables: Tables, heading: Sequence[str], title: str, answer: Answer = NO_ANSWER) -> str:
    """Render the page of a memory snapshot.

    view: from `memory.timeline.view`. tables: rows and their notes, by name. heading: lines above all tables.
    answer: what the page begins with.
    """
    when = moment(has_peak=view["peak"] is not None, has_events=view["events"] > 0)
    values = {
        "title": title,
        "diagnoses": sentences(answer),
        "view": view,
        "when": when,
        "data": packed({**view, "when": when}),
        "facts": _facts(view, when),
        "notes": [*heading, *_limits(view)],
        "sections": [_section(table, *tables[name]) for name, table in tables_at(when).items() if tables[name][0]],
    }
    return _templates.render("snapshot.html.jinja", values)


def _facts(view: View, when: str) -> list[tuple[str, str]]:
    drawn = len(view["allocations"]["bytes"])
    highest = view["highest"]
    sizes = [
        ("peak" if view["peak"] else f"allocated {when}", highest["bytes"]),
        (f"reserved {when}", highest["reserved"]),
    ]
    if when != AT_END:
        sizes += [("highest reserved", max((size for _, size in view["reserved"]), default=None))]
    return [
        *([] if view["peak"] else [("peak", "unknown")]),
        *((name, "unknown" if size is None else units.human(size, "bytes")) for name, size in sizes),
        ("events", f"{view['events']:,}"),
        ("allocations", f"{drawn + view['rest']['allocations']:,}"),
    ]


def _limits(view: View) -> list[str]:
    """Return the notes on the data that the page omits."""
    limits = []
    if rest := view["rest"]["allocations"]:
        limits.append(
            f"the {len(view['allocations']['bytes']):,} allocations with the most bytes × time are drawn one by one; "
            f"the other {rest:,} form one band per category, with its maximum in each 1/2000 of the time"
        )
    if hidden := view["hidden_segments"]:
        limits.append(f"the {hidden:,} smallest segments are not drawn: they have too many blocks")
    return limits


def _section(table: Table[Any], rows: Sequence[Row], notes: Sequence[str]) -> _templates.Section:
    return _templates.Section(table.caption, f"table-{table.name}", table_of(table, rows), notes)
