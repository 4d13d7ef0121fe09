"""Study: cells to measure, tables of the records, and an explanation that is computed from them.

Each scripts/studies/<name>.py answers the question of its `Study`; its docstring gives method and output. All of them:

    python scripts/studies/_study.py                          # lists them
    python scripts/studies/_study.py --all --budget-s 540     # runs them, the most telling first; again: the rest
    python scripts/studies/_study.py --index                  # writes profiles/README.md from their pages
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from _cells import Cell
from _index import INDEX, index_page
from _kernels import add_kernel_times, clean, drop_tables, possible

from cs_systems.cli import until_reader_leaves
from cs_systems.cli._progress import progress_lines
from cs_systems.cli._sweep import print_cells
from cs_systems.config import AttentionShape, ConfigError, Precision, RunConfig, describe
from cs_systems.core.tables import Table
from cs_systems.formulas.cost import FULL_MATRIX, attention_cost, step_cost
from cs_systems.measure.runtime.sweep import preflight, sweep
from cs_systems.record import RECORDS_FILE, Row, RunRecord, read_records, records_path
from cs_systems.report.files import write_file
from cs_systems.report.tables.formats import FORMATS
from cs_systems.report.tables.rows import render_rows, render_table

# most informative cells first, because a time limit leaves out the last ones
ORDER = (
    *(
        "step_time",
        "forward_backward_ratio",
        "nsys_and_clock",
        "top_kernels",
        "softmax_and_matmul",
        "attention_sample_run",
        "flash_attention_lengths",
        "attention_sequence_length",
        "attention_causal_mask",
        "attention_embedding",
        "attention_heads",
        "attention_out_of_memory",
        "flash_attention_advantage",
        "warmup_steps",
        "torch_compile",
        "triton_tile_sizes",
    ),
    *("precision_speed", "autocast_dtypes", "low_precision_sums"),
    *("memory_peaks", "activation_checkpointing", "nvidia_smi_memory", "attention_memory", "saved_for_backward"),
    *("data_parallel_variants", "fully_sharded", "sharded_optimizer", "zero_stage_1", "all_reduce", "scaling_limits"),
)
APART = "cuda_kernel_ablation"  # needs a GPU and CUDA's compiler, so it runs only if named
SCALES = ("auto", "full", "small")
PAGE_FILE, FIGURE_FILE = "table.md", "figure.svg"
UNANSWERED = "These records do not answer the question: the cells that would were not measured."
EXIT_MALFORMED, EXIT_NOTHING, EXIT_INTERRUPTED = 2, 3, 130
CELL_TIMEOUT_S = 300.0  # most of this time goes into compiling the largest model
# rough FLOP/s of a step on an H200; used only to choose the number of steps
_FLOPS_PER_S = {Precision.FP32: 40e12, Precision.TF32: 150e12}
_OTHER_FLOPS_PER_S = 300e12
_BYTES_PER_S = 2e12
# (seconds: steps shorter than this, most warm-up steps, most timed steps)
_MOST_STEPS = ((0.05, 5, 30), (0.2, 3, 10), (0.6, 2, 5), (inf, 1, 3))


@dataclass(frozen=True)
class Study:
    """Study of one question.

    Attributes:
        file: the script's `__file__`.
        doc: the script's docstring, with the method, the output and the command.
        question: title of the page, and the study's line in profiles/README.md.
        full: returns the cells for one H200.
        small: returns the cells for two CPU cores, under 20 s.
        tables: makes the tables from (cells, format).
        explain: makes the findings, sentences that are computed from the records.
        answer: makes the answer that the page opens with: one or two sentences with a number, its unit and the device;
            "" if the records do not answer the question.
        figure: kind of figure (report/figures), of the cells that are `drawn`, or of all if none is.
        drawn: chooses the cells of the figure; by default those that were not profiled.
        fresh_process: measure each cell in a worker of its own.
        interleave: measure the clean cells of a model in turn, round by round, and a profile of each, before the next
            model, so that a run that is cut short has whole models.
        drops: tables of a profile that the study does not use; its committed records leave them out.
        draw: makes a matplotlib Figure from the cells, instead of `figure`.
    """

    file: str
    doc: str | None
    question: str
    full: Callable[[], list[RunConfig]]
    small: Callable[[], list[RunConfig]]
    tables: Callable[[list[Cell], str], list[str]]
    explain: Callable[[list[Cell]], list[str]]
    answer: Callable[[list[Cell]], str]
    figure: str
    drawn: Callable[[Cell], bool] = lambda cell: not cell.profiled
    fresh_process: bool = False
    interleave: bool = False
    drops: tuple[str, ...] = ()
    draw: Callable[[list[Cell]], Any] | None = None

    @property
    def name(self) -> str:
        return Path(self.file).stem

    @property
    def command(self) -> str:
        return next(line.strip() for line in str(self.doc).splitlines() if line.startswith("    python "))

    def configs(self, scale: str) -> list[RunConfig]:
        return self.full() if scale == "full" else self.small()

    def folder(self, scale: str) -> Path:
        """Return the default folder: full results go into the repository, small ones into runs/."""
        return Path("profiles" if scale == "full" else "runs") / self.name


def cells(records: Sequence[RunRecord]) -> list[Cell]:
    """Return the records as Cells, without the failed attempts that a resumed sweep has replaced."""
    import pandas as pd

    from cs_systems.report.frame import CELL_COLUMNS, PHASE_COLUMNS, STEP, frame, without_retried

    records = without_retried(records)
    found = [Cell(record, {}) for record in records]
    for row in frame(records).to_dict("records"):
        known = {str(name): None if pd.isna(value) else value for name, value in row.items()}
        prefix = "" if known["phase"] in (None, STEP) else f"{known['phase']}."
        columns = found[row["record"]].columns
        columns |= {name: known[name] for name in CELL_COLUMNS}
        columns |= {prefix + name: known[name] for name in PHASE_COLUMNS}
    for cell in found:
        for name, value in _only_row(cell.record, "ran").items():
            cell.columns.setdefault(name, value)
        failed = _only_row(cell.record, "memory").get("failed_allocation_bytes")
        cell.columns["failed_allocation_bytes"] = failed
    add_kernel_times(found)
    return found


def _only_row(record: RunRecord, table: str) -> Row:
    return next(iter(record.results.get(table, ())), {})


def index(found: Sequence[Cell], *names: str) -> dict[Any, Cell]:
    """Return the measured clean cells by the values of these columns, e.g. `index(cells, "size")["small"]`."""
    found = clean(found)
    keys = [tuple(cell[name] for name in names) for cell in found]
    return {k[0] if len(k) == 1 else k: cell for k, cell in zip(keys, found, strict=True) if cell.measured}


def row_table(rows: Sequence[Row], caption: str, format: str, notes: Sequence[str] = ()) -> list[str]:
    """Return the rows as one table with notes; None if there are no rows."""
    return [render_rows(rows, format, caption, notes)] if rows else []


def declared_table(table: Table[Any], rows: Sequence[Row], caption: str, format: str) -> list[str]:
    """Return the rows of a declared table with every column; None if there are no rows."""
    return [render_table(replace(table, caption=caption, shown=""), rows, format)] if rows else []


def bounded(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the configs with fewer steps for cells that are slow by the formula, so that a study takes minutes."""
    made = []
    for config in configs:
        warmup, steps = next((w, n) for below, w, n in _MOST_STEPS if _expected_s(config) < below)
        made.append(replace(config, warmup=min(config.warmup, warmup), steps=min(config.steps, steps)))
    return made


