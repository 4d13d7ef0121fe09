"""Compare strategies for training on several ranks: step time, communication, waiting, memory.

The tables show hidden and exposed communication, waiting, bytes sent and memory by component, next to predictions by
formula. The strategies are the files in `cs_systems/model/parallel`; `+` joins several.

--batch-size is for each rank: N ranks train on N times as many sequences. --global-batch-size is for all of them.
`single` on one rank is measured too, with the batch of a rank, as the baseline, unless --no-baseline is given. Each
cell is timed without a profiler, and profiled separately (--with).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import (
    MaybeInt,
    MaybeNames,
    MaybePath,
    ModelCells,
    Names,
    Numbers,
    Steps,
    Sweep,
    Workloads,
    flag,
    given,
    optional,
    refuse,
)
from cs_systems.cli._output import (
    Format,
    Open,
    check_outputs,
    deliver_tables,
    figure_file,
    joined,
    page_asked,
    pictures_of,
    reads,
    sources_of,
    terminal_width,
)
from cs_systems.cli._tables import SHORT, All, Section
from cs_systems.config import STRATEGY_OPTIONS, ConfigError, RunConfig, describe, one_of, preset
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.core.own_strategy import FORMS
from cs_systems.core.tables import Row, Table
from cs_systems.record import RunRecord
from cs_systems.report.tables import document

PROFILED = ("overlap", "rank_memory")
WITH = (*PROFILED, "check")
COMPARED = plugins.declaring("parallel", "compared")
CELL = ("strategy", "ranks", "repeat")
PERCENT = ("efficiency", "of_step", "exposed", "hidden", "off")
ALLOCATED = "allocated: total of the device's allocator"
LONG = ("communication", "skew", "differences", "gathered", "stages")  # tables left out of the short answer
BLOCKING = "on a CPU, communication inside a phase counts as hidden, even where it waits"

# The user's own strategies are compared with one process on gloo, as the built-in strategies are tested.
CHECKED = RunConfig(
    workload=Subject.STRATEGY_ERROR, model=preset("tiny"), batch_size=2, seq_len=16, device="cpu", warmup=0, steps=1
)


@dataclass(frozen=True)
class Parallel:
    cells: ModelCells = field(default_factory=ModelCells)
    strategy: Annotated[
        Names,
        arg(help="names above, or path.py:name; joined by +: ddp_bucketed+zero1; options: ddp_flat:comm_dtype=bf16"),
    ] = tuple(sorted(COMPARED, key=lambda name: COMPARED[name]))
    world_size: Annotated[Numbers, arg(help="number of ranks; if there are GPUs, each rank needs its own")] = (2,)
    global_batch_size: Annotated[
        MaybeInt, optional("INT", "sequences per step of all ranks together, in place of --batch-size")
    ] = None
    bucket_size_mb: Annotated[
        Names,
        arg(help="bucket sizes in MiB, for strategies with buckets", help_behavior_hint="(default: the strategy's)"),
    ] = ()
    tp_degree: Annotated[
        MaybeInt, optional("INT", "neighbouring ranks that divide each block; required by fsdp+tp and ddp_*+tp")
    ] = None
    with_: Annotated[
        MaybeNames,
        arg(
            name="with",
            help=f"apart from timing, profile: {', '.join(PROFILED)}; check: compare with one process on gloo, as code "
            "of your own always is; without a value: none",
        ),
    ] = PROFILED
    no_baseline: Annotated[bool, flag("leave out `single`, for a model that one rank cannot hold")] = False
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)
    step: Workloads = field(default_factory=Workloads)
    all: All = False
    format: Annotated[Format, arg(help="format of the tables; html: a page with the figure")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the tables; CSV: one file each, FILE, FILE-2, …")] = None
    figure: Annotated[
        MaybePath,
        optional("FILE", "file for the figure of a step's streams: .svg, .png or .pdf", "streams.svg in --out"),
    ] = None
    open: Open = False


ARGS = Parallel


def further_help() -> list[str]:
    """Return a help line for each built-in strategy, and the accepted forms of a user's own strategy."""
    built_in = [f"  {name}: {plugins.summary('parallel', name)}" for name in plugins.names("parallel")]
    return ["Built-in strategies:", *built_in, f"Your own, path.py:name: {FORMS}."]


