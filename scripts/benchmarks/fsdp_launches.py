"""Cost of strategies on the host and of sharding, each against the model alone in one group of ranks.

Question: how much of the host does a strategy take? And sharded, by `fsdp` or PyTorch's FSDP2, how long is a step, and
    how much memory does it need at its peak?
Method: `launches` is a model of 24 blocks that are so small that a step is the host's work alone: per phase the
    processor time of the thread that submits it (on a CPU, where that is backward's too; waiting for peers is not
    counted) or the time until it is submitted (on a GPU), and how many operators a step asks for. `host` is that time
    for every data-parallel strategy at `medium` (on a CPU with the tiny blocks), all resident and visited in turn, and
    is meant for one rank, where nobody waits for a peer. `behind_s` says what a time is worth: how far the device was
    behind when backward was submitted. It takes about a thousand launches in advance, so up to some milliseconds
    nothing made the host wait, and `host_s` is its work alone. What NCCL plans for several ranks is not in it,
    nor are FSDP2's collectives, of which it starts none then.
    `medium` and `2.7B` are real steps: round by round each variant is built anew, runs steps that are not timed and
    then the timed ones; a step is the slowest rank's, the peak the largest rank's. `alone` is the model on each rank
    without communication. All run under bf16 autocast; the sharded ones gather and reduce in bf16. A rank's rows are
    --batch-size.
Output: a row per variant in DIR/SCALE.jsonl, DIR/SCALE.md and on the terminal, with medians and 10% and 90% quantiles.
    DIR is of one machine: a second run of a scale replaces the first. What was measured: profiles/fsdp_launches/.

    torchrun --standalone --nproc-per-node 1 scripts/benchmarks/fsdp_launches.py --scale host
    torchrun --standalone --nproc-per-node 2 scripts/benchmarks/fsdp_launches.py --scale launches
    torchrun --standalone --nproc-per-node 2 scripts/benchmarks/fsdp_launches.py --scale full --budget-s 60
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cs_systems.config import ModelConfig, Phase, Precision, preset
from cs_systems.core import statistics
from cs_systems.machine import process_group
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.model import BasicTransformerLM
from cs_systems.model.parallel import ParallelStrategy, compose
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.training.optimizers import optimizer_class
from cs_systems.report.tables.rows import render_rows

ALONE, PATIENCE_S = "alone", 120.0
Variant = tuple[str, dict[str, Any]]  # a strategy and its options
VARIANTS: dict[str, Variant] = {
    ALONE: ("", {}),
    "fsdp": ("fsdp", {}),
    "torch_fsdp2": ("torch_fsdp2", {}),
    "torch_fsdp2, no reshard": ("torch_fsdp2", {"reshard_after_forward": False}),
}
STRATEGIES: dict[str, Variant] = {
    ALONE: ("", {}),
    "torch_ddp": ("torch_ddp", {}),
    "torch_ddp 100 MB, view": ("torch_ddp", {"bucket_size_mb": 100, "gradient_as_bucket_view": True}),
    "torch_ddp 1000 MB, view": ("torch_ddp", {"bucket_size_mb": 1000, "gradient_as_bucket_view": True}),
    "torch_ddp 1 byte, view": ("torch_ddp", {"bucket_size_mb": 2**-20, "gradient_as_bucket_view": True}),
    "ddp_naive": ("ddp_naive", {}),
    "ddp_flat": ("ddp_flat", {}),
    "ddp_overlap": ("ddp_overlap", {}),
    "ddp_overlap, one thread": ("ddp_overlap", {"send_thread": False}),
    "ddp_bucketed 25 MB": ("ddp_bucketed", {"bucket_size_mb": 25}),
    "ddp_bucketed 100 MB": ("ddp_bucketed", {"bucket_size_mb": 100}),
    "ddp_bucketed 25 MB, one thread": ("ddp_bucketed", {"bucket_size_mb": 25, "send_thread": False}),
    "ddp_bucketed 100 MB, one thread": ("ddp_bucketed", {"bucket_size_mb": 100, "send_thread": False}),
    "ddp_bucketed 1000 MB": ("ddp_bucketed", {"bucket_size_mb": 1000}),
    "zero1_flat": ("zero1_flat", {}),
    "fsdp": ("fsdp", {}),
    "torch_fsdp2": ("torch_fsdp2", {}),
}
SCALES = {
    "host": ["host"],
    "launches": ["launches"],
    "medium": ["medium"],
    "2.7B": ["2.7B"],
    "full": ["launches", "medium", "2.7B"],
}
TINY = ModelConfig("launches", 64, 128, num_layers=24, num_heads=2, vocab_size=64, context_length=8)


class Step:
    """Training step of one variant."""

    def __init__(self, variant: Variant, config: ModelConfig, rows: int, attention: str, device: Device) -> None:
        torch.manual_seed(0)
        with device.torch:
            model = BasicTransformerLM(config, attention)
            torch.manual_seed(process_group.rank())
            self.tokens, self.targets = (
                torch.randint(config.vocab_size, (rows, config.context_length)) for _ in range(2)
            )
        name, options = variant
        if name in ("fsdp", "torch_fsdp2"):
            options = {"compute_dtype": torch.bfloat16, **options}
        self.strategy = compose(name, **options) if name else ParallelStrategy()
        self.model = self.strategy.wrap(model)
        cls, how = optimizer_class("adamw_fused")
        self.optimizer = self.strategy.make_optimizer(self.model.parameters(), cls, **how)
        self.device = device
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        self.loss = None
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        yield Phase.BACKWARD, self._backward
        yield Phase.OPTIMIZER, self.optimizer.step

    def _forward(self) -> None:
        with self.device.autocast(Precision.BF16):
            self.loss = cross_entropy(self.model(self.tokens), self.targets)

    def _backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.strategy.finish_gradients(self.model)


def on_thread(step: Step, steps: int) -> list[dict[str, float]]:
    """Return the processor time of this thread by phase, for each of some steps."""
    found = []
    for _ in range(steps):
        step.prepare()
        process_group.wait_for_all(step.device)
        row = {}
        for phase, run in step.step():
            began = time.thread_time()
            run()
            row[f"{phase}_host_s"] = time.thread_time() - began
        found.append(row)
    return found


def submitted(step: Step, steps: int) -> list[dict[str, float]]:
    samples = [x for x in measure(step, step.device, warmup=1, steps=steps) if not x.warmup]  # type: ignore[arg-type]
    step.prepare()  # its gradients would count as memory during the other variants' steps
    return [
        {f"{phase}_host_s": s for phase, s in x.submit_s.items()}
        | {"behind_s": (x.lag_s or {})[Phase.BACKWARD], "step_s": x.wall_s}
        for x in samples
    ]


def operators(step: Step) -> int:
    """Return the number of operators of a step, nested ones included."""
    from torch.profiler import ProfilerActivity, profile

    step.prepare()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _, run in step.step():
            run()
    return sum(event.name.startswith(("aten::", "c10d::")) for event in profiler.events())


def launches(
    variants: dict[str, Variant], config: ModelConfig, rows: int, args: argparse.Namespace, device: Device
) -> list[dict[str, Any]]:
    """Measure all variants, which are on the GPU at the same time, in turn."""
    began = time.monotonic()
    steps = {name: Step(variant, config, rows, args.attention, device) for name, variant in variants.items()}
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in steps}
    host = submitted if device.is_cuda else on_thread
    for step in steps.values():
        host(step, 3)
    for number in range(args.rounds):
        if process_group.agreed(number > 0 and time.monotonic() - began > args.budget_s, device):
            break
        for variant, step in steps.items():
            found[variant] += host(step, args.steps)
        say(f"round {number}")
    results = []
    for variant, samples in found.items():
        host_s = [s["forward_host_s"] + s["backward_host_s"] for s in samples]
        results.append(
            {
                "variant": variant,
                "host_s": median(host_s),
                "p10_s": quantile(host_s, 0.1),
                "p90_s": quantile(host_s, 0.9),
                **{name: median(s[name] for s in samples) for name in samples[0]},
            }
        )
        if device.is_cuda:
            results[-1]["steps_s"] = largest([s["step_s"] for s in samples], device)
            results[-1]["step_s"] = median(results[-1]["steps_s"])
        if variants is VARIANTS:  # of all strategies this would take a minute
            results[-1]["operators"] = operators(steps[variant])
    for row in results:
        row["of_strategy_s"] = row["host_s"] - results[0]["host_s"]
    return beside_torchs_best(results, args.steps)


def beside_torchs_best(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Add the ratio to the step of PyTorch's fastest DDP in the same round, with its 95% interval, to the rows.

    Without steps of PyTorch's DDP, the rows stay as they are. steps: steps of a round.
    """
    timed = {row["variant"]: row["steps_s"] for row in rows if "steps_s" in row}
    torchs = [name for name in timed if name.startswith("torch_ddp")]
    if not torchs:
        return rows

    def rounds(variant: str) -> list[float]:
        return [median(timed[variant][i : i + steps]) for i in range(0, len(timed[variant]), steps)]

    best = rounds(min(torchs, key=lambda name: median(timed[name])))
    for row in rows:
        ratios = [own / its for own, its in zip(rounds(row["variant"]), best, strict=True)]
        low, high = statistics.interval([[ratio] for ratio in ratios])[:2]
        row |= {"of_torchs_best": median(ratios), "ratio_ci_low": low, "ratio_ci_high": high}
    return rows


