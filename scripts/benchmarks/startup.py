"""Start-up time of the program, and the cost of a cell beyond its own measurement.

Method: each command's --help as a process of its own, with Python's bare start beside it; then one sweep of small cells
on one worker. A cell's time is from one record on disk to the next, less what the record accounts for (building the
workload, warm-up and timed steps). This rest is the harness: request, environment, record, disk.
Output: a markdown table; the promises are under 200 ms for --help and under 50 ms for a cell. For a quiet machine.

    python scripts/benchmarks/startup.py > profiles/overhead/startup.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from cs_systems import RunConfig, preset, sweep
from cs_systems.cli import COMMANDS
from cs_systems.core.statistics import quantile
from cs_systems.record import RunRecord

PROMISED_HELP_S, PROMISED_CELL_S = 0.2, 0.05


def process_s(command: Sequence[str], runs: int) -> list[float]:
    """Return the seconds of each of `runs` starts, after an uncounted one that fills the page cache."""
    durations = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        durations.append(time.perf_counter() - start)
    return durations[1:]


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


def row(what: str, durations_s: list[float], promised_s: float | None) -> str:
    middle, high = (1e3 * quantile(durations_s, q) for q in (0.5, 0.9))
    promise = "" if promised_s is None else f"{1e3 * promised_s:.0f}"
    return f"| {what} | {len(durations_s)} | {middle:.0f} | {high:.0f} | {promise} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="number of timed starts of each command")
    parser.add_argument("--cells", type=int, default=30)
    args = parser.parse_args()
    program = [sys.executable, "-m", "cs_systems"]
    print("| what | runs | median ms | p90 ms | promised ms |\n|---|---:|---:|---:|---:|")
    print(row("python -c pass", process_s([sys.executable, "-c", "pass"], args.runs), None), flush=True)
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        durations_s = process_s([*program, *words], args.runs)
        print(row(" ".join(["cs-systems", *words]), durations_s, PROMISED_HELP_S), flush=True)
    print(row("a cell, beyond building and steps", cell_overheads_s(args.cells), PROMISED_CELL_S))


if __name__ == "__main__":
    main()
