"""Say what takes the memory of a training step: phase by phase what is allocated, reserved and in use, beside what the
closed form says of parameters, gradients, optimizer state, activations and the rest. Nothing is timed.

`--fits 24GiB` says by prediction alone what fits a device, the largest batch and context that do, and what to change
first; `--best-checkpoint --budget 40GiB` finds the cheapest checkpoints that fit, and proves it by a run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import MaybePath, MaybeText, ModelCells, Steps, Sweep, flag, optional, parse_bytes
from cs_systems.cli._output import terminal_width
from cs_systems.cli._tables import within
from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.record import Row, RunRecord

SHOWN = {
    "step": "step",
    "phase": "phase",
    "allocated_bytes": "alloc.",
    "predicted_allocated_bytes": "predicted",
    "peak_allocated_bytes": "peak",
    "predicted_peak_bytes": "predicted",
    "residual_bytes": "off",
    "reserved_bytes": "reserved",
    "device_used_bytes": "device",
    "resident_bytes": "process",
}
PREDICTED_ALONE = {  # headings where nothing was measured beside it
    "predicted_allocated_bytes": "predicted",
    "predicted_peak_bytes": "predicted peak",
}
OF_MEMORY = {"memory_phases", "memory_parts", "residuals", "memory_ranges", "snapshot"}  # what a record may have of it
CHECKPOINT = "a checkpoint keeps its input; backward computes the rest again"
SELECTIVE = "what a selective one keeps beside it is no saved tensor: predicted counts it, kept does not"
COMPILED = "of a compiled model the compiler decides what it keeps"
ROOM_OF_NUMBERS = 24  # columns of a terminal: count, bytes and share, and what lies between
TOP = 5  # of what forward keeps; the record has all
NOTES = {
    "residual_bytes": "off: measured peak less the predicted one",
    "device_used_bytes": "device: in use by anybody, the CUDA context included",
    "resident_bytes": "process: its resident memory, Python and torch included",
}


@dataclass(frozen=True)
class Memory:
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=lambda: Steps(warmup=0, steps=2))
    sweep: Sweep = field(default_factory=Sweep)
    workload: Annotated[str, arg(help="what a step is: train_step, or package.module:factory")] = "train_step"
    snapshot: Annotated[bool, flag("also dump PyTorch's memory history of the steps after --warmup")] = False
    residuals: Annotated[bool, flag("also list what forward keeps for backward, by block and operation")] = False
    nsys: Annotated[bool, flag("also list what CUDA allocated in each phase and layer, by nsys")] = False
    no_caching_allocator: Annotated[
        bool, flag("with --nsys: let PyTorch ask CUDA for every tensor, or nsys sees its cache grow alone")
    ] = False
    show: Annotated[MaybePath, optional("DIR", "print what a folder of records tells of memory; runs nothing")] = None
    fits: Annotated[MaybeText, optional("SIZE", "by prediction: what fits a device of 24GiB; runs nothing")] = None
    best_checkpoint: Annotated[bool, flag("find the cheapest --checkpoint that fits --budget, and run it")] = False
    budget: Annotated[MaybeText, optional("SIZE", "what --best-checkpoint must fit, the CUDA context included")] = None


ARGS = Memory


def run(args: Memory) -> int:
    """The exit status of the sweep; 0 where nothing is run. Raises ConfigError for a malformed request."""
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells
    from cs_systems.record import records_path

    if args.show is not None:
        return _show(args.show)
    configs = args.cells.configs(args.steps.base(workload=args.workload))
    if args.fits is not None:
        return _print_fits(configs, parse_bytes(args.fits))
    if args.best_checkpoint != (args.budget is not None):
        raise ConfigError("--best-checkpoint and --budget go together: --best-checkpoint --budget 40GiB")
    if args.budget is not None:
        return _run_cheapest(args, configs, parse_bytes(args.budget))
    watched = _watched(args, configs)
    if args.sweep.dry_run:
        return print_cells(watched, args.sweep)
    folder, records = measured(watched, args.sweep, "memory", args.steps.seed)
    for record in records:
        print_memory(record, folder)
    print(f"records: {records_path(folder)}")
    return exit_status(asked_for(records, args.sweep.of_part(watched)))


def _show(folder: Path) -> int:
    from cs_systems.record import some_records

    records, complaints = some_records(folder)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    told = [record for record in records if OF_MEMORY & {*record.results, *record.artifacts}]
    if not told:
        raise ConfigError(f"{folder} tells of no memory by phase: cs-systems memory --out DIR measures it")
    for record in told:
        print_memory(record, folder)
    return 0


def _watched(args: Memory, configs: Sequence[RunConfig]) -> list[RunConfig]:
    from cs_systems.profilers.nsys_memory import UNCACHED

    if args.no_caching_allocator and not args.nsys:
        raise ConfigError("--no-caching-allocator is for what nsys sees: add --nsys")
    options = (UNCACHED,) if args.no_caching_allocator else ()
    profilers = (
        ("memory", True, ()),
        ("residuals", args.residuals, ()),
        ("memory_snapshot", args.snapshot, ()),
        ("nsys_memory", args.nsys, options),
    )
    return [
        replace(config, profiler=name, profiler_args=options)
        for config in configs
        for name, wanted, options in profilers
        if wanted
    ]


def print_memory(record: RunRecord, folder: Path) -> None:
    """Whatever of a record is of memory: phases, components, parts of the device's memory, residuals, files."""
    title, results = describe(record.run_config), record.results
    if record.status != "ok":
        _say(f"{title}: {record.status}: {record.reason}\n")
    if record.status == "oom" and record.run_config.profiler == "memory_snapshot" and not record.artifacts:
        _say("no snapshot: memory ran out before recording began, in building or in --warmup: use --warmup 0\n")
    if rows := results.get("memory_phases"):
        shown = [name for name in SHOWN if name in ("step", "phase") or any(row[name] is not None for row in rows)]
        notes = [note for name, note in NOTES.items() if name in shown]
        if record.run_config.compile != "none":
            notes.append(f"not predicted: {COMPILED}")
        titles = SHOWN if "allocated_bytes" in shown else SHOWN | PREDICTED_ALONE
        _print([{name: row[name] for name in shown} for row in rows], title, notes, titles)
    if rows := results.get("memory_components"):
        _print(by_phase(rows), "by the closed form, after each phase of the second step", [], {})
    if rows := results.get("memory_parts"):
        parts = [{"part": f"= {row['part']}" if row["total"] else row["part"], "bytes": row["bytes"]} for row in rows]
        _print(parts, "whose the device's memory is, after the last step", ["=: the sum so far"], {"bytes": "size"})
    if rows := results.get("residuals"):
        _print_residuals(rows, record, title)
    if "memory_ranges" in results:
        _print_ranges(results["memory_ranges"], title, results["memory_ranges_of"][0]["sees"])
    for what, file in record.artifacts.items():
        print(f"{what}: {folder / file}")
    if "snapshot" in record.artifacts:
        print(f"read it: cs-systems snapshot {folder / record.artifacts['snapshot']}\n")


