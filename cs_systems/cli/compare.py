"""Compare run B with baseline run A: for each cell the ratio of times, its interval and a verdict.

Where both runs profiled a cell, the difference in kernel time by phase, family and layer is shown as well. For two
traces (.sqlite, .nsys-rep, .json, .json.gz), that difference alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybePath, Names, optional
from cs_systems.cli._output import TableFormat, check_outputs, deliver, terminal_width
from cs_systems.config import ConfigError, describe, one_of
from cs_systems.core.file_types import command_for
from cs_systems.record import Row, RunRecord
from cs_systems.traces.range_names import SPLITS


@dataclass(frozen=True)
class Compare:
    a: Annotated[Positional[Path], arg(help="folder, records.jsonl or file of a profiler: the baseline")]
    b: Annotated[Positional[Path], arg(help="what is held against it, of the same kind")]
    phase: Annotated[Names, arg(help="step (wall clock), forward, loss, backward, optimizer")] = ("step",)
    format: Annotated[TableFormat, arg(help="what to write")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "write there instead of to the terminal")] = None


ARGS = Compare
UNKNOWN = "–"
TOP = 10  # rows of a difference, without the sum
PROFILED = "times of kernels under a profiler: for shares and causes, not to be quoted as timings"
# Above this, not even a doubling would have been detected, and "no difference" would mislead.
HOPELESS = 1.0


def run(args: Compare) -> int:
    if all(command_for(path) == "analyze" for path in (args.a, args.b)):
        from cs_systems.cli import analyze

        if args.phase != Compare.phase:
            raise ConfigError("--phase is of recorded runs: of two recordings of a profiler every phase is shown")
        if args.format == "csv":
            raise ConfigError("CSV holds one table: cs-systems analyze A B --format csv --table phases, for one")
        return analyze.run(analyze.Analyze(args.a, args.b, format=args.format, output=args.output))
    from cs_systems.comparison.runs import profiled_pairs, undisturbed
    from cs_systems.report.reading import some_records

    check_outputs({"--output": args.output}, [args.a, args.b])
    (a, torn_a), (b, torn_b) = some_records(args.a), some_records(args.b)
    pairs = profiled_pairs(a, b)
    texts = []
    if not pairs or args.format == "csv" or undisturbed(a):
        texts.append(_timings(args, a, b, [*torn_a, *torn_b]))
    elif args.phase != Compare.phase:
        raise ConfigError("--phase is for timings, and of profiles every phase is shown; leave out --phase")
    if args.format != "csv":
        texts += [_profiles(args, *pair) for pair in pairs]
    deliver("\n".join(texts), args.format, args.output)
    return 0


def _profiles(args: Compare, cell: str, a: RunRecord, b: RunRecord) -> str:
    from cs_systems.cli._tables import difference_part, document_text
    from cs_systems.comparison.profiles import difference_of_records

    found = [(by, difference_of_records(a, b, by)) for by in SPLITS.values()]
    parts = [difference_part(by, rows) for by, rows in found if rows]
    for _, rows, _, said in parts:
        if more := rows[TOP:-1]:
            said.append(f"{len(more)} more, which differ by less: the records have all")
            del rows[TOP:-1]
    sides = " · ".join(f"{side}: {describe(r.run_config)}" for side, r in (("A", a), ("B", b)))
    return "\n".join(document_text(args.format, [cell, sides, PROFILED], parts, args.output))


def _timings(args: Compare, a: list[RunRecord], b: list[RunRecord], torn: list[str]) -> str:
    from cs_systems.comparison.runs import compare
    from cs_systems.report.tables.rows import render_rows

    known = {name for r in (*a, *b) if r.measurement for name in r.measurement.phase_names()}
    for phase in args.phase:
        one_of("phase", phase, ["step", *sorted(known)])
    comparison = compare(a, b, args.phase)
    what = ", ".join(f"{name}: {left} → {right}" for name, (left, right) in comparison.compared.items())
    timed = f" of {args.phase[0]}" if args.format != "csv" and len(args.phase) == 1 else ""
    caption = f"B over A{timed}; {what or 'the same configuration on both sides'}"
    blind: dict[str, dict[str, None]] = {}  # those that are alike but for a percentage
    for text in filter(None, (row["unseen"] for row in comparison.rows)):
        blind.setdefault(re.sub(r"[\d.]+%", "%", text), {})[text] = None
    unseen = [f"not seen: {'e.g. ' if len(texts) > 1 else ''}{next(iter(texts))}" for texts in blind.values()]
    legends = ["finds: the smallest slowdown that would have been called one"]
    rows = comparison.rows if args.format == "csv" else list(map(_readable, comparison.rows))
    if timed:
        rows = [{name: value for name, value in row.items() if name != "phase"} for row in rows]
    if all(row.get("interval") == UNKNOWN for row in rows):
        rows = [{name: value for name, value in row.items() if name != "interval"} for row in rows]
    else:
        noise = " or ".join(dict.fromkeys(row["noise"] for row in comparison.rows))
        legends.insert(0, f"interval: of B/A, 95%, from {noise}")
    notes = [*legends, *unseen, *torn, *comparison.doubts]
    alike = [name for name in ("A_s", "B_s") if rows and name in rows[0]]
    return render_rows(rows, args.format, caption, notes, width=terminal_width(args.output), alike=alike)


def _readable(row: Row) -> Row:
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
