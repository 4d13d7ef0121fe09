"""Options of a data-parallel step of one model, each measured in turn in one group of processes.

Question: which of these makes a step shorter: larger buckets, gradients averaged where they lie instead of copied, a
    prioritised stream, fewer thread blocks for NCCL, multiprocessors that matrix products leave to it, gradients that
    travel as bf16?
Method: the ranks build one model and one optimizer. Round by round each variant wraps the model, runs two steps that
    are not timed and then the timed ones, and is taken off again; `alone` is the same step on each rank without any
    communication. A step is the slowest rank's. Then each variant's step is recorded once, apart from the timing.
Output: a row per variant in DIR/variants.jsonl and a table: median and spread of the step, what it exposes (its median
    less that of `alone`), and from the recording of the slower rank hidden and exposed communication, what computing
    takes longer than alone, and how long the device waits longer.

    torchrun --standalone --nproc-per-node 2 scripts/benchmarks/ddp_variants.py --size 2.7B --out runs/ddp_variants
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cs_systems.analysis.attribution.overlap import median_row, reconcile, streams
from cs_systems.config import ConfigError, Phase, Precision, preset
from cs_systems.instrument.annotate import RecordFunctionRanges, listening
from cs_systems.machine import process_group
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.model import BasicTransformerLM
from cs_systems.model.parallel._collectives import communicator
from cs_systems.model.parallel._data_parallel import DataParallel, by_size, one_each
from cs_systems.model.parallel._narrowed import NarrowedDataParallel
from cs_systems.model.parallel.ddp_flat import OneTensor
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.training.optimizers import make_optimizer
from cs_systems.readers._kineto import read
from cs_systems.report.tables.rows import render_rows

ALONE, PATIENCE_S, WARMUP = "alone", 60.0, 2
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Variant:
    """Data-parallel strategy with options.

    carveout: multiprocessors that matrix products leave free during backward. blas: library of these products.
    """

    name: str
    wrap: Wrap
    carveout: int | None = None
    blas: str | None = None


@cache
def group(max_ctas: int | None, high_priority: bool) -> dist.ProcessGroup | None:
    """Return one communicator for all variants with the same options."""
    return communicator(None, max_ctas, high_priority)


def own(kind: type[DataParallel] = DataParallel, size_mb: float = 100.0, **how: Any) -> Wrap:
    """Return one of our variants with buckets; size 0: one per parameter. last_mb: size of the bucket sent last."""
    how = {"send_thread": True, **how}
    last_bytes = how.pop("last_mb") * 2**20 if "last_mb" in how else None
    buckets = partial(by_size, size_bytes=size_mb * 2**20, last_bytes=last_bytes) if size_mb else one_each
    ctas, priority = how.pop("ctas", None), how.pop("priority", False)
    return lambda model: kind(
        model, buckets, overlap=how.get("overlap", True), group=group(ctas, priority), **rest(how)
    )


def rest(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name != "overlap"}


def torchs(size_mb: float | None, view: bool, bf16: bool = False, priority: bool = False) -> Wrap:
    def wrap(model: nn.Module) -> nn.Module:
        size: dict[str, Any] = {} if size_mb is None else {"bucket_cap_mb": size_mb}
        made = DistributedDataParallel(model, gradient_as_bucket_view=view, process_group=group(None, priority), **size)
        if bf16:
            made.register_comm_hook(None, bf16_compress_hook)
        return made

    return wrap


def variants(on_gpu: bool) -> list[Variant]:
    """Return the variants, the most informative first. Without NCCL, variants that need it are left out."""
    found = [
        Variant(ALONE, lambda model: model),
        Variant("torch_ddp", torchs(None, view=False)),
        Variant("torch_ddp 100 MB, view", torchs(100, view=True)),
        Variant("torch_ddp 1000 MB, view", torchs(1000, view=True)),
        Variant("ddp_overlap", own(size_mb=0)),
        Variant("ddp_bucketed 25 MB", own(size_mb=25)),
        Variant("ddp_bucketed 100 MB", own()),
        Variant("ddp_bucketed 100 MB, copied", own(OneTensor)),
        Variant("ddp_bucketed 100 MB, bf16", own(NarrowedDataParallel, dtype=torch.bfloat16)),
        Variant("torch_ddp 100 MB, view, bf16", torchs(100, view=True, bf16=True)),
        Variant("ddp_bucketed 1000 MB", own(size_mb=1000)),
        Variant("ddp_bucketed 500 MB, last 25 MB", own(size_mb=500, last_mb=25)),
        Variant("ddp_bucketed 1000 MB, last 25 MB", own(size_mb=1000, last_mb=25)),
        Variant("ddp_bucketed 2000 MB, last 25 MB", own(size_mb=2000, last_mb=25)),
        Variant("ddp_flat", own(OneTensor, math.inf, overlap=False)),
    ]
    if not on_gpu:
        return found
    return [
        *found[:7],
        Variant("ddp_bucketed 100 MB, priority", own(priority=True)),
        Variant("ddp_bucketed 100 MB, 16 CTAs", own(ctas=16)),
        Variant("ddp_bucketed 100 MB, 8 CTAs", own(ctas=8)),
        Variant("ddp_bucketed 100 MB, 16 CTAs, carve-out", own(ctas=16), carveout=16),
        Variant("ddp_bucketed 100 MB, 16 CTAs, carve-out, cublasLt", own(ctas=16), carveout=16, blas="cublaslt"),
        Variant("ddp_bucketed 100 MB, 32 CTAs, carve-out, cublasLt", own(ctas=32), carveout=32, blas="cublaslt"),
        Variant(
            "ddp_bucketed 1000 MB, last 25 MB, 16 CTAs, carve-out, cublasLt",
            own(size_mb=1000, last_mb=25, ctas=16),
            carveout=16,
            blas="cublaslt",
        ),
        Variant(f"{ALONE}, cublasLt", lambda model: model, blas="cublaslt"),
        Variant("ddp_bucketed 100 MB, bf16, 16 CTAs", own(NarrowedDataParallel, dtype=torch.bfloat16, ctas=16)),
        *found[7:],
    ]


class Step:
    """Training step of the shared model, wrapped by one variant."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        torch.manual_seed(0)
        config = preset(args.size, context_length=args.context_length)
        with device.torch:
            self.model = BasicTransformerLM(config, args.attention)
            torch.manual_seed(process_group.rank())
            self.tokens, self.targets = (
                torch.randint(config.vocab_size, (args.batch_size, args.context_length)) for _ in range(2)
            )
        self.optimizer = make_optimizer("adamw_fused", self.model.parameters())
        self.device, self.precision = device, Precision(args.precision)
        self.wrapped: nn.Module = self.model
        self.variant: Variant | None = None
        self.loss: torch.Tensor | None = None
        self.blas: Any = None  # the library preferred before

    def put_on(self, variant: Variant) -> None:
        self.variant, self.wrapped = variant, variant.wrap(self.model)
        if variant.blas:
            self.blas = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library(variant.blas)

    def take_off(self) -> None:
        """Restore the model without hooks; PyTorch's DDP removes its own when it is freed."""
        for p in self.model.parameters():
            p.grad = None
            if p._post_accumulate_grad_hooks:
                p._post_accumulate_grad_hooks.clear()
        if self.blas is not None:
            torch.backends.cuda.preferred_blas_library(self.blas)
            self.blas = None
        gone = weakref.ref(self.wrapped)
        self.wrapped, self.loss = self.model, None
        gc.collect()
        self.device.release_memory()
        if gone() not in (None, self.model):
            raise RuntimeError(f"{type(gone()).__name__} of {self.variant and self.variant.name} is still alive")

    def prepare(self) -> None:
        self.loss = None
        self.model.zero_grad(set_to_none=True)

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        yield Phase.BACKWARD, self._backward
        if isinstance(self.wrapped, DataParallel):
            yield "synchronize", self.wrapped.finish_gradient_synchronization
        yield Phase.OPTIMIZER, self.optimizer.step

    def _forward(self) -> None:
        with self.device.autocast(self.precision):
            self.loss = cross_entropy(self.wrapped(self.tokens), self.targets)

    def _backward(self) -> None:
        assert self.loss is not None
        carveout = self.variant.carveout if self.variant else None
        if carveout is not None:
            torch._C._set_sm_carveout_experimental(carveout)
        self.loss.backward()
        if carveout is not None:
            torch._C._set_sm_carveout_experimental(None)