def _print_residuals(rows: Sequence[Row], record: RunRecord, title: str) -> None:
    """The largest of what forward keeps, and how much each block does."""
    from cs_systems.report.units import human

    results = record.results
    of_modules = any(row["module"] for row in rows)  # a compiled model has one operation, and none
    columns = (*(("module",) if of_modules else ()), "operation", "shape", "dtype", "count", "total_bytes")
    top = [{name: row[name] for name in columns} | {"of all": f"{row['share']:.1%}"} for row in rows[:TOP]]
    taken = sum(2 + max(len(str(row[name])) for row in top) for name in columns if name in ("module", "shape", "dtype"))
    for row in top:
        row["operation"] = within(row["operation"] or "", max(12, (terminal_width() or 80) - taken - ROOM_OF_NUMBERS))
    left, whole = rows[TOP:], sum(row["total_bytes"] for row in rows)
    rest = f"{len(left)} more keep {human(sum(row['total_bytes'] for row in left), 'bytes')}"
    notes = [f"of {human(whole, 'bytes')} in all; {rest}; parameters, and what is kept already, cost nothing more"]
    for row in results.get("residual_stream", ()):
        notes.append(f"the residual stream is a tensor of {human(row['bytes'], 'bytes')}")
    _print(top, f"{title}: what forward keeps for backward", notes, {"total_bytes": "kept"})
    _print_blocks(results["residual_blocks"], record.run_config.checkpoint.startswith("selective"))
    if rows := results.get("backward_blocks", []):
        note = "predicted: the gradients that a block's backward emits, less what the block kept"
        titles = {"change_bytes": "allocated", "gradient_bytes": "gradients", "predicted_bytes": "predicted"}
        _print_beside_prediction(rows, "change of what is allocated during each block's backward", note, titles)


