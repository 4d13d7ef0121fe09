"""Start-up time of the program, and the cost of a cell beyond its own measurement.

Method: each command's --help as a process of its own, compared with Python's bare start, also of an earlier checkout
in turns (--against); processor time too, because other programs lengthen the rest. Then one sweep of small cells on one
worker. A cell's time is from one record on disk to the next, less what the record accounts for (building the workload,
warm-up and timed steps). This rest is the harness: request, environment, record, disk.
Output: a markdown table; the promises are under 200 ms for --help and under 50 ms for a cell. For a quiet machine.

    python scripts/benchmarks/startup.py > profiles/overhead/startup.md
    python scripts/benchmarks/startup.py --against EARLIER_CHECKOUT --runs 11 --cells 0
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cs_systems import RunConfig, preset, sweep
from cs_systems.cli import COMMANDS
from cs_systems.core.statistics import quantile
from cs_systems.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
PROMISED_HELP_S, PROMISED_CELL_S = 0.2, 0.05


class Starts(NamedTuple):
    """Seconds of each start of a program: in all, and of processor time."""

    lasted_s: list[float]
    cpu_s: list[float]


def starts(arguments: Sequence[str], runs: int, checkouts: Sequence[Path]) -> list[Starts]:
    """Return the times of Python with these arguments in each checkout, in turns, after an uncounted start of each."""
    found = [Starts([], []) for _ in checkouts]
    for number in range(runs + 1):
        for checkout, (lasted_s, cpu_s) in zip(checkouts, found, strict=True):
            before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(checkout)}
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
            end_s, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            if number:
                lasted_s.append(end_s - start_s)
                cpu_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return found


def accounted_s(record: RunRecord) -> float:
    assert record.measurement is not None, record.reason
    return record.measurement.setup_s + sum(sample.wall_s for sample in record.measurement.samples)


def cell_overheads_s(cells: int) -> list[float]:
    """Return the time of each cell outside of its record, except the first cell, which starts the worker."""
    model = preset("tiny")
    configs = [RunConfig(model=model, batch_size=1, warmup=2, steps=5, seed=seed) for seed in range(cells + 1)]
    overheads = []
    with tempfile.TemporaryDirectory() as folder:
        before = time.perf_counter()
        for record in sweep(configs, out=folder):
            now = time.perf_counter()
            overheads.append(now - before - accounted_s(record))
            before = now
    return overheads[1:]


def row(what: str, times: Sequence[Starts], promised_s: float | None) -> str:
    lasted_s = times[0].lasted_s
    middle, high = (f"{1e3 * quantile(lasted_s, q):.0f}" for q in (0.5, 0.9))
    cpu = (f"{1e3 * median(each.cpu_s):.0f}" if each.cpu_s else "" for each in times)
    promise = "" if promised_s is None else f"{1e3 * promised_s:.0f}"
    return f"| {' | '.join([what, str(len(lasted_s)), middle, high, promise, *cpu])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="number of timed starts of each command")
    parser.add_argument("--cells", type=int, default=30)
    parser.add_argument("--against", type=Path, help="an earlier checkout, started in turns with this one")
    args = parser.parse_args()
    checkouts = [ROOT] if args.against is None else [ROOT, args.against]
    columns = ["what", "runs", "median ms", "p90 ms", "promised ms", "CPU ms", "CPU ms before"][: 5 + len(checkouts)]
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    print(row("python -c pass", starts(["-c", "pass"], args.runs, checkouts), None), flush=True)
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        if any(not is_known(words[0], each) for each in checkouts[1:]):
            times = [*starts(["-m", "cs_systems", *words], args.runs, checkouts[:1]), Starts([], [])]
        else:
            times = starts(["-m", "cs_systems", *words], args.runs, checkouts)
        print(row(" ".join(["cs-systems", *words]), times, PROMISED_HELP_S), flush=True)
    if args.cells:
        cells = [Starts(cell_overheads_s(args.cells), []), *(Starts([], []) for _ in checkouts[1:])]
        print(row("a cell, beyond building and steps", cells, PROMISED_CELL_S))


def is_known(command: str, checkout: Path) -> bool:
    """Return whether a checkout has this command."""
    return command.startswith("-") or (checkout / f"cs_systems/cli/{command}.py").exists()


if __name__ == "__main__":
    main()
