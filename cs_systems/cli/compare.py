"""Compare a candidate run with a baseline run: for each cell the ratio of times, its interval and a verdict.

Where both runs profiled a cell, the difference in kernel time by phase, family and layer is shown as well. For two
traces of any profiler, that difference alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, cast

from tyro.conf import Positional, arg

from cs_systems.analysis.comparison import SIDES
from cs_systems.cli import _output, _tables
from cs_systems.cli._options import MaybePath, Names, flag, one_name, optional, refuse
from cs_systems.cli._output import Open, check_outputs, compared, deliver, joined, page_asked, terminal_width
from cs_systems.config import ConfigError, describe, one_of
from cs_systems.core.formats import command_for
from cs_systems.core.printable import command_line, visible
from cs_systems.core.range_names import SPLITS
from cs_systems.core.tables import Column, Table
from cs_systems.record import RunRecord

FORMATS = (*_output.FORMATS, "github")
if TYPE_CHECKING:
    from typing import Literal

    from cs_systems.analysis.comparison.runs import Comparison, ComparisonRow

    CompareFormat = _output.Format | Literal["github"]
else:
    CompareFormat = Annotated[object, one_name("format", FORMATS)]


@dataclass(frozen=True)
class Compare:
    a: Annotated[Positional[Path], arg(help="baseline: folder of a run, records.jsonl, or trace")]
    b: Annotated[Positional[Path], arg(help="candidate, compared with the baseline: a path of the same kind")]
    phase: Annotated[Names, arg(help="phases to compare: step (wall clock), forward, loss, backward, optimizer")] = (
        "step",
    )
    format: Annotated[
        CompareFormat, arg(help="output format; github: a Markdown summary for a pull request; html: a page")
    ] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None
    open: Open = False
    all: Annotated[bool, flag("every cell and row, with --format json, which shows some by default")] = False
    fail_on: Annotated[
        Names,
        arg(
            help="exit with status 1 if a cell of the candidate is slower (verdict) or larger (peak memory by over 1%)",
            help_behavior_hint="(default: never)",
        ),
    ] = ()


ARGS = Compare
UNKNOWN = "–"


class ShownRow(TypedDict):
    """Phase of a cell in both runs: a row of the printed table."""

    cell: str
    phase: str
    a_s: Annotated[float, Column("baseline")]
    b_s: Annotated[float, Column("candidate")]
    ratio: str
    interval: str
    finds: str
    a_bytes: Annotated[int | None, Column("baseline peak", own_unit=True, drop=1)]
    b_bytes: Annotated[int | None, Column("candidate peak", own_unit=True, drop=2)]
    a_j: Annotated[float | None, Column("baseline energy", own_unit=True, drop=1)]
    b_j: Annotated[float | None, Column("candidate energy", own_unit=True, drop=2)]
    verdict: str


TIMINGS = Table("timings", ShownRow, "times, candidate compared with baseline")
TIMES = ("a_s", "b_s")
MEDIANS = "baseline, candidate: medians over all rounds; ratio: candidate over baseline"
TOP = 10  # rows of a difference, without the sum
PROFILED = "kernel times under a profiler: use them for shares and causes, not as timings"
EXIT_FAILED_ON = 1
FAILURES = ("slower", "larger")


def run(args: Compare) -> int:
    if all(command_for(path) == "snapshot" for path in (args.a, args.b)):
        command = command_line("cs-systems", "snapshot", args.a, args.b)
        raise ConfigError(f"{args.a} and {args.b} are memory snapshots; compare them with {command}")
    traces = [path for path in (args.a, args.b) if command_for(path) == "analyze"]
    if len(traces) == 1:
        other = args.b if traces[0] == args.a else args.a
        if not other.exists():
            raise ConfigError(f"{other} does not exist; give two traces, or two runs")
        command = command_line("cs-systems", "analyze", traces[0])
        raise ConfigError(
            f"{traces[0]} is a trace, and {other} is not; read the trace with {command}, or give two traces or two runs"
        )
    if all(command_for(path) == "analyze" for path in (args.a, args.b)):
        from cs_systems.cli import analyze

        if args.phase != Compare.phase:
            raise ConfigError(
                "--phase has no effect on two traces, because all their phases are shown; leave out --phase"
            )
        if args.all:
            refuse(["all"], "a comparison of two traces shows every row already")
        if args.fail_on:
            raise ConfigError("--fail-on requires two runs, because two traces get no verdict; leave out --fail-on")
        if args.format == "csv":
            table = ("--format", "csv", "--table", "phases")
            command = command_line("cs-systems", "analyze", args.a, args.b, *table)
            raise ConfigError(
                "--format csv writes one table, and the comparison of two traces has several; choose another format, "
                f"or, unless they are ranks of one job, use {command}"
            )
        if args.format == "github":
            raise ConfigError(
                "--format github requires two runs, because two traces get no verdict; use --format markdown"
            )
        format = cast("_output.Format", args.format)
        both = analyze.ARGS((args.a, args.b), format=format, output=args.output, open=args.open)
        return analyze.run(both, merges=False)
    from cs_systems.analysis.comparison.runs import opening, profiled_pairs, undisturbed
    from cs_systems.report.reading import some_records
    from cs_systems.report.tables import document

    for name in args.fail_on:
        one_of("--fail-on", name, FAILURES)
    if args.all and args.format != "json":
        refuse(["all"], f"--format {args.format} shows every cell already")
    args = page_asked(args)
    check_outputs({"--output": args.output}, [args.a, args.b])
    (a, torn_a), (b, torn_b) = some_records(args.a), some_records(args.b)
    pairs = profiled_pairs(a, b)
    texts, found, pictures = [], None, []
    totals, cut = Counter[str](), set[str]()
    if not pairs or args.format == "csv" or undisturbed(a):
        found = _compared(args, a, b)
        texts.append(_timings(args, found, [*torn_a, *torn_b]))
        pictures = _pictures(found) if args.format == "html" else []
    elif args.fail_on:
        raise ConfigError(
            f"--fail-on requires timings of both runs, and {args.a} has only profiled cells; "
            "measure both runs with cs-systems time, or leave out --fail-on"
        )
    elif args.phase != Compare.phase:
        raise ConfigError(
            "--phase has no effect on two profiled runs, because all their phases are shown; leave out --phase"
        )
    if args.format not in ("csv", "github"):
        if pairs and args.format == "json":
            texts += [document.note(line) for line in (PROFILED, _tables.SHARES)]
        texts += [_profiles(args, *pair, totals, cut) for pair in pairs]
    if args.format == "json" and not args.all:
        texts.append(document.more({name: count for name, count in totals.items() if name in cut}))
    first = opening(found.rows) if found else ""
    text = joined(
        texts, args.format, compared(args.a, args.b), pictures, others=[*a, *b], opening=first, output=args.output
    )
    deliver(text, args.format, args.output, args.open)
    return _status(found, args.fail_on)


def _status(found: Comparison | None, fail_on: Sequence[str]) -> int:
    """Return the exit status, and print on standard error which cells caused it."""
    from cs_systems.analysis.comparison.runs import is_larger, said

    failing = [
        f"{row['cell']}, {row['phase']}: {name}"
        for row in (found.rows if found else ())
        for name in fail_on
        if said(row) == name or (name == "larger" and is_larger(row))
    ]
    for line in dict.fromkeys(failing):
        print(visible(line), file=sys.stderr)
    return EXIT_FAILED_ON if failing else 0


def _pictures(found: Comparison) -> list[tuple[str, str]]:
    from cs_systems.analysis.comparison.runs import WITHOUT_INTERVAL, said
    from cs_systems.report.figures import plot, ratios

    rows = [row for row in found.rows if said(row) not in WITHOUT_INTERVAL]
    title = "time of the candidate over the baseline's, with its 95% interval"
    return [(title, plot.drawn_svg(lambda: ratios.ratios(rows), "ratios"))] if rows else []


def _profiles(args: Compare, cell: str, a: RunRecord, b: RunRecord, totals: Counter[str], cut: set[str]) -> str:
    """Return the differences of a profiled cell; count the rows of each table, and add to `cut` those not whole."""
    from cs_systems.analysis.comparison.profiles import DIFFERENCES, difference_of_records

    found = [(by, difference_of_records(a, b, by)) for by in SPLITS.values()]
    sections: list[_tables.Section] = []
    for by, rows in found:
        totals[DIFFERENCES[by].name] += len(rows)
        if (more := len(rows[TOP:-1])) and not args.all:
            cut.add(DIFFERENCES[by].name)
            notes = [f"{more} more with smaller differences; the records have all"]
            sections.append((DIFFERENCES[by], [*rows[:TOP], rows[-1]], notes))
        elif rows:
            sections.append((DIFFERENCES[by], rows, []))
    if args.format == "json":  # its notes stand apart from the tables
        named = [(replace(table, caption=f"{cell}: {table.caption}"), rows, notes) for table, rows, notes in sections]
        return "".join(_tables.document_text("json", [], named, args.output))
    sides = " · ".join(f"{side}: {describe(r.run_config)}" for side, r in zip(SIDES, (a, b), strict=True))
    return "\n".join(_tables.document_text(args.format, [cell, sides, PROFILED, _tables.SHARES], sections, args.output))


def _compared(args: Compare, a: list[RunRecord], b: list[RunRecord]) -> Comparison:
    from cs_systems.analysis.comparison.runs import compare
    from cs_systems.report.frame_phases import known_phases

    for phase in args.phase:
        one_of("phase", phase, known_phases([*a, *b]))
    return compare(a, b, args.phase, (args.a, args.b))


def _timings(args: Compare, comparison: Comparison, torn: list[str]) -> str:
    from cs_systems.analysis.comparison.runs import COMPARED
    from cs_systems.report.tables import document
    from cs_systems.report.tables.rows import render_table

    if args.format == "csv":
        return render_table(TIMINGS, comparison.rows, "csv")
    if args.format == "json":
        return document.table(COMPARED, comparison.rows, [*torn, *comparison.doubts])
    what = ", ".join(f"{name}: {left} → {right}" for name, (left, right) in comparison.compared.items())
    of_one = args.phase[0] if len(args.phase) == 1 else None
    timed = f"{of_one} time" if of_one else "times"
    caption = f"{timed}, candidate compared with baseline; {what or 'same configuration in both'}"
    blind: dict[str, dict[str, None]] = {}  # text without its percentages → texts that differ only in their percentages
    for text in filter(None, (row["unseen"] for row in comparison.rows)):
        blind.setdefault(re.sub(r"[\d.]+%", "%", text), {})[text] = None
    unseen = [f"not measured: {'e.g. ' if len(texts) > 1 else ''}{next(iter(texts))}" for texts in blind.values()]
    rows = list(map(_readable, comparison.rows))
    legends = [MEDIANS]
    if any(row["finds"] != UNKNOWN for row in rows):
        legends.append("finds: the smallest slowdown that this comparison can detect")
    left_out = {"phase"} if of_one else set()
    if not any(row["a_bytes"] and row["b_bytes"] for row in rows):
        left_out |= {"a_bytes", "b_bytes"}
    if not any(row["a_j"] and row["b_j"] for row in rows):
        left_out |= {"a_j", "b_j"}
    else:
        legends.append("energy: of a step, by the counter of the device")
    if shared := _shared([row["cell"] for row in rows]):
        caption += f"; in all cells: {' · '.join(shared)}"
        for row in rows:
            row["cell"] = _without(shared, row["cell"])
    if any(row["interval"] != UNKNOWN for row in rows):
        noise = " or ".join(dict.fromkeys(row["noise"] for row in comparison.rows))
        legends.insert(0, f"interval: 95% confidence interval of the ratio, from {noise}")
    notes = [*legends, *unseen, *torn, *comparison.doubts]
    shown = " ".join(name for name in TIMINGS.titles if name not in left_out)
    table = replace(TIMINGS, caption=caption, shown=shown)
    if args.format == "github":
        return _summary(comparison, render_table(table, rows, "markdown", alike=TIMES), notes)
    width = terminal_width(args.output)
    return render_table(table, rows, args.format, notes, width, alike=TIMES)


def _shared(cells: Sequence[str]) -> list[str]:
    """Return the parts that all cell descriptions share; none if there is only one cell."""
    first, *others = dict.fromkeys(cells)
    return [part for _, part in _parts(first) if others and all(part in {p for _, p in _parts(c)} for c in others)]


def _without(shared: Sequence[str], cell: str) -> str:
    """Return the description without its shared parts, unless nothing else would be left."""
    own = "".join(f"{mark}{part}" for mark, part in _parts(cell) if part not in shared)
    return own.removeprefix(" · ").strip() or cell


def _parts(cell: str) -> list[tuple[str, str]]:
    """Return the parts of a description with their separators: `small ctx 256 batch 4 · naive` has four."""
    found = ["", *re.split(r"( · | (?=(?:ctx|batch) \d))", cell)]
    return list(zip(found[::2], found[1::2], strict=True))


def _summary(comparison: Comparison, table: str, notes: Sequence[str]) -> str:
    """Return GitHub Markdown: a heading with the verdicts, the table, and the notes in a collapsed section."""
    from cs_systems.analysis.comparison.runs import verdict_counts

    counts = verdict_counts(comparison.rows, with_peaks=True)
    folded = "".join(f"- {note}\n" for note in notes)
    return f"### {counts}\n\n{table}\n<details><summary>Notes</summary>\n\n{folded}\n</details>\n"


def _readable(row: ComparisonRow) -> ShownRow:
    """Return the columns to print: the ratio with its interval in one column, and the least detectable difference."""
    from cs_systems.analysis.comparison.runs import HOPELESS, WITHOUT_INTERVAL, said

    low, high, resolution = row["ratio_low"], row["ratio_high"], row["resolution"]
    verdict = said(row)
    return {
        "cell": row["cell"],
        "phase": row["phase"],
        "a_s": row["a_median_s"],
        "b_s": row["b_median_s"],
        "ratio": f"{row['ratio']:.3f}" if row["ratio"] < 10 else f"{row['ratio']:.3g}",
        # one word, so that narrow tables do not break it
        "interval": UNKNOWN if low is None or verdict in WITHOUT_INTERVAL else f"{low:.3f}…{high:.3f}",
        "finds": UNKNOWN if resolution is None else "> 100%" if resolution > HOPELESS else f"{resolution:.0%}",
        "a_bytes": row["a_peak_bytes"],
        "b_bytes": row["b_peak_bytes"],
        "a_j": row["a_step_j"],
        "b_j": row["b_step_j"],
        "verdict": verdict,
    }
