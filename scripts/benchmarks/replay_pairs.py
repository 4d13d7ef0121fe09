"""Compare predictions of the replay with measurements: programs before and after a known change, on a GPU.

    python scripts/benchmarks/replay_pairs.py record FOLDER   # needs a GPU: traces, and steps without a profiler
    python scripts/benchmarks/replay_pairs.py judge FOLDER    # needs none: the table

Each program trains a small transformer. torch.profiler records its trace, and its step is timed without a profiler.
From the trace before a change, the step after it is predicted twice: from the trace alone, and with the host's time of
the step without a profiler. The truth is the step of the changed program without a profiler.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

WARMUP, ROUNDS, STEPS, RECORDED = 20, 5, 30, 8


class Size(NamedTuple):
    width: int
    layers: int
    batch: int
    length: int


SIZES = {"small": Size(256, 8, 4, 128), "large": Size(1024, 8, 16, 512)}


@dataclass(frozen=True)
class Program:
    """Training step with optional faults that a change can remove."""

    size: str = "small"
    graph: bool = False  # the step is replayed as one CUDA graph
    items: int = 0  # number of times that the host reads a number from the GPU and then works for 0.5 ms
    augment_s: float = 0.0  # the host's own work in the range augment, in s
    load_s: float = 0.0  # the host's own work in the range input, in s
    copy_mib: int = 0  # bytes copied to the GPU in each step
    prefetches: bool = False  # copied from pinned memory, on a separate stream, one step ahead


# name → (before, after, change in the form that `analyze --what-if` takes)
PAIRS = {
    "launches": (Program(), Program(graph=True), "launches=free"),
    "syncs": (Program(items=4), Program(items=-4), "sync=0"),
    "augment": (Program(augment_s=3e-3), Program(), "host:augment=0"),
    "half of augment": (Program(augment_s=3e-3), Program(augment_s=1.5e-3), "host:augment=0.5"),
    "input": (Program(load_s=4e-3), Program(), "input=0"),
    "copies": (Program(copy_mib=64), Program(copy_mib=64, prefetches=True), "copies=overlapped"),
}


def of_size(size: str) -> dict[str, tuple[Program, Program, str]]:
    return {name: (replace(a, size=size), replace(b, size=size), change) for name, (a, b, change) in PAIRS.items()}


def label(program: Program) -> str:
    return "-".join(f"{name}={value}" for name, value in asdict(program).items() if value)


def spin(time_s: float) -> None:
    until = time.perf_counter() + time_s
    while time.perf_counter() < until:
        pass


def record(folder: Path) -> None:
    """Write the trace and the times of every program."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    folder.mkdir(parents=True, exist_ok=True)
    programs = {label(one): one for size in SIZES for pair in of_size(size).values() for one in pair[:2]}
    for name, program in programs.items():
        torch.manual_seed(0)
        run = trainer(program)
        for _ in range(WARMUP):
            run(None)
        rounds, phases = [], defaultdict[str, list[float]](list)
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                times: dict[str, float] = {}
                run(times)
                for phase, lasted in times.items():
                    phases[phase].append(lasted)
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - began) / STEPS)
        what = {"rounds_s": rounds, "host_s": {phase: statistics.median(all_) for phase, all_ in phases.items()}}
        (folder / f"{name}.times.json").write_text(json.dumps(what))
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, schedule=schedule(wait=0, warmup=3, active=RECORDED)) as profiler:
            for number in range(3 + RECORDED):
                with torch.profiler.record_function("step"):
                    run(None)
                if number == 2 + RECORDED:
                    torch.cuda.synchronize()  # so that the trace also has the kernels of the last step
                else:
                    profiler.step()
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        print(name, f"{statistics.median(rounds) * 1e3:.3f} ms", flush=True)


