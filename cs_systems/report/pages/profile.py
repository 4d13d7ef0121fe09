"""One self-contained HTML page of a profile: `render(view, results, title) -> str`, or `of_record`.

It holds a timeline of the recorded steps and an icicle, drawn by profile_page.js from the view's data, and every table.
Nothing is fetched; the template escapes names from the trace, and the data is parsed as JSON, never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from cs_systems.analysis.attribution import module_tables, timeline
from cs_systems.analysis.attribution.operator_table import operators
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.analysis.attribution.tables import TABLES, has_something, mean_step_s, steps
from cs_systems.analysis.diagnosis import NO_ANSWER, Answer, diagnose
from cs_systems.analysis.replay import Replay
from cs_systems.analysis.replay.lanes import lanes
from cs_systems.config import describe
from cs_systems.core import units
from cs_systems.core.printable import LONGEST_NAME, shortened
from cs_systems.core.tables import Row, Table, Tables, by_name
from cs_systems.formulas.communication import RANKS
from cs_systems.record import RunRecord
from cs_systems.report import origins
from cs_systems.report.diagnoses import sentences
from cs_systems.report.pages import _templates, plan
from cs_systems.report.pages._packing import packed
from cs_systems.report.pages.replay import svg
from cs_systems.report.tables.columns import UNKNOWN
from cs_systems.report.tables.rows import table_of

ON_PAGE: dict[str, Table[Any]] = {
    **by_name(*TABLES.values(), range_tree, operators),
    RANKS.name: RANKS,
    **module_tables.TABLES,
}

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.attribution.timeline import StepView, View


def of_record(record: RunRecord, seen: Profile, results: Tables, replayed: Callable[[], Replay]) -> str:
    """Return the page of a profiled record.

    seen, results, replayed: the profile of its steps, the tables made from it, which the record may lack, and the
    replay of the steps.
    """
    found = diagnose([replace(record, results={**record.results, **results})])
    ranks = RANKS.filled(rows) if (rows := RANKS.of(record.results)) else {}
    shown, title = {**results, **ranks}, describe(record.run_config)
    return render(timeline.view(seen), shown, title, found, origins.lines([record]), replayed())


def render(
    view: View,
    results: Tables,
    title: str,
    answer: Answer = NO_ANSWER,
    origin: Sequence[str] = (),
    replay: Replay | None = None,
) -> str:
    """Render the page of a profile.

    view: from `attribution.timeline.view`. results: tables by name, with `notes` and, where known, `overhead`, as in a
    profiled record, and `ranks` if there are several. answer: shown at the start of the page. origin: when and by which
    command it was recorded. replay: replay of its steps.
    """
    notes = [note for note in timeline.NOTES.of(results) if note["note"] != view["incomplete"]]
    short = dict(zip(view["names"]["name"], view["names"]["short"], strict=True))
    values = {
        "title": title,
        "diagnoses": sentences(answer, view["incomplete"]),
        "view": view,
        "data": packed(view),
        "by_module": any(path is not None for path in view["places"].get("module", ())),
        "plan": plan.picture(answer),
        "replay": _replay(replay, view["step"]["number"]),
        "heading": _heading(view, mean_step_s(steps.of(results))),
        "facts": _facts(view, results),
        "overhead": _overhead(results),
        "notes": [*origin, *_limits(view["step"]), *(note["note"] for note in notes if note["table"] is None)],
        "sections": [
            _section(name, results[name], [note["note"] for note in notes if note["table"] == name], short)
            for name in ON_PAGE
            if has_something(name, results.get(name, ()))
        ],
    }
    return _templates.render("profile.html.jinja", values)


def _replay(replay: Replay | None, number: int) -> tuple[str, Markup, list[str]] | None:
    """Return (heading, picture, sentences) of a replayed step; None if nothing was replayed."""
    if replay is None or (step := lanes(replay, number)) is None:
        return None
    allowed = (
        f"no change is predicted: {replay.why_not}"
        if replay.why_not
        else "changes can be predicted (analyze --what-if)"
    )
    sentences = [
        f"Above, step {step.number} as recorded; below, replayed from what each call and kernel depends on: off by "
        f"{replay.error:.2%} over {units.counted(len(replay.steps), 'step')}, {replay.unexplained:.2%} of the time is "
        f"unexplained; {allowed}.",
        "Kernels have the colours of their families, and the host's waits are pale. All times are with the profiler.",
    ]
    return f"Replay of step {step.number}", Markup(svg(step)), sentences


def _facts(view: View, results: Tables) -> list[tuple[str, str]]:
    step = view["step"]
    shares = [row["busy_share"] for row in steps.of(results) if row["step"] == step["number"]]
    busy = [UNKNOWN if share is None else f"{share:.1%}" for share in shares]
    which = f" of step {step['number']}" if step["steps"] > 1 else ""
    facts = [(f"wall clock{which}, profiled", _time(step["wall_ns"]))]
    if not step["kernels"]:
        return facts
    return [
        ("device", ", ".join(dict.fromkeys(view["devices"].values()))),
        *facts,
        ("sum of kernel times", _time(step["kernel_ns"])),
        ("GPU busy", ", ".join(busy)),
        ("kernels", f"{step['kernels']:,}"),
        ("kernel time in a phase", _share(step, step["no_phase_ns"])),
        ("kernel time in a layer", _share(step, step["no_layer_ns"])),
    ]


def _share(step: StepView, missing_ns: int) -> str:
    """Return the share of kernel time that is attributed, as text."""
    return units.percent(1 - missing_ns / step["kernel_ns"]) if step["kernel_ns"] else UNKNOWN


def _heading(view: View, mean_s: float | None) -> str:
    """Return a heading that names the drawn steps and the step of the numbers above; the tables cover all steps."""
    step, drawn = view["step"], view["steps"]
    if step["steps"] == 1:
        return "The one recorded step"
    some = ""
    if len(drawn) < step["steps"]:
        some = f" Of {step['steps']} steps, the timeline has {drawn[0]['number']} to {drawn[-1]['number']}."
    mean = "" if mean_s is None else f" of {units.human(mean_s, 's')} on average"
    return (
        f"One step of {step['steps']}: step {step['number']}, {_time(step['wall_ns'])}, has the median wall time; "
        f"the numbers at the top are its own.{some} The tables are means over all steps{mean}"
    )


def _limits(step: StepView) -> list[str]:
    """Return the limitations of the drawn step."""
    limits = [
        f"{_time(missing_ns)} of {_time(step['kernel_ns'])} of kernel time in this step belong to no {owner}; these "
        "kernels are hatched"
        for missing_ns, owner in ((step["no_phase_ns"], "phase"), (step["no_layer_ns"], "layer or named module"))
        if missing_ns
    ]
    if step["graph_kernels"]:
        limits.append(
            f"{step['graph_kernels']:,} kernels of this step ran in CUDA graphs, from "
            + units.counted(step["graph_launches"], "launch", "launches")
        )
    return limits


def _overhead(results: Tables) -> list[tuple[str, str]]:
    """Return the durations of a step while it was profiled, and before."""
    return [
        (units.human(row["recorded_s"], "s"), units.human(row["not_recorded_s"], "s"))
        for row in timeline.OVERHEAD.of(results)
        if row["not_recorded_s"] is not None
    ]


def _section(name: str, rows: Sequence[Row], notes: Sequence[str], kernels: Mapping[str, str]) -> _templates.Section:
    """Return one section; names are shown in their short form, kernels' as in the timeline."""
    declared = ON_PAGE[name]
    cut = {column: _cut(column, rows) for column in declared.titles}
    if "kernel" in cut:
        cut["kernel"] |= kernels
    return _templates.Section(declared.caption, f"table-{name}", table_of(declared, rows, short=cut), notes)


def _cut(column: str, rows: Sequence[Row]) -> dict[str, str]:
    names = [*dict.fromkeys(row[column] for row in rows if isinstance(row[column], str))]
    return dict(zip(names, shortened(names, LONGEST_NAME), strict=True))


def _time(ns: int) -> str:
    return units.human(ns * 1e-9, "s")
