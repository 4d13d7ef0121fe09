"""Read a CUDA memory snapshot of PyTorch, this toolkit's or any other: the peak and what it consists of, the largest
allocations and where they were made, fragmentation, what is left at the end; of two files, where the peaks differ.

The file is read as data: a pickle that asks for anything but numbers, texts and lists is refused. To record one, call
torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) after the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybeInt, MaybePath, MaybeText, Names, optional
from cs_systems.cli._tables import Part, document_text
from cs_systems.config import PRESETS, ConfigError, one_of
from cs_systems.report.snapshot_tables import CAPTIONS, DIFFERENT, LONG, SHOWN

if TYPE_CHECKING:
    from cs_systems.analysis.memory_categories import Attribution


@dataclass(frozen=True)
class SnapshotArgs:
    file: Annotated[Positional[Path], arg(metavar="FILE", help="a .pickle of torch.cuda.memory._dump_snapshot()")]
    other: Annotated[Positional[MaybePath], optional("FILE2", "hold this one (B) against FILE (A)")] = None
    table: Annotated[Names, arg(help=", ".join(SHOWN), help_behavior_hint="(default: all)")] = ()
    device: Annotated[MaybeInt, optional("N", "which device, where a file holds several")] = None
    top: Annotated[MaybeInt, optional("N", "so many rows of the long tables", "10; in CSV all")] = None
    size: Annotated[MaybeText, optional("PRESET", f"whose tensors they are: {', '.join(PRESETS)}", "a guess")] = None
    format: Annotated[Literal["terminal", "markdown", "latex", "typst", "csv"], arg(help="what to write")] = "terminal"


ARGS = SnapshotArgs


def run(args: SnapshotArgs) -> int:
    """Exit status 0. Raises ConfigError for a malformed request, or a file that is no snapshot."""
    known = DIFFERENT if args.other else SHOWN
    tables = [one_of("table of a comparison" if args.other else "table", name, known) for name in args.table or known]
    if args.format == "csv" and len(tables) != 1:
        raise ConfigError(f"CSV holds one table: choose it with --table {', '.join(tables)}")
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top {args.top}: it must be at least 1")
    from cs_systems.analysis.trace import without_collector

    with without_collector():
        found = [_read(path, args.device) for path in (args.file, args.other) if path]
        write = _comparison(args, tables, *found) if args.other else _tables(args, tables, found[0])
    sys.stdout.write("\n".join(write))
    return 0


def _read(path: Path, device: int | None) -> Attribution:
    from cs_systems.analysis.allocations import replay
    from cs_systems.analysis.memory_categories import attribute
    from cs_systems.analysis.snapshot import read

    return attribute(replay(read(path, device)))


def _tables(args: SnapshotArgs, tables: Sequence[str], found: Attribution) -> list[str]:
    from cs_systems.analysis.memory_tables import TABLES
    from cs_systems.analysis.tensor_names import tensor_names
    from cs_systems.cli._snapshot_text import heading, notes

    names = tensor_names(found, args.size)
    parts: list[Part] = []
    for name in tables:
        rows = TABLES[name](found, names)
        said = notes(name, found, rows)
        top = args.top or (len(rows) if args.format == "csv" else 10)
        if name in LONG and rows[top:]:
            said.append(f"{len(rows) - top} more row(s): show more with --top")
            rows = rows[:top]
        parts.append((CAPTIONS[name], rows, SHOWN[name], said))
    return document_text(args.format, heading(found, names), parts)


def _comparison(args: SnapshotArgs, tables: Sequence[str], a: Attribution, b: Attribution) -> list[str]:
    from cs_systems.analysis.memory_tables import differences, where
    from cs_systems.cli._snapshot_text import difference_notes

    by = {"category": lambda _, a: a.category, "layer": lambda _, a: a.layer, "site": where}
    parts: list[Part] = []
    for name in tables:
        rows = differences(a, b, by[name])
        said = difference_notes(a, b)
        top = args.top or (len(rows) if args.format == "csv" else 10)
        if rows[top:]:
            said.append(f"{len(rows) - top} more row(s): show more with --top")
        titles = {
            "what": DIFFERENT[name], "a_bytes": "A", "b_bytes": "B", "difference_bytes": "B − A",
            "a_allocations": "count of A", "b_allocations": "count of B",
        }  # fmt: skip
        parts.append((f"memory at the peak by {DIFFERENT[name]}, B against A", rows[:top], titles, said))
    return document_text(args.format, [f"A: {a.replay.snapshot.source}", f"B: {b.replay.snapshot.source}"], parts)
