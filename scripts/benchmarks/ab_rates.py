"""Error rates of the sequential test of `ab`: equal programs called different, and planted slowdowns not found.

Method: a step of matrix products (A), and one with more of them (B): 10% more on a CPU, 3% more on a GPU. Pairs of new
processes run in the drawn orders of `ab`, one process at a time; each gives the median of its steps. They start ahead,
because most of their time is the import of torch, and wait for their turn before they touch the device. On a CPU they
compute on two cores, and the next ones start on others; without others none starts ahead. `--replay` plays comparisons
with the recorded times: of A with A, where an order is drawn for each two neighbouring processes of A, and of A with B,
with the orders in which the pairs ran. Blocks of neighbouring pairs are drawn with replacement, so that drift and slow
phases stay; the comparisons share processes and are not independent. `--live` runs whole comparisons with processes of
their own.
Output: how often each verdict came, the upper limit of each error's rate (Clopper & Pearson 1934, 95%, one-sided), and
the pairs that a verdict took, as a markdown table; all times as JSON lines, from which --replay judges anew.

    python scripts/benchmarks/ab_rates.py --record cuda cpu --out profiles/ab_rates/h100
    python scripts/benchmarks/ab_rates.py --live cuda cpu --out profiles/ab_rates/h100
    python scripts/benchmarks/ab_rates.py --replay --out profiles/ab_rates/h100
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median, stdev
from typing import Any, NamedTuple

from cs_systems.core.sequential import Pair, SequentialTest
from cs_systems.measure.runtime.pairs import Interleaved
from cs_systems.measure.runtime.program import Trial

PRODUCTS = {"cpu": {"A": 10, "B": 11}, "cuda": {"A": 100, "B": 103}}
# On a CPU no power of two: with rows of 256 numbers processes had three speeds, up to 1.5 times apart, and 13% of the
# slower programs were not found (profiles/ab_rates/cpu_256, with 40 steps a process, next to other programs).
SIZE = {"cpu": 320, "cuda": 1024}
SLOWDOWN = {device: counts["B"] / counts["A"] - 1 for device, counts in PRODUCTS.items()}
WARMUP, STEPS = 5, {"cpu": 200, "cuda": 40}
CORES = 2  # number of CPU cores that a process computes on
BLOCK = 5  # neighbouring pairs that stay together
MOST_PAIRS = 100
FILE, LIVE = "processes.jsonl", "live.jsonl"


def one(device: str, ahead: int) -> None:
    """Import torch, report that it is loaded, and measure the side (A or B) that standard input names.

    Runs in its own process.
    """
    cores = sorted(os.sched_getaffinity(0))
    others = cores[CORES:] if len(cores) >= CORES + ahead else cores
    os.sched_setaffinity(0, others)
    import torch

    print("ready", flush=True)
    side = sys.stdin.readline().strip()
    if not side:
        return
    os.sched_setaffinity(0, cores[:CORES] if device == "cpu" else cores)
    torch.set_num_threads(CORES)
    x = torch.randn(SIZE[device], SIZE[device], device=device)
    out, durations = torch.empty_like(x), []
    for _ in range(WARMUP + STEPS[device]):
        began_s = time.perf_counter()
        for _ in range(PRODUCTS[device][side]):
            torch.mm(x, x, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - began_s)
    print(median(durations[WARMUP:]), flush=True)


class Processes:
    """Processes that have imported torch and wait for their turn."""

    def __init__(self, device: str, ahead: int) -> None:
        self._device, self._ahead, self._waiting = device, ahead, deque[subprocess.Popen[str]]()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            process.kill()
            process.communicate()

    def measure(self, side: str) -> Trial:
        """Return the median step of a new process."""
        while len(self._waiting) < self._ahead:
            command = [sys.executable, __file__, "--one", self._device, "--ahead", str(self._ahead)]
            self._waiting.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        process = self._waiting.popleft()
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            return Trial(None, "did not start", has_failed=True)
        out, _ = process.communicate(f"{side}\n")
        if process.returncode:
            return Trial(None, f"exited with status {process.returncode}", has_failed=True)
        return Trial(float(out))


class Recorded(NamedTuple):
    """Pair of processes: seconds of A and B, whether A came first, and the chance of this order."""

    a: float
    b: float
    a_first: bool
    chance: float


def record(device: str, pairs: int, folder: Path, budget_s: float, ahead: int) -> None:
    """Run pairs of A and B in drawn orders, and write a line for each."""
    test, began_s = SequentialTest(SLOWDOWN[device]), time.monotonic()
    with Processes(device, ahead) as processes, (folder / FILE).open("a") as lines:
        for trial in range(-1, pairs):  # the first pair warms up
            if time.monotonic() - began_s > budget_s:
                print(f"{device}: {trial} of {pairs} pairs in {budget_s:g} s", file=sys.stderr)
                return
            order = ("A", "B") if test.draw() else ("B", "A")
            times = {side: processes.measure(side) for side in order}
            if trial < 0 or any(each.value is None for each in times.values()):
                continue
            a, b = (times[side].value or 0.0 for side in ("A", "B"))
            test.add(a, b)
            row = {"device": device, **Recorded(*test.pairs[-1])._asdict()}
            print(json.dumps(row), file=lines, flush=True)


def live(device: str, comparisons: int, folder: Path, budget_s: float, ahead: int) -> None:
    """Compare A with A and A with B in turn; write each verdict and its pairs."""
    began_s = time.monotonic()
    with Processes(device, ahead) as processes, (folder / LIVE).open("a") as lines:
        for number in range(comparisons):
            b = "AB"[number % 2]
            test = SequentialTest(SLOWDOWN[device])
            pairs = Interleaved(
                lambda side, b=b: processes.measure("A" if side == "A" else b),  # type: ignore[misc]
                test,
                most_pairs=MOST_PAIRS,
                first=number == 0,
            )
            for _ in pairs:
                pass
            row = {"device": device, "b": b, "verdict": test.verdict, "pairs": len(test.pairs)}
            print(json.dumps(row), file=lines, flush=True)
            if time.monotonic() - began_s > budget_s:
                print(f"{device}: {number + 1} of {comparisons} comparisons in {budget_s:g} s", file=sys.stderr)
                return


def blocks(count: int, source: random.Random) -> Iterator[int]:
    """Yield numbers of pairs without end: blocks of neighbours from random places, in a circle."""
    while True:
        begin = source.randrange(count)
        yield from ((begin + i) % count for i in range(BLOCK))


def replayed(pairs: list[Recorded], b: str, find: float, source: random.Random) -> tuple[str, int]:
    """Return the verdict of one comparison with recorded times, and the pairs that it took."""
    test = SequentialTest(find, seed=source.randrange(1 << 40))
    equal = [(x.a, y.a) for x, y in zip(pairs[::2], pairs[1::2], strict=False)]  # neighbours, in the order they ran
    for number in blocks(len(equal) if b == "A" else len(pairs), source):
        if b == "B":
            test.add_pair(Pair(*pairs[number]))
        else:
            first, second = equal[number]
            test.add(*((first, second) if test.draw() else (second, first)))
        if test.verdict != "undecided" or len(test.pairs) == MOST_PAIRS:
            return test.verdict, len(test.pairs)
    raise AssertionError("unreachable: blocks never end")


def upper_limit(errors: int, trials: int, confidence: float = 0.95) -> float:
    """Return the Clopper-Pearson upper limit of a rate: at this rate, this many errors or fewer have a chance of 5%."""
    low, high = errors / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logs = (
            [
                math.lgamma(trials + 1)
                - math.lgamma(k + 1)
                - math.lgamma(trials - k + 1)
                + k * math.log(middle)
                + (trials - k) * math.log1p(-middle)
                for k in range(errors + 1)
            ]
            if middle < 1
            else [-math.inf]
        )
        low, high = (middle, high) if sum(map(math.exp, logs)) > 1 - confidence else (low, middle)
    return high


def row_of(device: str, how: str, b: str, results: list[tuple[str, int]]) -> str:
    """Return the line of the table for comparisons of one kind."""
    counts = Counter(verdict for verdict, _ in results)
    wrong = counts["slower"] + counts["faster"] if b == "A" else len(results) - counts["slower"]
    taken = sorted(pairs for _, pairs in results)
    what = "A with A" if b == "A" else f"A with B, {SLOWDOWN[device]:.0%} slower"
    told = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    limit = upper_limit(wrong, len(results))
    median_pairs, most = taken[len(taken) // 2], taken[math.ceil(0.95 * len(taken)) - 1]
    error = "false alarms" if b == "A" else "not found"
    return (
        f"| {device} | {how} | {what} | {len(results)} | {told} | {error}: {wrong / len(results):.2%} | {limit:.2%} | "
        f"{median_pairs} | {most} |"
    )


def judged(folder: Path, trials: int, seed: int) -> str:
    """Return the table of all recorded and live comparisons, with the spread of the processes."""
    source = random.Random(seed)
    lines = [
        "| device | comparisons | compared | number | verdicts | error | upper limit | pairs | 95% of them |",
        "|---|---|---|---:|---|---:|---:|---:|---:|",
    ]
    notes = []
    recorded = [*_rows(folder / FILE)]
    for device in dict.fromkeys(row["device"] for row in recorded):
        pairs = [Recorded(*(row[name] for name in Recorded._fields)) for row in recorded if row["device"] == device]
        for b in "AB":
            found = [replayed(pairs, b, SLOWDOWN[device], source) for _ in range(trials)]
            lines.append(row_of(device, "replayed", b, found))
        notes.append(_spread(device, pairs))
    rows = [*_rows(folder / LIVE)]
    for device, b in dict.fromkeys((row["device"], row["b"]) for row in rows):
        results = [(row["verdict"], row["pairs"]) for row in rows if (row["device"], row["b"]) == (device, b)]
        lines.append(row_of(device, "live", b, results))
    return "\n".join([*lines, "", *notes]) + "\n"


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def _spread(device: str, pairs: list[Recorded]) -> str:
    of_a = stdev(math.log(pair.a) for pair in pairs)
    of_pair = stdev(math.log(pair.b / pair.a) for pair in pairs)
    ratio = median(pair.b / pair.a for pair in pairs)
    return (
        f"{device}: {len(pairs)} pairs; standard deviation of A's processes {of_a:.2%}, of a pair's ratio "
        f"{of_pair:.2%}; B took {ratio:.3f} times as long as A (median of the pairs).\n"
    )


def _ahead() -> int:
    """Return how many processes are started at a time, with the one that computes."""
    return max(1, min(6, len(os.sched_getaffinity(0)) - CORES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="+", default=[], choices=PRODUCTS, metavar="DEVICE", help="cpu, cuda")
    parser.add_argument("--live", nargs="+", default=[], choices=PRODUCTS, metavar="DEVICE", help="cpu, cuda")
    parser.add_argument("--replay", action="store_true", help="judge what --out holds; also done after the others")
    parser.add_argument("--pairs", type=int, default=100, help="pairs to record per device")
    parser.add_argument("--comparisons", type=int, default=20, help="live comparisons per device")
    parser.add_argument("--budget-s", type=float, default=160.0, help="time for each device")
    parser.add_argument(
        "--ahead", type=int, default=_ahead(), help="processes started at a time, with the one that computes"
    )
    parser.add_argument("--trials", type=int, default=1000, help="replayed comparisons of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the replays")
    parser.add_argument("--out", type=Path, help="folder of the times and the table")
    parser.add_argument("--one", choices=PRODUCTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.ahead)
        return
    if args.out is None or not (args.record or args.live or args.replay):
        parser.error("give --out FOLDER, and --record, --live or --replay")
    args.out.mkdir(parents=True, exist_ok=True)
    for device in args.record:
        record(device, args.pairs, args.out, args.budget_s, args.ahead)
    for device in args.live:
        live(device, args.comparisons, args.out, args.budget_s, args.ahead)
    text = judged(args.out, args.trials, args.seed)
    (args.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
