"""Show the memory of a training step by phase and component, measured and predicted. Nothing is timed.

For each phase, allocated, reserved and used memory is measured. A formula predicts parameters, gradients, optimizer
state, activations and the other components.

`--fits 24GiB` predicts if the step fits such a device, the largest batch and context that fit, and what to change.
`--best-checkpoint --budget 40GiB` finds the checkpoint plan that fits with the least recomputation, and measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from tyro.conf import arg

from cs_systems.cli._document import is_wanted
from cs_systems.cli._memory_text import COMPILED, print_memory, say
from cs_systems.cli._options import (
    MaybePath,
    MaybeText,
    ModelCells,
    Steps,
    Sweep,
    Workloads,
    flag,
    given,
    optional,
    parse_bytes,
    refuse,
)
from cs_systems.cli._output import Format, Open, check_outputs, deliver, joined, page_asked, print_table, terminal_width
from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.core.fields import Subject
from cs_systems.core.printable import visible
from cs_systems.core.tables import Table
from cs_systems.core.units import counted, human
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.formulas.memory.fit import Change, Fit

# tables of a record that hold memory results
OF_MEMORY = {"memory_phases", "memory_parts", "residuals", "memory_ranges", "snapshot"}
IN_DOCUMENT = ("memory_phases", "memory_components", "memory_parts", "residuals", "residual_blocks", "memory_ranges")
WATCHED = {"snapshot", "residuals", "nsys", "no_caching_allocator", "best_checkpoint", "budget", "memory_limit"}
FORMS = ("format", "output", "open")
NOT_OF_FITS = WATCHED | {field.name for kind in (Sweep, Steps) for field in fields(kind)} - {"timeout_s"}


@dataclass(frozen=True)
class Memory:
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=lambda: Steps(warmup=(0,), steps=2))
    sweep: Sweep = field(default_factory=Sweep)
    step: Workloads = field(default_factory=Workloads)
    snapshot: Annotated[bool, flag("also write a CUDA memory snapshot of the steps after --warmup")] = False
    residuals: Annotated[
        bool, flag("also list the tensors that forward keeps for backward, by block and operation")
    ] = False
    nsys: Annotated[bool, flag("also list CUDA's allocations by phase and layer, recorded by nsys")] = False
    no_caching_allocator: Annotated[
        bool, flag("with --nsys: allocate every tensor by cudaMalloc; otherwise nsys only sees PyTorch's cache grow")
    ] = False
    show: Annotated[MaybePath, optional("DIR", "print the memory results of an earlier run, and run nothing")] = None
    fits: Annotated[
        MaybeText, optional("SIZE", "predict if the step fits a device of this memory (24GiB), and run nothing")
    ] = None
    best_checkpoint: Annotated[
        bool, flag("find the --checkpoint that fits --budget with the least recomputation, and run it")
    ] = False
    budget: Annotated[MaybeText, optional("SIZE", "memory limit of --best-checkpoint, the CUDA context included")] = (
        None
    )
    format: Annotated[Format, arg(help="json: for any result; the others: for --fits only")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the table of --fits, instead of the terminal")] = None
    open: Open = False


ARGS = Memory


class ChangeRow(TypedDict):
    """Memory that a step needs after one change, including the CUDA context."""

    change: str
    needed_bytes: int
    fits: bool


CHANGES = Table("changes", ChangeRow, "each change alone")


NOTHING_ENOUGH = "no combination is enough; shard the model over several devices"


def run(args: Memory) -> int:
    """Measure or predict memory; return the exit status of the sweep, 0 if nothing is run.

    Raises ConfigError for a malformed request.
    """
    from cs_systems.cli._sweep import (
        asked_for,
        exit_status,
        measured,
        print_cells,
        print_diagnoses,
        print_document,
        print_own_code,
        print_try,
    )
    from cs_systems.record import records_path

    _check_used(args)
    if args.show is not None:
        return _show(args.show)
    configs = args.cells.configs(args.steps.base(), args.step)
    if args.fits is not None:
        if any(config.subject is Subject.OWN for config in configs):
            forms = [name for name in given(args) if name in FORMS and not (name == "format" and is_wanted())]
            refuse(forms, "--fits prints text, not a table, for a workload of your own")
        return _print_fits(page_asked(args), configs, _device_bytes(args.fits, "--fits"))
    if args.best_checkpoint != (args.budget is not None):
        raise ConfigError(
            "--best-checkpoint and --budget require each other; give both, as in --best-checkpoint --budget 40GiB"
        )
    if args.budget is not None:
        return _run_cheapest(args, configs, _device_bytes(args.budget, "--budget"))
    cells = _measured_cells(args, configs)
    if args.sweep.dry_run:
        return print_cells(cells, args.sweep)
    folder, records = measured(cells, args.sweep, "memory", args.steps.seed)
    status = exit_status(asked_for(records, args.sweep.of_share(cells)))
    if is_wanted():
        print_document(records, folder, IN_DOCUMENT)
        return status
    answer = print_diagnoses(records)
    for record in records:
        print_memory(record, folder)
    _print_peaks(records)
    print_own_code(records)
    print(visible(f"records: {records_path(folder)}"))
    print_try(answer, records)
    return status


def _print_peaks(records: Sequence[RunRecord]) -> None:
    """Print the peaks of several cells as one table."""
    from cs_systems.report.tables.records import render

    read = [record for record in records if record.run_config.profiler == "memory"]
    if len(read) > 1:
        width = terminal_width()
        print(render(read, width=width, color=width is not None))


def _device_bytes(text: str, option: str) -> int:
    """Return the memory of a device in bytes. Raises ConfigError if it is no more than the CUDA context."""
    from cs_systems.formulas.memory.fit import CONTEXT_BYTES

    size_bytes = parse_bytes(text, option)
    if size_bytes <= CONTEXT_BYTES:
        context = human(CONTEXT_BYTES, "bytes")
        raise ConfigError(f"{option} {text} is no more than the {context} of the CUDA context alone; give more")
    return size_bytes


def _check_used(args: Memory) -> None:
    """Raise ConfigError for options that --show, --fits or --best-checkpoint would ignore."""
    names = given(args)
    as_json = ("format",) if is_wanted() and args.output is None else ()
    if args.show is not None:
        refuse([name for name in names if name not in ("show", *as_json)], "--show only prints recorded results")
    if args.fits is not None:
        refuse([name for name in names if name in NOT_OF_FITS], "--fits predicts memory without measuring a step")
    else:
        forms = [name for name in names if name in FORMS and name not in as_json]
        refuse(forms, "only --fits has a table in other formats; show a run by cs-systems report DIR --format")
    if args.best_checkpoint:
        itself = "--best-checkpoint runs every cell, and chooses its checkpoint plan and memory limit by --budget"
        refuse([name for name in names if name in ("checkpoint", "memory_limit", "part")], itself)


def _show(folder: Path) -> int:
    from cs_systems.cli._sweep import print_diagnoses, print_document
    from cs_systems.report.reading import some_records

    records, complaints = some_records(folder)
    for complaint in complaints:
        print(visible(complaint), file=sys.stderr)
    shown = [record for record in records if OF_MEMORY & {*record.results, *record.artifacts}]
    if not shown:
        raise ConfigError(f"{folder} has no memory results; measure them with cs-systems memory --out DIR")
    if is_wanted():
        print_document(shown, folder, IN_DOCUMENT)
        return 0
    print_diagnoses(shown)
    for record in shown:
        print_memory(record, folder)
    _print_peaks(shown)
    return 0


def _measured_cells(args: Memory, configs: Sequence[RunConfig]) -> list[RunConfig]:
    from cs_systems.measure.profilers.nsys_memory import UNCACHED

    if args.no_caching_allocator and not args.nsys:
        raise ConfigError("--no-caching-allocator requires --nsys; add --nsys, or leave out --no-caching-allocator")
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


def _print_fits(args: Memory, configs: Sequence[RunConfig], device_bytes: int) -> int:
    from cs_systems.cli import _forecasts
    from cs_systems.formulas.memory.fit import fits
    from cs_systems.measure.runtime.sweep import check, forecasting, preflight, run

    _check_predictable(args, configs, "--fits")
    check_outputs({"--output": args.output})
    own = [config for config in configs if config.subject is Subject.OWN]
    check(own, timeout_s=args.sweep.timeout_s)
    if own:
        has_gpu = preflight([replace(own[0], device="cuda")])[0]["reason"] is None
        with forecasting(args.sweep.timeout_s) as forecast:
            for config in own:
                _forecasts.print_fits(config, device_bytes, forecast, run if has_gpu else None)
    found = [(config, fits(replace(config, device="cuda"), device_bytes)) for config in configs if config not in own]
    if found and (len(found) > 1 or args.format != "terminal" or args.output is not None):
        _print_table_of_fits(args, found, device_bytes)
    else:
        for config, fit in found:
            _print_fit(config, fit)
    return 0


def _print_fit(config: RunConfig, fit: Fit) -> None:
    """Print whether a cell fits, the largest sizes that fit, and what to change."""
    from cs_systems.cli._forecasts import print_verdict, size

    print_verdict(config, fit.needed_bytes, fit.device_bytes)
    largest = {"batch": fit.largest_batch, "context": fit.largest_context}
    sizes = ", or ".join(size(name, most) for name, most in largest.items())
    say(f"  largest that fits: {sizes if any(largest.values()) else 'none; batch 1 or context 1 still needs more'}")
    if not fit.fits:
        say(f"  change first: {_first_changes(fit)}")
        rows: list[ChangeRow] = [
            {"change": one.what, "needed_bytes": one.needed_bytes, "fits": one.fits} for one in fit.changes
        ]
        print_table(CHANGES, rows)


def _first_changes(fit: Fit) -> str:
    if fit.fits:
        return ""
    return " ".join(change.what for change in fit.first) or NOTHING_ENOUGH


def _print_table_of_fits(args: Memory, found: Sequence[tuple[RunConfig, Fit]], device_bytes: int) -> None:
    """Print a row for each cell, named by what differs among the cells."""
    from cs_systems.cli._forecasts import FITS, FitRow
    from cs_systems.config import same_fields
    from cs_systems.formulas.memory.fit import MOST
    from cs_systems.report.tables.rows import render_table

    first = found[0][0]
    same = same_fields([config for config, _ in found]) if len(found) > 1 else set[str]()
    constant = f"; {describe(first, same_fields([first]) - same)}" if same else ""
    rows: list[FitRow] = [
        {
            "cell": describe(config, same),
            "needed_bytes": fit.needed_bytes,
            "fits": fit.fits,
            "largest_batch": fit.largest_batch,
            "largest_context": fit.largest_context,
            "first": _first_changes(fit),
        }
        for config, fit in found
    ]
    caption = f"{FITS.caption} with the CUDA context, on {human(device_bytes, 'bytes')}{constant}"
    ends = any(MOST in (row["largest_batch"], row["largest_context"]) for row in rows)
    notes = [f"{MOST:,}: the search ends there; more may fit"] if ends else []
    width = terminal_width(args.output)
    text = render_table(replace(FITS, caption=caption), rows, args.format, notes, width, width is not None)
    limit = human(device_bytes, "bytes")
    fitting = f"of {counted(len(found), 'cell')}, {sum(fit.fits for _, fit in found)} fit {limit} by prediction"
    opening = fitting if args.format == "html" else ""
    page = joined([text], args.format, f"What fits {limit}", opening=opening)
    deliver(page, args.format, args.output, args.open)


def _check_predictable(args: Memory, configs: Sequence[RunConfig], option: str) -> None:
    for config in configs:
        if config.subject not in (Subject.STEP, Subject.OWN):
            both = f"{option} and --budget" if option == "--best-checkpoint" else option
            raise ConfigError(
                f"{option} works only with --workload train_step or a model of your own, and the workload is "
                f"{config.workload}; use --workload train_step, or leave out {both}"
            )
        if config.compile != "none":
            by = "--compile" if {*args.cells.compile} != {"none"} else f"--recipe {' '.join(args.cells.recipe)}"
            raise ConfigError(f"{option} cannot predict memory with {by}, because {COMPILED}; leave out {by}")


def _run_cheapest(args: Memory, configs: Sequence[RunConfig], budget_bytes: int) -> int:
    from cs_systems.cli._sweep import exit_status
    from cs_systems.measure.runtime.journal import Journal
    from cs_systems.measure.runtime.sweep import check, preflight
    from cs_systems.record import records_path

    _check_predictable(args, configs, "--best-checkpoint")
    on_gpu = args.steps.device != "cpu" and preflight([replace(configs[0], device="cuda")])[0]["reason"] is None
    if args.sweep.dry_run:
        for config in configs:
            _run_within_budget(args, config, budget_bytes, on_gpu=on_gpu)
        return 0
    check(configs, args.sweep.repeats, args.sweep.timeout_s)
    folder = args.sweep.claim("memory")
    if args.sweep.fresh:
        Journal.prepare(folder, fresh=True)  # prepared only once, because each config and each plan is a separate sweep
    args = replace(args, sweep=replace(args.sweep, out=folder, fresh=False))
    records = [record for config in configs for record in _run_within_budget(args, config, budget_bytes, on_gpu=on_gpu)]
    print(visible(f"records: {records_path(folder)}"))
    return exit_status(records)


def _run_within_budget(args: Memory, config: RunConfig, budget_bytes: int, *, on_gpu: bool) -> list[RunRecord]:
    """Run a config with the cheapest checkpoint plan that is predicted to fit; if memory runs out, try the next plan.

    The prediction can be too low because it excludes the allocator's fragmentation. Returns the last run's records;
    none for a dry run.

    Raises ConfigError if nothing makes it fit.
    """
    from cs_systems.cli._forecasts import accuracy_of
    from cs_systems.cli._sweep import asked_for, measured, print_document
    from cs_systems.formulas.memory.fit import CONTEXT_BYTES

    limit, ceiling = budget_bytes - CONTEXT_BYTES if on_gpu else None, budget_bytes
    target = replace(config, device="cuda" if on_gpu else "cpu")
    while found := _cheapest_plan(target, ceiling, args.sweep.timeout_s):
        best, more_flops = found
        device = config.device if on_gpu else "cpu"
        planned = replace(config, device=device, checkpoint=best.config.checkpoint, memory_limit_bytes=limit)
        predicted = f"{human(best.needed_bytes, 'bytes')} predicted, {more_flops:.1%} more FLOPs"
        say(f"{describe(config)}: {best.what}: {predicted}")
        if args.sweep.dry_run or not on_gpu:
            say(f"  {accuracy_of(best.config)}")
        if args.sweep.dry_run:
            return []
        cells = _measured_cells(args, [planned])
        folder, records = measured(cells, args.sweep, "memory", args.steps.seed)
        own = asked_for(records, cells)
        if is_wanted():
            print_document(own, folder, IN_DOCUMENT)
        else:
            for record in own:
                print_memory(record, folder)
        say(_result_in_budget(own[0], budget_bytes, best.needed_bytes - CONTEXT_BYTES))
        if own[0].status != "oom":
            return own
        ceiling = best.needed_bytes - budget_bytes // 50
    helps = "the largest batch and context that fit" if config.subject is Subject.OWN else "which changes would help"
    raise ConfigError(
        f"{describe(config)} does not fit {human(budget_bytes, 'bytes')} with any checkpoint plan; "
        f"to see {helps}, use --fits {args.budget} instead of --best-checkpoint and --budget"
    )


def _cheapest_plan(config: RunConfig, budget_bytes: int, timeout_s: float | None) -> tuple[Change, float] | None:
    """Return the cheapest checkpoint plan that is predicted to fit, and the share of its recomputed FLOPs.

    The built-in model is predicted by formula, a user's own model by a step on fake tensors.
    """
    from cs_systems.cli import _forecasts
    from cs_systems.formulas.memory.fit import cheapest_plan
    from cs_systems.measure.runtime.sweep import forecasting

    if config.subject is Subject.OWN:
        with forecasting(timeout_s) as forecast:
            return _forecasts.cheapest_plan(config, budget_bytes, forecast)
    best = cheapest_plan(config, budget_bytes)
    return None if best is None else (best, _more_flops(best.config))


def _more_flops(config: RunConfig) -> float:
    """Return the recomputed FLOPs as a fraction of the step's FLOPs without checkpoints."""
    from cs_systems.formulas.cost import recomputed_flops, step_cost
    from cs_systems.formulas.memory.fit import algorithm_of

    algorithm, length = algorithm_of(config), config.tokens_per_sequence
    costs = step_cost(config.model, config.batch_size, length, config.mode, algorithm, config.precision).values()
    again = recomputed_flops(config.model, config.batch_size, length, algorithm, config.checkpoint)
    return again / sum(cost.hardware_flops or 0 for cost in costs)


def _result_in_budget(record: RunRecord, budget_bytes: int, predicted_bytes: int) -> str:
    from cs_systems.formulas.memory.fit import CONTEXT_BYTES

    peak = record.measurement.peak_allocated_bytes if record.measurement else None
    outcome = f"{describe(record.run_config)}: {record.status}"
    if peak is not None:
        beside = f"{human(peak, 'bytes')}, plus {human(CONTEXT_BYTES, 'bytes')} of CUDA context"
        error = predicted_bytes / peak - 1
        off = f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"
        beside += f"; the prediction was {human(predicted_bytes, 'bytes')}, {off}"
        return f"{outcome} in a budget of {human(budget_bytes, 'bytes')}: measured peak {beside}"
    if record.status == "ok":
        return f"{outcome}, but the memory of a CPU is not limited; run on a GPU to verify that it fits"
    return f"{outcome}: {record.reason}"
