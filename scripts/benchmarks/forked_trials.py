"""Forked trials of `cs-systems advise` and new processes: whether their steps agree, and how much sooner forks end.

Question: is the step of a script as long, and does it vary as much, if its process is a fork of one that has imported
torch, and how long does a trial take each way?
Method: planted programs of diagnosis_truth/faults/loops run on a CPU with one thread, unedited, as trials of a search:
by turns as new processes and as forks of one server, in pairs of alternating order. A process counts by its median
step; its variation is the standard deviation of the logarithms. The interval of the ratio is `compare`'s.
Output: a markdown table with a row for each program. For a quiet machine; about 10 s for each pair.
Committed: profiles/advised_scripts/forked_trials.md.

    python scripts/benchmarks/forked_trials.py
    python scripts/benchmarks/forked_trials.py --programs healthy_plain --pairs 3 --output table.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import chdir
from math import log
from pathlib import Path
from statistics import median, stdev

from cs_systems.advise.lever import ScriptPlan, all_levers
from cs_systems.advise.scripts import ScriptBench
from cs_systems.advise.sources import sources
from cs_systems.core.statistics import ratio_interval
from cs_systems.measure.runtime.program import script_command

ROOT = Path(__file__).parents[2]
LOOPS = Path(__file__).with_name("diagnosis_truth") / "faults" / "loops"
COMMITTED = ROOT / "profiles" / "advised_scripts" / "forked_trials.md"
PROGRAMS = ("healthy_plain", "healthy_lstm", "gc_collect_each_step", "anomaly_mode")
OPTIONS = {"name": "script", "stop": True, "profile": "none", "warmup": 5, "steps": 20}
WAYS = ("new", "forked")


def compared(program: str, pairs: int) -> list[str]:
    """Run a program both ways, and return the cells of its row."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copy(LOOPS / f"{program}.py", folder)
        words, files = [f"{program}.py"], sources(Path(f"{program}.py"))
        benches = {
            way: ScriptBench(
                words,
                all_levers(),
                Path(folder, way),
                script_command,
                OPTIONS,
                sources=files,
                may_fork=way == "forked",
            )
            for way in WAYS
        }
        steps_s: dict[str, list[float]] = {way: [] for way in WAYS}
        lasted_s: dict[str, list[float]] = {way: [] for way in WAYS}
        try:
            for bench in benches.values():  # fills the caches, and shows what the script imports
                bench.measure(ScriptPlan(), 0)
            for pair in range(1, pairs + 1):
                for way in WAYS if pair % 2 else reversed(WAYS):
                    began_s = time.perf_counter()
                    record = benches[way].measure(ScriptPlan(), pair)
                    lasted_s[way].append(time.perf_counter() - began_s)
                    assert record.measurement is not None, record.reason
                    steps_s[way].append(median(sample.wall_s for sample in record.measurement.timed))
        finally:
            benches["forked"].close()
    found = ratio_interval(*([[[step_s]] for step_s in steps_s[way]] for way in WAYS))
    return [
        program,
        *(f"{1e3 * median(steps_s[way]):.3g}" for way in WAYS),
        f"{found.ratio:.3f} ({found.low:.3f} … {found.high:.3f})",
        *(f"{stdev(map(log, steps_s[way])):.1%}" for way in WAYS),
        *(f"{median(lasted_s[way]):.1f}" for way in WAYS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="names of programs")
    parser.add_argument("--pairs", type=int, default=12, help="processes each way; at least 2")
    parser.add_argument("--output", type=Path, default=COMMITTED)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    rows = []
    for program in args.programs:
        rows.append(compared(program, args.pairs))
        print(*rows[-1], file=sys.stderr, flush=True)
    lines = [
        "# Forked trials compared with new processes",
        "",
        f"{args.pairs} processes each way by turns, each with {OPTIONS['steps']} timed steps, on {os.cpu_count()} CPU "
        "cores with one thread.",
        "",
        "| program | step, new (ms) | forked (ms) | forked over new | variation, new | forked | trial, new (s) "
        "| forked (s) |",
        "| --- | --: | --: | --- | --: | --: | --: | --: |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
