"""Compare strategies for training on several ranks: step time, communication, waiting, memory.

Shows hidden and exposed communication, waiting, bytes sent, and memory by component, each beside its formula.
Strategies are the files in `cs_systems/parallel`; join several with +.

--batch-size is for each rank: N ranks train on N times as many sequences. `single` on one rank is always measured too,
as the baseline. Each cell is timed without a profiler, and profiled separately (--with).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import MaybeInt, MaybeNames, MaybePath, ModelCells, Names, Numbers, Steps, Sweep, optional
from cs_systems.cli._output import (
    TableFormat,
    check_outputs,
    deliver_tables,
    figure_file,
    reads,
    sources_of,
    terminal_width,
)
from cs_systems.config import ConfigError, RunConfig, describe, one_of
from cs_systems.record import Row, RunRecord

WITH = ("overlap", "rank_memory")
DDP = ("ddp_naive", "ddp_flat", "ddp_overlap", "ddp_bucketed", "torch_ddp")
CELL = {"strategy": "strategy", "ranks": "ranks", "repeat": "repeat"}
STEPS = CELL | {"step_s": "step", "p10_s": "p10", "p90_s": "p90", "tokens_per_s": "tokens/s",
                "efficiency": "efficiency", "note": "note"}  # fmt: skip
COMMUNICATION = CELL | {"by_difference_s": "longer", "of_step": "of step", "in_trace_s": "exposed",
                        "hidden_s": "hidden", "hidden": "hidden %"}  # fmt: skip
SKEW = CELL | {"transfer_s": "transfer", "waiting_s": "waiting"}
DIFFERENCES = CELL | {"difference_s": "longer", "exposed_s": "exposed", "slower_compute_s": "compute",
                      "waits_longer_s": "idle", "recorder_s": "recorder"}  # fmt: skip
VOLUMES = CELL | {"collectives": "calls", "sent_bytes": "sent", "formula_sent_bytes": "formula",
                  "peak_allocated_bytes": "peak", "predicted_peak_bytes": "predicted"}  # fmt: skip
STAGES = CELL | {"component": "component", "built_bytes": "built", "forward_bytes": "forward",
                 "backward_bytes": "backward", "optimizer_bytes": "optimizer", "off": "off"}  # fmt: skip
SPREAD = ("p10_s", "p90_s")  # dropped on a narrow terminal; cs-systems report shows it too
PERCENT = ("efficiency", "of_step", "hidden", "off")
NOTES = {
    "steps": ["efficiency: tokens/s over those of as many ranks that train alone"],
    "communication": [
        "longer: than the step of a rank that trains alone; the rest from a recording of the slowest rank: exposed, "
        "hidden: communication alone, and beside computing"
    ],
    "skew": [
        "summed over the collectives, which may run at once, means of the recorded steps; transfer: once all ranks "
        "are there; waiting: for them, of the rank that waits most"
    ],
    "differences": [
        "longer = exposed + what computing takes longer beside communication + what the device idles longer + what "
        "the recorder changed"
    ],
    "volumes": ["sent: by a rank in a step, as counted where our own strategies send; formula: in rings"],
    "stages": [
        "of the rank that holds most; off: the farthest from the formula; allocated: all that the device's allocator "
        "has given out"
    ],
}

BLOCKING = (
    "on a CPU communication inside forward, backward or optimizer counts as hidden, also where the phase waits for it"
)

DISTURBED = "over 100%: one rank alone was slower than one of several, as on a busy machine: measure it again, --fresh"
MOST_EFFICIENT = 1.05  # a higher efficiency is more than noise


@dataclass(frozen=True)
class Parallel:
    cells: ModelCells = field(default_factory=ModelCells)
    strategy: Annotated[
        Names,
        arg(help="of cs_systems/parallel, several joined by +, told more after a colon: ddp_bucketed:comm_dtype=bf16"),
    ] = DDP
    world_size: Annotated[Numbers, arg(help="ranks, each with a GPU of its own where there are GPUs")] = (2,)
    bucket_size_mb: Annotated[
        Names, arg(help="2^20 bytes, of strategies with buckets", help_behavior_hint="(default: the strategy's)")
    ] = ()
    tp_degree: Annotated[
        MaybeInt, optional("INT", "neighbouring ranks that divide a block: fsdp+tp and ddp_*+tp need it, tp takes all")
    ] = None
    with_: Annotated[
        MaybeNames,
        arg(name="with", help=f"record apart from timing: {', '.join(WITH)}; alone: nothing"),
    ] = WITH
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)
    format: Annotated[TableFormat, arg(help="of the tables")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "write the tables there; CSV: FILE, FILE-2, …, one each")] = None
    figure: Annotated[
        MaybePath, optional("FILE", "streams of a step: FILE.svg, .png or .pdf", "streams.svg in --out")
    ] = None


ARGS = Parallel


def run(args: Parallel) -> int:
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells, told_beside
    from cs_systems.runtime.sweep import check

    configs = cells(args)
    check(configs)
    if args.sweep.dry_run:
        return print_cells(configs, args.sweep)
    outputs = {"--output": args.output, "--figure": figure_file(args.figure)}
    check_outputs(outputs, [*reads(args.sweep.out), *sources_of(configs)])
    folder, records = measured(configs, args.sweep, "parallel", args.steps.seed)
    said = texts(records, args.format, terminal_width(args.output))
    deliver_tables(said, args.format, args.output, [folder])
    recorded = [record for record in records if record.results.get("streams") and record.repeat == 0]
    told_beside(args.format, folder, "streams", args.figure, recorded)
    return exit_status(asked_for(records, args.sweep.of_part(configs)))


def cells(args: Parallel) -> list[RunConfig]:
    """Return the clean cells, the baseline of each group first; then the same under each recorder."""
    from cs_systems.formulas.rank_layout import options_of

    if stray := [name for name in args.strategy if "=" in _plain(name)]:
        raise ConfigError(
            f"{stray[0]!r} is no strategy: join its options by colons, ddp_bucketed:comm_dtype=bf16:max_ctas=16"
        )
    if {*args.strategy} == {"single"} and args.world_size != Parallel.world_size:
        raise ConfigError("single trains on one rank: name a strategy beside it, or leave out --world-size")
    if args.tp_degree is not None and not any(map(_has_two_dimensions, args.strategy)):
        raise ConfigError("--tp-degree is of fsdp+tp and ddp_*+tp: name one in --strategy; tp alone takes all ranks")
    if args.figure and "overlap" not in args.with_:
        raise ConfigError("--figure draws what the recorder overlap sees: add it to --with")
    if args.bucket_size_mb and not any("bucket_size_mb" in options_of(_plain(name)) for name in args.strategy):
        raise ConfigError("--bucket-size-mb is of strategies with buckets: name one in --strategy, as ddp_bucketed")
    made: list[RunConfig] = []
    for base in args.cells.configs(args.steps.base()):
        made.append(base)
        made += [cell for name in args.strategy for cell in _of_strategy(base, name, args)]
    made = list(dict.fromkeys(made))
    recorders = [one_of("recorder", name, WITH) for name in args.with_]
    return made + [_recorded(cell, name) for name in recorders for cell in made]


def _recorded(cell: RunConfig, name: str) -> RunConfig:
    """Return the cell under a recorder: a few warm steps; for memory the first step, which creates optimizer state."""
    if name == "rank_memory":
        return replace(cell, profiler=name, warmup=0, steps=2, rounds=1)
    return replace(cell, profiler=name, steps=min(cell.steps, 3), rounds=1)


def _of_strategy(base: RunConfig, name: str, args: Parallel) -> list[RunConfig]:
    """Return the cells of one strategy for each number of ranks, and for each bucket size if it has buckets."""
    from cs_systems.formulas.rank_layout import options_of
    from cs_systems.parallel import check

    degree = args.tp_degree if _has_two_dimensions(name) else None
    name, *settings = name.split(":")
    if name == "single":
        return []
    check(name)
    sizes: Sequence[float | None] = [None]
    if args.bucket_size_mb and "bucket_size_mb" in options_of(name):
        sizes = [_megabytes(text) for text in args.bucket_size_mb]
    return [
        replace(
            base,
            strategy=name,
            strategy_args=tuple(settings),
            world_size=ranks,
            bucket_size_mb=size,
            tp_degree=degree,
        )
        for ranks in args.world_size
        for size in sizes
    ]


def _plain(strategy: str) -> str:
    """Strip a strategy's options: `ddp_bucketed:comm_dtype=bf16` → `ddp_bucketed`."""
    return strategy.partition(":")[0]


