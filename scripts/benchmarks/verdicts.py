"""Error rates of the verdicts of `compare`, on equal runs and on runs with a planted 5% slowdown.

Method: a step of matrix products (A), and one with 5% more of them (B). Processes of both kinds run in a shuffled
order, so that drift of the machine hits both alike; each measures `--rounds` rounds. Processes may start beside each
other (`--jobs`), which is most of their time; one at a time touches the device. A comparison takes 1, 3 or 5 processes
a side that no other takes (disjoint); with one a side, also every pair there is, more but not independent.
Output: how often A/A came out as "no difference" and A/B as "slower" (the aim: 95 in 100 of both), how much rounds and
processes varied, as a markdown table; and the medians of all rounds as JSON lines, from which --again judges anew.

    python scripts/benchmarks/verdicts.py --processes 100 --out profiles/verdicts/h200
    python scripts/benchmarks/verdicts.py --again profiles/verdicts/h200
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev

import torch

import cs_systems
from cs_systems.config import RunConfig
from cs_systems.core import statistics

PRODUCTS = {"a": 100, "b": 105}
SIZE = {"cpu": 128, "cuda": 1024}
FILE = "processes.jsonl"
TURN = Path(tempfile.gettempdir()) / "cs_systems-verdicts.lock"
Rounds = list[list[float]]
Pair = tuple[tuple[Rounds, ...], tuple[Rounds, ...]]


class Products:
    """Step of `count` matrix products."""

    def __init__(self, config: RunConfig, device: object, count: int) -> None:
        torch.set_num_threads(1)
        # Until this process ends, and before it touches the device: another's start disturbs a step by 15%.
        self.turn = TURN.open("w")
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        place = device.torch  # type: ignore[attr-defined]
        self.count = count
        self.x = torch.randn(SIZE[place.type], SIZE[place.type], device=place)
        self.out = torch.empty_like(self.x)

    def prepare(self) -> None:
        return

    def step(self):  # type: ignore[no-untyped-def]
        return (("products", self.multiply),)

    def multiply(self) -> None:
        for _ in range(self.count):
            torch.mm(self.x, self.x, out=self.out)

    def cost(self) -> None:
        return None

    def describe(self) -> dict[str, object]:
        return {"tokens": None, "products": self.count}


def a(config: RunConfig, device: object) -> Products:
    return Products(config, device, PRODUCTS["a"])


def b(config: RunConfig, device: object) -> Products:
    return Products(config, device, PRODUCTS["b"])


def measure(kind: str, args: argparse.Namespace) -> Rounds:
    """Return the timed samples of one process by round."""
    config = RunConfig(
        workload=f"{__file__}:{kind}", warmup=5, steps=args.steps, rounds=args.rounds, device=args.device
    )
    record = cs_systems.run(config)
    if record.measurement is None:
        raise SystemExit(f"{record.status}: {record.reason}")
    rounds: Rounds = [[] for _ in range(args.rounds)]
    for sample in record.measurement.timed:
        rounds[sample.round].append(sample.wall_s)
    return rounds


def judge(runs: dict[str, list[Rounds]]) -> str:
    """Return the verdicts as a markdown table, with the spread of the samples."""
    lines = ["| processes a side | comparisons | A/A: no difference | A/B: slower |", "|---|---|---:|---:|"]
    for size in (1, 3, 5):
        a, b = (list(zip(*[iter(runs[kind])] * size, strict=False)) for kind in "ab")
        equal = list(zip(a[::2], a[1::2], strict=False))
        lines.append(_row(size, "disjoint", equal, list(zip(a, b, strict=False))))
    singles = {kind: [(process,) for process in runs[kind]] for kind in "ab"}
    equal, planted = itertools.combinations(singles["a"], 2), itertools.product(singles["a"], singles["b"])
    lines.append(_row(1, "all pairs", list(equal), list(planted)))
    return "\n".join([*lines, "", _spread(runs)]) + "\n"


def _row(size: int, which: str, equal: list[Pair], planted: list[Pair]) -> str:
    counts = []
    for pairs, wanted in ((equal, "no difference"), (planted, "slower")):
        right = sum(statistics.ratio_interval(x, y).verdict == wanted for x, y in pairs)
        counts.append(f"{right} of {len(pairs)}")
    return f"| {size} | {which} | {counts[0]} | {counts[1]} |"


def _spread(runs: dict[str, list[Rounds]]) -> str:
    logs = [[math.log(median(samples)) for samples in rounds] for rounds in runs["a"]]
    between = stdev(fmean(process) for process in logs)
    within = fmean(stdev(process) for process in logs)
    ratio = math.exp(
        median(fmean(map(math.log, map(median, rounds))) for rounds in runs["b"]) - median(map(fmean, logs))
    )
    return (
        f"{len(runs['a'])} processes of A, {len(runs['b'])} of B; standard deviation of the round medians "
        f"within a process of A {within:.2%}, between processes {between:.2%}; B took {ratio:.3f} times as long as A"
    )


def load(folder: Path) -> dict[str, list[Rounds]]:
    runs: dict[str, list[Rounds]] = {"a": [], "b": []}
    for line in (folder / FILE).read_text().splitlines():
        row = json.loads(line)
        runs[row["kind"]].append([[m] for m in row["round_median_s"]])
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=100, help="number of processes of A; B has half as many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that run at the same time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder to measure into")
    where.add_argument("--again", type=Path, help="folder of earlier measurements to judge")
    args = parser.parse_args()
    if args.out:
        experiment(args)
    folder = args.out or args.again
    text = judge(load(folder))
    (folder / "table.md").write_text(text)
    print(text)


def experiment(args: argparse.Namespace) -> None:
    order = ["a"] * args.processes + ["b"] * (args.processes // 2)
    random.Random(args.seed).shuffle(order)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / FILE).open("w") as lines, ThreadPoolExecutor(args.jobs) as pool:
        for kind, rounds in zip(order, pool.map(lambda kind: measure(kind, args), order), strict=True):
            medians = [round(median(samples), 9) for samples in rounds]
            print(json.dumps({"kind": kind, "round_median_s": medians}), file=lines, flush=True)


if __name__ == "__main__":
    main()
