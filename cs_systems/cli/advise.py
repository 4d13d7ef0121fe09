"""Make a training step faster or smaller: try the levers that apply, keep those that are proved, check the numbers.

Begins with one cell, such as `--size small --context-length 512`, or your own, `--workload mine.py:factory`. Each
option is measured in processes of its own and compared with the best cell so far. The answer has each kept lever with
its expected and its measured step, why others were not kept, and the command of the best cell.

`advise -- train.py ARGS` tries the levers of an unedited script, applied from outside, and prints the diff.
Of the options below, a script takes --goal, --budget, --memory, --levers, --apply-patch, --dry-run, --out, --format,
--warmup and --steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._document import PrintedFormat, add, failed
from cs_systems.cli._options import (
    Int,
    MaybePath,
    MaybeText,
    ModelCells,
    Names,
    RecordHost,
    Steps,
    Workloads,
    flag,
    given,
    one_name,
    optional,
    parse_bytes,
    parse_seconds,
    refuse,
)
from cs_systems.config import ConfigError, RunConfig, describe, one_of
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.core.printable import labelled_command, visible
from cs_systems.core.units import counted

if TYPE_CHECKING:
    from cs_systems.advise.answer import Answer

GOALS = ("time", "memory", "energy", "tokens-per-joule")
KEEPS = ("training", "strict")
OUT = "runs/TIME-advise; of a script, a temporary folder"
WINDOW_S = 1.5  # least time of a round's steps if energy is the goal, because NVML's counter needs a second
OF_SCRIPTS = ("warmup", "steps")  # options of a measurement that also apply to a script


@dataclass(frozen=True)
class Advise:
    script: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="-- SCRIPT ...", help="a script of your own with its arguments", help_behavior_hint="(optional)"),
    ] = ()
    goal: Annotated[
        str,
        one_name("goal", GOALS),
        arg(help="what to improve: time, peak memory or energy of a step; tokens-per-joule: energy per token"),
    ] = "time"
    keep: Annotated[
        str,
        one_name("value of --keep", KEEPS),
        arg(
            help="training: loss curves differ by no more than those of other seeds; strict: loss and gradients of a "
            "step are as exact as before"
        ),
    ] = "training"
    budget: Annotated[str, arg(metavar="TIME", help="time for the search: 90s, 15m, 2h")] = "15m"
    memory: Annotated[MaybeText, optional("SIZE", "memory that a step may take: 80GiB", "the device's")] = None
    levers: Annotated[Names, flag(f"only these: {', '.join(plugins.names('levers'))}")] = ()
    change_batch: Annotated[bool, flag("also try larger batches, by tokens per second; this changes the training")] = (
        False
    )
    train_steps: Annotated[Int, arg(help="steps of the loss curves")] = 40
    apply_patch: Annotated[bool, flag("try the diff of a script in a copy of the current folder")] = False
    dry_run: Annotated[bool, flag("print the options that would be tried, and run nothing")] = False
    out: Annotated[
        MaybePath,
        optional("DIR", "folder for the records; if it has records, the search is resumed", OUT),
    ] = None
    fresh: Annotated[bool, flag("rename the folder's old records, and measure everything again; not for a script")] = (
        False
    )
    record_host: RecordHost = False
    format: PrintedFormat = "terminal"
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=lambda: Steps(steps=30, rounds=3))
    step: Workloads = field(default_factory=Workloads)


ARGS = Advise


def run(args: Advise) -> int:
    """Run the search; return 0, also if no lever was kept, or 3 if the start cannot be measured."""
    budget_s = parse_seconds(args.budget, "--budget")
    for name in args.levers:
        one_of("lever", name, plugins.names("levers"))
    if args.script:
        from cs_systems.cli._advise_script import Asked, searched

        _check_script_options(args)
        cell = args.steps.base()
        steps = cell.warmup, cell.steps
        limit_bytes = parse_bytes(args.memory, "--memory") if args.memory else None
        what = args.script, args.goal, limit_bytes, args.levers
        asked = Asked(*what, *steps, args.budget, budget_s, args.out, args.dry_run, args.apply_patch)
        return searched(asked)
    refuse(["apply_patch"] * args.apply_patch, "--apply-patch requires a script after --")
    start = _start(args)
    limit_bytes = parse_bytes(args.memory, "--memory") if args.memory else None
    if args.train_steps < 10:
        raise ConfigError(f"--train-steps is {args.train_steps}; it must be at least 10")
    _check_numbers(args, start)
    return _search(args, start, budget_s, limit_bytes)


def _check_script_options(args: Advise) -> None:
    """Raise ConfigError for options that have no effect on a script."""
    defaults = Advise()
    of_steps = [name for name in given(args.steps, defaults.steps) if name not in OF_SCRIPTS]
    refuse([*given(args.cells), *given(args.step), *of_steps], "the script decides what is trained, and where")
    others = ("keep", "change_batch", "train_steps", "fresh", "record_host")
    refuse([name for name in others if getattr(args, name) != getattr(defaults, name)], "a script has no such option")


def _check_numbers(args: Advise, start: RunConfig) -> None:
    """Raise ConfigError for options of a check of the numbers that the search does not make."""
    if args.keep == "strict" and start.subject is not Subject.STEP:
        refuse(["keep"], "--keep strict requires the built-in model, because the gradients of your own are unknown")
    if args.train_steps != Advise().train_steps:
        refuse(["train_steps"] * (args.keep == "strict"), "--keep strict compares one step and trains nothing")
        refuse(["train_steps"] * (start.subject is not Subject.STEP), "your own workload is judged by its last loss")


def _start(args: Advise) -> RunConfig:
    """Return the cell that the search begins with. Raises ConfigError for several."""
    cells = args.cells.configs(args.steps.base(), args.step)
    if len(cells) > 1:
        raise ConfigError(f"advise begins with one cell, got {len(cells)}; give one value for each option")
    if cells[0].is_distributed:
        raise ConfigError("advise measures one process, and the cell has ranks; leave out the strategy")
    return cells[0]


def _search(args: Advise, start: RunConfig, budget_s: float, limit_bytes: int | None) -> int:
    from cs_systems.advise.cells import CellBench, machine
    from cs_systems.advise.judge import OF_ENERGY
    from cs_systems.advise.lever import Situation, all_levers
    from cs_systems.advise.search import Search, Unmeasurable
    from cs_systems.cli._advice import announce, check_memory, say
    from cs_systems.cli._options import Sweep
    from cs_systems.cli._output import Interrupted
    from cs_systems.cli._sweep import EXIT_NOTHING
    from cs_systems.measure.runtime.journal import Journal
    from cs_systems.report.advice import TO_TRY
    from cs_systems.report.tables import document

    environment = machine(start.device)
    check_memory(args.goal, limit_bytes, environment.device)
    limit_bytes = limit_bytes or environment.device_memory_bytes
    if args.goal in OF_ENERGY:
        start = replace(start, steps_s=max(start.steps_s, WINDOW_S * start.rounds))
    situation = Situation(start, environment, goal=args.goal, memory_bytes=limit_bytes, changes_batch=args.change_batch)
    every = all_levers()
    if of_scripts := [name for name in args.levers if every[name].options is None]:
        raise ConfigError(f"{', '.join(of_scripts)}: for scripts only; give the script after --")
    levers = {name: lever for name, lever in every.items() if lever.options and name in (args.levers or every)}
    to_try = announce(situation, levers, args.budget, budget_s, describe(start), is_answer=args.dry_run)
    if args.dry_run:
        add(document.table(TO_TRY, to_try))
        return 0
    folder = Sweep(out=args.out).claim("advise")
    journal = Journal.prepare(folder, fresh=args.fresh, record_host=args.record_host)
    bench = CellBench(journal, start, args.keep, args.train_steps, budget_s)
    search = Search(situation, levers, bench, say)
    with bench.opened():
        bench.resume(environment)
        if bench.recorded:
            say(f"{counted(bench.recorded, 'process', 'processes')} recorded before will not be measured again")
        try:
            search.run()
        except KeyboardInterrupt:
            if search.situation.history:
                _deliver(search.answer(), folder)
            raise Interrupted(folder) from None
        except Unmeasurable as reason:
            return failed(f"the start cannot be measured: {reason}", EXIT_NOTHING)
    _deliver(search.answer(), folder)
    return 0


def _deliver(answer: Answer, folder: Path) -> None:
    """Write the answer into the folder as JSON, and print it."""
    from cs_systems.advise.answer import command_words
    from cs_systems.cli._advice import print_answer, print_continuation, print_report
    from cs_systems.cli._output import terminal_width
    from cs_systems.record import records_path
    from cs_systems.report.advice import FILE
    from cs_systems.report.files import write_file
    from cs_systems.report.tables.formats import text_width

    write_file(folder / FILE, json.dumps(answer.to_dict(), indent=1).encode())
    print_answer(answer)
    width = text_width(terminal_width())
    assert isinstance(answer.best, RunConfig)
    print(labelled_command("best:", command_words(answer.best), width))
    print(visible(f"records: {records_path(folder)}"))
    print_report(folder)
    print_continuation(answer, folder)
