"""One self-contained HTML page of a run: `render(records, command=None) -> str`.

Nothing is fetched: styles, script and figures are part of the page. All text from records is escaped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any

from cs_systems.config import describe
from cs_systems.core.printable import plain
from cs_systems.record import Environment, RunRecord
from cs_systems.report import units
from cs_systems.report.figures import plot
from cs_systems.report.figures.kinds import KINDS
from cs_systems.report.frame import CELL_COLUMNS, CLEAN, STEP, by_kind, frame, without_retried
from cs_systems.report.tables.columns import Column, phases_of
from cs_systems.report.tables.layout import UNTIMED_WORKLOADS
from cs_systems.report.tables.records import counted_caveats, tables
from cs_systems.report.tables.table import Table

FOLDER = Path(__file__).parent
UNUSUAL = re.compile(r"[^\x20-\x7e\n]+")  # includes characters that change the direction of text, in names from outside
# The second table of a workload holds all measurements, one row per phase.
IN_FULL = (
    *("phase", "status", "n", "median_s", "mean_s", "std_s", "p10_s", "p90_s", "ci_low_s", "ci_high_s", "spread"),
    *("submit_median_s", "lag_median_s", "wall_minus_phases_s", "tokens_per_s", "model_flops", "hardware_flops"),
    *("model_flops_per_s", "hardware_flops_per_s", "mfu", "hfu", "setup_s", "compile_s", "peak_allocated_bytes"),
    *("peak_reserved_bytes", "predicted_peak_bytes", "warnings"),
)
AT_A_GLANCE = 6  # tables up to this many rows get no filter
MOST_CONFIGS = 200  # above it the page refers to the records file


def render(records: Sequence[RunRecord], command: str | None = None) -> str:
    """Render the page; `command` made the records, if known. Raises ConfigError for a malformed record."""
    records = without_retried(records)
    kinds = by_kind(records)
    title = escape(f"{' and '.join(kinds)} on {_machines(records)}")
    sections = [_workload(number, name, chosen) for number, (name, chosen) in enumerate(kinds.items())]
    body = f"""<header>
<h1>{title}</h1>
{_headline(records)}
</header>
<main>
{"".join(sections)}
{_environment(records)}
{_reproduce(records, command)}
</main>"""
    return document(title, body)


def document(title: str, body: str, more: Sequence[str] = ()) -> str:
    """Return a page that fetches nothing.

    title, body: HTML. more: names of further styles and scripts of this folder, placed after those of every page.
    """
    styles, scripts = (
        "".join((FOLDER / name).read_text() for name in ("page.css", "page.js", *more) if name.endswith(kind))
        for kind in (".css", ".js")
    )
    title, body = (UNUSUAL.sub(_printable, text) for text in (title, body))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{styles}</style>
</head>
<body>
{body}
<script>{scripts}</script>
</body>
</html>
"""


def _printable(found: re.Match[str]) -> str:
    return "".join(c if c.isprintable() else " " for c in found[0])


def script_data(value: Any) -> str:
    """Return JSON that ends no script and opens no comment, whatever its strings contain."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def notes_html(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(plain(note))}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _machines(records: Iterable[RunRecord]) -> str:
    names = dict.fromkeys(r.environment.device_name for r in records if r.environment)
    return " and ".join(names) or "an unknown device"


def _headline(records: Sequence[RunRecord]) -> str:
    """Return the number of cells, their outcomes, and the best result."""
    statuses = Counter(r.status for r in records)
    facts = [("cells", str(len(records)))]
    if set(statuses) != {"ok"}:
        facts += [(status, str(count)) for status, count in statuses.items()]
    if doubted := sum(bool(r.warnings) for r in records):
        facts.append(("with a caveat", str(doubted)))
    data = frame(records)
    if (clean := data["profiler"].fillna(CLEAN) == CLEAN).any():
        data = data[clean & ~data["workload"].isin(UNTIMED_WORKLOADS)]
    steps = data[data["phase"] == STEP]
    best = {"most model FLOP/s": "model_flops_per_s", "best MFU": "mfu", "highest peak": "peak_allocated_bytes"}
    if set(data["workload"]) != {"attention"}:
        best = {"most tokens/s": "tokens_per_s", **best}
    facts += [(what, units.human(float(steps[c].max()), c)) for what, c in best.items() if steps[c].notna().any()]
    items = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _workload(number: int, name: str, records: Sequence[RunRecord]) -> str:
    (summary,) = tables(records)
    apart = [c.name for c in summary.columns if c.name in CELL_COLUMNS and c.name not in IN_FULL]
    phases = phases_of(frame(records))
    (whole,) = tables(records, columns=[*apart, *IN_FULL], phases=phases)
    whole = replace(whole, columns=tuple(c for c in whole.columns if not c.is_empty))
    figures = [
        f"<figure><figcaption>{escape(KINDS[kind].title)}</figcaption>"
        f'<div class="scroll">{plot.svg(records, kind, f"w{number}-")}</div></figure>'
        for kind in plot.kinds(records)
    ]
    return f"""<section>