def run(args: Parallel) -> int:
    from cs_systems.cli._sweep import (
        asked_for,
        exit_status,
        measured,
        print_cells,
        print_diagnoses,
        print_figure_and_paths,
    )
    from cs_systems.measure.runtime.sweep import check
    from cs_systems.report.diagnoses import again

    configs: Sequence[RunConfig] = check(cells(args))
    if args.sweep.dry_run:
        return print_cells(configs, args.sweep)
    args = page_asked(args)
    if args.all and (args.format not in SHORT or args.output is not None):
        refuse(["all"], "a file, and a format other than terminal and json, has every table")
    outputs = {"--output": args.output, "--figure": figure_file(args.figure)}
    check_outputs(outputs, [*reads(args.sweep.out), *sources_of(configs)])
    folder, records = measured(configs, args.sweep, "parallel", args.steps.seed)
    on_terminal = args.format == "terminal" and args.output is None
    asked = asked_for(records, args.sweep.of_share(configs))  # the folder may have other strategies, too
    answer = print_diagnoses(asked) if on_terminal else None
    tables = texts(records, args.format, terminal_width(args.output), on_terminal and not args.all)
    recorded = [record for record in records if record.results.get("streams") and record.repeat == 0]
    if args.format in ("html", "json"):
        pictures = pictures_of(recorded, "streams") if args.format == "html" else []
        tables = [joined(tables, args.format, f"Parallel strategies of {folder}", pictures, records)]
        tables += [document.more({})] * (args.format == "json" and not args.all and args.output is None)
    deliver_tables(tables, args.format, args.output, [folder], args.open)
    print_figure_and_paths(args.format, folder, "streams", args.figure, recorded)
    if answer:
        print(again(answer, terminal_width()), end="")
    return exit_status(asked)


def cells(args: Parallel) -> list[RunConfig]:
    """Return the cells without a profiler, the baseline of each group first; then the same under each profiler."""
    from cs_systems.formulas.rank_layout import options_of

    if stray := [name for name in args.strategy if "=" in _plain(name)]:
        raise ConfigError(
            f"{stray[0]!r} is an option without its strategy; join both by a colon, as in "
            "ddp_bucketed:comm_dtype=bf16:max_ctas=16"
        )
    if {*args.strategy} == {RunConfig.strategy} and "world_size" in given(args):
        raise ConfigError(
            f"--world-size has no effect on --strategy {RunConfig.strategy}, which trains on one rank; add "
            "another strategy, or leave out --world-size"
        )
    if args.tp_degree is not None and not any(map(_has_two_dimensions, args.strategy)):
        raise ConfigError(
            f"--tp-degree requires a strategy such as fsdp+tp, got {' and '.join(args.strategy)}; add fsdp+tp to "
            "--strategy, or leave out --tp-degree"
        )
    if args.figure and "overlap" not in args.with_:
        raise ConfigError("--figure requires --with overlap; add overlap to --with, or leave out --figure")
    if args.bucket_size_mb and not any("bucket_size_mb" in options_of(_plain(name)) for name in args.strategy):
        raise ConfigError(
            "--bucket-size-mb requires a strategy with buckets; add one to --strategy, such as ddp_bucketed"
        )
    if args.no_baseline and RunConfig.strategy in args.strategy:
        raise ConfigError("--no-baseline leaves out `single`, which --strategy names; leave out one of them")
    if args.global_batch_size is not None and "batch_size" in given(args.cells):
        raise ConfigError(
            "--batch-size is for each rank and --global-batch-size for all ranks together; leave out one of them"
        )
    made: list[RunConfig] = []
    for base in args.cells.configs(args.steps.base(), args.step):
        on_ranks = [cell for name in args.strategy for cell in _of_strategy(base, name, args)]
        if args.global_batch_size is not None:
            on_ranks = [_of_global_batch(cell, args.global_batch_size) for cell in on_ranks]
            sizes = [cell.batch_size for cell in on_ranks] or [args.global_batch_size]
            baselines = [replace(base, batch_size=size) for size in sizes]
        else:
            baselines = [base]
        made += on_ranks if args.no_baseline else baselines + on_ranks
    made = list(dict.fromkeys(made))
    asked = [one_of("value of --with", name, WITH) for name in args.with_]
    checked = _checked(made, "check" in asked)
    return made + [_profiled(cell, name) for name in asked if name in PROFILED for cell in made] + checked


