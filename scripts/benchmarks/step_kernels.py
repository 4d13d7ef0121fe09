"""Kernels of the captured training step of `fast`: the time each takes in it, and the counters that show what binds it.

    python3 scripts/benchmarks/step_kernels.py --sizes small medium --contexts 512 --json kernels.json

Question: where is the time of a step that is above its floor, and what holds those kernels? Method: torch.profiler
records replays of the step's graph, so that each kernel has its time within the step. Then one step with the kernels of
four blocks, uncaptured, runs under ncu, which counts each kernel alone and on cold caches; the clock is left as it is.
Kernels of one kind are one row: their counters are means, weighted by time. Output: a table for each size and context,
and the rows as JSON. Needs a Hopper GPU, and ncu on PATH.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from training_step import step_flops

from cs_systems.config import Mode, RunConfig, preset
from cs_systems.core.recipes import RECIPES
from cs_systems.formulas import cost
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads.train_step import TrainStep

STEPS, REPLAYS = 40, 5  # timed, and under torch.profiler
COUNTED_BLOCKS = 4  # as many as share a launch of their update
COUNTERS = {
    "seconds": "gpu__time_duration.sum",
    "sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_share": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
SHARES = tuple(name for name in COUNTERS if name != "seconds")
SECONDS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0}
UPDATE, FORWARD, BACKWARD = "update in products", "SwiGLU in products, forward", "SwiGLU in products, backward"
PRODUCTS, ATTENTION = "other products", "attention"
KINDS = {
    UPDATE: r"^update_weights",
    FORWARD: r"^gated_forward",
    BACKWARD: r"^gated_backward",
    PRODUCTS: r"^nvjet|gemm|cutlass",
    ATTENTION: r"^attend_",
    "norms": r"^rms_norm|^norm_sum",
    "rotation": r"^rotary",
    "AdamW of the other weights": r"^adamw",
}
REST = "rest"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-step", action="store_true", help="only run a step of a few blocks, for ncu")
    args = parser.parse_args()
    device = resolve("cuda")
    if args.one_step:
        one_step(args.sizes[0], args.contexts[0], device)
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu is not on PATH; add the folder of CUDA's tools, or install nsight-compute")
    rows = []
    for context in args.contexts:
        for size in args.sizes:
            rows.append(row_of(size, context, device))
            print("\n".join(table(rows[-1])), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def fast(size: str, context: int) -> RunConfig:
    model = replace(preset(size), context_length=context)
    return RunConfig(model=model, **RECIPES["fast"].of(Mode.TRAIN_STEP))


def row_of(size: str, context: int, device: Device) -> dict[str, Any]:
    """Return the time of the step and of its kernels, and their counters, by kind."""
    device.release_memory()
    torch._dynamo.reset()
    workload = TrainStep(fast(size, context), device)
    seconds = [s.wall_s for s in measure(workload, device, warmup=10, steps=STEPS) if not s.warmup]
    tenths = quantiles(seconds, n=10)
    row: dict[str, Any] = {"size": size, "context": context, "device": device.name, "step_s": median(seconds)}
    row |= {"step_p10_s": tenths[0], "step_p90_s": tenths[-1]}
    kernels = list(in_the_step(workload, device))
    row["busy_s"] = busy_s(kernels) / REPLAYS
    del workload
    counted, flops = counters(size, context), model_flops(fast(size, context))
    row["kinds"] = [
        {
            "kind": kind,
            "flops": flops.get(kind),
            "calls": sum(kind_of(name) == kind for name, *_ in kernels) / REPLAYS,
            "seconds": sum(end - start for name, start, end in kernels if kind_of(name) == kind) / REPLAYS,
            **mean([each for each in counted if kind_of(each["kernel"]) == kind]),
        }
        for kind in (*KINDS, REST)
    ]
    return row


def model_flops(config: RunConfig) -> dict[str, int]:
    """Return the model FLOPs of each kind of kernel that has some; they add up to those of the step."""
    shape, tokens = config.model, config.batch_size * config.tokens_per_sequence
    gate = 2 * tokens * shape.d_model * shape.d_ff * shape.num_layers
    weights = cost.block_parameter_count(shape) - 2 * shape.d_model  # without the norms'
    found = {
        UPDATE: 2 * tokens * shape.num_layers * weights,
        FORWARD: 2 * gate,
        BACKWARD: gate,
        ATTENTION: 6 * tokens * config.tokens_per_sequence * shape.d_model * shape.num_layers,  # half is masked
    }
    return found | {PRODUCTS: step_flops(config) - sum(found.values())}


Kernel = tuple[str, float, float]
"""Name, start and end in seconds."""


def in_the_step(workload: TrainStep, device: Device) -> Iterator[Kernel]:
    """Yield the kernels, copies and fills of some replays of the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        list(measure(workload, device, warmup=0, steps=REPLAYS))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def busy_s(kernels: list[Kernel]) -> float:
    """Return how long at least one kernel ran."""
    total, until = 0.0, 0.0
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


def counters(size: str, context: int) -> list[dict[str, Any]]:
    """Return the counters of each kernel of one step of a few blocks."""
    options = [f"--metrics={','.join(COUNTERS.values())}", "--csv", "--page=raw"]
    options += ["--profile-from-start=off", "--clock-control=none"]
    cell = ["--one-step", "--sizes", size, "--contexts", str(context)]
    command = ["ncu", *options, sys.executable, __file__, *cell]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units, *counted = csv.DictReader(lines[header:])
    return [
        {
            "kernel": each["Kernel Name"],
            "seconds": float(each[COUNTERS["seconds"]].replace(",", "")) * SECONDS[units[COUNTERS["seconds"]]],
            **{name: float(each[COUNTERS[name]].replace(",", "")) / 100 for name in SHARES},
        }
        for each in counted
    ]


def one_step(size: str, context: int, device: Device) -> None:
    config = fast(size, context)
    few = replace(config, graph="none", model=replace(config.model, num_layers=COUNTED_BLOCKS))
    workload = TrainStep(few, device)
    list(measure(workload, device, warmup=4, steps=1))
    torch.cuda.cudart().cudaProfilerStart()
    list(measure(workload, device, warmup=0, steps=1))
    torch.cuda.cudart().cudaProfilerStop()


def mean(kernels: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each counter, weighted by time; None without kernels."""
    total = sum(each["seconds"] for each in kernels)
    return {name: sum(each[name] * each["seconds"] for each in kernels) / total if total else None for name in SHARES}


def table(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{row['size']} {row['context']} on {row['device']}: step {1e3 * row['step_s']:.2f} ms "
        f"({1e3 * row['step_p10_s']:.2f}–{1e3 * row['step_p90_s']:.2f}), busy {1e3 * row['busy_s']:.2f}"
    )
    for kind in row["kinds"]:
        shares = " ".join("    –" if kind[name] is None else f"{kind[name]:5.0%}" for name in SHARES)
        yield f"  {kind['kind']:<30} {kind['calls']:6.1f} × {1e3 * kind['seconds']:8.3f} ms  {shares}"


if __name__ == "__main__":
    sys.exit(main())
