"""Memory results of records as terminal tables: phases, components, saved tensors, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypedDict

from cs_systems.cli._output import print_table, terminal_width
from cs_systems.config import RunConfig, describe
from cs_systems.core.printable import command_line, spans, visible, within
from cs_systems.core.tables import Row, Table, table
from cs_systems.core.units import human
from cs_systems.formulas.memory import tables
from cs_systems.record import RunRecord, declared_by
from cs_systems.report.files import standard_output

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.memory_ranges import MemoryRangeRow

CHECKPOINT = "checkpoint: it keeps its input, and backward recomputes the rest"
SELECTIVE = (
    "a selective checkpoint also keeps outputs that are no saved tensors: `predicted` counts them, `kept` does not"
)
WHOLE = "a model that is compiled as a whole has no blocks: use --compile-scope block"
COMPILED = "the compiler decides which tensors a compiled model keeps"
WIDE = 100  # from this width on, shares of all tensors stand next to a block's shares
ROOM_OF_NUMBERS = 24  # width of the columns count, bytes and share, with the space between them
TOP = 5  # rows of the table of saved tensors; the record has all


def print_memory(record: RunRecord, folder: Path) -> None:
    """Print a record's memory results: phases, components, owners, saved tensors, files."""
    title, results = describe(record.run_config), record.results
    if record.status != "ok":
        say(f"{title}: {record.status}: {record.reason}\n")
    without_file = declared_by(record.run_config.profiler).get("without_file")
    if record.status == "oom" and without_file and not record.artifacts:
        say(f"{without_file}\n")
    if rows := tables.MEMORY_PHASES.of(results):
        reasons = [row["reason"] for row in tables.MEMORY_UNPREDICTED.of(results)]
        if record.run_config.compile != "none":
            reasons = reasons or [COMPILED]
        notes = [f"predicted memory: unknown; {reason}" for reason in reasons]
        is_measured = any(row["allocated_bytes"] is not None for row in rows)
        headings = {} if is_measured else {"predicted_peak_bytes": "predicted peak"}
        print_table(replace(tables.MEMORY_PHASES, caption=title, headings=headings), rows, notes)
    if predicted := tables.MEMORY_COMPONENTS.of(results):
        print_table(by_phase, by_phase(predicted))
    if owners := tables.MEMORY_PARTS.of(results):
        named = [{**row, "part": f"= {row['part']}" if row["total"] else row["part"]} for row in owners]
        print_table(tables.MEMORY_PARTS, named)
    if residuals := tables.RESIDUALS.of(results):
        _print_residuals(residuals, record, title)
    if "memory_ranges" in results:
        from cs_systems.analysis.attribution.memory_ranges import MEMORY_RANGES, MEMORY_RANGES_OF

        print_ranges(MEMORY_RANGES.of(results), title, MEMORY_RANGES_OF.of(results)[0]["sees"])
    for name, file in record.artifacts.items():
        print(visible(f"{name}: {folder / file}"))
    if "snapshot" in record.artifacts:
        print(f"read it: {command_line('cs-systems', 'snapshot', folder / record.artifacts['snapshot'])}\n")


