"""Proof of `cs-systems advise`: a plain step made 10 times as fast without a human choice, as it expected.

Question: how much faster does the step become, and do the expectations hold?

    pip install cuda-core cuda-bindings nvidia-cuda-nvrtc           # for the kernels in CUDA C++
    python3 scripts/benchmarks/advise_proof.py --budget 4m          # on one H100 or H200, in 5 minutes
    python3 scripts/benchmarks/advise_proof.py --show               # the page again, from the saved answer

Method: `cs-systems advise` begins with `small` at context 512 and batch 4, in fp32 with naive attention, eager, as
someone writes it first. It chooses everything else. The start and the best cell are measured again at the end, in
alternating processes; that ratio is the gain. The expectation of each kept lever was printed before its trial.
Output: profiles/advise/advice.json (every trial), figure.svg and table.md: the kept levers with expected and measured
steps, what was not kept and why, and the two goals: a gain of at least 10, and an expectation within 25% for half of
the kept levers. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cs_systems.advise.answer import CLOSE
from cs_systems.report.advice import OTHERS, WATERFALL, Advice, TrialRow
from cs_systems.report.figures import plot
from cs_systems.report.figures.waterfall import waterfall
from cs_systems.report.tables.rows import render_table

FOLDER = Path("profiles/advise")
START = (
    "--size",
    "small",
    "--context-length",
    "512",
    "--batch-size",
    "4",
    "--precision",
    "fp32",
    "--attention",
    "naive",
)
LEAST_GAIN, LEAST_SHARE = 10.0, 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--out", type=Path, default=Path("runs/advise_proof"), help="folder of the records")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the page")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args, more = parser.parse_known_args(argv)
    if not args.show:
        command = [
            sys.executable,
            "-m",
            "cs_systems",
            "advise",
            *START,
            "--budget",
            args.budget,
            "--out",
            str(args.out),
        ]
        subprocess.run([*command, *more], check=True)
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "advice.json").write_bytes((args.out / "advice.json").read_bytes())
    advice = json.loads((args.folder / "advice.json").read_text())
    plot.write(lambda: waterfall(drawn(advice)), args.folder / "figure.svg")
    page = "\n".join(text(advice))
    (args.folder / "table.md").write_text(page)
    print(page)
    return 0 if all(met for _, met in goals(advice)) else 1


def goals(advice: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each goal as a sentence, with whether it is met."""
    gain = 1 / advice["whole"]["ratio"] if advice["whole"] else 1.0
    yield f"at least {LEAST_GAIN:g} times as fast: {gain:.2f}", gain >= LEAST_GAIN
    kept = [row for row in advice["trials"] if row["status"] == "kept"]
    off = [abs(row["expected_s"] / row["step_s"] - 1) for row in kept if row["expected_s"]]
    close = sum(error <= CLOSE for error in off)
    words = f"{close} of {len(kept)} kept levers have an expectation within {CLOSE:.0%}"
    if off:
        words += f"; the median of those with one is off by {median(off):.1%}"
    yield f"{words} (half is the goal)", bool(kept) and close >= LEAST_SHARE * len(kept)


def drawn(advice: Mapping[str, Any]) -> Advice:
    """Return the start and the kept levers, and the options that were not kept."""
    rows = advice["trials"]
    first = {**dict.fromkeys(TrialRow.__annotations__), "lever": "start", "change": " ".join(START)}
    kept = [row for row in rows if row["status"] == "kept"]
    others = [row for row in rows if row["status"] != "kept" and row["change"]]
    first["step_s"] = advice["start_s"]
    return Advice(advice["goal"], (*advice["sentences"],), (first, *kept), (*others,))


def text(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    search = drawn(advice)
    kept = search.waterfall[1:]
    yield "# Does advise make a plain step 10 times as fast by itself, and do its expectations hold?\n"
    yield f"One {advice['device']}, by `scripts/benchmarks/advise_proof.py`. {advice['sentences'][0]}.\n"
    yield from (f"- {'met' if met else 'missed'}: {words}" for words, met in goals(advice))
    yield from (f"- {text}\n" for text in advice["sentences"][1:])
    yield "![The step after each kept lever, with what was expected](figure.svg)\n"
    yield render_table(WATERFALL["time"], search.waterfall, "markdown")
    yield from (f"- {row['lever']}: {row['numbers']}" for row in kept if row["numbers"])
    yield ""
    yield render_table(OTHERS, search.others, "markdown")
    yield f"Best: `{' '.join(advice['command'])}`\n"


if __name__ == "__main__":
    sys.exit(main())
