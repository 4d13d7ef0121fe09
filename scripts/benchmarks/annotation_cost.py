"""Cost of annotations, off and on.

Method: the median over repeats of a loop of one `with annotate(...)`, less the loop itself, when nobody listens, with
NVTX ranges (no profiler attached) and with record_function (no profiler running); and a whole training step of `tiny`
with and without its hooks, whose ranges go nowhere, in turns.
Output: a markdown table on standard output. Committed: profiles/annotation_cost/.

    python scripts/benchmarks/annotation_cost.py
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch

from cs_systems.config import RunConfig, preset
from cs_systems.instrument.annotate import NvtxRanges, Ranges, RecordFunctionRanges, annotate, listening
from cs_systems.instrument.hooks import annotated
from cs_systems.machine.device import resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads.train_step import TrainStep

REPEATS, CALLS = 15, 20_000


class Nowhere:
    """Ranges that cost nothing, so that only the cost of the hooks remains."""

    def push(self, name: str) -> None:
        return

    def pop(self) -> None:
        return


def call_s(run: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / CALLS)
    return median(times)


def empty() -> None:
    for _ in range(CALLS):
        pass


def ranges() -> None:
    for _ in range(CALLS):
        with annotate("attention"):
            pass


def annotation_s(listener: Ranges | None) -> float:
    with listening(listener) if listener else nullcontext():
        return call_s(ranges) - call_s(empty)


def step_s(size: str, rounds: int) -> tuple[float, float, int]:
    """Return (median step without hooks, with them, blocks of the model)."""
    device = resolve("auto")
    workload = TrainStep(RunConfig(model=preset(size), device="auto"), device)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for watched, into in zip((False, True), times, strict=True):
            with annotated(Nowhere(), workload.model) if watched else nullcontext():
                into.extend(s.wall_s for s in measure(workload, device, warmup=2, steps=5) if not s.warmup)
    return median(times[0]), median(times[1]), workload.config.model.num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="preset whose training step is timed")
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds, each with and without hooks")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    print(f"python {platform.python_version()}, torch {torch.__version__}, {where}\n")
    print("| one range | cost (µs) |\n|---|---:|")
    print(f"| nobody listens | {annotation_s(None) * 1e6:.3f} |")
    print(f"| NVTX, no profiler attached | {annotation_s(NvtxRanges()) * 1e6:.3f} |")
    print(f"| record_function, no profiler running | {annotation_s(RecordFunctionRanges()) * 1e6:.3f} |\n")
    without, watched, blocks = step_s(args.size, args.rounds)
    print(f"| training step of {args.size} | ms |\n|---|---:|")
    print(f"| without hooks | {without * 1e3:.3f} |")
    print(f"| with the hooks of all modules and of backward | {watched * 1e3:.3f} |")
    print(f"| more, each block | {(watched - without) / blocks * 1e3:.3f} |")


if __name__ == "__main__":
    main()