def _of_global_batch(cell: RunConfig, sequences: int) -> RunConfig:
    """Return the cell with the batch of one rank.

    Raises ConfigError if the ranks cannot divide the sequences evenly.
    """
    from cs_systems.formulas.rank_layout import data_ranks

    ranks = data_ranks(cell.to_dict())
    if sequences < ranks or sequences % ranks:
        raise ConfigError(
            f"--global-batch-size {sequences} cannot be divided among {ranks} ranks of {cell.strategy}; give a "
            f"multiple of {ranks}"
        )
    return replace(cell, batch_size=sequences // ranks)


def _checked(cells: Sequence[RunConfig], asked: bool) -> list[RunConfig]:
    """Return a cell per strategy that compares it with one process, if asked for or if one is the user's own."""
    if not asked and not any("strategy" in cell.own_code for cell in cells):
        return []
    small = replace(CHECKED, seed=cells[0].seed)
    options = ("strategy", "world_size", *STRATEGY_OPTIONS)
    found = [
        replace(small, workload_args=_own_model(cell), **{name: getattr(cell, name) for name in options})
        for cell in cells
        if cell.is_distributed
    ]
    return list(dict.fromkeys(found))


def _own_model(cell: RunConfig) -> tuple[str, ...]:
    """Return the user's own workload and its arguments as a check takes them."""
    return (f"model={cell.workload}", *cell.workload_args) if cell.subject is Subject.OWN else ()


def _profiled(cell: RunConfig, name: str) -> RunConfig:
    """Return the cell under a profiler: after a few warm-up steps.

    For memory the first step, which creates the optimizer state.
    """
    cell = replace(cell, steps_s=0.0)
    if name == "rank_memory":
        return replace(cell, profiler=name, warmup=0, steps=2, rounds=1)
    return replace(cell, profiler=name, steps=min(cell.steps, 3), rounds=1)


def _of_strategy(base: RunConfig, name: str, args: Parallel) -> list[RunConfig]:
    """Return the cells of one strategy for each number of ranks, and for each bucket size if it has buckets."""
    from cs_systems.formulas.rank_layout import options_of
    from cs_systems.model.parallel import check

    degree = args.tp_degree if _has_two_dimensions(name) else None
    written, (name, settings) = name, _split(name)
    if "" in settings:
        where = (
            "ends with a colon; leave out the colon" if written.endswith(":") else "has two colons in a row; write one"
        )
        raise ConfigError(f"strategy {written!r} {where}")
    if word := next((word for word in settings if word in plugins.names("parallel")), None):
        raise ConfigError(
            f"strategy {written!r} joins {word} by a colon, which stands before an option; write {name}+{word}"
        )
    if name == base.strategy and not settings:  # the baseline is always measured
        return []
    if name == base.strategy:
        raise ConfigError(f"strategy {written!r} gives options to {name}, which has none; write {name}")
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


def _split(strategy: str) -> tuple[str, list[str]]:
    """Return the name and the options of a strategy, such as `ddp_bucketed:comm_dtype=bf16` or `mine.py:DDP:size=3`.

    The name of a user's own strategy also has a colon; options are told apart by their equals sign.
    """
    first, *others = strategy.split(":")
    if {*first.split("+")} <= {*plugins.names("parallel")}:
        return first, others
    options = [*dropwhile(lambda word: "=" not in word, others)]
    return ":".join([first, *others[: len(others) - len(options)]]), options


def _plain(strategy: str) -> str:
    """Strip a strategy's options: `ddp_bucketed:comm_dtype=bf16` → `ddp_bucketed`."""
    return _split(strategy)[0]


def _has_two_dimensions(strategy: str) -> bool:
    from cs_systems.formulas.rank_layout import splits_of

    return {"batch", "features"} <= splits_of(_plain(strategy))


def _megabytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--bucket-size-mb must be a number of MiB, got {text!r}; use a form such as --bucket-size-mb 1 25 100"
        ) from None


