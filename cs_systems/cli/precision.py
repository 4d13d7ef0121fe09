"""Compare precisions: time, speed-up over fp32, and numerical error against float64.

`--train-steps N` compares the loss curves of training. `--explain` profiles each precision and explains its speed-up.
`--show DIR` prints the results of an earlier run, and measures nothing.

`--dtypes` lists the dtype of parameters, of each module's inputs and outputs, of logits, loss and gradients under each
precision, and reports the cause if a step did not run in that precision. The model is `toy` (fc1 →
relu → LayerNorm → fc2), a preset, or your own.

`--workload path.py:factory` compares precisions of your own model, by time, by the dtypes of its modules with
`--dtypes`, and by the error of its outputs, loss and gradients against fp32.

`--accumulation` shows the error of sums in low precision, explained by units in the last place. `--normalization` shows
which step of LayerNorm, RMSNorm and softmax fails in low precision, and at which size of the input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import (
    Int,
    MaybePath,
    Names,
    Numbers,
    Sweep,
    Workloads,
    attribute,
    derived,
    flag,
    given,
    of_own_code,
    of_subject,
    optional,
    refuse,
)
from cs_systems.cli._output import (
    RAW,
    Format,
    Open,
    check_outputs,
    deliver_tables,
    joined,
    page_asked,
    pictures_of,
    reads,
    sources_of,
    terminal_width,
)
from cs_systems.config import FIELDS, PRESETS, ConfigError, Mode, Precision, RunConfig, describe, grid, one_of
from cs_systems.core.fields import Subject
from cs_systems.core.plugins import is_foreign
from cs_systems.core.printable import plain, visible
from cs_systems.core.tables import Row, Table
from cs_systems.core.units import counted
from cs_systems.core.validation import option
from cs_systems.record import RunRecord
from cs_systems.report.tables import document

TOY = "toy"
PRECISIONS = (
    "fp32, tf32, bf16, fp16 (autocast; fp16 with a gradient scaler), bf16-pure (no autocast), fp8 (linear layers only)"
)
SIZES = ("small",)  # the default of --size for timings
TABLES = ("bf16",)  # the default precision of --dtypes, --accumulation and --normalization


@dataclass(frozen=True)
@derived(*of_own_code())
class PrecisionOptions:
    dtypes: Annotated[bool, flag("show the dtypes of parameters, inputs, outputs and gradients by module")] = False
    accumulation: Annotated[
        bool, flag("show the error of sums in low precision: 0.01 added many times, and random numbers")
    ] = False
    normalization: Annotated[
        bool, flag("show the error of LayerNorm, RMSNorm, softmax with one step at a time in low precision")
    ] = False
    explain: Annotated[bool, flag("also profile each precision, on a GPU, and explain its speed-up")] = False
    show: Annotated[MaybePath, optional("DIR", "print the results of an earlier run, and measure nothing")] = None
    size: Annotated[Names, arg(help=f"presets to time: {', '.join(PRESETS)}")] = SIZES
    model: Annotated[Names, arg(help=f"models for --dtypes: toy, {', '.join(PRESETS)}, or package.module:name")] = (
        TOY,
    )
    precision: Annotated[
        Names,
        arg(
            help=PRECISIONS, help_behavior_hint="(default: all; with --dtypes, --accumulation or --normalization bf16)"
        ),
    ] = ()
    attention: Annotated[Names, arg(help="attention backends of presets, or path.py:function")] = ("naive",)
    mode: Annotated[str, arg(help="forward, forward-backward, train-step")] = "train-step"
    context_length: Annotated[
        Numbers, arg(help="tokens per sequence of presets", help_behavior_hint="(default: the preset's)")
    ] = ()
    batch_size: Annotated[Int, arg(help="sequences per step of presets")] = 4
    train_steps: Annotated[Int, arg(help="steps of training on the same data in each precision; 0: none")] = 0
    warmup: Annotated[Int, arg(help="untimed steps before the timed ones")] = 3
    steps: Annotated[Int, arg(help="timed steps")] = 10
    rounds: Annotated[Int, arg(help="measurement rounds; each runs all precisions in turn")] = 5
    seed: Annotated[Int, arg(help="random seed of parameters and data")] = 0
    device: Annotated[str, arg(help="auto, cpu, cuda or cuda:N")] = "auto"
    format: Annotated[Format, arg(help="output format; html: a page with the figure of training")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output; CSV: one file per table, FILE, FILE-2, …")] = (
        None
    )
    open: Open = False
    sweep: Sweep = field(default_factory=Sweep)
    step: Workloads = field(default_factory=Workloads)


ARGS = PrecisionOptions
OF_TIMING = {"train_steps", "explain", *(name for name, each in FIELDS.items() if not each.field.identity)}
OF_PRESETS = {attribute(each) for each in of_subject(Subject.STEP) if Subject.TOY not in each.subjects}
NUMERICS = ("accumulation", "normalization")


def run(args: PrecisionOptions) -> int:
    """Run the command; return the exit status of the sweep, 3 if a step did not run in its precision.

    Raises ConfigError.
    """
    args = page_asked(args)
    if args.show:
        refuse(
            [n for n in given(args) if n not in ("show", "format", "output", "open")],
            "--show only prints recorded results",
        )
        return _shown(args, args.show)
    tables = [name for name in ("dtypes", *NUMERICS) if getattr(args, name)]
    _check_used(args, tables)
    if not tables:
        return compared(args)
    from cs_systems.cli._sweep import EXIT_NOTHING, asked_for, exit_status, measured, print_cells

    models = args.step.workload if _is_own(args) else args.model
    configs = [config for model in models if args.dtypes for config in _configs(model, args)]
    once = RunConfig(warmup=0, steps=1, device=args.device)
    for workload in NUMERICS:
        if getattr(args, workload):
            configs += grid(once, workload=[workload], precision=args.precision or TABLES)
    if args.sweep.dry_run:
        return print_cells(configs, args.sweep)
    check_outputs({"--output": args.output}, [*reads(args.sweep.out), *sources_of(configs)])
    folder, records = measured(configs, args.sweep, "precision", 0)
    _deliver(args, asked_for(records, configs), folder)
    mine = asked_for(records, args.sweep.of_share(configs))
    failed = any(record.status == "error" for record in mine)
    return EXIT_NOTHING if failed else exit_status(mine)


def _is_own(args: PrecisionOptions) -> bool:
    """Return whether --workload names the user's own model.

    Raises ConfigError for built-in workloads other than the model.
    """
    for name in args.step.workload:
        if not is_foreign(name) and name != RunConfig.workload:
            raise ConfigError(
                f"--workload must be path.py:name or package.module:name, got {name}; name a model of your own, or "
                "leave out --workload for the built-in model"
            )
    return is_foreign(args.step.workload[0])


def _check_used(args: PrecisionOptions, tables: Sequence[str]) -> None:
    """Raise ConfigError for options that the chosen tables would ignore."""
    plain = PrecisionOptions()
    numerics = " and ".join(option(name) for name in NUMERICS if name in tables)
    if _is_own(args):
        refuse(
            [name for name in given(args) if name == "model"],
            "--model has no effect with --workload, which names the model",
        )
        if numerics:
            raise ConfigError(
                f"--workload names a model, which has no effect on {numerics}; leave out --workload or {numerics}"
            )
        refuse(
            [name for name in given(args) if name == "train_steps"],
            "--train-steps trains only the built-in model, but --workload names another",
        )
    elif tables and (names := [name for name in given(args) if name in ("inputs", "set")]):
        words = " and ".join(map(option, names))
        if numerics:
            raise ConfigError(f"{words} cannot be used with {numerics}; leave out {words}")
        own = next(filter(is_foreign, args.model), None)
        instead = f"write --workload {own} in place of --model" if own else "name your model by --workload path.py:name"
        raise ConfigError(f"{words} can be used only with --workload; {instead}, or leave out {words}")
    if "model" in given(args) and "dtypes" not in tables:
        models, instead = " ".join(args.model), "leave out --model"
        if not tables and {*args.model} <= {*PRESETS}:
            instead = f"use --size {models} for timings"
        elif not tables and all(map(is_foreign, args.model)):
            instead = f"use --workload {models} for timings"
        raise ConfigError(f"--model requires --dtypes; add --dtypes, or {instead}")
    if tables and args.size != plain.size:
        instead = (
            f"use --model {' '.join(args.size)}" if "dtypes" in tables and not _is_own(args) else "leave out --size"
        )
        raise ConfigError(f"--size has no effect with --{tables[0]}; {instead}")
    if args.explain and args.device == "cpu":
        raise ConfigError("--explain compares kernels of a GPU, and --device is cpu; leave out one of them")
    names = given(args)
    if timing := [name for name in OF_TIMING if tables and name in names]:
        name, without = option(timing[0]), " and ".join(map(option, tables))
        raise ConfigError(f"{name} has no effect with {without}; leave out {name}")
    if tables and "dtypes" not in tables:
        refuse(
            [name for name in names if name in (*OF_PRESETS, "mode")], "--accumulation and --normalization use no model"
        )
    unfit = " ".join(option(name) for name in names if name in OF_PRESETS)
    if unfit and tables and not _is_own(args) and not PRESETS.keys() & {*args.model}:
        raise ConfigError(
            f"{unfit} cannot be applied to the model {' '.join(args.model)}; add a preset, such as --model small, or "
            f"leave out {unfit}"
        )


def _shown(args: PrecisionOptions, folder: Path) -> int:
    from cs_systems.report.reading import some_records

    records, complaints = some_records(folder)
    for complaint in complaints:
        print(visible(complaint), file=sys.stderr)
    check_outputs({"--output": args.output}, [folder])
    _deliver(args, records, folder)
    return 0


def _deliver(args: PrecisionOptions, records: Sequence[RunRecord], folder: Path) -> None:
    """Write all results of the records, in --format, to the terminal or into --output."""
    from cs_systems.analysis.comparison.own_code import OWN_CODE
    from cs_systems.analysis.comparison.own_code import compared as compared_code
    from cs_systems.analysis.comparison.precision import CURVES
    from cs_systems.cli._precision_tables import comparison_texts
    from cs_systems.record import records_path
    from cs_systems.report.figures import plot
    from cs_systems.report.frame import without_retried
    from cs_systems.report.tables.rows import render_table

    records = without_retried(records)
    dtypes = [r for r in records if r.config["profiler"] == "dtypes"]
    sums = [r for r in records if r.config["workload"] in NUMERICS]
    rest = [r for r in records if r not in dtypes and r not in sums]
    width = terminal_width(args.output)
    texts = [dtypes_text(record, args.format, args.output) for record in dtypes]
    texts += [failed_text(record, args.format) for record in sums if record.status != "ok"]
    texts += [*numerics_texts(sums, args.format, width), *comparison_texts(rest, args.format, width)]
    if own := compared_code(rest):
        texts.append(render_table(OWN_CODE, own, args.format, (), width, width is not None))
    if not texts:
        raise ConfigError(
            f"{folder} has no results of cs-systems precision; measure them with cs-systems precision --out DIR"
        )
    curves = [record for record in rest if record.config["workload"] == CURVES]
    if args.format in ("html", "json"):
        pictures = pictures_of(curves, "curves") if args.format == "html" else []
        texts = [joined(texts, args.format, f"Precisions of {folder}", pictures, rest)]
        texts += [document.more({})] * (args.format == "json" and args.output is None)
    deliver_tables(texts, args.format, args.output, [folder], args.open)
    stream = sys.stdout if args.format == "terminal" and args.output is None else sys.stderr
    if not args.show and "curves" in plot.kinds(curves):
        plot.save(curves, folder / "training.svg", "curves")
        print(visible(f"figure:  {folder / 'training.svg'}"), file=stream)
    print(visible(f"records: {records_path(folder)}"), file=stream)


def compared(args: PrecisionOptions) -> int:
    """Time fp32 and the chosen precisions in turn.

    Then measure errors and loss curves, and profile, in separate cells.
    """
    from cs_systems.cli._sweep import asked_for, exit_status, measured, print_cells
    from cs_systems.measure.runtime.sweep import check
    from cs_systems.record import records_path

    timed, apart = comparison_configs(args)
    if args.sweep.dry_run:
        return print_cells([*timed, *apart], args.sweep)
    check_outputs({"--output": args.output}, [*reads(args.sweep.out), *sources_of(timed)])
    mine = {*args.sweep.of_share([*timed, *apart])}
    timed, apart = ([cell for cell in group if cell in mine] for group in (timed, apart))
    if args.sweep.out and not records_path(args.sweep.out).is_file():
        cells = counted(len(mine), "cell")
        text = visible(f"{args.sweep.out} has no records yet; measuring {cells} (--show DIR prints an earlier run)")
        width = terminal_width(stream=sys.stderr)
        print(text if width is None else fill(text, width, break_on_hyphens=False), file=sys.stderr)
    check([*timed, *apart], args.sweep.repeats, args.sweep.timeout_s)
    options = replace(args.sweep, part=None, out=args.sweep.claim("precision"))
    sweeps = [(timed, replace(options, interleave=True)), (apart, replace(options, interleave=False, repeats=1))]
    first, *others = [(group, how) for group, how in sweeps if group]
    folder, records = measured(*first, "precision", args.seed)
    for group, how in others:
        folder, records = measured(group, replace(how, fresh=False), "precision", args.seed)
    _deliver(args, records, folder)
    return exit_status(asked_for(records, [*timed, *apart]))


def comparison_configs(args: PrecisionOptions) -> tuple[list[RunConfig], list[RunConfig]]:
    """Return (cells to time in turn, cells for other results). The baseline, fp32, is always included."""
    from cs_systems.analysis.comparison.precision import BASELINE, CURVES, ERRORS

    chosen = [one_of("precision", name, Precision) for name in args.precision] or list(Precision)
    what: dict[str, Sequence[object]] = {"workload": args.step.workload, "size": args.size}
    what |= {"precision": [*dict.fromkeys([BASELINE, *map(Precision, chosen)])]}
    subject = Subject.OWN if _is_own(args) else Subject.STEP
    axes, of_errors = ({**_axes(args, each), **what} for each in (subject, Subject.ERRORS))
    if args.train_steps < 0:
        raise ConfigError(f"--train-steps is {args.train_steps}; it must be at least 0")
    base = RunConfig(device=args.device, seed=args.seed, mode=Mode(one_of("mode", args.mode, Mode)), warmup=args.warmup)
    base = args.step.base(base)
    timed = grid(replace(base, steps=args.steps, rounds=args.rounds), **axes)
    once = replace(base, mode=Mode.TRAIN_STEP, warmup=0, steps=1)
    if _is_own(args):
        low = [name for name in axes["precision"] if name != BASELINE]
        if not low:
            raise ConfigError(
                "--precision fp32 leaves nothing to compare, because fp32 is the baseline; add another precision, such "
                "as bf16"
            )
        apart = grid(replace(once, profiler=ERRORS), **{**of_errors, "precision": low})
    else:
        apart = grid(once, **{**of_errors, "workload": [ERRORS]})
    if args.train_steps:
        of_curves = {**_axes(args, Subject.CURVE), **what, "workload": [CURVES]}
        apart += grid(replace(once, steps=args.train_steps), **of_curves)
    if args.explain:  # a CPU's trace has no kernels
        device = "cuda" if args.device == "auto" else args.device
        apart += grid(replace(base, profiler="kineto", device=device, warmup=5, steps=3), **axes)
    return timed, apart


def _axes(args: PrecisionOptions, subject: Subject) -> dict[str, Sequence[object]]:
    """Return the values of the options that apply to a subject, by field, except the size."""
    found: dict[str, Sequence[object]] = {}
    for each in of_subject(Subject.STEP):
        name = attribute(each)
        if each.name == "name" or subject not in each.subjects:
            continue
        if value := getattr(args, name, None):
            found[each.name] = value if isinstance(value, tuple) else [value]
    return found


def _configs(model: str, args: PrecisionOptions) -> list[RunConfig]:
    base = RunConfig(profiler="dtypes", warmup=0, steps=1, device=args.device)
    axes: dict[str, Sequence[object]] = {"mode": [args.mode], "precision": args.precision or TABLES}
    if model in PRESETS:
        return grid(base, size=[model], **{**_axes(args, Subject.STEP), **axes})
    if _is_own(args):
        return grid(args.step.base(base), workload=[model], **{**_axes(args, Subject.OWN), **axes})
    workload = model if ":" in model else one_of("model", model, [TOY, *PRESETS])
    return grid(base, workload=[workload], **{**_axes(args, Subject.of(workload)), **axes})


def numerics_texts(records: Sequence[RunRecord], format: str, width: int | None) -> list[str]:
    """Return the tables of sums and normalizations for which there are records, each with its notes."""
    from cs_systems.analysis.comparison import numerics
    from cs_systems.report.tables.rows import render_table

    sums = numerics.accumulated(records)
    verdicts = [sentence for record in records for sentence in numerics.verdicts(record)]
    sections: list[tuple[Table[Any], Sequence[Row], list[str]]] = [
        (numerics.accumulated, sums, numerics.reasons(sums)),
        (numerics.ulps, numerics.ulps(records), []),
        (numerics.summed, numerics.summed(records), []),
        (numerics.normalized, numerics.normalized(records), []),
        (numerics.ranges, numerics.ranges(records), verdicts),
    ]
    return [
        render_table(table, rows, format, notes, width, width is not None) for table, rows, notes in sections if rows
    ]


def title(record: RunRecord) -> str:
    config = record.run_config
    device = f" on {record.environment.device_name}" if record.environment else ""
    return f"{describe(config, {'precision', 'profiler'})} · {config.precision.value}{device}"


def failed_text(record: RunRecord, format: str) -> str:
    from cs_systems.report.tables.formats import paragraph, text_width

    message = plain(f"{title(record)}: {record.status}: {record.reason}")
    return paragraph(fill(message, text_width(terminal_width())) if format == "terminal" else message, format)


def dtypes_text(record: RunRecord, format: str = "terminal", output: Path | None = None) -> str:
    """Return the table of one record's dtypes; if it has none, only the reason."""
    from cs_systems.analysis.comparison.dtypes import FP8_LAYER, SHORT, collapsed, dtypes, recorded
    from cs_systems.cli._tables import table_text

    rows = recorded(record.results)
    if not rows:
        return failed_text(record, format)
    shown = [{name: short(value, SHORT) for name, value in row.items()} for row in collapsed(rows)]
    own = record.subject is Subject.OWN
    for row in shown:
        if own and row["what"] == "logits":
            row["what"] = "outputs"
        if str(row["what"]).rpartition(".")[2].isdigit():  # a mere index in nn.Sequential needs the module's type
            row["what"] = f"{row['what']} {row['type']}"
    notes = []
    if low := sum(row["type"] == FP8_LAYER for row in rows):
        notes.append(f"{FP8_LAYER} ({low} modules): multiplies in e4m3; the gradient of its output is in e5m2")
    notes += [f"{record.status}: {record.reason}"] if record.reason else []
    named = replace(dtypes, caption=title(record))
    return table_text(named, rows if format in RAW else shown, notes, format, output)


def short(value: object, names: dict[str, str]) -> object:
    """Abbreviate dtypes: `float32, bfloat16` → `fp32, bf16`."""
    return ", ".join(names.get(name, name) for name in value.split(", ")) if isinstance(value, str) else value
