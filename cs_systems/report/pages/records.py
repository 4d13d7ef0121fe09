"""One self-contained HTML page of a run: `render(records) -> str`.

Nothing is fetched: styles, script and figures are part of the page. Its template escapes all text from records.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from cs_systems.analysis.diagnosis import diagnose
from cs_systems.config import Mode, describe
from cs_systems.core import units
from cs_systems.core.fields import Subject
from cs_systems.record import Environment, Origin, RunRecord
from cs_systems.report import origins
from cs_systems.report.advice import Advice, TrialRow
from cs_systems.report.diagnoses import sentences
from cs_systems.report.figures import plot
from cs_systems.report.figures.kinds import KINDS
from cs_systems.report.figures.labels import labels
from cs_systems.report.figures.waterfall import waterfall
from cs_systems.report.frame import CELL_COLUMNS, CLEAN, STEP, by_kind, frame, without_retried
from cs_systems.report.pages import _templates, plan
from cs_systems.report.tables.columns import phases_of
from cs_systems.report.tables.layout import is_timed
from cs_systems.report.tables.records import CountedCaveat, counted_caveats, in_order, loop_times, tables, varying
from cs_systems.report.tables.rows import table_of
from cs_systems.report.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd

# The second table of a workload holds all measurements, one row per phase.
IN_FULL = (
    *("phase", "status", "n", "median_s", "mean_s", "std_s", "p10_s", "p90_s", "ci_low_s", "ci_high_s", "spread"),
    *("submit_median_s", "lag_median_s", "wall_minus_phases_s", "tokens_per_s", "model_flops", "hardware_flops"),
    *("model_flops_per_s", "hardware_flops_per_s", "mfu", "hfu", "setup_s", "compile_s", "step_j"),
    *("above_idle_j", "tokens_per_j", "mean_w", "peak_allocated_bytes", "peak_reserved_bytes"),
    *("predicted_peak_bytes", "warnings"),
)
WORK = [mode.value for mode in (Mode.FORWARD, Mode.BACKWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP)]
LONGEST_CHANGE = 60  # characters of a lever's options in a table of a search
MOST_CONFIGS = 200  # limit; beyond it, the page refers to the records file


class _Workload(NamedTuple):
    """Section of a page: the records of one workload.

    loops: the total time of each loop and its division. figures: caption and SVG. failures: descriptions of the cells,
    by status and reason.
    """

    name: str
    cells: int
    summary: Table
    whole: Table
    loops: Sequence[str]
    caveats: Sequence[CountedCaveat]
    failures: dict[tuple[str, str], list[str]]
    figures: Sequence[tuple[str, Markup]]


def render(records: Sequence[RunRecord], advice: Advice | None = None) -> str:
    """Render the page, with the answer of a search if there is one. Raises ConfigError for a malformed record."""
    records = without_retried(records)
    kinds = by_kind(records)
    known = origins.of(records)
    configs = {r.key: r.config for r in records}
    answer = diagnose(records)
    values = {
        "title": f"{_subject(records)} on {_machines(records)}" if records else "Search by cs-systems advise",
        "diagnoses": [*(advice.sentences if advice else ()), *sentences(answer)],
        "plan": plan.picture(answer),
        "facts": _headline(records) if records else (),
        "advice": advice and _search(advice),
        "workloads": [_workload(number, name, chosen) for number, (name, chosen) in enumerate(kinds.items())],
        "environment": [*_origin(known), *_environment(records)],
        "commands": origins.commands(known),
        "configs": [json.dumps(config, ensure_ascii=False) for config in configs.values()],
        "most_configs": MOST_CONFIGS,
    }
    return _templates.render("records.html.jinja", values)


def _search(advice: Advice) -> dict[str, Any]:
    """Return the section of a search: the figure and the tables; the page begins with its sentences."""
    from cs_systems.report.pages.tables import sections

    figure = plot.drawn_svg(lambda: waterfall(advice), "waterfall") if advice.waterfall else ""
    return {
        "figure": Markup(figure),
        "tables": Markup(sections([table_of(declared, rows, short=_short(rows)) for declared, rows in advice.tables])),
    }


def _short(rows: Sequence[TrialRow]) -> dict[str, dict[Any, str]]:
    """Return the shorter texts of long options, which would push the numbers out of the page."""
    return {"change": {row["change"]: shorten(row["change"], LONGEST_CHANGE, placeholder=" …") for row in rows}}


def _subject(records: Iterable[RunRecord]) -> str:
    """Return the workloads, each with its profilers if it was measured only under profilers."""
    profilers: dict[str, dict[str, None]] = {}
    for r in records:
        profilers.setdefault(r.config["workload"], {})[r.config.get("profiler", CLEAN)] = None
    return " and ".join(
        name if CLEAN in under else f"{name} under {' and '.join(under)}" for name, under in profilers.items()
    )


def _machines(records: Iterable[RunRecord]) -> str:
    names = dict.fromkeys(r.environment.device_name for r in records if r.environment)
    return " and ".join(names) or "an unknown device"


def _headline(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the number of cells, their outcomes, and the best result."""
    statuses = Counter(r.status for r in records)
    facts = [("cells", str(len(records)))]
    if set(statuses) != {"ok"}:
        facts += [(status, str(count)) for status, count in statuses.items()]
    if doubted := sum(bool(r.warnings) for r in records):
        facts.append(("with a caveat", str(doubted)))
    return [*facts, *_best(records)]