def _has_two_dimensions(strategy: str) -> bool:
    from cs_systems.formulas.rank_layout import splits_of

    return {"batch", "features"} <= splits_of(_plain(strategy))


def _megabytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no bucket size: give a number of MB, as in --bucket-size-mb 1 25 100") from None


def texts(records: Sequence[RunRecord], format: str, width: int | None) -> list[str]:
    """Return the tables of each group of cells."""
    from cs_systems.comparison import strategies as parallel

    said = []
    trained = [record for record in records if record.config["workload"] == "train_step"]
    for group, own in parallel.groups(trained).items():
        title = describe(group)
        tables: list[tuple[str, str, list[Row], dict[str, str]]] = [
            ("steps", f"{title}: steps", parallel.steps(own), STEPS),
            ("communication", "communication, of a step", parallel.communication(own), COMMUNICATION),
            ("skew", "transfer and waiting, of a step", parallel.communication(own), SKEW),
            ("differences", "why a step is longer than alone", parallel.differences(own), DIFFERENCES),
            ("volumes", "bytes sent and memory, of a rank", parallel.volumes(own), VOLUMES),
            ("stages", "what a rank holds after each stage of its first step", parallel.stages(own), STAGES),
        ]
        said += [
            _table(rows, caption, NOTES[key] + _beyond_reason(rows) + _of_a_cpu(key, own), titles, format, width)
            for key, caption, rows, titles in tables
            if any(row[name] is not None for row in rows for name in titles if name not in CELL)
        ]
    return said


