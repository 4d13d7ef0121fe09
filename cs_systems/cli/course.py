"""Run the tasks of a systems course (CS336, assignment 2) at the size that fits this machine.

Without arguments: list the tasks, with the state of each in the folder of your results. With the name of a task: run
its commands, print their tables, and say what a good answer has. A task that was interrupted continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated

from tyro.conf import Positional, arg

from cs_systems.cli import EXIT_INTERRUPTED, _course
from cs_systems.cli._course import Machine, Plan
from cs_systems.cli._document import PrintedFormat, add
from cs_systems.cli._options import MaybeFloat, MaybeInt, MaybeNames, MaybePath, MaybeText, flag, given, optional
from cs_systems.cli._output import print_table, terminal_width
from cs_systems.config import ConfigError, one_of
from cs_systems.core import origin, plugins
from cs_systems.core.course import Task, tasks
from cs_systems.core.printable import command_line, visible
from cs_systems.report.tables import document

FOLDER = Path("runs/course")


@dataclass(frozen=True)
class Course:
    task: Annotated[
        Positional[MaybeNames], arg(metavar="[TASK ...]", help="short names of tasks", help_behavior_hint="")
    ] = ()
    all: Annotated[bool, flag("run all tasks")] = False
    gpus: Annotated[MaybeInt, optional("INT", "with --all: only the tasks that take so many GPUs, 0, 1 or 2")] = None
    size: Annotated[MaybeNames, flag("sizes of the model, instead of the task's")] = ()
    context_length: Annotated[MaybeNames, flag("tokens of a sequence, instead of the task's")] = ()
    full: Annotated[bool, flag("use the handout's sizes, whether they fit or not")] = False
    code: Annotated[MaybeText, optional("PATH:NAME", "your own attention or strategy, next to the built-in one")] = None
    model: Annotated[
        MaybeText, optional("MODULE:CLASS", "your own class of a language model, instead of the built-in one")
    ] = None
    out: Annotated[MaybePath, optional("DIR", "folder of the results, with one folder for each task", str(FOLDER))] = (
        None
    )
    fresh: Annotated[bool, flag("rename old records, and measure again")] = False
    budget_s: Annotated[MaybeFloat, optional("SECONDS", "begin no command that measures after so many seconds")] = None
    dry_run: Annotated[bool, flag("print the commands, and run nothing")] = False
    format: PrintedFormat = "terminal"


ARGS = Course


def run(args: Course) -> int:
    """List or run tasks. Returns 0, the highest exit status of the commands, or 130 after Ctrl-C."""
    folder = args.out or FOLDER
    chosen = _chosen(args)
    if not chosen:
        _list(folder)
        return 0
    machine = _course.machine() if any(task.steps for task in chosen) else Machine(0, None)
    began, statuses = time.monotonic(), []
    renewed: set[str] | None = set() if args.fresh else None
    for task in chosen:
        try:
            plan = _course.planned(
                task,
                machine,
                folder,
                full=args.full,
                sizes=args.size,
                contexts=args.context_length,
                code=args.code,
                model=args.model,
                renewed=renewed,
            )
        except ConfigError as error:
            if len(chosen) == 1:
                raise
            print(visible(f"\n{task.name}: {error.with_options()}"), flush=True)
            continue
        _print_plan(plan)
        if args.dry_run:
            if not add(document.table(_course.COMMANDS, _course.command_rows(plan))):
                for words in plan.commands:
                    print(visible("    " + command_line("cs-systems", *words)))
        else:
            deadline = None if args.budget_s is None else began + args.budget_s
            status = _run_task(plan, deadline)
            if status == EXIT_INTERRUPTED:
                print(visible(f"to continue the task: {origin.command()}"), file=sys.stderr)
                return status
            statuses.append(status)
            _print_answer(task)
            add(document.table(_course.COMMANDS, _course.command_rows(plan)))
            add(document.table(_course.TASKS, _rows([task], folder)))
    return max(statuses, default=0)


def _chosen(args: Course) -> list[Task]:
    """Return the tasks to run. Raises ConfigError for an unknown one, and for options without effect."""
    if args.all and args.task:
        raise ConfigError(f"--all runs every task; leave out --all, or {' '.join(args.task)}")
    if args.all and args.code:
        raise ConfigError("--code is for one kind of task; leave out --all, and name the tasks")
    if args.budget_s is not None and not args.budget_s > 0:
        raise ConfigError(f"--budget-s must be more than 0 s, got {args.budget_s:g}")
    if args.gpus is not None and not args.all:
        raise ConfigError("--gpus requires --all; add --all, or leave out --gpus")
    known = tasks()
    if not (args.all or args.task) and (stray := [name for name in given(args) if name not in ("out", "format")]):
        raise ConfigError(f"--{stray[0].replace('_', '-')} requires a task; add its name, or --all")
    if args.all:
        found = [task for task in known.values() if args.gpus in (None, task.gpus)]
        if not found:
            raise ConfigError(f"no task takes {args.gpus} GPUs; use --gpus 0, 1 or 2")
    else:
        found = [known[one_of("task", name, known)] for name in args.task]
    if args.code and (without := [task.name for task in found if not task.code]):
        raise ConfigError(f"{without[0]} takes no code of your own; leave out --code")
    if args.code:
        for subject in sorted({task.steps[0].split()[0] for task in found}):  # attention or parallel
            plugins.check(subject, args.code)
    if args.model and any("size" in task.full for task in found):
        plugins.check("workloads", args.model)
    return found


def _list(folder: Path) -> None:
    known = tasks()
    print_table(_course.TASKS, _rows([*known.values()], folder))
    first = next(iter(known))
    print(visible(f"results: {folder}\nrun one: cs-systems course {first} (--dry-run: print its commands)"))


def _rows(chosen: Sequence[Task], folder: Path) -> list[_course.TaskRow]:
    """Return the tasks with their state in a folder of results."""
    return [{"task": task.name, "gpus": task.gpus, "state": _course.state(task, folder)} for task in chosen]


def _wrapped(text: str) -> str:
    from cs_systems.report.tables.formats import text_width

    return fill(visible(text), text_width(terminal_width()), break_on_hyphens=False, break_long_words=False)


def _print_plan(plan: Plan) -> None:
    task = plan.task
    print()
    print(_wrapped(f"{task.name}: {task.asks}"))
    if plan.size:
        print(_wrapped(plan.size))
    sys.stdout.flush()


def _print_answer(task: Task) -> None:
    print(_wrapped(f"look at: {task.look}"))
    print(_wrapped(f"a good answer: {task.good}"))
    for mistake in task.mistakes:
        print(_wrapped(f"usual mistake: {mistake}"))
    sys.stdout.flush()


def _run_task(plan: Plan, deadline: float | None) -> int:
    began = time.monotonic()
    status = _course.carried_out(plan, deadline)
    seconds = time.monotonic() - began
    text = plan.out / f"{plan.task.name}.txt"
    print(visible(f"{seconds:.0f} s; records: {plan.out}\nall that was printed: {text}"), flush=True)
    return status
