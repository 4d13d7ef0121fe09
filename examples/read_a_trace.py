"""Read a trace of nsys or torch.profiler, and print the kernel time by phase and the idle time of the GPU.

    python examples/read_a_trace.py [TRACE]

TRACE is a .json or .json.gz of torch.profiler, or an .sqlite or .nsys-rep of nsys; the default is a small trace of one
H200 that the tests use. Shows `read`, `profile` and the tables. Nothing here needs torch or a GPU.
"""

import sys
from pathlib import Path

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.tables import families, gaps, phases
from cs_systems.readers import read

SAMPLE = Path(__file__).parents[1] / "tests/data/kineto_h200_step.json.gz"


def main(trace: str | Path = SAMPLE) -> None:
    found = profile(read(Path(trace)))
    print(f"{len(found.steps)} steps, {found.phase_coverage:.0%} of the kernel time belongs to a phase")
    for row in phases(found):
        if row["family"] == "all":
            print(f"{row['phase']:<10} {row['time_s'] * 1e3:8.3f} ms of kernels in a step")
    for row in sorted(families(found), key=lambda row: -row["time_s"]):
        print(f"{row['family']:<10} {row['time_s'] * 1e3:8.3f} ms")
    for row in gaps(found):
        print(f"idle, {row['cause']:<15} {row['time_s'] * 1e3:8.3f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
