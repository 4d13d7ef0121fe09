"""Share of each planted fault: the time of a case's loop with the fault and without it.

Question: how much of the time of a program in diagnosis_truth/faults/ does its planted fault take?
Method: a case that declares `without`, replacements of its text that remove the fault, runs as it is and without it, in
turns. The time is that between the third and the last backward pass. Wall time counts waits; CPU time of the process is
less disturbed by other programs. The share is 1 − without ÷ with, from the fastest runs of each.
Output: a line for each case, for the constant CASE of its file.

    python scripts/benchmarks/planted_shares.py                    # all cases that declare it, about 5 minutes
    python scripts/benchmarks/planted_shares.py too_many_threads --runs 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    """Time the cases, or one file in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=["*"], metavar="NAME", help="names of cases, or patterns")
    parser.add_argument("--runs", type=int, default=3, help="runs of each program (default: 3)")
    parser.add_argument("--timed", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.timed:
        return timed(options.timed)
    from diagnosis_truth import cases

    for case in cases(patterns=options.cases):
        if not case.without:
            continue
        text = case.path.read_text()
        mended = replaced(text, case.without)
        found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
        for _ in range(options.runs):
            found["with"].append(run(case.path.name, text, case.ranks))
            found["without"].append(run(case.path.name, mended, case.ranks))
        least = {name: {key: min(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()}
        words = [f"{case.kind}/{case.name}:"]
        for key in ("wall_s", "cpu_s"):
            before, after = least["with"][key], least["without"][key]
            words.append(f"{key} {before:.3f} → {after:.3f} ({1 - after / before:.0%}),")
        before, after = least["with"]["grown_bytes"], least["without"]["grown_bytes"]
        print(*words, f"memory grows by {before / 2**20:.1f} and {after / 2**20:.1f} MiB", flush=True)
    return 0


def replaced(text: str, without: tuple[tuple[str, str], ...]) -> str:
    """Return the program without its fault; its constant CASE, which quotes the same text, stays."""
    end = text.index("\n}\n", text.index("\nCASE = ")) + 3
    head, body = text[:end], text[end:]
    for old, new in without:
        if old not in body:
            raise ValueError(f"the program has no text {old!r} to replace")
        body = body.replace(old, new)
    return head + body


def run(name: str, text: str, ranks: int) -> dict[str, float]:
    """Run a program in new processes, and return what its first rank measured."""
    with tempfile.TemporaryDirectory(prefix="planted_shares_") as folder:
        path = Path(folder) / name
        path.write_text(text)
        words = [__file__, "--timed", str(path)]
        if ranks > 1:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"wall_s"')]
        if not lines:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
        return json.loads(lines[0])


def timed(path: Path) -> int:
    """Run a program in this process, and print the time of its loop and how its memory grew."""
    import torch

    seen: list[tuple[float, float, int]] = []
    backward = torch.Tensor.backward

    def stamped(self: torch.Tensor, *args: object, **options: object) -> None:
        backward(self, *args, **options)  # type: ignore[arg-type]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seen.append((time.perf_counter(), time.process_time(), peak))

    torch.Tensor.backward = stamped  # type: ignore[method-assign,assignment]
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
    first, last = seen[2], seen[-1]
    if os.environ.get("RANK", "0") == "0":
        print(
            json.dumps({"wall_s": last[0] - first[0], "cpu_s": last[1] - first[1], "grown_bytes": last[2] - first[2]})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