def _expected_s(config: RunConfig) -> float:
    if config.workload == "attention":
        costs = attention_cost(config.shape or AttentionShape(), config.mode, FULL_MATRIX, 4)
    else:
        tokens = config.tokens_per_sequence
        costs = step_cost(config.model, config.batch_size, tokens, config.mode, FULL_MATRIX, config.precision)
    rate = _FLOPS_PER_S.get(config.precision, _OTHER_FLOPS_PER_S)
    return sum((c.hardware_flops or 0) / rate + (c.bytes or 0) / _BYTES_PER_S for c in costs.values())


def decide(asked: str) -> str:
    """Return the requested scale, or for `auto` the scale that fits this machine, and print the reason."""
    if asked != "auto":
        return asked
    (row,) = preflight([RunConfig(device="cuda")])
    if row["reason"]:
        print(f"the small size, for two CPU cores ({row['reason'].split(';')[0]})", file=sys.stderr)
        return "small"
    print(f"the full size, on a GPU of {row['device_memory_bytes'] / 2**30:.0f} GiB", file=sys.stderr)
    return "full"


def measure(study: Study, scale: str, out: Path, *, fresh: bool = False, deadline: float = inf) -> None:
    """Measure the cells that the folder lacks, until the deadline (a value of time.monotonic)."""
    configs, left_out = possible(study.configs(scale))
    for why in left_out:
        print(why, file=sys.stderr)
    before = 0
    try:
        for group in _groups(study, configs):
            for _ in sweep(
                group,
                out=out,
                timeout_s=CELL_TIMEOUT_S,
                interleave=study.interleave,
                fresh=fresh and not before,
                skip_oom=scale == "small",  # a cell that needs more memory than the host has would crash the host
                on_progress=lambda p, before=before: sys.stderr.writelines(progress_lines(p, before, len(configs))),
            ):
                if time.monotonic() > deadline:
                    return
            before += len(group)
    finally:  # clean the records of a study that was cut short as well: they may be committed
        if study.drops and (out / RECORDS_FILE).is_file():
            drop_tables(out, study.drops)