def _print_blocks(rows: Sequence[Row], selective: bool) -> None:
    """How much each block keeps; blocks that keep the same, and checkpoints of as many blocks, are one row."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        under_one = row["blocks"] if row.get("checkpoint") else None  # older records tell of no checkpoint
        alike.setdefault((row["bytes"], row["predicted_bytes"], under_one), []).append(row["block"])
    blocks = [
        {"block": _span(names, under_one), "bytes": size, "predicted_bytes": like}
        for (size, like, under_one), names in alike.items()
    ]
    notes = [CHECKPOINT] if any(row.get("checkpoint") for row in rows) else []
    notes += [SELECTIVE] if notes and selective else []
    titles = {"bytes": "kept", "predicted_bytes": "predicted"}
    _print_beside_prediction(blocks, "kept by each block", "predicted: by the closed form", titles, notes)


def _span(names: Sequence[str], under_one: int | None) -> str:
    """`spans`; where as many blocks are under one checkpoint, the names are of the first of each."""
    if under_one is None:
        return spans(names)
    if under_one == 1:
        return f"{spans(names)}: a checkpoint{' each' if names[1:] else ''}"
    covered = [f"block {int(name.removeprefix('block ')) + i}" for name in names for i in range(under_one)]
    return f"{spans(covered)}: a checkpoint{f' every {under_one}' if names[1:] else ''}"


def _print_beside_prediction(
    rows: Sequence[Row], caption: str, note: str, titles: dict[str, str], notes: Sequence[str] = ()
) -> None:
    """Without the columns of which nothing is known; `note` is of the prediction."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    alike = [name for name in titles if name in names]
    known = [{name: row[name] for name in names} for row in rows]
    _print(known, caption, [*notes, *([note] if "predicted_bytes" in names else [])], titles, alike=alike)


def _print_ranges(rows: Sequence[Row], title: str, sees: str) -> None:
    """What CUDA allocated by phase and layer; layers of a phase in which the same happened are one row."""
    if not rows:
        _say(
            f"{title}: in no recorded step CUDA was asked for memory, for the allocator's cache held enough: add "
            "--no-caching-allocator, or record the first steps with --warmup 0\n"
        )
        return
    same = ("phase", "allocations", "allocated_bytes", "freed_bytes", "change_bytes", "predicted_bytes")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    shown = [
        {"phase": key[0], "layer": spans([row["layer"] for row in members])}
        | dict(zip(same[1:], key[1:], strict=True))
        | {"most_bytes": max(row["most_bytes"] for row in members)}
        for key, members in groups.items()
    ]
    unknown = {name for name in shown[0] if all(row[name] is None for row in shown)}
    titles = {name: name.removesuffix("_bytes") for name in shown[0] if name.endswith("_bytes") and name not in unknown}
    notes = [f"cudaMalloc and cudaFree by nsys, which sees {sees}; most: in use meanwhile, above the step's begin"]
    if sees != "tensors":
        notes.append("what is freed stays in the allocator's cache: add --no-caching-allocator to see tensors")
    known = [{name: value for name, value in row.items() if name not in unknown} for row in shown]
    headings = titles | {"allocations": "calls"}
    _print(known, f"{title}: the device's memory by range, a step", notes, headings, alike=list(titles))


def spans(names: Sequence[str]) -> str:
    """`block 0 … block 3, block 5, lm_head`: blocks that follow one another, in whatever order, by both ends."""
    blocks = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"block (\d+)", name)))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])]
    said = [f"block {run[0]}" + (f" … block {run[-1]}" if run[1:] else "") for run in runs]
    return ", ".join([*said, *(name for name in names if not re.fullmatch(r"block \d+", name))])


def by_phase(rows: Sequence[Row]) -> list[Row]:
    """A row for each component, a column for each phase of the last step, and the sum."""
    last = max(row["step"] for row in rows)
    phases = list(dict.fromkeys(row["phase"] for row in rows if row["step"] in (0, last)))
    sizes = {(row["phase"], row["component"]): row["bytes"] for row in rows if row["step"] in (0, last)}
    names = list(dict.fromkeys(row["component"] for row in rows if row["bytes"]))
    made = [
        {"component": name.replace("_", " ")} | {f"{phase}_bytes": sizes.get((phase, name), 0) for phase in phases}
        for name in names
    ]
    total = {f"{phase}_bytes": sum(row[f"{phase}_bytes"] for row in made) for phase in phases}
    return [*made, {"component": "all", **total}]


def _print(
    rows: Sequence[Row], caption: str, notes: Sequence[str], titles: dict[str, str], alike: Sequence[str] = ()
) -> None:
    from cs_systems.report.rows import render_rows

    width = terminal_width()
    print(render_rows(rows, "terminal", caption, notes, titles, width, color=width is not None, alike=alike))


def _say(text: str) -> None:
    """A sentence, and the line breaks after it; broken between words where a terminal shows it."""
    indent = len(text) - len(text.lstrip())
    width = terminal_width()
    said = text.rstrip("\n")
    shown = said if width is None else fill(said, width, subsequent_indent=" " * (indent + 2), break_on_hyphens=False)
    print(shown + text[len(said) :], flush=True)