def _best(records: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Yield the best values of clean timings, each with its cell; only for the mode with the most work.

    Throughput is shown for the largest model, because the smallest would always have the highest.
    """
    timed = [r for r in records if r.config.get("profiler", CLEAN) == CLEAN and is_timed(r.config["workload"], CLEAN)]
    whole = max((r.config["mode"] for r in timed), key=WORK.index, default=None)
    data = frame([record for record in timed if record.config["mode"] == whole])
    steps = data[data["phase"] == STEP] if len(data) else data
    if steps.empty:
        return
    steps = _with_cells(in_order(steps))
    # a user's own model has no comparable size
    has_sizes = steps["workload"].nunique() == 1 and steps["size"].notna().all()
    of_largest = steps[steps["size"] == steps["size"].iloc[-1]] if has_sizes else steps
    best = {
        "highest model FLOP/s": "model_flops_per_s",
        "highest MFU": "mfu",
        "highest peak memory": "peak_allocated_bytes",
    }
    if set(steps["workload"]) != {Subject.ATTENTION}:
        best = {"highest tokens/s": "tokens_per_s", **best}
    several = of_largest is not steps and steps["size"].nunique() > 1
    for title, column in best.items():
        if column == "tokens_per_s" and several:
            title += f" of {of_largest['size'].iloc[0]}"  # other modes may have more work
        among = of_largest if column == "tokens_per_s" else steps
        if steps[column].count() == 1 < len(steps):
            continue  # do not mark a maximum among one value
        if column == "mfu" and steps.dropna(subset=["mfu"])["ceiling_flops_per_s"].nunique() > 1:
            continue  # shares of different peaks are not compared
        if ranked := among.dropna(subset=[column]).sort_values(column).to_dict("records"):
            title = title if len(ranked) > 1 else title.removeprefix("highest ")
            value, cell = units.human(float(ranked[-1][column]), column), str(ranked[-1]["cell"])
            yield title, f"{value} · {cell}" if cell else value


def _with_cells(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a column `cell`: the differences of each from the other cells of its workload."""
    import pandas as pd

    parts = []
    for _, of_workload in steps.groupby("workload", sort=False, dropna=False):
        apart = varying(of_workload)[0] if len(of_workload) > 1 else []
        parts.append(of_workload.assign(cell=labels(of_workload, [name for name in apart if name != "workload"])))
    return pd.concat(parts)


def _workload(number: int, name: str, records: Sequence[RunRecord]) -> _Workload:
    (summary,) = tables(records)
    apart = [c.name for c in summary.columns if c.name in CELL_COLUMNS and c.name not in IN_FULL]
    phases = phases_of(frame(records))
    (whole,) = tables(records, columns=[*apart, *IN_FULL], phases=phases)
    return _Workload(
        name=name,
        cells=len(records),
        summary=summary,
        whole=replace(whole, columns=tuple(c for c in whole.columns if not c.is_empty)),
        loops=loop_times(records),
        caveats=counted_caveats(records),
        failures=_failures(records),
        figures=[
            (KINDS[kind].title, Markup(drawn))  # matplotlib escapes the texts
            for kind, drawn in plot.svgs(records, f"w{number}-").items()
        ],
    )


def _failures(records: Iterable[RunRecord]) -> dict[tuple[str, str], list[str]]:
    """Return descriptions of the cells by status and reason."""
    cells: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r.status != "ok":
            cells.setdefault((r.status, r.reason or "no reason recorded"), []).append(describe(r.run_config))
    return cells


def _origin(known: Sequence[Origin]) -> list[tuple[str, str]]:
    """Return the times at which the records were written, and the hosts if they were recorded."""
    if not known:
        return []
    hosts = origins.hosts(known)
    return [("recorded", origins.span(known)), *([("host", ", ".join(hosts))] if hosts else [])]


def _environment(records: Iterable[RunRecord]) -> list[tuple[str, str]]:
    """Return name and value of each field of the environments, with all values if they differ."""
    known = [r.environment for r in records if r.environment]
    rows = []
    for field in fields(Environment):
        values = [v for e in known if (v := getattr(e, field.name)) is not None]
        if values:
            name = field.name.removesuffix(units.base_suffix(field.name) or "")
            rows.append((name if name == "cs_systems" else name.replace("_", " "), _values(field.name, values)))
    return rows


def _values(name: str, values: list[Any]) -> str:
    if isinstance(values[0], tuple):
        return ", ".join(dict.fromkeys(str(v) for each in values for v in each)) or "none"
    distinct = sorted(set(values))
    numeric = isinstance(distinct[0], int | float) and units.base_suffix(name)
    shown = [units.human(v, name) if numeric else str(v) for v in distinct]
    return " to ".join((shown[0], shown[-1])) if numeric and len(shown) > 2 else ", ".join(shown)
