"""Make a training step faster or smaller: try the levers that apply, keep those that are proved, check the numbers.

Begins with one cell, such as `--size small --context-length 512`, or your own, `--workload mine.py:factory`. Each
option is measured in fresh processes beside the best cell so far. The answer has each kept lever with its expected and
its measured step, why others were not kept, and the command of the best cell.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

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
    one_name,
    optional,
    parse_bytes,
)
from cs_systems.config import ConfigError, RunConfig, describe, one_of
from cs_systems.core import plugins
from cs_systems.core.printable import labelled_command, plain, visible
from cs_systems.core.units import counted, human

if TYPE_CHECKING:
    from cs_systems.advise.answer import Answer
    from cs_systems.advise.lever import Lever, Situation

GOALS, KEEPS = ("time", "memory"), ("training", "strict")
UNITS_S = {"s": 1, "m": 60, "h": 3600}
ADVICE = "advice.json"
RECORD_BYTES = 20_000  # of a process, at most


@dataclass(frozen=True)
class Advise:
    goal: Annotated[str, one_name("goal", GOALS), arg(help="what to reduce: time of a step, or its peak memory")] = (
        "time"
    )
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
    dry_run: Annotated[bool, flag("print the options that would be tried, and run nothing")] = False
    out: Annotated[
        MaybePath,
        optional("DIR", "folder for the records; if it has records, the search is resumed", "runs/TIME-advise"),
    ] = None
    fresh: Annotated[bool, flag("rename the folder's old records, and measure everything again")] = False
    record_host: RecordHost = False
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=lambda: Steps(steps=30, rounds=3))
    step: Workloads = field(default_factory=Workloads)


ARGS = Advise


def run(args: Advise) -> int:
    """Run the search; return 0, also if nothing was kept, 3 if the start cannot be measured."""
    start, budget_s = _start(args), _seconds(args.budget)
    limit_bytes = parse_bytes(args.memory, "--memory") if args.memory else None
    if args.train_steps < 10:
        raise ConfigError(f"--train-steps is {args.train_steps}; it must be at least 10")
    for name in args.levers:
        one_of("lever", name, plugins.names("levers"))
    return _search(args, start, budget_s, limit_bytes)


def _start(args: Advise) -> RunConfig:
    """Return the cell that the search begins with. Raises ConfigError for several."""
    cells = args.cells.configs(args.steps.base(), args.step)
    if len(cells) > 1:
        raise ConfigError(f"advise begins with one cell, got {len(cells)}; give one value for each option")
    if cells[0].is_distributed:
        raise ConfigError("advise measures one process, and the cell has ranks; leave out the strategy")
    return cells[0]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget is {text!r}; write a time such as 90s, 15m or 2h")
    return float(found[1]) * UNITS_S[found[2]]


def _search(args: Advise, start: RunConfig, budget_s: float, limit_bytes: int | None) -> int:
    from cs_systems.advise.cells import CellBench, machine
    from cs_systems.advise.lever import Situation, all_levers
    from cs_systems.advise.search import Nothing, Search
    from cs_systems.cli._options import Sweep
    from cs_systems.cli._output import Interrupted
    from cs_systems.cli._sweep import EXIT_NOTHING
    from cs_systems.measure.runtime.journal import Journal

    environment = machine(start.device)
    if args.goal == "memory" and environment.device == "cpu":
        raise ConfigError("--goal memory requires a GPU, because the memory of a CPU's step is not measured")
    limit_bytes = limit_bytes or environment.device_memory_bytes
    situation = Situation(start, environment, goal=args.goal, memory_bytes=limit_bytes, changes_batch=args.change_batch)
    levers = {name: lever for name, lever in all_levers().items() if name in (args.levers or all_levers())}
    _announce(situation, levers, args)
    if args.dry_run:
        return 0
    folder = Sweep(out=args.out).claim("advise")
    journal = Journal.prepare(folder, fresh=args.fresh, record_host=args.record_host)
    bench = CellBench(journal, start, args.keep, args.train_steps, budget_s)
    search = Search(situation, levers, bench, _say)
    with bench.opened():
        bench.resume(environment)
        if bench.recorded:
            _say(f"{counted(bench.recorded, 'process', 'processes')} recorded before will not be measured again")
        try:
            search.run()
        except KeyboardInterrupt:
            _deliver(search.answer(), folder)
            raise Interrupted(folder) from None
        except Nothing as reason:
            print(visible(f"cs-systems: the start cannot be measured: {reason}"), file=sys.stderr)
            return EXIT_NOTHING
    _deliver(search.answer(), folder)
    return 0


def _say(line: str) -> None:
    print(plain(line) if not line.startswith(" ") else "  " + plain(line), file=sys.stderr, flush=True)


def _announce(situation: Situation, levers: Mapping[str, Lever], args: Advise) -> None:
    """Say what will be tried, how long it may take, and what it leaves on the disk."""
    from cs_systems.advise.search import planned

    options = [f"{one.lever} ({one.words})" for one in planned(situation, levers)]
    _say(f"start: {describe(situation.config)} on {situation.environment.device_name}")
    _say(f"to try: {'; '.join(options) or 'nothing'}")
    _say(
        f"at most {args.budget}, each option 1 to 6 processes; later options follow from those that are kept; "
        f"about {human(RECORD_BYTES, 'bytes')} of records per process"
    )


def _deliver(answer: Answer, folder: Path) -> None:
    """Write the answer into the folder, for other programs, and print it."""
    from cs_systems.report.files import write_file

    write_file(folder / ADVICE, json.dumps(answer.to_dict(), indent=1).encode())
    _print(answer, folder)


def _print(answer: Answer, folder: Path) -> None:
    """Print the answer: the result, the waterfall, what was not kept, the numbers, and the command of the best cell."""
    from cs_systems.advise.answer import OTHERS, WATERFALL, command_words
    from cs_systems.cli._output import print_table, terminal_width
    from cs_systems.record import records_path
    from cs_systems.report.tables.formats import text_width

    width = text_width(terminal_width())
    for sentence in answer.sentences():
        print(textwrap.fill(plain(sentence), width, break_on_hyphens=False))
    print()
    if answer.waterfall:
        print_table(WATERFALL[answer.goal], answer.waterfall)
    if answer.others:
        print_table(OTHERS, answer.others)
    for line in _lines(answer):
        print(textwrap.fill(plain(line), width, subsequent_indent="  ", break_on_hyphens=False))
    print(labelled_command("best:", command_words(answer.best), width))
    print(visible(f"records: {records_path(folder)}"))


def _lines(answer: Answer) -> Iterator[str]:
    """Yield what each kept lever changed in the numbers, how to write it in a program, and what does not apply."""
    from cs_systems.advise.lever import all_levers

    levers = all_levers()
    for row in answer.kept:
        lever = levers[row["lever"]]
        saw = f"; {row['numbers']}" if row["numbers"] else ""
        yield f"{row['lever']}: {lever.numbers or 'changes no number'}{saw}; in your own program: {lever.lines}"
    if answer.unfit:
        yield f"does not apply: {'; '.join(answer.unfit)}"