def _print_fits(configs: Sequence[RunConfig], device_bytes: int) -> int:
    from cs_systems.formulas.memory_fit import fits
    from cs_systems.report.units import human

    for config in configs:
        if config.workload != "train_step":
            raise ConfigError(f"the memory of {config.workload} is not known by formula: leave out --fits")
        if config.compile != "none":
            raise ConfigError(f"{COMPILED}: leave out --compile with --fits")
        fit = fits(replace(config, device="cuda"), device_bytes)
        verdict = "with the CUDA context, " + ("fits" if fit.fits else "does not fit")
        _say(f"{describe(config)}: {human(fit.needed_bytes, 'bytes')} {verdict} {human(device_bytes, 'bytes')}")
        batch = f"batch {fit.largest_batch}" if fit.largest_batch else "no batch"
        context = f"context {fit.largest_context}" if fit.largest_context else "no context"
        print(f"  largest that fits: {batch}, or {context}")
        if not fit.fits:
            first = " ".join(change.what for change in fit.first)
            _say(f"  change first: {first or 'nothing of this is enough: shard it over several devices'}")
            rows = [{"change": c.what, "needed_bytes": c.needed_bytes, "fits": c.fits} for c in fit.changes]
            _print(rows, "each alone", [], {})
    return 0


def _run_cheapest(args: Memory, configs: Sequence[RunConfig], budget_bytes: int) -> int:
    from cs_systems.cli._sweep import exit_status
    from cs_systems.record import records_path
    from cs_systems.runner import preflight, prepare_folder

    on_gpu = args.steps.device != "cpu" and preflight([replace(configs[0], device="cuda")])[0]["reason"] is None
    folder = args.sweep.folder("memory")
    if args.sweep.fresh and not args.sweep.dry_run:
        prepare_folder(folder, fresh=True)  # once: each config and each plan is a sweep of its own
    args = replace(args, sweep=replace(args.sweep, out=folder, fresh=False))
    records = [record for config in configs for record in _proven(args, config, budget_bytes, on_gpu=on_gpu)]
    if args.sweep.dry_run:
        return 0
    print(f"records: {records_path(folder)}")
    return exit_status(records)


def _proven(args: Memory, config: RunConfig, budget_bytes: int, *, on_gpu: bool) -> list[RunRecord]:
    """Run a config under the cheapest checkpoint that fits by prediction, and under the next one where that fails:
    what the allocator cannot piece together is known to no formula. The last run's records; none of a dry run.

    Raises ConfigError where nothing makes it fit.
    """
    from cs_systems.cli._sweep import asked_for, measured
    from cs_systems.formulas.memory_fit import CONTEXT_BYTES, cheapest_plan
    from cs_systems.report.units import human

    limit, ceiling = budget_bytes - CONTEXT_BYTES if on_gpu else None, budget_bytes
    while best := cheapest_plan(replace(config, device="cuda" if on_gpu else "cpu"), ceiling):
        device = config.device if on_gpu else "cpu"
        planned = replace(config, device=device, checkpoint=best.config.checkpoint, memory_limit_bytes=limit)
        predicted = f"{human(best.needed_bytes, 'bytes')} by prediction, {_more_flops(best.config):.1%} more FLOPs"
        _say(f"{describe(config)}: {best.what}: {predicted}")
        if args.sweep.dry_run:
            return []
        watched = _watched(args, [planned])
        folder, records = measured(watched, args.sweep, "memory", args.steps.seed)
        own = asked_for(records, watched)
        for record in own:
            print_memory(record, folder)
        _say(_proof(own[0], budget_bytes))
        if own[0].status != "oom":
            return own
        ceiling = best.needed_bytes - budget_bytes // 50
    raise ConfigError(
        f"{describe(config)}: no checkpoint makes it fit {human(budget_bytes, 'bytes')}: "
        f"--fits {args.budget} says what would"
    )


def _more_flops(config: RunConfig) -> float:
    """FLOPs that are executed again, as a share of the step's without checkpoints."""
    from cs_systems.formulas.cost import recomputed_flops, step_cost
    from cs_systems.formulas.memory_fit import algorithm_of

    algorithm, length = algorithm_of(config), config.tokens_per_sequence
    costs = step_cost(config.model, config.batch_size, length, config.mode, algorithm, config.precision).values()
    again = recomputed_flops(config.model, config.batch_size, length, algorithm, config.checkpoint)
    return again / sum(cost.hardware_flops or 0 for cost in costs)


def _proof(record: RunRecord, budget_bytes: int) -> str:
    from cs_systems.formulas.memory_fit import CONTEXT_BYTES
    from cs_systems.report.units import human

    peak = record.measurement.peak_allocated_bytes if record.measurement else None
    said = f"{describe(record.run_config)}: {record.status}"
    if peak is not None:
        beside = f"{human(peak, 'bytes')}, beside {human(CONTEXT_BYTES, 'bytes')} of CUDA context"
        return f"{said} in a budget of {human(budget_bytes, 'bytes')}: its measured peak is {beside}"
    if record.status == "ok":
        return f"{said}, but nothing limits the memory of a CPU: only a GPU proves that it fits"
    return f"{said}: {record.reason}"
