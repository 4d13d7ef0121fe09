"""Compare run B with baseline run A: for each cell the ratio of times, its interval and a verdict.

Where both runs profiled a cell, the difference in kernel time by phase, family and layer is shown as well. For two
traces (.sqlite, .nsys-rep, .json, .json.gz), that difference alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybePath, Names, optional
from cs_systems.cli._output import TableFormat, check_outputs, deliver, terminal_width
from cs_systems.config import ConfigError, describe, one_of
from cs_systems.core.file_types import command_for
from cs_systems.core.printable import command_line
from cs_systems.record import Row, RunRecord
from cs_systems.traces.range_names import SPLITS

if TYPE_CHECKING:
    from cs_systems.comparison.runs import ComparisonRow


@dataclass(frozen=True)
class Compare:
    a: Annotated[Positional[Path], arg(help="baseline A: folder of a run, records.jsonl, or trace")]
    b: Annotated[Positional[Path], arg(help="candidate B, compared with A: a path of the same kind")]
    phase: Annotated[Names, arg(help="phases to compare: step (wall clock), forward, loss, backward, optimizer")] = (
        "step",
    )
    format: Annotated[TableFormat, arg(help="output format")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None


ARGS = Compare
UNKNOWN = "–"
TOP = 10  # rows of a difference, without the sum
PROFILED = "kernel times under a profiler: use them for shares and causes, not as timings"
# Above this, not even a doubling would have been detected, and "no difference" would mislead.
HOPELESS = 1.0


def run(args: Compare) -> int:
    traces = [path for path in (args.a, args.b) if command_for(path) == "analyze"]
    if len(traces) == 1:
        other = args.b if traces[0] == args.a else args.a
        command = command_line("cs-systems", "analyze", traces[0])
        raise ConfigError(f"{traces[0]} is a trace, and {other} is not; read it with {command}, or give two traces")
    if all(command_for(path) == "analyze" for path in (args.a, args.b)):
        from cs_systems.cli import analyze

        if args.phase != Compare.phase:
            raise ConfigError(
                "--phase requires two runs, got two traces, for which every phase is shown; leave out --phase"
            )
        if args.format == "csv":
            raise ConfigError("--format csv writes one table; use cs-systems analyze A B --format csv --table phases")
        both = analyze.Analyze((args.a, args.b), format=args.format, output=args.output)
        return analyze.run(both, merges=False)
    from cs_systems.comparison.runs import profiled_pairs, undisturbed
    from cs_systems.report.reading import some_records

    check_outputs({"--output": args.output}, [args.a, args.b])
    (a, torn_a), (b, torn_b) = some_records(args.a), some_records(args.b)
    pairs = profiled_pairs(a, b)
    texts = []
    if not pairs or args.format == "csv" or undisturbed(a):
        texts.append(_timings(args, a, b, [*torn_a, *torn_b]))
    elif args.phase != Compare.phase:
        raise ConfigError(
            "--phase requires timings, got two profiled runs, for which every phase is shown; leave out --phase"
        )
    if args.format != "csv":
        texts += [_profiles(args, *pair) for pair in pairs]
    deliver("\n".join(texts), args.format, args.output)
    return 0


def _profiles(args: Compare, cell: str, a: RunRecord, b: RunRecord) -> str:
    from cs_systems.cli._tables import difference_part, document_text
    from cs_systems.comparison.profiles import difference_of_records

    found = [(by, difference_of_records(a, b, by)) for by in SPLITS.values()]
    parts = []
    for by, rows in found:
        if more := len(rows[TOP:-1]):
            notes = [f"{more} more with smaller differences; the records have all"]
            parts.append(difference_part(by, [*rows[:TOP], rows[-1]], notes))
        elif rows:
            parts.append(difference_part(by, rows))
    sides = " · ".join(f"{side}: {describe(r.run_config)}" for side, r in (("A", a), ("B", b)))
    return "\n".join(document_text(args.format, [cell, sides, PROFILED], parts, args.output))


def _timings(args: Compare, a: list[RunRecord], b: list[RunRecord], torn: list[str]) -> str:
    from cs_systems.comparison.runs import compare
    from cs_systems.report.phase_columns import known_phases
    from cs_systems.report.tables.rows import render_rows

    for phase in args.phase:
        one_of("phase", phase, known_phases([*a, *b]))
    comparison = compare(a, b, args.phase)
    what = ", ".join(f"{name}: {left} → {right}" for name, (left, right) in comparison.compared.items())
    timed = f" of {args.phase[0]}" if args.format != "csv" and len(args.phase) == 1 else ""
    caption = f"B over A{timed}; {what or 'same configuration in A and B'}"
    blind: dict[str, dict[str, None]] = {}  # text without its percentages → texts that differ only in these
    for text in filter(None, (row["unseen"] for row in comparison.rows)):
        blind.setdefault(re.sub(r"[\d.]+%", "%", text), {})[text] = None
    unseen = [f"not measured: {'e.g. ' if len(texts) > 1 else ''}{next(iter(texts))}" for texts in blind.values()]
    legends = ["finds: the smallest slowdown that this comparison can detect"]
    rows: Sequence[Row] = comparison.rows if args.format == "csv" else list(map(_readable, comparison.rows))
    if timed:
        rows = [{name: value for name, value in row.items() if name != "phase"} for row in rows]
    if all(row.get("interval") == UNKNOWN for row in rows):
        rows = [{name: value for name, value in row.items() if name != "interval"} for row in rows]
    else:
        noise = " or ".join(dict.fromkeys(row["noise"] for row in comparison.rows))
        legends.insert(0, f"interval: 95% confidence interval of B/A, from {noise}")
    notes = [*legends, *unseen, *torn, *comparison.doubts]
    alike = [name for name in ("A_s", "B_s") if rows and name in rows[0]]
    return render_rows(rows, args.format, caption, notes, width=terminal_width(args.output), alike=alike)


def _readable(row: ComparisonRow) -> Row:
    """Return the columns to show: the ratio's interval in one, and the least detectable difference."""
    low, high, resolution = row["ratio_low"], row["ratio_high"], row["resolution"]
    noisy = resolution is not None and resolution > HOPELESS
    return {
        "cell": row["cell"],
        "phase": row["phase"],
        "A_s": row["a_median_s"],
        "B_s": row["b_median_s"],
        "B/A": f"{row['ratio']:.3f}" if row["ratio"] < 10 else f"{row['ratio']:.3g}",
        "interval": UNKNOWN if low is None or noisy else f"{low:.3f} … {high:.3f}",
        "finds": UNKNOWN if resolution is None else "> 100%" if noisy else f"{resolution:.0%}",
        "verdict": "too noisy" if noisy else row["verdict"],
    }
