"""One self-contained HTML page of a memory snapshot: `render(view, tables, heading, title) -> str`.

It shows allocations over time, stacked by category, and the segments at the end, drawn by snapshot_page.js from the
view's data, and every table. Nothing is fetched; names are escaped, and the data is parsed as JSON, never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cs_systems.core.printable import plain
from cs_systems.record import Row
from cs_systems.report import units
from cs_systems.report.pages.records import document, notes_html, script_data, table_html
from cs_systems.report.tables.profile import says_something
from cs_systems.report.tables.rows import table_of
from cs_systems.report.tables.snapshot import CAPTIONS, SHOWN

KEYS = "wheel, pinch or + − zooms, dragging or ← → moves, a double click zooms to an allocation, 0 shows all"
Tables = Mapping[str, tuple[Sequence[Row], Sequence[str]]]


def render(view: Mapping[str, Any], tables: Tables, heading: Sequence[str], title: str) -> str:
    """Render the page of a memory snapshot.

    view: from `analysis.memory_view.view`. tables: rows and their notes, by name. heading: lines above all tables.
    """
    body = f"""<header>
<h1>{escape(plain(title))}</h1>
{_facts(view)}
{notes_html([*heading, *_limits(view)])}
</header>
<main>
<section>
<h2>Allocated over time</h2>
<noscript><p>The timeline and the segments are drawn by a script, which this browser does not run.</p></noscript>
<div class="tools">
<span class="buttons"><button type="button" id="out" aria-label="zoom out">−</button><button type="button" id="in"
 aria-label="zoom in">+</button><button type="button" id="whole">all</button><button type="button" id="to-peak">the
 peak</button></span>
</div>
<div id="categories" class="families" role="group" aria-label="show one category alone"></div>
<canvas id="timeline" tabindex="0" role="application" aria-label="allocated bytes over time: {KEYS}"></canvas>
<p class="legend"><output id="shown"></output> <span>{KEYS}. A
 category's bytes are those at the peak; press it to see it alone. {_scale(view)}</span></p>
</section>
<section>
<h2>Segments at the end</h2>
<p class="caption">The blocks of each pool's segments, one segment after the other: coloured by what they hold, hatched
 where they are free.</p>
<canvas id="segments" tabindex="0" role="application" aria-label="blocks of the segments: {KEYS}"></canvas>
</section>
{"".join(_section(name, *tables[name]) for name in SHOWN if name in tables and tables[name][0])}
<section>
<h2>How it is told what memory is</h2>
<div class="scroll"><table>{_rules(view["rules"])}</table></div>
<h3>The phase in which it was made</h3>
<p class="caption">A range of that name says it, where there are some; else the first of these that fits the stack.</p>
<div class="scroll"><table>{_rules(view["phase_rules"])}</table></div>
</section>
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="snapshot">{script_data(view)}</script>"""
    more = ("profile_page.css", "snapshot_page.css", "chart.js", "snapshot_page.js")
    return document(escape(plain(title)), body, more)


def _facts(view: Mapping[str, Any]) -> str:
    reserved = [bytes for _, bytes in view["reserved"]]
    drawn = len(view["allocations"]["bytes"])
    facts = [
        ("peak", units.human(view["peak"]["bytes"], "bytes")),
        ("reserved, at most", units.human(max(reserved), "bytes") if max(reserved) else "not known"),
        ("events", f"{view['events']:,}"),
        ("allocations", f"{drawn + view['rest']['allocations']:,}"),
    ]
    items = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _limits(view: Mapping[str, Any]) -> list[str]:
    """Return what the page omits."""
    said = []
    if rest := view["rest"]["allocations"]:
        said.append(
            f"drawn one by one: the {len(view['allocations']['bytes']):,} allocations that take the most bytes for the "
            f"longest; the {rest:,} others are one band of each category, as high as it gets in each 1/2000 of the time"
        )
    if hidden := view["hidden_segments"]:
        said.append(f"the {hidden:,} smallest segments are not drawn: their blocks are too many")
    return said


def _scale(view: Mapping[str, Any]) -> str:
    if view["timed"]:
        return "Time is from the first event; events of one µs are spread over it."
    return "The recording has no times: each event takes a µs here."


def _section(name: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    shown = {column: title for column, title in SHOWN[name].items() if says_something(column, rows)}
    table = table_of([{column: row[column] for column in shown} for row in rows], titles=shown)
    caption = CAPTIONS[name]
    heading = f"{caption[0].upper()}{caption[1:]}"
    return f"<section><h2>{escape(heading)}</h2>{table_html(table, f'table-{name}')}{notes_html(notes)}</section>\n"


def _rules(rules: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(what)}</th><td class="prose">{escape(rule)}</td></tr>' for what, rule in rules
    )
