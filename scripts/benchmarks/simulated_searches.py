"""Simulated searches of `cs-systems advise`, whose processes vary by a known amount.

Question: does a search keep the option that gains, none that does not, and how wide is the interval of the whole gain?
Method: a script with six levers that apply, of which one or none makes the step shorter. The step of each process is
drawn from a log-normal distribution, and each process takes 5 s of a simulated clock, 25 s with torch.compile. The
search is that of the command; only its processes are made up. A gain is claimed where the interval of the whole gain
excludes 1.
Output: a markdown table. Committed: profiles/advised_scripts/simulated.md. Some minutes.

    python scripts/benchmarks/simulated_searches.py --searches 100 --output profiles/advised_scripts/simulated.md
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from cs_systems.advise.budget import Budgeted
from cs_systems.advise.cells import machine
from cs_systems.advise.lever import Cell, Lever, ScriptChange, ScriptPlan, Situation, all_levers
from cs_systems.advise.numerics import Check
from cs_systems.advise.search import Search
from cs_systems.config import RunConfig
from cs_systems.record import Environment, Measurement, RunRecord, Sample

LEVERS = ("more_workers", "bf16", "compile", "tf32", "fused_optimizer", "channels_last")
STEP_S, STEPS, STEP_SD = 0.05, 20, 0.03
PROCESS_S, COMPILING_S = 5.0, 25.0
BUDGETS_S, VARIATIONS = (170.0, 400.0, 600.0), (0.02, 0.05, 0.1, 0.25)
GAINS: tuple[dict[str, float], ...] = ({"more_workers": 2.5}, {"tf32": 1.18}, {})
HEAD = (
    "| budget (s) | processes vary by | lever that gains | true gain | kept | another kept | a gain claimed | "
    "half width, median | in the interval |"
)


@dataclass
class Simulated(Budgeted):
    """Bench of a script on a simulated clock: `gains` is how many times as fast a step is with a lever."""

    budget_s: float
    variation: float
    gains: dict[str, float]
    seed: int
    environment: Environment
    now_s: float = 0.0
    drawn: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.clock, self.drawn = lambda: self.now_s, random.Random(self.seed)
        super().__post_init__()

    def measure(self, cell: Cell, number: int) -> RunRecord:
        assert isinstance(cell, ScriptPlan)
        took_s = COMPILING_S if "compile" in cell.levers else PROCESS_S
        self.now_s += took_s
        self.took(took_s)
        step_s = STEP_S * math.exp(self.drawn.gauss(0, self.variation)) / self.true_gain(cell.levers)
        steps_s = [step_s * math.exp(self.drawn.gauss(0, STEP_SD)) for _ in range(STEPS)]
        samples = tuple(Sample(0, False, each, {"forward": each}, {"forward": 0.0}) for each in steps_s)
        return RunRecord(
            "", RunConfig().to_dict(), "ok", number, None, self.environment, Measurement("host", samples, 0.0)
        )

    def true_gain(self, levers: tuple[str, ...]) -> float:
        return math.prod(self.gains.get(name, 1.0) for name in levers)

    def check(self, cell: Cell) -> Check:
        return Check(True, "")


def levers() -> dict[str, Lever]:
    """Return the levers, with their usual gains and costs, as if each applied and changed no numbers."""
    known = all_levers()
    return {
        name: replace(known[name], numbers="", script=ScriptChange(name, lambda situation: None)) for name in LEVERS
    }


def searched(budget_s: float, variation: float, gains: dict[str, float], searches: int) -> str:
    """Return the row of a table for searches with these gains."""
    here = machine("cpu")
    kept = others = claimed = held = 0
    widths = list[float]()
    for seed in range(searches):
        bench = Simulated(budget_s, variation, gains, seed, here)
        search = Search(Situation(ScriptPlan(), here, texts=("",)), levers(), bench)
        search.run()
        answer = search.answer()
        names = tuple(row["lever"] for row in answer.trials if row["status"] == "kept")
        kept += {*gains} <= {*names}
        others += not {*names} <= {*gains}
        if answer.whole and answer.whole.low and answer.whole.high:
            widths.append((answer.whole.high - answer.whole.low) / 2 / answer.whole.ratio)
            claimed += answer.whole.high < 1
            held += answer.whole.low <= 1 / bench.true_gain(names) <= answer.whole.high
    of_lever = [(name, gain, f"{kept} of {searches}") for name, gain in gains.items()] or [("none", "", "")]
    width, inside = (f"{median(widths):.1%}", f"{held} of {len(widths)}") if widths else ("", "")
    counts = (f"{count} of {searches}" for count in (others, claimed))
    cells = (f"{budget_s:.0f}", f"{variation:.0%}", *of_lever[0], *counts, width, inside)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100, help="searches of each kind")
    parser.add_argument("--output", type=Path, help="file for the table; by default it is printed")
    args = parser.parse_args()
    rows = [
        searched(budget_s, variation, gains, args.searches)
        for budget_s in BUDGETS_S
        for variation in VARIATIONS
        for gains in GAINS
    ]
    text = "\n".join(
        (
            "# Simulated searches of advise",
            "",
            f"{args.searches} searches a row by `scripts/benchmarks/simulated_searches.py`: six levers apply, of which "
            f"one gains or none; processes of {PROCESS_S:.0f} s, with torch.compile {COMPILING_S:.0f} s.",
            "",
            HEAD,
            f"|{' ---: |' * HEAD.count(' |')}",
            *rows,
            "",
        )
    )
    if args.output:
        args.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
