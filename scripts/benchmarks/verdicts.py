"""Can `compare` be believed? Pairs of real runs in separate processes, equal and with a planted 5% slowdown.

Method: a step of equal matrix products, and one with 5% more of them. Processes of both kinds are started in an order
that is shuffled, so that drift of the machine hits both alike; each measures `--rounds` rounds. Every comparison takes
processes that no other takes: `--pairs` of A with A, as many of A with B, `--processes` a side.
Output: how often A/A came out as "no difference" and A/B as "slower" (both must reach 95 in 100), as a markdown table,
and the medians of all processes as JSON lines in --out, from which the verdicts can be worked out again.

    python scripts/benchmarks/verdicts.py --pairs 100 --out profiles/verdicts
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import cs_systems
from cs_systems import stats
from cs_systems.config import RunConfig

PRODUCTS = {"a": 100, "b": 105}
SIZE = {"cpu": 128, "cuda": 2048}


class Products:
    """A step of `count` matrix products."""

    def __init__(self, config: RunConfig, device: object, count: int) -> None:
        torch.set_num_threads(1)
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


def measure(kind: str, args: argparse.Namespace) -> list[list[float]]:
    """One process: its timed samples by round."""
    config = RunConfig(
        workload=f"{__file__}:{kind}", warmup=5, steps=args.steps, rounds=args.rounds, device=args.device
    )
    record = cs_systems.run(config)
    if record.measurement is None:
        raise SystemExit(f"{record.status}: {record.reason}")
    rounds: list[list[float]] = [[] for _ in range(args.rounds)]
    for sample in record.measurement.timed:
        rounds[sample.round].append(sample.wall_s)
    return rounds


def verdicts(runs: dict[str, list[list[list[float]]]], pairs: int, processes: int) -> dict[str, Counter[str]]:
    """Compare disjoint groups of processes: A with A, and A with B."""
    found: dict[str, Counter[str]] = {"A/A": Counter(), "A/B": Counter()}
    groups = [runs["a"][i : i + processes] for i in range(0, len(runs["a"]), processes)]
    slower = [runs["b"][i : i + processes] for i in range(0, len(runs["b"]), processes)]
    for i in range(pairs):
        found["A/A"][stats.ratio_interval(groups[2 * i], groups[2 * i + 1]).verdict] += 1
        found["A/B"][stats.ratio_interval(groups[2 * i], slower[i]).verdict] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, help="a side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each on one core")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    order = ["a"] * (2 * args.pairs * args.processes) + ["b"] * (args.pairs * args.processes)
    random.Random(args.seed).shuffle(order)
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[list[float]]]] = {"a": [], "b": []}
    with (args.out / "processes.jsonl").open("w") as lines, ThreadPoolExecutor(args.jobs) as pool:
        for kind, rounds in zip(order, pool.map(lambda kind: measure(kind, args), order), strict=True):
            runs[kind].append(rounds)
            medians = [round(stats.quantile(r, 0.5), 9) for r in rounds]
            print(json.dumps({"kind": kind, "round_median_s": medians}), file=lines, flush=True)
    found = verdicts(runs, args.pairs, args.processes)
    table = ["| comparison | wanted | got it | of | all verdicts |", "|---|---|---:|---:|---|"]
    for name, wanted in (("A/A", "no difference"), ("A/B", "slower")):
        counts = ", ".join(f"{verdict} {n}" for verdict, n in found[name].most_common())
        table.append(f"| {name} | {wanted} | {found[name][wanted]} | {args.pairs} | {counts} |")
    text = "\n".join(table) + "\n"
    (args.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
