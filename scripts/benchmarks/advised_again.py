"""Gains that searches of `cs-systems advise` printed, measured again on another machine.

Question: do kept changes gain elsewhere too, and is the gain within what the search printed?
Method: for each program of advised_faults.py in which changes were kept (profiles/diagnosis_truth/advised.json), the
program as it is and with all of them run in turns, in pairs of processes of alternating order, until the 95% interval
of the gain is within 3% or the time of the program is up. A change is slower if its interval lies below 1; a gain is
within what was printed if the printed interval holds it. With --answers, searches of advised_scripts.py on two
machines are compared where both kept the same changes.
Output: one JSON file, and a markdown table of such files. Committed: profiles/diagnosis_truth/again.md.

    python scripts/benchmarks/advised_again.py --budget 60s --json again.json
    python scripts/benchmarks/advised_again.py --programs anomaly_mode --budget 60s --json again.json
    python scripts/benchmarks/advised_again.py --answers EARLIER LATER --json scripts.json  # measures nothing
    python scripts/benchmarks/advised_again.py --show again.json scripts.json --output table.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from advised_faults import ENVIRONMENT, copy_to, launcher_of, place

from cs_systems.advise.cells import machine
from cs_systems.advise.lever import ScriptPlan, Situation, all_levers
from cs_systems.advise.ranks import split
from cs_systems.advise.scripts import ScriptBench
from cs_systems.advise.search import Search
from cs_systems.advise.sources import sources
from cs_systems.cli._advise_script import MAY_FORK, recording_command
from cs_systems.cli._options import parse_seconds

ROOT = Path(__file__).parents[2]
PRINTED = ROOT / "profiles" / "diagnosis_truth" / "advised.json"
COMMITTED = PRINTED.with_name("again.md")
WARMUP, STEPS = 3, 20  # as advised_faults.py


@dataclass(frozen=True)
class Again:
    """Gain of the kept changes of a program, as printed, and as measured again; None if it was not measured."""

    program: str
    kept: tuple[str, ...]
    printed: float
    printed_low: float
    printed_high: float
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    reason: str = ""

    @property
    def verdict(self) -> str:
        if self.gain is None:
            return f"not measured: {self.reason}"
        if self.low is None or self.high is None or self.pairs == 1:
            return "one pair, which shows no variation"
        if self.high < 1:
            return "slower"
        if self.printed_low <= self.gain <= self.printed_high:
            return "within what was printed"
        more = "more" if self.gain > self.printed_high else "less"
        is_sure = self.low > self.printed_high or self.high < self.printed_low
        return f"{more} than printed" + ("" if is_sure else ", but the intervals overlap")


def measured(row: Mapping[str, Any], budget_s: float) -> Again:
    """Measure the kept changes of a program again, in a copy of its file, with all cores of this process."""
    program, kept = row["program"], (*row["kept"],)
    again = partial(Again, program, kept, row["gain"], row["low"], row["high"])
    original = place(program)
    launcher, words = split([*launcher_of(original), f"{program}.py"])
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        copy_to(folder, original)
        files = sources(Path(words[0]))
        recorder = {"name": program, "stop": True, "profile": "none", "warmup": WARMUP, "steps": STEPS}
        bench = ScriptBench(
            words,
            all_levers(),
            Path("out"),
            partial(recording_command, launcher),
            recorder,
            budget_s,
            sources=files,
            may_fork=not launcher and MAY_FORK,
        )
        situation = Situation(
            ScriptPlan(),
            machine("auto"),
            texts=tuple(each.text for each in files),
            has_ranks=bool(launcher),
        )
        search = Search(situation, bench.levers, bench)
        try:
            found = search.compared_with_start(ScriptPlan(kept))
        finally:
            bench.close()
    if found is None:
        return again(reason="a process failed")
    low, high = (1 / end if end else None for end in (found.high, found.low))
    return again(1 / found.ratio, low, high, sum(len(compared.pairs) for compared in search.comparisons))


def of_answers(earlier: Path, later: Path) -> list[Again]:
    """Return the gains of scripts that two searches, each in a folder of answers, reached with the same changes."""
    rows = []
    for file in sorted(earlier.glob("*.json")):
        then, now = (json.loads(each.read_text()) if each.exists() else {} for each in (file, later / file.name))
        kept = [(*answer.get("best", {}).get("levers", ()),) for answer in (then, now)]
        if not kept[0]:
            continue
        printed = [1 / then["whole"][name] for name in ("ratio", "high", "low")]
        if kept[0] != kept[1] or not now.get("whole"):
            rows.append(Again(then["script"], kept[0], *printed, reason="the later search kept other changes"))
            continue
        gain, low, high = (1 / now["whole"][name] for name in ("ratio", "high", "low"))
        rows.append(Again(then["script"], kept[0], *printed, gain, low, high))
    return rows


def table(rows: Sequence[Again]) -> str:
    known = [row for row in rows if row.low is not None and row.pairs != 1]
    slower = sum(row.verdict == "slower" for row in known)
    within = sum(row.verdict == "within what was printed" for row in known)
    lines = [
        "# Kept changes, measured again on another machine",
        "",
        f"{len(rows)} programs in which advise kept changes: {len(known)} were measured again in several pairs, of "
        f"which {slower} are slower, and {within} have a gain within what was printed.",
        "",
        "| program | kept | printed | interval | again | interval | pairs | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        interval = f"{row.low:.2f} … {row.high:.2f}" if row.low and row.high else ""
        again = (f"{row.gain:.2f}" if row.gain else "", interval)
        printed = f"{row.printed:.2f}", f"{row.printed_low:.2f} … {row.printed_high:.2f}"
        cells = (row.program, ", ".join(row.kept), *printed, *again, str(row.pairs or ""), row.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def keep(rows: Sequence[Again], file: Path | None) -> None:
    if file:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", help="names of programs; by default all with a kept change")
    parser.add_argument("--printed", type=Path, default=PRINTED, help="answers of advised_faults.py")
    parser.add_argument("--budget", default="60s", help="time of each program")
    parser.add_argument("--answers", type=Path, nargs=2, help="folders of answers of advised_scripts.py to compare")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing; make the table of these files")
    parser.add_argument("--output", type=Path, help="file for the table")
    args = parser.parse_args()
    if args.show:
        found = [Again(**row | {"kept": (*row["kept"],)}) for file in args.show for row in json.loads(file.read_text())]
        (args.output or COMMITTED).write_text(table(found))
        return
    rows = of_answers(*args.answers) if args.answers else []
    if not args.answers:
        os.environ |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))}
        printed = {row["program"]: row for row in json.loads(args.printed.read_text()) if row["kept"]}
        for name in args.programs or printed:
            rows.append(measured(printed[name], parse_seconds(args.budget, "--budget")))
            print(rows[-1], rows[-1].verdict, file=sys.stderr, flush=True)
            keep(rows, args.json)
    keep(rows, args.json)
    if args.output:
        args.output.write_text(table(rows))


if __name__ == "__main__":
    main()
