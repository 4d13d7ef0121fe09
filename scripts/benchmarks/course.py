"""Run the tasks of the systems course at the handout's sizes, and keep the small results: outputs, records, figures.

    python3 scripts/benchmarks/course.py --gpus 1 --budget-s 480                  # the tasks for one GPU or none
    python3 scripts/benchmarks/course.py --gpus 2 --tasks fsdp:60 leaderboard     # these, fsdp for at most 60 s
    python3 scripts/benchmarks/course.py --tiny --gpus 2 --out /tmp/kept          # on a CPU, to check the commands
    python3 scripts/benchmarks/course.py --keep                                   # only copy the results again

Question: does every task of the handout give its table on this machine, and how long does it take? Method: each task
runs in a process of its own, the shortest limit first, into runs/course. At its limit a task is interrupted and reports
what it has; one that does not end is killed. Output: in profiles/course a folder for each task with what its commands
printed, their seconds and exit statuses, the records, and the log of one that failed; table.md lists all tasks. A task
that got less far than the kept one does not replace it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cs_systems.cli import EXIT_INTERRUPTED, _course
from cs_systems.cli import main as command
from cs_systems.cli._course import Machine, Plan
from cs_systems.core.course import Task, tasks
from cs_systems.core.printable import command_line

ROOT = Path(__file__).resolve().parents[2]
RUNS, KEPT = Path("runs/course"), ROOT / "profiles" / "course"
SMALL = {".txt", ".json", ".jsonl", ".svg", ".log"}
LARGE = (".pickle.json", ".trace.json", ".modules.json")
MOST_BYTES = 3_000_000
TAIL_BYTES = 4000  # bytes shown of the workers' log if a task failed
GRACE_S = 30
LEAST_S = 10  # a task with less time is not begun
UNKNOWN_S = 120  # limit of a task that was never measured


def chosen(gpus: int) -> list[str]:
    """Return the tasks that take one GPU or none, or those that take several."""
    return [task.name for task in tasks().values() if (task.gpus > 1) == (gpus > 1)]


def limits(wanted: Sequence[str], kept: Path) -> dict[str, float]:
    """Return the limit of each task in seconds, the shortest first.

    Default: twice the recorded time, plus time to start.

    wanted: NAME or NAME:SECONDS. Raises ValueError for an unknown task, and for seconds that are not a number.
    """
    found = {}
    for word in wanted:
        name, _, seconds = word.partition(":")
        if name not in tasks():
            raise ValueError(f"unknown task {name!r}; use one of {', '.join(tasks())}")
        found[name] = float(seconds) if seconds else _usual_limit(tasks()[name], kept)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _usual_limit(task: Task, kept: Path) -> float:
    state = _state(task, kept)
    return 2 * sum(step["seconds"] for step in state["steps"]) + GRACE_S if state and _done(state) else UNKNOWN_S


def run(names: dict[str, float], machine: Machine, budget_s: float) -> dict[str, str]:
    """Run each task in a process of its own; return the exit status or reason of each that failed."""
    began, failed = time.monotonic(), {}
    for name, limit_s in names.items():
        seconds = min(limit_s, budget_s - (time.monotonic() - began))
        if seconds < LEAST_S:
            failed[name] = "not begun: no time left"
            continue
        print(f"--- {name}: at most {seconds:.0f} s", flush=True)
        process = multiprocessing.get_context("spawn").Process(target=carry_out, args=(name, machine, seconds))
        process.start()
        process.join(seconds + GRACE_S)
        for end in (process.terminate, process.kill):
            if process.is_alive():
                failed[name] = "killed: it did not end at its limit"
                end()
                process.join(10)
        if process.exitcode and name not in failed:
            failed[name] = f"exit status {process.exitcode}"
    return failed


def carry_out(name: str, machine: Machine, seconds: float) -> None:
    """Run a task; when its time is up, report the results so far. Ends the process with the task's exit status."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    plan = _course.planned(tasks()[name], machine, RUNS)
    plan.out.mkdir(parents=True, exist_ok=True)
    log = plan.out / f"{name}.log"
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    print(plan.size, flush=True)
    status = _course.carried_out(plan, time.monotonic() + seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if status == EXIT_INTERRUPTED:
        report_rest(plan)
    sys.stderr.flush()
    if status:
        keep_tail(plan.out, log)
    else:
        log.unlink()
    raise SystemExit(status)


def report_rest(plan: Plan) -> None:
    """Add to an interrupted task's output what its own reports say of the records, or a plain report."""
    ended = json.loads(_course.state_file(plan.task, plan.out).read_text())["steps"]
    reports = [words for words in plan.commands[len(ended) :] if words[0] == "report"]
    with (plan.out / f"{plan.task.name}.txt").open("a", encoding="utf-8") as file, redirect_stdout(file):
        for words in reports or [["report", str(plan.out)]]:
            print(f"$ {command_line('cs-systems', *words)}")
            command(words)


def keep_tail(folder: Path, log: Path) -> None:
    """Add the end of the workers' logs to the log of a task that failed."""
    for file in sorted(folder.rglob("worker*.log")):
        with log.open("ab") as text:
            text.write(f"\n{file}:\n".encode() + file.read_bytes()[-TAIL_BYTES:])


def keep(source: Path, kept: Path) -> Iterator[str]:
    """Copy the small files of the results; yield a sentence on each that is too large, or worse than the kept one."""
    ran = [task for task in tasks().values() if _state(task, source)]
    worse = {task.name for task in ran if _done(_state(task, source)) < _done(_state(task, kept))}
    yield from (f"{name} got less far than the results in {kept}, which stay" for name in sorted(worse))
    folders = {task.folder or task.name for task in ran if task.name not in worse}
    for task in ran:
        if task.name not in worse:
            (kept / (task.folder or task.name) / f"{task.name}.log").unlink(missing_ok=True)
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        if not file.is_file() or file.suffix not in SMALL or file.name.endswith(LARGE):
            continue
        if file.name.startswith("worker") or inside.stem in worse or inside.parts[0] not in folders:
            continue
        if file.stat().st_size > MOST_BYTES:
            yield f"{file}: {file.stat().st_size / 1e6:.1f} MB, left out"
            continue
        copy = kept / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _state(task: Task, folder: Path) -> dict[str, Any]:
    file = _course.state_file(task, folder / (task.folder or task.name))
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def _done(state: dict[str, Any]) -> int:
    return sum(step["status"] == 0 for step in state.get("steps", []))


def table(kept: Path) -> str:
    """Return a table of all tasks: their size, machine, commands and seconds."""
    rows = ["| task | size | machine | commands | seconds | failed |", "| --- | --- | --- | --- | --- | --- |"]
    for task in tasks().values():
        if not (state := _state(task, kept)):
            rows.append(f"| {task.name} | not run | | | | |")
            continue
        steps = state["steps"]
        failed = ", ".join(step["command"][0] for step in steps if step["status"])
        row = (task.name, state["scale"], state["machine"], f"{_done(state)} of {state['planned']}")
        rows.append(f"| {' | '.join(row)} | {sum(step['seconds'] for step in steps):.0f} | {failed} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--gpus", type=int, default=1, choices=(1, 2), help="1: tasks for one GPU or none; 2: the others"
    )
    parser.add_argument("--tasks", nargs="+", metavar="NAME[:SECONDS]", help="only these, each with its limit")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds for all tasks together")
    parser.add_argument("--tiny", action="store_true", help="run at tiny size on a CPU; requires --out")
    parser.add_argument("--out", type=Path, help="folder for the small results (default: profiles/course)")
    parser.add_argument("--keep", action="store_true", help="only copy the results of runs/course")
    args = parser.parse_args()
    kept = args.out or KEPT
    if args.tiny and not args.out:
        parser.error("--tiny requires --out: profiles/course is for the handout's sizes")
    began, failed = time.monotonic(), {}
    if not args.keep:
        try:
            names = limits(args.tasks or chosen(args.gpus), KEPT)
        except ValueError as error:
            parser.error(str(error))
        machine = Machine(0, None) if args.tiny else _course.machine()
        if machine.gpus < args.gpus and not args.tiny:
            parser.error(f"--gpus {args.gpus}, and this is {machine}; use --tiny to check the commands")
        failed = run(names, machine, args.budget_s)
    for sentence in keep(RUNS, kept):
        print(sentence)
    kept.mkdir(parents=True, exist_ok=True)
    text = table(kept)
    (kept / "table.md").write_text(f"# The tasks of the course at the handout's sizes\n\n{text}")
    print(text)
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
