"""Random faults against sweeps, in cells, ranks, disks and by a person.

Method: COUNT faults, made from SEED and always the same, in sweeps of faulty cells among innocent ones, each sweep in a
folder of its own through the public command. A sweep that was cut is run again until it is complete. Then its files and
its processes are judged: every cell has one record that counts (`lost`, `doubled`), a faulty one says what that fault
must give (`wrong`), an innocent one is ok and saw an untouched process (`contaminated`), no process or temporary file
outlives the run (`left`), no run exceeds a generous deadline (`hung`), the same command may be given again (`refused`),
the program shows no traceback of its own (`traceback`), and what was on disk stays byte for byte (`changed`).
Output: a line a failure, with the command that repeats it; then a table of families and counts. The exit status is 0
if every count is 0. For Linux; the full disk needs root and is a limit on the size of files elsewhere.

    python scripts/benchmarks/fault_campaign.py 1000 1 > profiles/overhead/faults.md
    python scripts/benchmarks/fault_campaign.py 1000 1 --sweep 17 --keep /tmp/kept
    python scripts/benchmarks/fault_campaign.py 20 3 --only forks state.changes
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from _fault_oracle import CATEGORIES, label
from _fault_plan import FAMILIES, MIXED, Sweep, plan
from _fault_sweeps import INNOCENT, Outcome, adopt_orphans, calibrate, play
from _fault_workload import CATALOGUE


def known_names() -> list[str]:
    return [*FAMILIES, *(f"{fault.family}.{name}" for name, fault in CATALOGUE.items())]


def list_faults(sweeps: Sequence[Sweep]) -> None:
    """Print the plan, one line per fault."""
    for sweep in sweeps:
        print(f"sweep {sweep.number} ({sweep.family}, {sweep.face}): {sweep.options}")
        for cell in sweep.cells:
            print(f"    {label(cell) if cell['fault'] else 'innocent'}")
        for event in sweep.events:
            print(f"    {event}")


def repeat_command(args: argparse.Namespace, sweep: Sweep) -> str:
    only = ["--only", *args.only] if args.only else []
    words = [str(args.count), str(args.seed), *only, "--sweep", str(sweep.number)]
    return shlex.join(["fault_campaign.py", *words])


def tell(args: argparse.Namespace, outcome: Outcome) -> None:
    """Print one line per failure."""
    sweep = outcome.sweep
    for failure in outcome.failures:
        print(f"{failure.category} · {sweep.family} · {failure.where}: {failure.what} → {repeat_command(args, sweep)}")
    kept = f"; kept in {outcome.kept}" if outcome.kept else ""
    news = f"sweep {sweep.number}: {sweep.family}, {sweep.faults} faults, {outcome.wall_s:.1f} s"
    print(f"{news}, {len(outcome.failures)} failures{kept}", file=sys.stderr, flush=True)
    sys.stdout.flush()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by family as a Markdown table."""
    rows = ["| family | faults | " + " | ".join(CATEGORIES) + " |", "|---|" + "---:|" * (len(CATEGORIES) + 1)]
    families = [name for name in (INNOCENT, *FAMILIES, MIXED) if any(o.sweep.family == name for o in outcomes)]
    for name in (*families, "all"):
        own = [o for o in outcomes if name in (o.sweep.family, "all")]
        counts = Counter(failure.category for o in own for failure in o.failures)
        cells = [sum(o.sweep.faults for o in own), *(counts[category] for category in CATEGORIES)]
        rows.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, metavar="COUNT", help="number of faults")
    parser.add_argument("seed", type=int, metavar="SEED", help="seed of the plan")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FAMILY",
        help="run only these families or faults (FAMILY.FAULT)",
    )
    parser.add_argument("--sweep", nargs="+", type=int, metavar="NUMBER", help="run only these sweeps of the plan")
    parser.add_argument("--jobs", type=int, default=2, help="number of sweeps at the same time (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of sweeps that failed")
    parser.add_argument("--list", action="store_true", help="print the plan and run nothing")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.only if name not in known_names()]:
        parser.error(f"unknown family or fault {unknown[0]!r}; choose from {', '.join(FAMILIES)}, or FAMILY.FAULT")
    return args


def main() -> int:
    args = arguments()
    sweeps = plan(args.count, args.seed, args.only)
    if args.sweep:
        sweeps = [sweep for sweep in sweeps if sweep.number in args.sweep]
    if args.list:
        list_faults(sweeps)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, context, adopt_orphans) as pool:
        faces = sorted({sweep.face for sweep in sweeps})
        calibrated = dict(zip(faces, pool.map(calibrate, faces), strict=True))
        outcomes = [outcome for _, outcome in calibrated.values()]
        expected = {face: seen for face, (seen, _) in calibrated.items()}
        for outcome in outcomes:
            tell(args, outcome)
        waiting = [pool.submit(play, sweep, expected[sweep.face], args.keep) for sweep in sweeps]
        try:
            for done in as_completed(waiting):
                outcomes.append(done.result())
                tell(args, outcomes[-1])
        except KeyboardInterrupt:
            print("interrupted: the sweeps that run now are let end", file=sys.stderr)
            pool.shutdown(cancel_futures=True)
    wall_s, faults = time.monotonic() - began, sum(outcome.sweep.faults for outcome in outcomes)
    print(f"\n{table(outcomes)}\n\n{faults} faults of seed {args.seed} in {len(outcomes)} sweeps, {wall_s:.0f} s")
    return 1 if any(outcome.failures for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
