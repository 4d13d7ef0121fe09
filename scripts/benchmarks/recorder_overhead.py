"""Cost of a `Recorder` in a training loop, while it records and afterwards.

Method: one process, one model, one loop with a DataLoader and clipped gradients. Blocks of steps alternate between the
loop alone, the same loop while the recorder times it, and the same loop in a recorder that is done; the order rotates
from round to round. A block is timed as a whole by the host's clock and ends with a synchronisation of the device.
Output: a markdown table: median time of a step in each kind of block, its spread over the rounds (p10 to p90), and the
median over the rounds of the ratio to the loop alone, with its interval. The goal is below 1.005 while it times and
1.000 afterwards. Last, the CPU time of the watch over the loop, which goes on until its end.

    python scripts/benchmarks/recorder_overhead.py --size tiny small --rounds 10 --steps 20
    python scripts/benchmarks/recorder_overhead.py --size small medium --precision bf16 --context-length 512  # on a GPU
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from cs_systems import Recorder
from cs_systems.config import Precision, preset
from cs_systems.core import statistics
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.recorder.stacks import SAMPLER
from cs_systems.measure.recorder.watch import Watch
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training.losses import cross_entropy

KINDS = ("alone", "while timing", "done")
Step = Callable[[Any], None]


class Loop:
    """Training loop of the model of one size."""

    def __init__(self, size: str, device: Device, precision: Precision, context_length: int, batch_size: int) -> None:
        torch.manual_seed(0)
        config = replace(preset(size), context_length=context_length)
        self.device, self.precision = device, precision
        self.model = BasicTransformerLM(config, "sdpa_flash" if device.is_cuda else "sdpa_math").to(device.torch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        tokens = torch.randint(config.vocab_size, (batch_size * 64, context_length + 1))
        self.loader = DataLoader(TensorDataset(tokens), batch_size, pin_memory=device.is_cuda)

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def step(self, tokens: Any) -> None:
        tokens = tokens.to(self.device.torch, non_blocking=True)
        self.optimizer.zero_grad()
        with self.device.autocast(self.precision):
            loss = cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def block(self, kind: str, steps: int, out: Path) -> float:
        """Run `steps` steps; return the mean time of one in seconds."""
        batches = self.batches()
        with self._recorder(kind, steps, out) as recorder:
            for _ in range(2):  # the recorder of kind `done` is done after the first
                with recorder.step() if recorder else nullcontext():
                    self.step(next(batches)[0])
            self.device.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                (tokens,) = next(batches)
                with recorder.step() if recorder else nullcontext():
                    self.step(tokens)
            self.device.synchronize()
            return (time.perf_counter() - start) / steps

    @contextmanager
    def _recorder(self, kind: str, steps: int, out: Path) -> Iterator[Recorder | None]:
        if kind == "alone":
            yield None
            return
        timed = 1 if kind == "done" else steps + 9  # more than the block has: it ends before the record is written
        options: Any = {"warmup": 0, "steps": timed, "profile": "none", "stacks": kind != "done"}
        with Recorder(self.model, self.optimizer, out=out, **options) as recorder:
            yield recorder
            assert recorder.done == (kind == "done")


def measured(loop: Loop, rounds: int, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            loop.block(kind, 2, Path(folder))
        for round in range(rounds):
            for kind in (*KINDS[round % len(KINDS) :], *KINDS[: round % len(KINDS)]):
                found[kind].append(loop.block(kind, steps, Path(folder) / f"{round}-{kind}"))
    return found


def watch_us(device: Device, steps: int = 1000, step_s: float = 0.005) -> tuple[float, float]:
    """Return the CPU time of the watch over usual steps, in µs a step: in the loop's thread, and in the sampler's.

    CPU time does not depend on what else the machine does.
    """
    watch, own_s = Watch(device, lambda: None), 0.0
    for _ in range(steps):
        time.sleep(step_s)
        begin_s = time.thread_time()
        watch.step_ended()
        own_s += time.thread_time() - begin_s
    (sampler,) = (thread for thread in threading.enumerate() if thread.name == SAMPLER)
    ran_ns = int(Path(f"/proc/self/task/{sampler.native_id}/schedstat").read_text().split()[0])
    watch.close()
    return own_s / steps * 1e6, ran_ns / steps * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["tiny", "small"])
    parser.add_argument("--context-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = resolve(options.device)
    print(f"Recorder on {device.name}, torch {torch.__version__}: {options.rounds} rounds of {options.steps} steps,")
    print(f"batch {options.batch_size}, context {options.context_length}, {options.precision}\n")
    print("| size | loop | step (ms) | p10 … p90 (ms) | to the loop alone | interval |")
    print("| --- | --- | --: | --: | --: | --: |")
    for size in options.size:
        loop = Loop(size, device, Precision(options.precision), options.context_length, options.batch_size)
        found = measured(loop, options.rounds, options.steps)
        for kind in KINDS:
            times_ms = np.array(found[kind]) * 1e3
            ratios = np.array(found[kind]) / np.array(found["alone"])
            low, high, _ = statistics.interval([[ratio] for ratio in ratios.tolist()])
            interval = "" if kind == "alone" or low is None or high is None else f"{low:.4f} … {high:.4f}"
            p10, p90 = np.percentile(times_ms, [10, 90])
            cells = (size, kind, f"{np.median(times_ms):.3f}", f"{p10:.3f} … {p90:.3f}", f"{np.median(ratios):.4f}")
            print(f"| {' | '.join(cells)} | {interval} |", flush=True)
    own_us, sampler_us = watch_us(device)
    print(f"\nWatch over a usual step of 5 ms: {own_us:.1f} µs of CPU time in the loop, {sampler_us:.1f} µs beside it")


if __name__ == "__main__":
    main()
