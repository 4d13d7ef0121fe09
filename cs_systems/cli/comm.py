"""Measure collectives: latency, algbw and busbw of all-reduce, all-gather, reduce-scatter, broadcast, all-to-all.

Sizes and rates follow nccl-tests: the size is a rank's largest buffer in bytes (for all-gather the output, for
reduce-scatter the input), algbw is size over time, busbw is the traffic of a link. The table shows set-up, the first
call and the waiting for a late rank separately from the transfer. Ranks use NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import MaybeInt, MaybePath, Names, Numbers, Steps, Sweep, optional, parse_bytes, refuse
from cs_systems.cli._output import (
    RAW,
    Format,
    Open,
    check_outputs,
    deliver,
    figure_file,
    joined,
    page_asked,
    pictures_of,
    reads,
    terminal_width,
)
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.collectives import COLLECTIVES, ELEMENT_BYTES, CollectiveShape, calls_for, readable_bytes
from cs_systems.core.tables import Row, Table
from cs_systems.record import RunRecord
from cs_systems.report.tables import document

FACTOR = 4  # factor between neighbouring sizes of a range


@dataclass(frozen=True)
class CommCells:
    """Collective calls to measure: every combination of the values given."""

    collective: Annotated[Names, arg(help=", ".join(COLLECTIVES))] = COLLECTIVES
    size: Annotated[
        Names,
        arg(
            help=f"sizes (64KiB 1020B) or ranges: 1KiB:1GiB in steps of ×{FACTOR}, 1KiB:1GiB:2 in steps of ×2; sizes "
            "of a range are rounded down so that the ranks can divide them"
        ),
    ] = ("1KiB:1GiB",)
    dtype: Annotated[Names, arg(help=", ".join(ELEMENT_BYTES))] = ("fp32",)
    world_size: Annotated[Numbers, arg(help="number of ranks; if there are GPUs, each rank needs its own")] = (2,)
    calls: Annotated[
        MaybeInt, optional("INT", "consecutive calls per sample", "20; fewer if they move over 64 MiB")
    ] = None

    def configs(self, steps: Steps) -> list[RunConfig]:
        base = steps.base(workload="collective", seed=RunConfig.seed)  # --seed only changes the order of the cells
        sizes = dict.fromkeys((size, ":" in text) for text in self.size for size in parse_sizes(text))
        return [
            replace(base, collective=self._call(name, dtype, size, ranks if of_range else None), world_size=ranks)
            for name in self.collective
            for dtype in self.dtype
            for ranks in self.world_size
            for size, of_range in sizes
        ]

    def _call(self, name: str, dtype: str, size: int, ranks: int | None) -> CollectiveShape:
        """Return the shape of a call; its size is rounded down so that this many ranks can divide it."""
        shape = CollectiveShape(name, size, dtype, calls_for(size) if self.calls is None else self.calls)
        if not ranks:
            return shape
        unit = shape.unit_bytes(ranks)
        return replace(shape, size_bytes=max(unit, size // unit * unit))


def parse_sizes(text: str) -> list[int]:
    """Parse sizes: `1KiB:1GiB` → 1024, 4096, … 2³⁰ bytes. Raises ConfigError."""
    first, *rest = text.split(":")
    if not rest:
        return [parse_bytes(first, "--size")]
    factor = rest[1] if len(rest) == 2 else str(FACTOR)
    if not first or not rest[0] or len(rest) > 2 or not factor.isdecimal() or int(factor) < 2:
        raise ConfigError(
            f"--size {text!r} is not a range of sizes; write FIRST:LAST, such as 1KiB:1GiB, or "
            "FIRST:LAST:FACTOR with a whole FACTOR of at least 2, such as 1KiB:1GiB:2"
        )
    size, last = parse_bytes(first, "--size"), parse_bytes(rest[0], "--size")
    if size > last:
        raise ConfigError(f"--size {text!r} begins above its end; give the smaller size first, as in 1KiB:1GiB")
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= int(factor)
    return sizes


@dataclass(frozen=True)
class Comm:
    cells: CommCells = field(default_factory=CommCells)
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)
    format: Annotated[Format, arg(help="format of the tables; html: a page with the figure")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the tables, instead of the terminal")] = None
    figure: Annotated[MaybePath, optional("FILE", "file for the figure: .svg, .png or .pdf", "figure.svg in --out")] = (
        None
    )
    open: Open = False


ARGS = Comm


def run(args: Comm) -> int:
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells, print_figure_and_paths

    if args.steps.seed and not args.sweep.shuffle:
        refuse(["seed"], "--seed has no effect on collectives without --shuffle")
    configs = args.cells.configs(args.steps)
    if args.sweep.dry_run:
        return print_cells(configs, args.sweep)
    args = page_asked(args)
    outputs = {"--output": args.output, "--figure": figure_file(args.figure)}
    check_outputs(outputs, reads(args.sweep.out))
    folder, records = measured(configs, args.sweep, "comm", args.steps.seed)
    tables = texts(records, args.format, terminal_width(args.output))
    pictures = pictures_of(records, "collectives") if args.format == "html" else []
    text = joined(tables, args.format, f"Collectives of {folder}", pictures, records)
    text += document.more({}) if args.format == "json" and args.output is None else ""
    deliver(text, args.format, args.output, args.open)
    print_figure_and_paths(args.format, folder, "collectives", args.figure, records)
    return exit_status(asked_for(records, args.sweep.of_share(configs)))


def texts(records: Sequence[RunRecord], format: str, width: int | None) -> list[str]:
    """Return the tables of the calls, of the fits over the sizes, and of the set-up. CSV has only the calls."""
    from cs_systems.report import collectives
    from cs_systems.report.tables.records import render
    from cs_systems.report.tables.rows import render_table

    color = width is not None
    tables = [render(records, format, width=width, color=color)]
    for table in (collectives.fits, collectives.setups):
        rows: Sequence[Row] = table(records)
        if rows and format != "csv":
            readable = [{name: _readable(name, value) for name, value in row.items()} for row in rows]
            shown = rows if format in RAW else readable
            tables.append(render_table(_telling(table, rows), shown, format, (), width, color))
    return tables


def _telling(table: Table[Any], rows: Sequence[Row]) -> Table[Any]:
    """Return the table without the columns dtype and ranks if their value is the same in all rows."""
    alike = [name for name in ("dtype", "world_size") if len({row[name] for row in rows}) == 1]
    return replace(table, shown=" ".join(name for name in table.titles if name not in alike))


def _readable(name: str, value: object) -> object:
    """Format a message size in its own unit, because sizes go from KiB to GiB."""
    return readable_bytes(value) if name == "size_bytes" and isinstance(value, int) else value
