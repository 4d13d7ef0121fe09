"""Show where the memory of a training step goes, phase by phase, beside the closed form. Nothing is timed.

Each phase shows allocated, reserved and used memory; the closed form gives parameters, gradients, optimizer state,
activations and the rest.

`--fits 24GiB` predicts what fits a device, the largest batch and context that do, and what to change first.
`--best-checkpoint --budget 40GiB` finds the cheapest checkpoints that fit, and proves the choice by a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from cs_systems.cli._memory_text import COMPILED, print_memory, print_table, say
from cs_systems.cli._options import (
    MaybePath,
    MaybeText,
    ModelCells,
    Steps,
    Sweep,
    flag,
    given,
    optional,
    parse_bytes,
    refuse,
)
from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.core.printable import visible
from cs_systems.record import RunRecord

OF_MEMORY = {"memory_phases", "memory_parts", "residuals", "memory_ranges", "snapshot"}  # memory tables of a record
WATCHED = {"snapshot", "residuals", "nsys", "no_caching_allocator", "best_checkpoint", "budget", "memory_limit"}
NOT_OF_FITS = WATCHED | {field.name for kind in (Sweep, Steps) for field in fields(kind)} - {"device"}


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
    """Measure or predict memory; return the exit status of the sweep, 0 if nothing is run.

    Raises ConfigError for a malformed request.
    """
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells
    from cs_systems.record import records_path

    _check_used(args)
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
    print(visible(f"records: {records_path(folder)}"))
    return exit_status(asked_for(records, args.sweep.of_part(watched)))


def _check_used(args: Memory) -> None:
    """Raise ConfigError for options that --show, --fits or --best-checkpoint would ignore."""
    names = given(args)
    if args.show is not None:
        refuse([name for name in names if name != "show"], "--show prints what was recorded")
    if args.fits is not None:
        refuse([name for name in names if name in NOT_OF_FITS], "--fits predicts and runs nothing")
    if args.best_checkpoint:
        itself = "--best-checkpoint itself chooses the checkpoint, within --budget, for each config"
        refuse([name for name in names if name in ("checkpoint", "memory_limit", "part")], itself)


def _show(folder: Path) -> int:
    from cs_systems.report.reading import some_records

    records, complaints = some_records(folder)
    for complaint in complaints:
        print(visible(complaint), file=sys.stderr)
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


def _print_fits(configs: Sequence[RunConfig], device_bytes: int) -> int:
    from cs_systems.core.units import human
    from cs_systems.formulas.memory.fit import fits

    _check_predictable(configs, "--fits")
    for config in configs:
        fit = fits(replace(config, device="cuda"), device_bytes)
        verdict = "with the CUDA context, " + ("fits" if fit.fits else "does not fit")
        say(f"{describe(config)}: {human(fit.needed_bytes, 'bytes')} {verdict} {human(device_bytes, 'bytes')}")
        batch = f"batch {fit.largest_batch}" if fit.largest_batch else "no batch"
        context = f"context {fit.largest_context}" if fit.largest_context else "no context"
        print(f"  largest that fits: {batch}, or {context}")
        if not fit.fits:
            first = " ".join(change.what for change in fit.first)
            say(f"  change first: {first or 'nothing of this is enough: shard it over several devices'}")
            rows = [{"change": c.what, "needed_bytes": c.needed_bytes, "fits": c.fits} for c in fit.changes]
            print_table(rows, "each alone", [], {})
    return 0


def _check_predictable(configs: Sequence[RunConfig], option: str) -> None:
    for config in configs:
        if config.workload != "train_step":
            raise ConfigError(f"the memory of {config.workload} is not known by formula: leave out {option}")
        if config.compile != "none":
            raise ConfigError(f"{COMPILED}: leave out --compile with {option}")


def _run_cheapest(args: Memory, configs: Sequence[RunConfig], budget_bytes: int) -> int:
    from cs_systems.cli._sweep import exit_status
    from cs_systems.record import records_path
    from cs_systems.runtime.journal import Journal
    from cs_systems.runtime.sweep import check, preflight

    _check_predictable(configs, "--best-checkpoint")
    on_gpu = args.steps.device != "cpu" and preflight([replace(configs[0], device="cuda")])[0]["reason"] is None
    if args.sweep.dry_run:
        for config in configs:
            _proven(args, config, budget_bytes, on_gpu=on_gpu)
        return 0
    check(configs, args.sweep.repeats, args.sweep.timeout_s)
    folder = args.sweep.claim("memory")
    if args.sweep.fresh:
        Journal.prepare(folder, fresh=True)  # once, because each config and each plan is a sweep of its own
    args = replace(args, sweep=replace(args.sweep, out=folder, fresh=False))
    records = [record for config in configs for record in _proven(args, config, budget_bytes, on_gpu=on_gpu)]
    print(visible(f"records: {records_path(folder)}"))
    return exit_status(records)


def _proven(args: Memory, config: RunConfig, budget_bytes: int, *, on_gpu: bool) -> list[RunRecord]:
    """Run a config under the cheapest checkpoint that fits by prediction, and under the next one if that fails.

    The prediction can be too low because no formula knows the allocator's fragmentation. Returns the last run's
    records; none for a dry run.

    Raises ConfigError if nothing makes it fit.
    """
    from cs_systems.cli._sweep import asked_for, measured
    from cs_systems.core.units import human
    from cs_systems.formulas.memory.fit import CONTEXT_BYTES, cheapest_plan

    limit, ceiling = budget_bytes - CONTEXT_BYTES if on_gpu else None, budget_bytes
    while best := cheapest_plan(replace(config, device="cuda" if on_gpu else "cpu"), ceiling):
        device = config.device if on_gpu else "cpu"
        planned = replace(config, device=device, checkpoint=best.config.checkpoint, memory_limit_bytes=limit)
        predicted = f"{human(best.needed_bytes, 'bytes')} by prediction, {_more_flops(best.config):.1%} more FLOPs"
        say(f"{describe(config)}: {best.what}: {predicted}")
        if args.sweep.dry_run:
            return []
        watched = _watched(args, [planned])
        folder, records = measured(watched, args.sweep, "memory", args.steps.seed)
        own = asked_for(records, watched)
        for record in own:
            print_memory(record, folder)
        say(_proof(own[0], budget_bytes))
        if own[0].status != "oom":
            return own
        ceiling = best.needed_bytes - budget_bytes // 50
    raise ConfigError(
        f"{describe(config)}: no checkpoint makes it fit {human(budget_bytes, 'bytes')}: "
        f"--fits {args.budget} says what would"
    )


def _more_flops(config: RunConfig) -> float:
    """Return the recomputed FLOPs as a fraction of the step's FLOPs without checkpoints."""
    from cs_systems.formulas.cost import recomputed_flops, step_cost
    from cs_systems.formulas.memory.fit import algorithm_of

    algorithm, length = algorithm_of(config), config.tokens_per_sequence
    costs = step_cost(config.model, config.batch_size, length, config.mode, algorithm, config.precision).values()
    again = recomputed_flops(config.model, config.batch_size, length, algorithm, config.checkpoint)
    return again / sum(cost.hardware_flops or 0 for cost in costs)


def _proof(record: RunRecord, budget_bytes: int) -> str:
    from cs_systems.core.units import human
    from cs_systems.formulas.memory.fit import CONTEXT_BYTES

    peak = record.measurement.peak_allocated_bytes if record.measurement else None
    said = f"{describe(record.run_config)}: {record.status}"
    if peak is not None:
        beside = f"{human(peak, 'bytes')}, beside {human(CONTEXT_BYTES, 'bytes')} of CUDA context"
        return f"{said} in a budget of {human(budget_bytes, 'bytes')}: its measured peak is {beside}"
    if record.status == "ok":
        return f"{said}, but nothing limits the memory of a CPU: only a GPU proves that it fits"
    return f"{said}: {record.reason}"