def _beyond_reason(rows: Sequence[Row]) -> list[str]:
    """Return a note on implausible efficiency: N ranks cannot do more than N times the work of one."""
    return [DISTURBED] if any((row.get("efficiency") or 0) > MOST_EFFICIENT for row in rows) else []


def _of_a_cpu(key: str, records: Sequence[RunRecord]) -> list[str]:
    """Return a note on CPU traces: they hold phases only, so communication within one counts as hidden."""
    recorded = [record.environment for record in records if record.results.get("overlap")]
    on_cpu = any(machine and machine.device == "cpu" for machine in recorded)
    return [BLOCKING] if key == "communication" and on_cpu else []


def _table(
    rows: Sequence[Row], caption: str, notes: Sequence[str], titles: dict[str, str], format: str, width: int | None
) -> str:
    from cs_systems.report.tables.rows import render_rows

    one_world = len({row["ranks"] for row in rows if row["ranks"] > 1}) <= 1
    known = [name for name in titles if any(row[name] not in (None, "") for row in rows)]
    names = [name for name in known if name != "ranks" or not one_world]
    shown = [{name: _percent(name, row[name]) for name in names} for row in rows]
    alike = [name for name in names if name.endswith("_bytes")] if "component" in names else []
    told = {name: titles[name] for name in names}
    color = width is not None
    return render_rows(shown, format, caption, notes, told, width, color=color, alike=alike, optional=SPREAD)


def _percent(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name in PERCENT and value is not None else value