def visit(variant: str, config: ModelConfig, args: argparse.Namespace, device: Device) -> dict[str, list[float]]:
    """Measure the steps of a variant that is built for this visit."""
    step = Step(VARIANTS[variant], config, args.batch_size, args.attention, device)
    list(measure(step, device, warmup=3, steps=1))  # type: ignore[arg-type]
    device.reset_peaks()
    samples = list(measure(step, device, warmup=0, steps=args.steps))  # type: ignore[arg-type]
    peak = device.peak_allocated_bytes() or math.nan
    del step
    gc.collect()
    if device.is_cuda:
        torch.cuda.empty_cache()
    mine = {
        "step_s": [s.wall_s for s in samples],
        "host_s": [s.submit_s["forward"] + s.submit_s["backward"] for s in samples],
        "peak_bytes": [peak],
    }
    return {name: largest(values, device) for name, values in mine.items()}


def largest(values: list[float], device: Device) -> list[float]:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device.torch)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def real_steps(size: str, args: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    began = time.monotonic()
    config = preset(size, context_length=args.context_length)
    found: dict[str, dict[str, list[float]]] = {variant: {} for variant in VARIANTS}
    for number in range(args.rounds):
        for variant in VARIANTS:
            if process_group.agreed(number > 0 and time.monotonic() - began > args.budget_s, device):
                break
            for name, values in visit(variant, config, args, device).items():
                found[variant].setdefault(name, []).extend(values)
            say(f"{size}, round {number}: {variant}: {1e3 * median(found[variant]['step_s']):.2f} ms")
    return [
        {
            "variant": variant,
            "step_s": median(of["step_s"]),
            "p10_s": quantile(of["step_s"], 0.1),
            "p90_s": quantile(of["step_s"], 0.9),
            "exposed_s": median(of["step_s"]) - median(found[ALONE]["step_s"]),
            "host_s": median(of["host_s"]),
            "peak_bytes": None if math.isnan(max(of["peak_bytes"])) else max(of["peak_bytes"]),
            "samples": len(of["step_s"]),
        }
        for variant, of in found.items()
    ]


def is_tiny(scale: str, device: Device) -> bool:
    return scale == "launches" or (scale == "host" and not device.is_cuda)


def measured(scale: str, args: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    if scale not in ("host", "launches"):
        return real_steps(scale, args, device)
    config, rows = preset("medium", context_length=args.context_length), args.batch_size
    if is_tiny(scale, device):
        config, rows = TINY, 1
    chosen = {name: v for name, v in STRATEGIES.items() if name == ALONE or re.search(args.only, name)}
    return launches(chosen if scale == "host" else VARIANTS, config, rows, args, device)


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def publish(scale: str, rows: list[dict[str, Any]], args: argparse.Namespace, device: Device) -> None:
    """Write and print the rows, on rank 0."""
    if process_group.rank():
        return
    stamp = {"scale": scale, "ranks": process_group.size(), "device": device.name, "torch": torch.__version__}
    if not is_tiny(scale, device):
        stamp |= {name: getattr(args, name) for name in ("batch_size", "context_length", "attention")}
    (args.out / f"{scale}.jsonl").write_text("".join(json.dumps(stamp | row) + "\n" for row in rows))
    rows = [{name: value for name, value in row.items() if name != "steps_s"} for row in rows]
    table = render_rows(rows, "markdown", ", ".join(f"{name} {value}" for name, value in stamp.items()))
    (args.out / f"{scale}.md").write_text(table)
    print(table, flush=True)


def say(text: str) -> None:
    if not process_group.rank():
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="launches")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4, help="batch size of each rank")
    parser.add_argument("--attention", default="naive")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="regular expression: strategies of `host` to run, besides `alone`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="start no new round of a size after this many seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp_launches"))
    args = parser.parse_args()
    device = resolve(args.device)
    process_group.join(device, PATIENCE_S)
    args.out.mkdir(parents=True, exist_ok=True)
    for scale in SCALES[args.scale]:
        publish(scale, measured(scale, args, device), args, device)
    process_group.leave()


if __name__ == "__main__":
    main()
