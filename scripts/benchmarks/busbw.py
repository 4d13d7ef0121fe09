"""Bus bandwidth of `cs-systems comm` beside that of nccl-tests' method.

Method: one process a rank, one pair of buffers a size. Rounds of samples under `timing.measure`, as `comm` takes them,
alternate with rounds of a bare loop as nccl-tests has it (ranks meet; synchronise, read the clock, 20 calls,
synchronise, read the clock; mean over the calls and over the ranks), so that drift hits both alike; every other round
the order is swapped.
Output: a markdown table of medians, and of the rounds' ratios with their interval; the promise is a busbw within 3%
where the calls last longer than their launches. Where they do not, the bare loop tells how long Python takes to launch
one (`launch` of the table), and ours how long it lasts. As JSON lines with --json.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/benchmarks/busbw.py --size 1MiB:1GiB
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cs_systems.cli.comm import parse_sizes
from cs_systems.config import RunConfig
from cs_systems.core import statistics
from cs_systems.core.collectives import COLLECTIVES, CollectiveShape, busbw, calls_for, readable_bytes
from cs_systems.machine import process_group
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads.collective import Collective

ITERATIONS, WARMUP = 20, 5  # nccl-tests' -n and -w
PATIENCE_S = 60.0


def over_ranks(value: float, operation: Any, device: Device) -> float:
    number = torch.tensor(value, dtype=torch.float64, device=device.torch)
    dist.all_reduce(number, operation)
    return float(number)


def bare_loop(workload: Collective, device: Device, calls: int) -> tuple[float, float]:
    """Return (seconds a call, of them the host's to launch it), in the mean over the ranks."""
    process_group.wait_for_all(device)
    started = time.perf_counter()
    for _ in range(calls):
        workload.call()
    launched = time.perf_counter()
    device.synchronize()
    ended = time.perf_counter()
    whole, launch = (
        over_ranks((t - started) / calls, dist.ReduceOp.SUM, device) / process_group.size() for t in (ended, launched)
    )
    return whole, launch


def ours(workload: Collective, device: Device, samples: int) -> float:
    """Return the seconds per call: the median over the samples, each of which is the straggler's."""
    taken = [s.phases_s["transfer"] for s in measure(workload, device, warmup=1, steps=samples) if not s.warmup]
    slowest = torch.tensor(taken, dtype=torch.float64, device=device.torch)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(median(slowest.tolist())) / workload.shape.calls


def compare(shape: CollectiveShape, device: Device, rounds: int, samples: int) -> dict[str, object]:
    config = RunConfig(workload="collective", collective=shape, world_size=process_group.size())
    workload = Collective(config, device)
    bare_loop(workload, device, WARMUP)
    ours(workload, device, 1)
    bare, launches, own = [], [], []
    for number in range(rounds):
        for kind in ("bare", "own") if number % 2 else ("own", "bare"):
            if kind == "own":
                own.append(ours(workload, device, samples))
            else:
                whole, launch = bare_loop(workload, device, ITERATIONS)
                bare.append(whole)
                launches.append(launch)
    ratios = [b / o for b, o in zip(bare, own, strict=True)]  # of bandwidths: ours over nccl-tests'
    low, high = statistics.interval([[r] for r in ratios])[:2]
    return {
        "collective": shape.collective,
        "size_bytes": shape.size_bytes,
        "dtype": shape.dtype,
        "world_size": process_group.size(),
        "device": device.name,
        "torch": torch.__version__,
        "rounds": rounds,
        "bare_call_s": median(bare),
        "launch_s": median(launches),
        "own_call_s": median(own),
        "bare_busbw_bytes_per_s": busbw(shape.collective, shape.size_bytes, process_group.size(), median(bare)),
        "own_busbw_bytes_per_s": busbw(shape.collective, shape.size_bytes, process_group.size(), median(own)),
        "ratio_median": median(ratios),
        "ratio_ci_low": low,
        "ratio_ci_high": high,
    }


def line(row: dict[str, Any]) -> str:
    times = " | ".join(f"{1e6 * row[name]:,.1f}" for name in ("launch_s", "bare_call_s", "own_call_s"))
    rates = " | ".join(f"{row[f'{who}_busbw_bytes_per_s'] / 1e9:.3f}" for who in ("bare", "own"))
    interval = f"{row['ratio_ci_low']:.4f} … {row['ratio_ci_high']:.4f}" if row["ratio_ci_low"] else "–"
    size = readable_bytes(row["size_bytes"])
    return f"| {row['collective']} | {size} | {times} | {rates} | {row['ratio_median']:.4f} | {interval} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", nargs="+", default=["all_reduce"], choices=COLLECTIVES)
    parser.add_argument("--size", nargs="+", default=["1MiB:1GiB"])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=10, help="number of samples in a round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = resolve(args.device)
    process_group.join(device, PATIENCE_S)
    is_first = process_group.rank() == 0
    if is_first and not args.json:
        print("| collective | size | launch µs | nccl-tests µs | ours µs | nccl-tests GB/s | ours GB/s | ratio | |")
        print("|---|---|--:|--:|--:|--:|--:|--:|---|", flush=True)
    for collective in args.collective:
        for size in dict.fromkeys(size for text in args.size for size in parse_sizes(text)):
            shape = CollectiveShape(collective, size, args.dtype, calls_for(size))
            row = compare(shape, device, args.rounds, args.samples)
            if is_first:
                print(json.dumps(row) if args.json else line(row), flush=True)
    process_group.leave()


if __name__ == "__main__":
    main()
