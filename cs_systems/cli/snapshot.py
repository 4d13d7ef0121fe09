"""Analyze a CUDA memory snapshot of any PyTorch program: the peak, its categories and the largest allocations.

Also shows where allocations were made, fragmentation, and the allocations left at the end. For two files, shows the
difference of the peaks.

The file is read as data: a pickle with anything but numbers, strings, lists and dicts is refused. To record one, call
torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) after the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybeInt, MaybePath, MaybeText, Names, optional, refuse
from cs_systems.cli._output import Format, check_outputs, check_page, deliver
from cs_systems.cli._tables import Part, check_top, chosen_tables, document_text
from cs_systems.config import PRESETS, ConfigError
from cs_systems.record import Row
from cs_systems.report.tables.snapshot import CAPTIONS, DEVICES, DIFFERENT, LONG, OPTIONAL, SHOWN

if TYPE_CHECKING:
    from cs_systems.diagnosis import Diagnosis
    from cs_systems.snapshots.categories import Attribution
    from cs_systems.snapshots.tensor_names import TensorNames

MOST_ROWS_OF_PAGE = 100


@dataclass(frozen=True)
class SnapshotArgs:
    file: Annotated[
        Positional[Path], arg(metavar="FILE", help="snapshot: a .pickle of torch.cuda.memory._dump_snapshot()")
    ]
    other: Annotated[Positional[MaybePath], optional("FILE2", "snapshot B, compared with FILE (A)")] = None
    table: Annotated[Names, arg(help=f"tables to show: {', '.join(SHOWN)}", help_behavior_hint="(default: all)")] = ()
    device: Annotated[MaybeInt, optional("N", "device to analyze, if the file has several", "all")] = None
    top: Annotated[MaybeInt, optional("N", "number of rows of long tables", "10; in CSV all")] = None
    size: Annotated[MaybeText, optional("PRESET", f"model, to name the tensors: {', '.join(PRESETS)}", "inferred")] = (
        None
    )
    format: Annotated[Format, arg(help="output format; html: a page with a timeline")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None


ARGS = SnapshotArgs


def run(args: SnapshotArgs) -> int:
    """Show the snapshot; return exit status 0.

    Raises ConfigError for a malformed request, or a file that is no snapshot.
    """
    known = DIFFERENT if args.other else SHOWN
    tables = chosen_tables(args.table, known, args.other is not None, args.format, args.top)
    if args.format == "html" and (args.other or args.table):
        raise ConfigError("--format html shows every table of one snapshot; leave out FILE2 and --table")
    if not args.other:
        check_top(args.top, tables, LONG)
    if args.other and args.size is not None:
        refuse(["size"], "a comparison of two snapshots does not name tensors")
    check_page(args.format, args.output)
    check_outputs({"--output": args.output}, [file for file in (args.file, args.other) if file])
    from cs_systems.traces.trace import without_collector

    with without_collector():
        text = _text(args, tables)
    deliver(text, args.format, args.output)
    return 0


def _text(args: SnapshotArgs, tables: Sequence[str]) -> str:
    if args.other:
        return "\n".join(_comparison(args, tables, *(_read(path, args.device) for path in (args.file, args.other))))
    found = _read_all(args.file) if args.device is None else [_read(args.file, args.device)]
    if len(found) > 1 and args.format in ("html", "csv"):
        numbers = " or ".join(str(one.replay.snapshot.device) for one in found)
        raise ConfigError(f"--format {args.format} shows one device; choose it with --device {numbers}")
    if args.format == "html":
        return _page(args, found[0])
    if len(found) > 1:
        return "\n".join(_devices(args, tables, found))
    return "\n".join(_tables(args, tables, found[0]))


def _read(path: Path, device: int | None) -> Attribution:
    from cs_systems.snapshots.allocations import replay
    from cs_systems.snapshots.categories import attribute
    from cs_systems.snapshots.snapshot import read

    return attribute(replay(read(path, device)))


def _read_all(path: Path) -> list[Attribution]:
    from cs_systems.snapshots.allocations import replay
    from cs_systems.snapshots.categories import attribute
    from cs_systems.snapshots.snapshot import read_all

    return [attribute(replay(snapshot)) for snapshot in read_all(path)]


def _devices(args: SnapshotArgs, tables: Sequence[str], found: Sequence[Attribution]) -> list[str]:
    """Return a table of all devices, then each device's tables: the composition alone, unless --table names others."""
    from cs_systems.cli._snapshot_text import SUMS
    from cs_systems.snapshots.tables import devices

    overview: Part = ("devices", devices(found), DEVICES, [SUMS])
    text = document_text(args.format, [f"{args.file} · {len(found)} devices"], [overview], args.output)
    chosen = tables if args.table else ["composition", "out_of_memory"]
    return [*text, *(line for one in found for line in _tables(args, chosen, one))]