def _groups(study: Study, configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """Return the cells in groups that are measured together, one sweep per group."""
    if study.fresh_process:
        return [[config] for config in configs]
    models = {config.model: None for config in configs} if study.interleave else {}
    groups = [[config for config in configs if config.model == model] for model in models] or [list(configs)]
    return [group for group in groups if group]  # no cells if this machine can run none


def publish(study: Study, out: Path, format: str = "markdown", measured: Sequence[Path] = ()) -> int:
    """Print tables and explanation; write table.md and figure.svg next to the records. Returns the exit status.

    measured: other folders with records to show too; with it `out` may have no records.
    """
    from cs_systems.report.figures import plot

    records, complaints = records_of(out, measured)
    found = cells(records)
    explanation = [*complaints, *study.explain(found), *_missing(study, records)]
    text = "\n".join(f"- {sentence}" for sentence in explanation)
    command = " ".join([study.command, *(["--measured", *map(str, measured)] if measured else [])])
    tables = [table.strip() for table in study.tables(found, "markdown")]
    if drawing := picture_of(study, found):
        plot.write(drawing, out / FIGURE_FILE)
    picture = [f"![{study.question}]({FIGURE_FILE})"] if (out / FIGURE_FILE).is_file() else []
    sections = [f"# {study.question}", answered(study, found), *picture, *tables, "## Findings", text, f"    {command}"]
    write_file(out / PAGE_FILE, ("\n\n".join(sections) + "\n").encode())
    print("\n".join(study.tables(found, format)))
    print(text, file=sys.stdout if format == "markdown" else sys.stderr)
    print(
        f"{out}: {RECORDS_FILE if records_path(out).is_file() else 'no records'}, table.md, figure.svg", file=sys.stderr
    )
    return 0 if any(r.status in ("ok", "oom") for r in records) else EXIT_NOTHING


def records_of(out: Path, measured: Sequence[Path] = ()) -> tuple[list[RunRecord], list[str]]:
    """Return the records of the folders, and a message for each line that could not be read."""
    records, complaints = [], []
    for folder in [*([out] if records_path(out).is_file() or not measured else []), *measured]:
        read, torn = read_records(folder)
        records, complaints = records + read, complaints + torn
    return records, complaints


def picture_of(study: Study, found: list[Cell]) -> Callable[[], Any] | None:
    """Return the function that draws the study's figure; None if these cells cannot fill a figure."""
    from cs_systems.report.figures import plot

    if (draw := study.draw) is not None:
        return lambda: draw(found)
    drawn = [cell.record for cell in found if study.drawn(cell)] or [cell.record for cell in found]
    fitting = plot.kinds(drawn)  # a study that was cut short may not have the cells of its figure yet
    kind = study.figure if study.figure in fitting else None
    return (lambda: plot.figure(drawn, kind)) if fitting else None


def answered(study: Study, found: list[Cell]) -> str:
    """Return the study's answer, or a sentence that says that these records give none."""
    return (study.answer(found) if any(cell.measured for cell in found) else "") or UNANSWERED


def _missing(study: Study, records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield a sentence on the cells that are missing in the folder, for each size at which it was measured."""
    known = {record.run_config for record in records}
    full, small = study.full(), study.small()
    sizes = (small, full) if known <= set(small) else (full, small)  # two folders may hold the same cells
    wanted = next((configs for configs in sizes if known & set(configs)), [])
    if missing := [config for config in wanted if config not in known]:
        first = describe(missing[0])
        count = "1 cell is" if len(missing) == 1 else f"{len(missing)} cells are"
        yield f"{count} not measured yet, the first is {first}; run the same command again to measure the rest"


def run(study: Study, argv: Sequence[str] | None = None) -> int:
    """Run the command line of one study and return its exit status."""
    return until_reader_leaves(lambda: _answered(study, argv))


def _answered(study: Study, argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        description=study.doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="folder of the records (default: profiles/NAME, small: runs/NAME)")
    parser.add_argument("--format", choices=[f for f in FORMATS if f != "terminal"], default="markdown")
    parser.add_argument("--scale", choices=SCALES, default="auto", help="auto: full on a GPU, else small")
    parser.add_argument("--fresh", action="store_true", help="rename the old records, and measure every cell again")
    parser.add_argument("--show", action="store_true", help="show the records of --out without measuring")
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[], help="also show the records of these folders, without measuring"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the cells with their predicted memory")
    args = parser.parse_args(argv)
    try:
        if args.show or args.measured:
            return publish(study, args.out or study.folder("full"), args.format, args.measured)
        scale = decide(args.scale)
        if args.dry_run:
            return print_cells(possible(study.configs(scale))[0])
        out = args.out or study.folder(scale)
        measure(study, scale, out, fresh=args.fresh)
        return publish(study, out, args.format)
    except BrokenPipeError:  # not a failure of the study
        raise
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"{study.name}: {error}", file=sys.stderr)
        return EXIT_MALFORMED
    except KeyboardInterrupt:
        print("interrupted; the records are kept, run the same command again to measure the rest", file=sys.stderr)
        return EXIT_INTERRUPTED


def studies() -> list[Study]:
    """Return the STUDY of each file that ORDER names."""
    return [importlib.import_module(name).STUDY for name in ORDER]


def run_all(out_root: Path | None, budget_s: float, scale: str) -> int:
    """Run every study until the budget is spent; a failed study does not stop the others."""
    began = time.monotonic()
    scale, statuses = decide(scale), {}
    for study in studies():
        spent = time.monotonic() - began
        if spent > budget_s:
            print(f"{study.name}: left out after {spent:.0f} of {budget_s:.0f} s; run this again to measure it")
            continue
        out = out_root / study.name if out_root else study.folder(scale)
        print(f"\n## {study.question}\n", flush=True)
        try:
            measure(study, scale, out, deadline=began + budget_s)
            statuses[study.name] = publish(study, out)
        except Exception as error:  # an error in this study must not affect the next one
            statuses[study.name] = EXIT_MALFORMED
            print(f"{study.name} failed: {error!r}")
        print(f"{study.name}: {time.monotonic() - began - spent:.0f} s", file=sys.stderr, flush=True)
    return max(statuses.values(), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--all", action="store_true", help="run every study")
    parser.add_argument("--index", action="store_true", help="write profiles/README.md from the committed pages")
    parser.add_argument("--out-root", type=Path, help="folder of the studies' folders (default: profiles, or runs)")
    parser.add_argument("--budget-s", type=float, default=inf, help="start no new cell after this many seconds")
    parser.add_argument("--scale", choices=SCALES, default="auto", help="auto: full on a GPU, else small")
    args = parser.parse_args()
    if args.index:
        write_file(INDEX, index_page([*ORDER, APART], PAGE_FILE, FIGURE_FILE).encode())
        print(INDEX)
        return 0
    if args.all:
        return run_all(args.out_root, args.budget_s, args.scale)
    for study in studies():
        full, small = len(study.full()), len(study.small())
        print(f"{study.question}\n    {study.command}    # {full} cells; without a GPU {small}\n")
    return 0


if __name__ == "__main__":
    import _study  # the one that the studies import, not this script's second copy of it

    raise SystemExit(until_reader_leaves(_study.main))