<h2>{escape(name)}</h2>
<p class="caption">{escape(summary.caption)}</p>
{table_html(summary, f"results-{number}")}
{_legends(summary)}
{_doubts(records)}
{_failures(records)}
<div class="figures">{"".join(figures)}</div>
<details>
<summary>Every phase, every number ({len(whole.statuses)} rows)</summary>
{table_html(whole, f"full-{number}")}
{_legends(whole)}
</details>
</section>
"""


def table_html(table: Table, id: str) -> str:
    """Return a sortable table that scrolls inside its own box; `data-v` holds the sort key of a cell."""
    heads = "".join(_head(c) for c in table.columns)
    lines = zip(*(zip(c.cells, c.values, strict=True) for c in table.columns), strict=True)
    body = "\n".join(
        f'<tr class="{escape(status)}">{"".join(map(_cell, table.columns, line))}</tr>'
        for status, line in zip(table.statuses, lines, strict=True)
    )
    search = f'<label class="filter">filter <input type="search" data-filters="{id}" autocomplete="off"></label>'
    return f"""{search if len(table.statuses) > AT_A_GLANCE else ""}
<div class="scroll" tabindex="0" role="region" aria-label="table {id}">
<table id="{id}"><thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table>
</div>
"""


def _head(column: Column) -> str:
    kind = ' class="number"' if column.numeric else ""
    unit = f" <small>{escape(column.unit)}</small>" if column.unit else ""
    return f'<th scope="col" aria-sort="none"{kind}><button type="button">{escape(column.title)}{unit}</button></th>'


def _cell(column: Column, shown: tuple[str, Any]) -> str:
    text, value = shown
    if not column.numeric:
        full = plain(str(value or ""))  # full text, where the cell shortens it
        about = f' title="{escape(full)}"' if full and full != text else ""
        return f"<td{about}>{escape(text)}</td>"
    value = value[0] if isinstance(value, tuple) else value
    return f'<td class="number" data-v="{"" if value is None else escape(repr(value))}">{escape(text)}</td>'


def _legends(table: Table) -> str:
    legends = dict.fromkeys(c.legend for c in table.columns if c.legend)
    return f'<p class="legend">{"; ".join(map(escape, legends))}</p>' if legends else ""


def _doubts(records: Sequence[RunRecord]) -> str:
    items = "".join(
        f"<li><b>{escape(d.code)}</b> <small>{d.count} of {len(records)} cells</small><br>{escape(d.message)}"
        f'<br><span class="remedy">→ {escape(d.remedy)}</span></li>'
        for d in counted_caveats(records)
    )
    return f'<h3>Caveats</h3><ul class="doubts">{items}</ul>' if items else ""


def _failures(records: Iterable[RunRecord]) -> str:
    """Return each reason once, with the cells that it concerns."""
    cells: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r.status != "ok":
            cells.setdefault((r.status, r.reason or "no reason recorded"), []).append(describe(r.run_config))
    items = "".join(
        f'<li><b class="{escape(status)}">{escape(status)}</b> {escape(plain(reason))}'
        f"<br><small>{'<br>'.join(map(escape, about))}</small></li>"
        for (status, reason), about in cells.items()
    )
    return f'<h3>Cells without a number</h3><ul class="failures">{items}</ul>' if items else ""


def _environment(records: Iterable[RunRecord]) -> str:
    """Return every field of the environments, with all its values where they differ."""
    known = [r.environment for r in records if r.environment]
    rows = []
    for field in fields(Environment):
        values = [v for e in known if (v := getattr(e, field.name)) is not None]
        if values:
            name = field.name.removesuffix(units.base_suffix(field.name) or "").replace("_", " ")
            rows.append(f"<tr><th>{escape(name)}</th><td>{escape(_values(field.name, values))}</td></tr>")
    if not rows:
        return ""
    return f'<section><h2>Environment</h2><div class="scroll"><table>{"".join(rows)}</table></div></section>'


def _values(name: str, values: list[Any]) -> str:
    if isinstance(values[0], tuple):
        return ", ".join(dict.fromkeys(str(v) for each in values for v in each)) or "none"
    distinct = sorted(set(values))
    numeric = isinstance(distinct[0], int | float) and units.base_suffix(name)
    shown = [units.human(v, name) if numeric else str(v) for v in distinct]
    return " to ".join((shown[0], shown[-1])) if numeric and len(shown) > 2 else ", ".join(shown)


def _reproduce(records: Sequence[RunRecord], command: str | None) -> str:
    """Return the command, and each cell's configuration for Python."""
    configs = {r.key: r.config for r in records}
    shown = list(configs.values())[:MOST_CONFIGS]
    lines = "\n".join(escape(json.dumps(config, ensure_ascii=False)) for config in shown)
    more = f"<p>{len(configs) - len(shown)} more stand in records.jsonl.</p>" if len(configs) > len(shown) else ""
    ran = f"<pre>{escape(command)}</pre>" if command else ""
    return f"""<section>
<h2>To measure it again</h2>
{ran}
<p>Any cell from Python, with <code>config</code> one of the configurations below:</p>
<pre>import cs_systems
record = cs_systems.run(cs_systems.RunConfig.from_dict(config))</pre>
<details><summary>{len(configs)} configurations</summary><pre>{lines}</pre>{more}</details>
</section>
"""
