"""Measure a baseline and a candidate in several processes, and ask whether the difference is real.

    python examples/compare_two_runs.py [FOLDER]

Shows `repeats` and `interleave`, which reveal the variance that one process hides, and the verdict of `compare`. On
the command line: `cs-systems compare FOLDER/baseline FOLDER/candidate`.
"""

import sys
from pathlib import Path

import cs_systems
from cs_systems import RunConfig, preset
from cs_systems.analysis.comparison.runs import compare


def main(folder: str = "runs/compare-two-runs") -> None:
    runs = []
    for name, attention in (("baseline", "naive"), ("candidate", "sdpa_flash")):
        config = RunConfig(model=preset("tiny"), batch_size=1, attention=attention, steps=10, rounds=2)
        out = Path(folder) / name
        list(cs_systems.sweep([config], out=out, repeats=2, interleave=True))
        records, _unreadable_lines = cs_systems.read_records(out)
        runs.append(records)

    result = compare(*runs, phases=["step", "forward", "backward"])
    for row in result.rows:
        print(f"{row['phase']:<8} {row['ratio']:.3f} times the baseline: {row['verdict']}")
    for doubt in result.doubts:
        print("caution:", doubt)


if __name__ == "__main__":
    main(*sys.argv[1:])