def _print_residuals(rows: Sequence[tables.ResidualRow], record: RunRecord, title: str) -> None:
    """Print the largest tensors that forward keeps for backward, and the bytes that each block keeps."""
    results = record.results
    of_modules = any(row["module"] for row in rows)  # a compiled model has one operation and no modules
    columns = [name for name in tables.RESIDUALS.titles if name != "share" and (of_modules or name != "module")]
    largest: Sequence[Row] = rows[:TOP]
    in_blocks, width = any(row.get("of_block") for row in largest), terminal_width() or 80
    shares = [*["share"] * (not in_blocks or width >= WIDE), *["of_block"] * in_blocks]
    top = [
        {name: row[name] for name in columns} | {name: _percent(row.get(name)) for name in shares} for row in largest
    ]
    taken = (2 + len("of one")) * len(shares[1:])
    taken += sum(
        2 + max(len(str(row[name])) for row in top) for name in columns if name in ("module", "shape", "dtype")
    )
    for row in top:
        row["operation"] = within(row["operation"] or "", max(12, width - taken - ROOM_OF_NUMBERS))
    left, whole = rows[TOP:], sum(row["total_bytes"] for row in rows)
    rest = f"{len(left)} more keep {human(sum(row['total_bytes'] for row in left), 'bytes')}"
    notes = [
        f"total {human(whole, 'bytes')}; {rest}; parameters and tensors that are kept already are not counted again"
    ]
    for stream in tables.RESIDUAL_STREAM.of(results):
        notes.append(f"one tensor of the residual stream takes {human(stream['bytes'], 'bytes')}")
    named = replace(
        tables.RESIDUALS, caption=f"{title}: {tables.RESIDUALS.caption}", shown=" ".join([*columns, *shares])
    )
    print_table(named, top, notes)
    _print_blocks(tables.RESIDUAL_BLOCKS.of(results), record.run_config)
    if changes := tables.BACKWARD_BLOCKS.of(results):
        print_table(tables.BACKWARD_BLOCKS, changes, alike=_sizes(tables.BACKWARD_BLOCKS))


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _print_blocks(rows: Sequence[tables.ResidualBlockRow], config: RunConfig) -> None:
    """Print the bytes that each block keeps; equal blocks, and checkpoints of equally many blocks, share a row."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        under_one = row["blocks"] if row["checkpoint"] else None
        alike.setdefault((row["bytes"], row["predicted_bytes"], under_one), []).append(row["block"])
    blocks = [
        {"block": _span(names, under_one), "bytes": size, "predicted_bytes": like}
        for (size, like, under_one), names in alike.items()
    ]
    notes = [CHECKPOINT] if any(row.get("checkpoint") for row in rows) else []
    notes += [SELECTIVE] if notes and config.checkpoint.startswith("selective") else []
    notes += [WHOLE] if config.compile != "none" and config.compile_scope == "model" else []
    print_table(tables.RESIDUAL_BLOCKS, blocks, notes, _sizes(tables.RESIDUAL_BLOCKS))


def _span(names: Sequence[str], under_one: int | None) -> str:
    """Return the names as ranges (`spans`).

    Under checkpoints of several blocks, each name is the first block of a checkpoint.
    """
    if under_one is None:
        return spans(names)
    if under_one == 1:
        return f"{spans(names)}: a checkpoint{' each' if names[1:] else ''}"
    covered = [f"block {int(name.removeprefix('block ')) + i}" for name in names for i in range(under_one)]
    return f"{spans(covered)}: a checkpoint{f' every {under_one}' if names[1:] else ''}"


def _sizes(table: Table[Any]) -> list[str]:
    """Return the columns of bytes, which share one unit so that they can be compared."""
    return [name for name in table.titles if name.endswith("bytes")]


def print_ranges(rows: Sequence[MemoryRangeRow], title: str, sees: str) -> None:
    """Print CUDA allocations by phase and layer; equal layers of a phase share a row."""
    from cs_systems.analysis.attribution.memory_ranges import MEMORY_RANGES

    if not rows:
        say(
            f"{title}: no recorded step called cudaMalloc, because the allocator's cache had enough memory; add "
            "--no-caching-allocator, or record the first steps with --warmup 0\n"
        )
        return
    same = [name for name in MEMORY_RANGES.titles if name not in ("layer", "most_bytes")]
    groups: dict[tuple[Any, ...], list[MemoryRangeRow]] = {}
    for row in rows:
        known: Row = row
        groups.setdefault(tuple(known[name] for name in same), []).append(row)
    shown = [
        {"layer": spans([row["layer"] for row in members])}
        | dict(zip(same, key, strict=True))
        | {"most_bytes": max(row["most_bytes"] for row in members)}
        for key, members in groups.items()
    ]
    notes = [
        f"cudaMalloc and cudaFree calls recorded by nsys, of {sees}; most: highest use minus use at the step's start"
    ]
    if sees != "tensors":
        notes.append("freed tensors stay in the allocator's cache; add --no-caching-allocator to see each tensor")
    named = replace(MEMORY_RANGES, caption=f"{title}: {MEMORY_RANGES.caption}")
    print_table(named, shown, notes, _sizes(named))


class ComponentRow(TypedDict):
    """Predicted bytes of a component after each phase of the last step; `all` is their sum."""

    component: str
    bytes: dict[str, int]


@table(tables.MEMORY_COMPONENTS.caption)
def by_phase(rows: Sequence[tables.MemoryComponentRow]) -> list[ComponentRow]:
    """Return a row for each component, and their sum."""
    last = max(row["step"] for row in rows)
    phases = list(dict.fromkeys(row["phase"] for row in rows if row["step"] in (0, last)))
    sizes = {(row["phase"], row["component"]): row["bytes"] for row in rows if row["step"] in (0, last)}
    names = list(dict.fromkeys(row["component"] for row in rows if row["bytes"]))
    made: list[ComponentRow] = [
        {"component": name.replace("_", " "), "bytes": {phase: sizes.get((phase, name), 0) for phase in phases}}
        for name in names
    ]
    total = {phase: sum(row["bytes"][phase] for row in made) for phase in phases}
    return [*made, {"component": "all", "bytes": total}]


def say(text: str) -> None:
    """Print a sentence with its line breaks, wrapped between words on a terminal."""
    indent = len(text) - len(text.lstrip())
    width = terminal_width()
    printable = visible(text.rstrip("\n"))
    shown = (
        printable
        if width is None
        else fill(printable, width, subsequent_indent=" " * (indent + 2), break_on_hyphens=False)
    )
    with standard_output():
        print(shown + text[len(text.rstrip("\n")) :], flush=True)