def texts(records: Sequence[RunRecord], format: str, width: int | None, short: bool = False) -> list[str]:
    """Return the tables of checks, without which times mean nothing, then the tables of each group of cells.

    short: of each group, only the tables of a short answer, without explanations of their columns.
    """
    tables = _sections(records)
    shown = [section for section in tables if not short or section[0].name not in LONG]
    written = [_table(*section, format, width, short) for section in shown]
    if left_out := dict.fromkeys(table.name for table, _, _ in tables if short and table.name in LONG):
        written[-1] += f"more with --all, and --out as below: {', '.join(left_out)}\n"
    return written


def _sections(records: Sequence[RunRecord]) -> list[Section]:
    """Return every table that has rows, with its notes."""
    from cs_systems.analysis.comparison import strategies as parallel
    from cs_systems.analysis.comparison.own_code import JUDGED, OWN_CODE, compared, judged

    checked: list[tuple[Table[Any], Sequence[Row]]] = [(JUDGED, judged(records)), (OWN_CODE, compared(records))]
    found: list[Section] = [(table, rows, []) for table, rows in checked if rows]
    trained = [r for r in records if r.subject in (Subject.STEP, Subject.OWN)]
    for group, own in parallel.groups(trained).items():
        communication = parallel.communication(own)
        tables: list[tuple[Table[Any], Sequence[Row]]] = [
            (replace(parallel.steps, caption=f"{describe(group)}: steps"), parallel.steps(own)),
            (parallel.communication, communication),
            (parallel.skew, communication),
            (parallel.differences, parallel.differences(own)),
            (parallel.gathered, parallel.gathered(own)),
            (parallel.volumes, parallel.volumes(own)),
            (parallel.stages, parallel.stages(own)),
        ]
        told = _of_a_cpu(own)  # only under the first table, of steps
        for table, rows in tables:
            if any(row[name] is not None for row in rows for name in table.titles if name not in CELL):
                found.append((table, rows, [*_notes_of(table.name, rows, own), *told]))
                told = []
    return found


def _notes_of(key: str, rows: Sequence[Row], group: Sequence[RunRecord]) -> list[str]:
    """Return notes on `allocated`, and on an efficiency over 100%: N ranks cannot do more than N times the work."""
    from cs_systems.analysis.comparison.strategies import disturbance

    notes = disturbance(group) if key == "steps" else []
    return notes + [ALLOCATED] * any(row.get("component") == "allocated" for row in rows)


def _of_a_cpu(records: Sequence[RunRecord]) -> list[str]:
    """Return a note on CPU traces: they contain only phases, so communication within a phase counts as hidden."""
    recorded = [record.environment for record in records if record.results.get("overlap")]
    return [BLOCKING] if any(machine and machine.device == "cpu" for machine in recorded) else []


def _table(
    table: Table[Any], rows: Sequence[Row], notes: Sequence[str], format: str, width: int | None, short: bool
) -> str:
    from cs_systems.report.tables.rows import render_table, tells_something

    same_ranks = len({ranks for row in rows if (ranks := row.get("ranks", 1)) > 1}) <= 1
    names = [name for name in table.titles if tells_something(name, rows) and not (name == "ranks" and same_ranks)]
    of_people = [{name: _percent(name, row[name]) for name in names} for row in rows]
    shown = rows if format == "json" else of_people
    alike = [name for name in names if name.endswith("_bytes")] if "component" in names else []
    table = replace(table, shown=" ".join(names))
    return render_table(table, shown, format, notes, width, width is not None, alike, is_explained=not short)


def _percent(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name in PERCENT and value is not None else value