def visit(step: Step, variant: Variant, steps: int) -> list[float]:
    """Return the slowest rank's times of some steps."""
    step.put_on(variant)
    samples = measure(step, step.device, warmup=WARMUP, steps=steps)  # type: ignore[arg-type]
    mine = torch.tensor([s.wall_s for s in samples if not s.warmup], dtype=torch.float64, device=step.device.torch)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    step.take_off()
    return mine.tolist()


def recorded(step: Step, variant: Variant, folder: Path) -> dict[str, Any]:
    """Return the faster of two steps of this rank under torch.profiler, as described by `overlap`."""
    from torch.profiler import ProfilerActivity, profile

    step.put_on(variant)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.device.is_cuda else [])]
    list(measure(step, step.device, warmup=WARMUP, steps=1))  # type: ignore[arg-type]
    with profile(activities=activities) as profiler, listening(RecordFunctionRanges()):
        list(measure(step, step.device, warmup=0, steps=2))  # type: ignore[arg-type]
    step.take_off()
    path = folder / f"rank{process_group.rank()}.trace.json"
    profiler.export_chrome_trace(str(path))
    row = median_row(streams(read(path)))
    path.unlink()
    return row


def run(args: argparse.Namespace) -> None:
    device = resolve(args.device)
    process_group.join(device, PATIENCE_S)
    args.out.mkdir(parents=True, exist_ok=True)
    began, step = time.monotonic(), Step(args, device)
    chosen = [v for v in variants(device.is_cuda) if v.name == ALONE or re.search(args.only, v.name)]
    times: dict[str, list[float]] = {v.name: [] for v in chosen}
    for number in range(args.rounds):
        for variant in list(chosen):
            if process_group.agreed(number > 0 and time.monotonic() - began > args.budget_s, device):
                break
            try:
                times[variant.name] += visit(step, variant, args.steps)
            except (
                ConfigError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # the same on all ranks: this option does not exist here
                step.take_off()
                chosen.remove(variant)
                say(f"{variant.name} is left out: {error}")
                continue
            say(f"round {number}: {variant.name}: {1e3 * median(times[variant.name]):.2f} ms")
    rows = [summary(args, device, v.name, times[v.name], times[ALONE]) for v in chosen]
    publish(args, rows)
    explained: dict[str, dict[str, Any]] = {}
    for variant in chosen if args.explain is not None else []:
        if variant.name != ALONE and not re.search(args.explain, variant.name):
            continue
        if process_group.agreed(time.monotonic() - began > args.budget_s, device):
            break
        explained[variant.name] = slower(recorded(step, variant, args.out))
        say(f"recorded: {variant.name}")
    for row in rows:
        if row["variant"] in explained and ALONE in explained:
            of, alone = explained[row["variant"]], explained[ALONE]
            why = reconcile(of, alone, row["step_s"], median(times[ALONE]))
            row |= {"hidden_s": of["hidden_s"], "exposed_in_trace_s": of["exposed_s"]}
            row |= {name: why[name] for name in ("slower_compute_s", "waits_longer_s")}
            row["recorder_s"] = why["difference_s"] - why["traced_difference_s"]
    publish(args, rows)
    process_group.wait_for_all(device)  # a rank that leaves first would end the connections of the others
    process_group.leave()


def slower(row: dict[str, Any]) -> dict[str, Any]:
    """Return the straggler's row: the row of the rank with the longest step."""
    rows: list[dict[str, Any]] = [{} for _ in range(process_group.size())]
    dist.all_gather_object(rows, row)
    return max(rows, key=lambda row: row["step_s"])


def summary(
    args: argparse.Namespace, device: Device, name: str, times: list[float], alone: list[float]
) -> dict[str, Any]:
    step_s = median(times)
    return {
        "variant": name,
        "size": args.size,
        "ranks": process_group.size(),
        "device": device.name,
        "batch_size": args.batch_size,
        "context_length": args.context_length,
        "precision": args.precision,
        "attention": args.attention,
        "torch": torch.__version__,
        "step_s": step_s,
        "p10_s": sorted(times)[len(times) // 10],
        "p90_s": sorted(times)[len(times) * 9 // 10],
        "exposed_s": step_s - median(alone),
        "exposed_share": 1 - median(alone) / step_s,
        "samples": len(times),
    }


SHOWN = ("variant", "step_s", "p10_s", "p90_s", "exposed_s", "exposed_share")
WHY = ("hidden_s", "exposed_in_trace_s", "slower_compute_s", "waits_longer_s", "recorder_s")


def publish(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write and print the results so far, on rank 0."""
    if process_group.rank():
        return
    (args.out / f"{args.size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [*SHOWN, *(name for name in WHY if any(name in row for row in rows))]
    shown = [{name: row.get(name) for name in columns} for row in rows]
    for row in shown:
        row["exposed_share"] = f"{row['exposed_share']:.1%}"
    first = rows[0]
    caption = (
        f"{first['size']}, {first['precision']}, {first['attention']}, batch {first['batch_size']} a rank, context "
        f"{first['context_length']}, {first['ranks']} ranks on {first['device']}, torch {first['torch']}"
    )
    table = render_rows(shown, "markdown", caption)
    (args.out / f"{args.size}.md").write_text(table)
    print(table, flush=True)


def say(text: str) -> None:
    if not process_group.rank():
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4, help="batch size of each rank")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--attention", default="sdpa_flash")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="regular expression: run only the variants that match, and `alone`")
    parser.add_argument("--explain", help="regular expression: also profile a step of the variants that match")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start nothing new after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/ddp_variants"))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