def _tables(args: SnapshotArgs, tables: Sequence[str], found: Attribution) -> list[str]:
    from cs_systems.cli._snapshot_text import heading
    from cs_systems.snapshots.tensor_names import tensor_names

    names = tensor_names(found, args.size)
    diagnoses = None if args.table else _diagnoses(found, names)
    parts: list[Part] = []
    for name in tables:
        rows, remarks = _table(name, found, names, args.top or (None if args.format == "csv" else 10))
        if not rows and name in OPTIONAL and not args.table:
            continue
        parts.append((CAPTIONS[name], rows, SHOWN[name], remarks))
    return document_text(args.format, heading(found, names), parts, args.output, diagnoses)


def _diagnoses(found: Attribution, names: TensorNames) -> list[Diagnosis] | None:
    from cs_systems.diagnosis import apply_rules
    from cs_systems.diagnosis._evidence import of_snapshot

    return apply_rules(of_snapshot(found, names))


def _table(name: str, found: Attribution, names: TensorNames, top: int | None) -> tuple[Sequence[Row], list[str]]:
    """Return the rows of a table, only the first `top` of a long one, and its notes."""
    from cs_systems.cli._snapshot_text import notes
    from cs_systems.snapshots.tables import TABLES

    rows = TABLES[name](found, names)
    remarks = notes(name, found, rows)
    if name not in LONG or top is None or not rows[top:]:
        return rows, remarks
    first, where = 0, ""
    if name == "timeline":
        peak = next((n for n, row in enumerate(rows) if row["is_peak"]), 0)
        first, where = max(0, min(peak - top // 2, len(rows) - top)), ", around the peak"
    more = f"{len(rows) - top:,} more row(s){where}; --top shows more"
    return rows[first : first + top], [*remarks, more]


def _page(args: SnapshotArgs, found: Attribution) -> str:
    from cs_systems.cli._snapshot_text import heading
    from cs_systems.report.pages.snapshot import render
    from cs_systems.snapshots.tensor_names import tensor_names
    from cs_systems.snapshots.timeline import view

    names = tensor_names(found, args.size)
    tables = {name: _table(name, found, names, args.top or MOST_ROWS_OF_PAGE) for name in SHOWN}
    title = f"Memory of {args.file.name}"
    return render(view(found, names), tables, heading(found, names), title, _diagnoses(found, names))


def _comparison(args: SnapshotArgs, tables: Sequence[str], a: Attribution, b: Attribution) -> list[str]:
    from cs_systems.cli._snapshot_text import difference_heading
    from cs_systems.snapshots.tables import differences, where

    by = {"category": lambda _, a: a.category, "layer": lambda _, a: a.layer or "no layer", "site": where}
    parts: list[Part] = []
    for name in tables:
        rows = differences(a, b, by[name])
        remarks = []
        top = args.top or (len(rows) if args.format == "csv" else 10)
        if rows[top:]:
            remarks.append(f"{len(rows) - top} more row(s); --top shows more")
        titles = {
            "what": DIFFERENT[name], "a_bytes": "A", "b_bytes": "B", "difference_bytes": "B − A",
            "a_allocations": "count of A", "b_allocations": "count of B",
        }  # fmt: skip
        parts.append((f"memory at the peak by {name}, B compared with A", rows[:top], titles, remarks))
    return document_text(args.format, difference_heading(a, b), parts, args.output)
