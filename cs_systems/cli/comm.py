"""Measure collectives: latency, algbw and busbw of all-reduce, all-gather, reduce-scatter, broadcast, all-to-all.

Sizes and rates follow nccl-tests: the size is that of a rank's largest buffer in bytes (for all-gather the output, for
reduce-scatter the input), algbw is size over time, busbw is the traffic of a link. Set-up, the first call and waiting
for a late rank are shown apart from the transfer. Ranks use NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from tyro.conf import arg

from cs_systems.cli._options import MaybeInt, MaybePath, Names, Numbers, Steps, Sweep, optional, parse_bytes
from cs_systems.cli._output import TableFormat, check_outputs, deliver, figure_file, reads, terminal_width
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.collectives import COLLECTIVES, ELEMENT_BYTES, CollectiveShape, calls_for, readable_bytes
from cs_systems.record import Row, RunRecord

FACTOR = 4  # factor between neighbouring sizes of a range
FITS = {
    "collective": "collective", "dtype": "dtype", "world_size": "ranks", "latency_s": "α", "algbw_bytes_per_s": "β",
    "busbw_bytes_per_s": "β as busbw", "half_bandwidth_bytes": "α β", "r_squared": "R²",
    "worst_residual_share": "worst residual",
}  # fmt: skip
FIT_NOTES = [
    "α: latency; β: the algbw that large sizes approach; α β: the size that reaches half of it",
    "fitted to relative residuals, so that each size counts alike; R² of these; a worst residual above some 10%: no "
    "one line describes all sizes",
]
SETUPS = {
    "collective": "collective", "dtype": "dtype", "world_size": "ranks", "start_s": "start",
    "init_process_group_s": "init", "new_group_s": "new group", "size_bytes": "size", "first_call_s": "first call",
    "call_s": "a call",
}  # fmt: skip
SETUP_NOTES = [
    "start: of a rank's process, until it joins the others; init: init_process_group, on GPUs with its communicator; "
    "new group: a further one of the same ranks; once a process, of the slowest rank, and in none of the times above"
]


@dataclass(frozen=True)
class CommCells:
    """Which calls: every combination of what is given."""

    collective: Annotated[Names, arg(help=f"{', '.join(COLLECTIVES)}")] = COLLECTIVES
    size: Annotated[
        Names,
        arg(
            help=f"64KiB 1020B, or a range, 1KiB:1GiB in steps of ×{FACTOR}, 1KiB:1GiB:2 of ×2; a range "
            "is rounded down to what the ranks can share"
        ),
    ] = ("1KiB:1GiB",)
    dtype: Annotated[Names, arg(help=", ".join(ELEMENT_BYTES))] = ("fp32",)
    world_size: Annotated[Numbers, arg(help="ranks, each with a GPU of its own where there are GPUs")] = (2,)
    calls: Annotated[MaybeInt, optional("INT", "in a row, as one sample", "20, fewer where they move over 64 MiB")] = (
        None
    )

    def configs(self, steps: Steps) -> list[RunConfig]:
        base = steps.base(workload="collective")
        sizes = dict.fromkeys((size, ":" in text) for text in self.size for size in parse_sizes(text))
        return [
            replace(base, collective=self._call(name, dtype, size, ranks if of_range else None), world_size=ranks)
            for name in self.collective
            for dtype in self.dtype
            for ranks in self.world_size
            for size, of_range in sizes
        ]

    def _call(self, name: str, dtype: str, size: int, ranks: int | None) -> CollectiveShape:
        """Return the shape of a call; its size may be rounded down so that this many ranks can share it."""
        shape = CollectiveShape(name, size, dtype, calls_for(size) if self.calls is None else self.calls)
        if not ranks:
            return shape
        unit = shape.unit_bytes(ranks)
        return replace(shape, size_bytes=max(unit, size // unit * unit))


def parse_sizes(text: str) -> list[int]:
    """Parse sizes: `1KiB:1GiB` → 1024, 4096, … 2³⁰ bytes. Raises ConfigError."""
    first, *rest = text.split(":")
    if not rest:
        return [parse_bytes(first)]
    factor = rest[1] if len(rest) == 2 else str(FACTOR)
    if not first or not rest[0] or len(rest) > 2 or not factor.isdecimal() or int(factor) < 2:
        raise ConfigError(f"{text!r} is no range of sizes: write 1KiB:1GiB, or 1KiB:1GiB:2 to double each")
    size, last = parse_bytes(first), parse_bytes(rest[0])
    if not 0 < size <= last:
        raise ConfigError(f"{text!r} is no range of sizes: begin above 0, and end at or after the first")
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
    format: Annotated[TableFormat, arg(help="of the tables")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "write the tables there instead of to the terminal")] = None
    figure: Annotated[MaybePath, optional("FILE", "the figure: FILE.svg, .png or .pdf", "figure.svg in --out")] = None


ARGS = Comm


def run(args: Comm) -> int:
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells, told_beside

    configs = args.cells.configs(args.steps)
    if args.sweep.dry_run:
        return print_cells(configs, args.sweep)
    outputs = {"--output": args.output, "--figure": figure_file(args.figure)}
    check_outputs(outputs, reads(args.sweep.out))
    folder, records = measured(configs, args.sweep, "comm", args.steps.seed)
    told = "\n".join(texts(records, args.format, terminal_width(args.output)))
    deliver(told, args.format, args.output)
    told_beside(args.format, folder, "collectives", args.figure, records)
    return exit_status(asked_for(records, args.sweep.of_part(configs)))


def texts(records: Sequence[RunRecord], format: str, width: int | None) -> list[str]:
    """Return the tables of the calls, of their fits over the sizes, and of set-up. CSV holds the calls alone."""
    from cs_systems.report import collectives
    from cs_systems.report.tables.records import render
    from cs_systems.report.tables.rows import render_rows

    said = [render(records, format, width=width, color=width is not None)]
    parts: list[tuple[str, list[Row], dict[str, str], list[str]]] = [
        ("t(n) = α + n/β", collectives.fits(records), FITS, FIT_NOTES),
        ("before the first sample", collectives.setups(records), SETUPS, SETUP_NOTES),
    ]
    for caption, rows, titles, notes in parts:
        if rows and format != "csv":
            shown = [{name: _readable(name, row[name]) for name in _telling(rows, [*titles])} for row in rows]
            said.append(render_rows(shown, format, caption, notes, titles, width, color=width is not None))
    return said


def _telling(rows: Sequence[Row], titles: Sequence[str]) -> list[str]:
    """Drop unknown columns, and dtype and ranks if they are the same in all rows."""
    alike = [name for name in ("dtype", "world_size") if len({row[name] for row in rows}) == 1]
    return [name for name in titles if name not in alike and any(row[name] is not None for row in rows)]


def _readable(name: str, value: object) -> object:
    """Format a message size in its own unit, because sizes go from KiB to GiB."""
    return readable_bytes(value) if name == "size_bytes" and isinstance(value, int) else value
