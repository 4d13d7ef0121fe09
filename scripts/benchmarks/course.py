"""Run the tasks of the systems course at the handout's sizes, and keep the small results: outputs, records, figures.

    python3 scripts/benchmarks/course.py --gpus 1 --budget-s 480    # the tasks for one GPU or none
    python3 scripts/benchmarks/course.py --gpus 2 --budget-s 360    # the tasks for several GPUs
    python3 scripts/benchmarks/course.py --keep                     # only copy the results again

Question: does every task of the handout give its table on this machine, and how long does it take? Method: one process
of `cs-systems course --full` runs the tasks, the longest last, into runs/course; no command begins after the budget,
and one that hangs is stopped 90 s after it. The same call goes on with the rest. Output: in profiles/course a folder
for each task with what its commands printed, their seconds and exit statuses, and the records; table.md lists all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cs_systems.core.course import tasks

ROOT = Path(__file__).resolve().parents[2]
RUNS, KEPT = Path("runs/course"), ROOT / "profiles" / "course"
LAST = ("flash_benchmarking", "nsys_profile", "torch_compile", "leaderboard")  # the longest
SMALL = {".txt", ".json", ".jsonl", ".svg"}
MOST_BYTES = 1_500_000
GRACE_S = 90


def chosen(gpus: int) -> list[str]:
    """Return the tasks that take one GPU or none, or those that take several; the longest last."""
    found = [task.name for task in tasks().values() if not task.is_by_hand and (task.gpus > 1) == (gpus > 1)]
    return sorted(found, key=lambda name: LAST.index(name) + 1 if name in LAST else 0)


def run(names: list[str], budget_s: float) -> int | None:
    """Run the tasks in a process of their own; return its exit status, None if it had to be stopped."""
    words = [sys.executable, "-m", "cs_systems", "course", *names, "--full", "--out", str(RUNS), "--budget-s"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen([*words, str(budget_s)], env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    try:
        return process.wait(budget_s + GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        return None


def keep(source: Path, kept: Path) -> Iterator[str]:
    """Copy the small files of the results; yield a sentence on each that is too large."""
    for file in sorted(source.rglob("*")):
        if not file.is_file() or file.suffix not in SMALL or file.name.endswith((".pickle.json", ".trace.json")):
            continue
        if file.stat().st_size > MOST_BYTES:
            yield f"{file}: {file.stat().st_size / 1e6:.1f} MB, left out"
            continue
        copy = kept / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def table(kept: Path) -> str:
    """Return a table of all tasks: their size, machine, commands and seconds."""
    rows = ["| task | size | machine | commands | seconds | failed |", "| --- | --- | --- | --- | --- | --- |"]
    for task in tasks().values():
        file = kept / (task.folder or task.name) / f"{task.name}.json"
        if not file.is_file():
            rows.append(f"| {task.name} | {'by hand' if task.is_by_hand else 'not run'} | | | | |")
            continue
        state = json.loads(file.read_text())
        steps = state["steps"]
        failed = ", ".join(step["command"][0] for step in steps if step["status"])
        done, seconds = sum(step["status"] == 0 for step in steps), sum(step["seconds"] for step in steps)
        row = (task.name, state["scale"], state["machine"], f"{done} of {state['planned']}", f"{seconds:.0f}", failed)
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--gpus", type=int, default=1, choices=(1, 2), help="1: tasks for one GPU or none; 2: the others"
    )
    parser.add_argument("--budget-s", type=float, default=480, help="begin no command after so many seconds")
    parser.add_argument(
        "--out", type=Path, default=KEPT, help="folder for the small results (default: profiles/course)"
    )
    parser.add_argument("--keep", action="store_true", help="only copy the results of runs/course")
    args = parser.parse_args()
    began = time.monotonic()
    status = 0 if args.keep else run(chosen(args.gpus), args.budget_s)
    for sentence in keep(RUNS, args.out):
        print(sentence)
    text = table(args.out)
    (args.out / "table.md").write_text(f"# The tasks of the course at the handout's sizes\n\n{text}")
    print(text, f"{time.monotonic() - began:.0f} s in all; exit status {status}", sep="\n")
    return 1 if status is None else status


if __name__ == "__main__":
    raise SystemExit(main())