def trainer(program: Program) -> Any:
    """Return a function that runs one step. If given a dictionary, it writes the host's time of each phase into it."""
    import torch
    from torch import nn
    from torch.nn import functional

    size = SIZES[program.size]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(size.width) for _ in range(2)])
            self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
            self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    torch.backends.cuda.matmul.allow_tf32 = True
    model = nn.Sequential(*(Block() for _ in range(size.layers)), nn.Linear(size.width, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch = torch.randn(size.batch, size.length, size.width, device="cuda")
    more = torch.empty(program.copy_mib << 20, dtype=torch.uint8, pin_memory=program.prefetches)
    there = [torch.empty_like(more, device="cuda") for _ in range(2)]
    side, ready = torch.cuda.Stream(), torch.cuda.Event()

    @contextmanager
    def phase(name: str, times: dict[str, float] | None) -> Iterator[None]:
        began = time.perf_counter()
        with torch.profiler.record_function(name):
            yield
        if times is not None:
            times[name] = time.perf_counter() - began

    def compute(times: dict[str, float] | None) -> Any:
        with phase("forward", times):
            loss = model(batch).float().square().mean()
        with phase("backward", times):
            loss.backward()
        with phase("optimizer", times):
            optimizer.step()
            optimizer.zero_grad(set_to_none=not program.graph)
        return loss

    graph = torch.cuda.CUDAGraph()
    if program.graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compute(None)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            compute(None)

    def step(times: dict[str, float] | None) -> None:
        if program.load_s:
            with phase("input", times):
                spin(program.load_s)
        if program.augment_s:
            with phase("augment", times):
                spin(program.augment_s)
        if program.copy_mib:
            with phase("copy", times):
                if program.prefetches:
                    torch.cuda.current_stream().wait_event(ready)
                    with torch.cuda.stream(side):
                        there[0].copy_(more, non_blocking=True)
                        ready.record()
                else:
                    there[0].copy_(more)
        if program.graph:
            graph.replay()
            return
        loss = compute(times)
        for _ in range(abs(program.items)):
            if program.items > 0:
                loss.item()
            spin(0.5e-3)

    return step


def judge(folder: Path) -> None:
    """Print each prediction next to the measured step."""
    from cs_systems.analysis.attribution.profile import profile
    from cs_systems.analysis.replay import Clean, Refusal, replayed
    from cs_systems.analysis.replay.what_ifs import change
    from cs_systems.readers import read

    known = {
        path.name.removesuffix(".times.json"): json.loads(path.read_text()) for path in folder.glob("*.times.json")
    }
    print("pair | before ms | recorded ms | after ms | from the trace ms | error | with clean host ms | error | gate")
    print("--- | --- | --- | --- | --- | --- | --- | --- | ---")
    for size in SIZES:
        for name, (before, after, text) in of_size(size).items():
            if label(before) not in known or label(after) not in known:
                continue
            was_s, is_s = (statistics.median(known[label(one)]["rounds_s"]) for one in (before, after))
            replay = replayed(profile(read(folder / f"{label(before)}.json.gz"), "step"))
            clean = Clean(was_s, known[label(before)]["host_s"])
            cells = [f"{name}, {size}", f"{was_s * 1e3:.2f}", f"{replay.step_s * 1e3:.2f}", f"{is_s * 1e3:.2f}"]
            for given in (None, clean):
                answer = replay.what_if(change(text), clean=given)
                if isinstance(answer, Refusal):
                    cells += [answer.reason, ""]
                    continue
                # From the trace alone, the share that is saved counts: the step without a profiler is not known.
                factor = was_s / answer.now
                value, low, high = (x * factor * 1e3 for x in (answer.value, answer.low, answer.high))
                cells += [f"{value:.2f} [{low:.2f}, {high:.2f}]", f"{value / is_s / 1e3 - 1:+.1%}"]
            print(" | ".join([*cells, f"{replay.error:.2%}, {replay.unexplained:.2%}"]))


if __name__ == "__main__":
    {"record": record, "judge": judge}[sys.argv[1]](Path(sys.argv[2]))
