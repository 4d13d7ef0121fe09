"""Time that the harness adds to a step.

Method: one process, one model. Rounds of steps under `timing.measure` alternate with rounds of a bare loop over the
same step (synchronise, read the clock, forward, loss, backward, optimizer, synchronise, read the clock), so that drift
hits both alike.
Output: a markdown table of medians, their ratio and its interval over the rounds; the promise is a ratio within 0.5%
of 1 on a GPU and within 2% on a CPU. As JSON lines with --json.

    python scripts/benchmarks/harness_overhead.py --size small xl --context-length 256 --rounds 10 --steps 10
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch

from cs_systems.config import RunConfig, preset
from cs_systems.core import statistics
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.model.training.losses import cross_entropy


def bare_loop(workload: TrainStep, device: Device, steps: int) -> list[float]:
    """Time steps with the loop that a careful engineer writes by hand."""
    model, optimizer = workload.model, workload.optimizer
    assert optimizer is not None
    durations = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        device.synchronize()
        start = time.perf_counter()
        loss = cross_entropy(model(workload.tokens), workload.targets)
        loss.backward()
        optimizer.step()
        device.synchronize()
        durations.append(time.perf_counter() - start)
    return durations


def compare(config: RunConfig, rounds: int, steps: int) -> dict[str, object]:
    """Alternate both loops over one model; every other round swaps their order."""
    device = resolve(config.device)
    torch.manual_seed(config.seed)
    workload = TrainStep(Cell(config), device)
    bare_loop(workload, device, 3)
    list(measure(workload, device, warmup=3, steps=1))
    bare: list[list[float]] = []
    harness: list[list[float]] = []
    for round in range(rounds):
        kinds = ["bare", "harness"] if round % 2 else ["harness", "bare"]
        for kind in kinds:
            if kind == "bare":
                bare_loop(workload, device, 1)
                bare.append(bare_loop(workload, device, steps))
            else:
                samples = measure(workload, device, warmup=1, steps=steps)
                harness.append([s.wall_s for s in samples if not s.warmup])
    ratios = [median(h) / median(b) for h, b in zip(harness, bare, strict=True)]
    low, high = statistics.interval([[r] for r in ratios])[:2]
    return {
        "size": config.model.label,
        "context_length": config.tokens_per_sequence,
        "batch_size": config.batch_size,
        "device": device.name,
        "torch": torch.__version__,
        "rounds": rounds,
        "steps": steps,
        "bare_median_s": median(d for r in bare for d in r),
        "harness_median_s": median(d for r in harness for d in r),
        "ratio_median": median(ratios),
        "ratio_ci_low": low,
        "ratio_ci_high": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["tiny", "small"])
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--attention", default="sdpa_math")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| size | context | bare ms | harness ms | harness / bare | interval |\n|---|---:|---:|---:|---:|---|")
    for size in args.size:
        model = preset(size, context_length=args.context_length)
        config = RunConfig(model=model, batch_size=args.batch_size, attention=args.attention)
        row = compare(config, args.rounds, args.steps)
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"| {row['size']} | {row['context_length']} | {1e3 * row['bare_median_s']:.3f} | "  # type: ignore[operator]
            f"{1e3 * row['harness_median_s']:.3f} | {row['ratio_median']:.4f} | "  # type: ignore[operator]
            f"{row['ratio_ci_low']:.4f} … {row['ratio_ci_high']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
