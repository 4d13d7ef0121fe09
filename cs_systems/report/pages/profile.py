"""One self-contained HTML page of a profile: `render(view, results, title) -> str`.

It holds a timeline and an icicle of one step, drawn by profile_page.js from the view's data, and every table. Nothing
is fetched; names from the trace are escaped, and the data is parsed as JSON, never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from cs_systems.core.printable import plain
from cs_systems.record import Row
from cs_systems.report import units
from cs_systems.report.pages.records import document, notes_html, script_data, table_html
from cs_systems.report.tables.columns import UNKNOWN
from cs_systems.report.tables.profile import CAPTIONS, SHOWN, has_something, says_something
from cs_systems.report.tables.rows import table_of
from cs_systems.report.tables.table import Table

PROFILED = "Times under a profiler: for shares and causes, not to be quoted as timings."
KEYS = "wheel, pinch or + − zooms, dragging or ← → moves, a double click zooms to an item, 0 shows the whole step"

SEARCH = (
    '<input type="search" id="search" placeholder="find kernels; Enter: next" aria-label="find kernels by name" '
    'autocomplete="off">'
)
ICICLE = f"""<section>
<h2>Kernel time by phase, layer, part and family</h2>
<p class="caption">Each row splits the one above it; widths are kernel time, summed, not the time of day.</p>
<canvas id="icicle" tabindex="0" role="application" aria-label="icicle of kernel time: {KEYS}"></canvas>
</section>"""


def render(view: Mapping[str, Any], results: Mapping[str, Sequence[Row]], title: str) -> str:
    """Render the page of a profile.

    view: from `analysis.view.view`. results: tables by name, with `notes` and, where known, `overhead`, as in a
    profiled record.
    """
    said = results["notes"]
    short = dict(zip(view["names"]["name"], view["names"]["short"], strict=True))
    tables = [
        _section(name, results[name], [note["note"] for note in said if note["table"] == name], short)
        for name in SHOWN
        if has_something(name, results.get(name, ()))
    ]
    body = f"""<header>
<h1>{escape(plain(title))}</h1>
{_facts(view, results)}
<p class="caption">{escape(PROFILED)}{_overhead(results)}</p>
{notes_html([*_limits(view["step"]), *(note["note"] for note in said if note["table"] is None)])}
</header>
<main>
<section>
<h2>{escape(_which(view["step"]))}</h2>
<noscript><p>The timeline and the icicle are drawn by a script, which this browser does not run.</p></noscript>
<div class="tools">
{SEARCH if view["step"]["kernels"] else ""}
<span class="buttons"><button type="button" id="out" aria-label="zoom out">−</button><button type="button" id="in"
 aria-label="zoom in">+</button><button type="button" id="whole">whole step</button></span>
<output id="found"></output>
</div>
<div id="families" class="families" role="group" aria-label="highlight a family"></div>
<canvas id="timeline" tabindex="0" role="application" aria-label="timeline: {KEYS}"></canvas>
<p class="legend"><output id="shown"></output> <span>{KEYS}</span></p>
</section>
{ICICLE if view["step"]["kernels"] else ""}
{"".join(tables)}
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="profile">{script_data(view)}</script>"""
    return document(escape(plain(title)), body, ("profile_page.css", "chart.js", "profile_page.js"))


def _facts(view: Mapping[str, Any], results: Mapping[str, Sequence[Row]]) -> str:
    step = view["step"]
    busy = [f"{row['busy_share']:.1%}" for row in results.get("steps", ()) if row["step"] == step["number"]]
    facts = [("wall clock, profiled", _time(step["wall_ns"]))]
    if step["kernels"]:
        facts = [
            ("device", ", ".join(dict.fromkeys(view["devices"].values()))),
            *facts,
            ("sum of kernels", _time(step["kernel_ns"])),
            ("GPU busy", ", ".join(busy)),
            ("kernels", f"{step['kernels']:,}"),
            ("in a phase", _share(step, "no_phase_ns")),
            ("in a layer", _share(step, "no_layer_ns")),
        ]
    items = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(plain(value))}</dd></div>" for what, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _share(step: Mapping[str, int], missing: str) -> str:
    """Return the share of kernel time that is attributed."""
    return f"{1 - step[missing] / step['kernel_ns']:.1%}" if step["kernel_ns"] else UNKNOWN


def _which(step: Mapping[str, Any]) -> str:
    last = step["steps"] - 1
    return f"Step {step['number']}" + (f": of steps 0 to {last} the one with the median wall time" if last else "")


def _limits(step: Mapping[str, Any]) -> list[str]:
    """Return the limitations of the drawn step."""
    said = [
        f"{_time(step[key])} of {_time(step['kernel_ns'])} of kernel time in this step belong to no {what}: they are "
        "drawn hatched"
        for key, what in (("no_phase_ns", "phase"), ("no_layer_ns", "layer or named module"))
        if step[key]
    ]
    if step["graph_kernels"]:
        said.append(
            f"{step['graph_kernels']:,} kernels of this step ran in CUDA graphs, and share {step['graph_launches']:,} "
            "launch(es)"
        )
    return said


def _overhead(results: Mapping[str, Sequence[Row]]) -> str:
    said = [
        f" A step took {units.human(row['recorded_s'], 's')} while recorded and "
        f"{units.human(row['not_recorded_s'], 's')} before."
        for row in results.get("overhead", ())
        if row["not_recorded_s"] is not None
    ]
    return escape("".join(said))


def _section(name: str, rows: Sequence[Row], notes: Sequence[str], short: Mapping[str, str]) -> str:
    shown = {column: title for column, title in SHOWN[name].items() if says_something(column, rows)}
    table = table_of([{column: row[column] for column in shown} for row in rows], titles=shown)
    caption, _, rest = CAPTIONS[name].partition(":")
    heading = f"{caption[0].upper()}{caption[1:]}{':' if rest else ''}{rest}"
    shown_table = table_html(_shortened(table, short), f"table-{name}")
    return f"<section><h2>{escape(heading)}</h2>{shown_table}{notes_html(notes)}</section>\n"


def _shortened(table: Table, short: Mapping[str, str]) -> Table:
    """Return the table with short kernel names as text; the values keep the full names."""
    columns = (
        replace(c, cells=tuple(plain(short.get(v, v)) for v in c.values)) if c.name == "kernel" else c
        for c in table.columns
    )
    return replace(table, columns=tuple(columns))


def _time(ns: int) -> str:
    return units.human(ns * 1e-9, "s")
