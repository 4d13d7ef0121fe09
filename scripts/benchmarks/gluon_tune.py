"""Search for the fastest options of the Gluon FlashAttention kernels on a Hopper GPU, each checked for correctness.

Method: every variant below is compiled in as many processes as the machine has cores, without the GPU. Each is then
held against float64 (output, log-sum-exp, gradients; causal and not, odd and unequal lengths, grouped heads), in worker
processes that are killed when a kernel hangs. What is right is timed, alone on the GPU, on the shapes of the table:
device events, the launches hidden behind a sleeping kernel, the L2 cache overwritten before each call, medians; torch's
cuDNN attention is timed in the same way. A backward's time has all of its three kernels. What has lost on every row is
in profiles/attention_h200/log.md, no longer here.
Output: JSON lines (--out), and a table: milliseconds, TFLOP/s of the credited work (4 or 10 · B·H·S²·d, causal halved).

    python scripts/benchmarks/gluon_tune.py --out gluon_tune.jsonl
    python scripts/benchmarks/gluon_tune.py --only forward-128 --rows 4,16,4096,128 --causal yes
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cs_systems.model.kernels.compile import compile_for
from cs_systems.model.kernels.gluon.configs import BackwardOptions, ForwardOptions
from cs_systems.model.kernels.gluon.launch import Problem
from cs_systems.model.kernels.layout import padded_rows
from cs_systems.model.kernels.triton.launch import Launch

Options = ForwardOptions | BackwardOptions
VARIANTS: dict[str, list[Options]] = {
    "forward-64": [
        ForwardOptions(3, 128, 3, ping_pong=True),
        ForwardOptions(2, 128, 4, overlap=True),
    ],
    "forward-128": [
        ForwardOptions(2, 128, 2),
        ForwardOptions(2, 128, 2, persistent=False),
    ],
    "backward-64": [BackwardOptions(128, 2, False, mib << 20) for mib in (0, 20, 40)],
    "backward-128": [BackwardOptions(64, 2, True, mib << 20) for mib in (0, 20, 40)],
}
ROWS = ["4,16,1024,64", "4,16,4096,64", "1,16,16384,64", "4,16,4096,128", "2,16,8192,128", "1,32,16384,128"]
HANG_S = 20.0
TOLERANCE = 2e-2  # of bfloat16, as in the semantics suite


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    heads_kv: int
    seq_q: int
    seq_k: int
    offset: int = 0  # of causal

    @classmethod
    def square(cls, batch: int, heads: int, seq: int) -> Shape:
        return cls(batch, heads, heads, seq, seq)


CHECKED = [
    Shape.square(1, 2, 1024),
    Shape.square(2, 3, 333),
    Shape(1, 4, 2, 200, 457, 257),
    Shape(1, 2, 2, 457, 200, -257),
]


def name(options: Options) -> str:
    """Return a short name: the tile, then the options that differ from the defaults."""
    if isinstance(options, BackwardOptions):
        return f"m{options.block_m} s{options.stages}{' late' * options.late} l2:{options.l2_bytes >> 20}"
    text = f"{options.consumers}x64 n{options.block_n} s{options.stages}"
    return text + " overlap" * options.overlap + " pingpong" * options.ping_pong + " grid" * (not options.persistent)


def variant(key: str, index: int) -> tuple[str, int, Options]:
    kind, d_head = key.split("-")
    return kind, int(d_head), VARIANTS[key][index]


def matters(key: str, index: int, causal: bool) -> bool:
    """Return true if the variant differs from an earlier one: l2_bytes matters for causal attention alone."""
    options = variant(key, index)[2]
    return causal or isinstance(options, ForwardOptions) or not options.l2_bytes


class Call:
    """Tensors of one call on `device` and its launches."""

    def __init__(self, shape: Shape, d_head: int, causal: bool, device: str, multiprocessors: int = 132) -> None:
        torch.manual_seed(0)
        like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        queries = (shape.batch, shape.heads, shape.seq_q, d_head)
        keys = (shape.batch, shape.heads_kv, shape.seq_k, d_head)
        self.q, self.do, self.o, self.dq = (torch.randn(queries, **like) for _ in range(4))
        self.k, self.v, self.dk, self.dv = (torch.randn(keys, **like) for _ in range(4))
        self.lse = torch.empty(queries[:3], device=device)
        rows = (shape.batch * shape.heads, padded_rows(shape.seq_q))
        self.summed = torch.empty(*rows, d_head, device=device)
        self.lse_log2, self.delta = torch.empty(rows, device=device), torch.empty(rows, device=device)
        self.causal, self.offset, self.scale = causal, shape.offset if causal else 0, 1 / math.sqrt(d_head)
        self.problem = Problem(self.q, self.k, self.v, causal, self.offset, self.scale, multiprocessors)

    def forward(self, options: ForwardOptions | None = None) -> Launch:
        return self.problem.forward(self.o, self.lse, options)

    def backward(self, options: BackwardOptions | None = None) -> list[Launch]:
        p = self.problem
        return [
            p.prepare(self.o, self.lse, self.do, self.lse_log2, self.delta, self.summed),
            p.backward(self.do, self.lse_log2, self.delta, self.summed, self.dk, self.dv, options),
            p.finish(self.summed, self.dq),
        ]

    def run(self, options: Options) -> None:
        if isinstance(options, ForwardOptions):
            self.forward(options).run()
        else:
            for launch in self.backward(options):
                launch.run()


def compiled(key: str, index: int, causal: bool, shape: Shape) -> str | None:
    """Compile into Triton's cache on disk; return the error, or None."""
    _, d_head, options = variant(key, index)
    call = Call(shape, d_head, causal, "meta")
    launches = [call.forward(options)] if isinstance(options, ForwardOptions) else call.backward(options)
    try:
        spills = [compile_for(90, x.kernel, x.arguments, x.options).spills for x in launches]
    except Exception as error:  # triton and ptxas raise what they like
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return f"{sum(spills)} spills" if sum(spills) else None


def reference(call: Call) -> dict[str, Tensor]:
    """Return output, log-sum-exp and gradients in float64, by the formula."""
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * call.scale
    if call.causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[2:])
        scores = scores.masked_fill(columns > rows[:, None] + call.offset, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    o = weights @ v.repeat_interleave(group, 1)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), call.do.double())
    dq = dq.nan_to_num() if call.offset < 0 else dq
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def error(got: Tensor, ref: Tensor) -> float:
    """Return ‖got − ref‖ / ‖ref‖ over the reference's finite elements; inf if another element is not finite."""
    finite = ref.isfinite()
    if not bool((got.isfinite() == finite).all()):
        return math.inf
    return float((got.double() - ref)[finite].norm() / ref[finite].norm())


def check(task: dict[str, Any]) -> dict[str, Any]:
    """Return the largest error of each output over the checked shapes, causal and not; outputs are poisoned before."""
    kind, d_head, options = variant(task["key"], task["index"])
    worst: dict[str, float] = {}
    for shape, causal in itertools.product(CHECKED, (False, True)):
        call = Call(shape, d_head, causal, "cuda")
        ref = reference(call)
        outputs = ("o", "lse") if kind == "forward" else ("dq", "dk", "dv")
        if kind == "backward":
            call.o.copy_(ref["o"])
            call.lse.copy_(ref["lse"])
        for output in outputs:
            getattr(call, output).fill_(torch.nan)
        call.run(options)
        torch.cuda.synchronize()
        for output in outputs:
            found = error(getattr(call, output), ref[output])
            worst[output] = max(worst.get(output, 0.0), found)
            if not found <= TOLERANCE:
                worst[f"{output} {dataclasses.astuple(shape)} causal={causal}"] = found
    return {"errors": worst, "right": all(e <= TOLERANCE for e in worst.values())}


def timed(step: Callable[[], object], budget_s: float = 0.12) -> list[float]:
    """Return the seconds of each call by device events, with hidden launches and an overwritten L2 cache."""
    cache = torch.empty(128 << 20, dtype=torch.int16, device="cuda")
    samples: list[float] = []
    for count in (3, 0):
        count = count or max(5, min(30, int(budget_s / median(samples))))
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            torch.cuda._sleep(1_500_000)  # cycles: long enough for the host to launch all of the step
            cache.zero_()
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        samples = [start.elapsed_time(end) / 1e3 for start, end in pairs]
    return samples


def time_it(task: dict[str, Any]) -> dict[str, Any]:
    batch, heads, seq, d_head = map(int, task["row"].split(","))
    call = Call(Shape.square(batch, heads, seq), d_head, task["causal"], "cuda")
    if task["key"] == "sdpa_cudnn":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.requires_grad_() for x in (call.q, call.k, call.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

            def forward() -> Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=call.causal)

            out = forward()
            back = timed(lambda: torch.autograd.grad(out, (q, k, v), call.do, retain_graph=True))
            with torch.no_grad():
                return {"forward_s": median(timed(forward)), "backward_s": median(back)}
    kind, _, options = variant(task["key"], task["index"])
    if kind == "backward":
        call.forward().run()
    parts: dict[str, float] = {}
    if isinstance(options, BackwardOptions):
        launches = call.backward(options)
        parts = {
            f"{part}_s": median(timed(x.run, 0.03))
            for part, x in zip(("prepare", "main", "finish"), launches, strict=True)
        }
        whole = timed(lambda: [x.run() for x in launches])
    else:
        whole = timed(call.forward(options).run)
    return {f"{kind}_s": median(whole), **parts}


def serve() -> None:
    """Serve JSON tasks from standard input, one per line, and print one JSON answer per line."""
    torch.zeros(1, device="cuda")
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = check(task) if task["do"] == "check" else time_it(task)
        except Exception as problem:
            answer = {"failed": f"{type(problem).__name__}: {str(problem)[-300:]}"}
            if "CUDA error" in answer["failed"] or "Triton Error" in answer["failed"]:  # the context is lost
                print(json.dumps(answer), flush=True)
                raise
        torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


class Worker:
    """Worker process that is replaced when it hangs or dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            self.process.stdout.readline()  # ready
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(HANG_S, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            self.process.kill()
            self.process.wait()
            return {"failed": f"no answer within {HANG_S:.0f} s, or the process died"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def asked(tasks: list[dict[str, Any]], workers: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each task with its answer, as they come."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[dict[str, Any], dict[str, Any]]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        worker = Worker()
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return worker.close()
            done.put((task, worker.ask(task)))

    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    for _ in tasks:
        yield done.get()


def show(row: str, causal: bool, found: dict[str, dict[str, Any]]) -> None:
    """Print the variants of forward and of backward, the fastest first."""
    batch, heads, seq, d_head = map(int, row.split(","))
    work = batch * heads * seq**2 * d_head / (2 if causal else 1)
    for kind, factor in (("forward", 4), ("backward", 10)):
        times = {label: x[f"{kind}_s"] for label, x in found.items() if f"{kind}_s" in x}
        ranked = sorted(times.items(), key=lambda item: item[1])
        cells = [f"{label} {s * 1e3:.3f} ({factor * work / s / 1e12:.0f})" for label, s in ranked]
        print(f"{row} {'causal' if causal else 'full'} {kind}: " + "; ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rows", nargs="+", default=ROWS, help="shapes: batch,heads,seq,d_head")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    parser.add_argument("--checks", type=int, default=6, help="number of processes that check at the same time")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    began = time.monotonic()
    chosen = [(key, index) for key in args.only for index in range(len(VARIANTS[key]))]
    lines: list[dict[str, Any]] = []

    kernels = [one for one in chosen if matters(*one, causal=False)]
    wanted = [(*one, causal, shape) for one in kernels for causal in (False, True) for shape in CHECKED[: 2 + causal]]
    with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
        compiling = {one: pool.submit(compiled, *one) for one in wanted}
        for (key, index, causal, _), future in compiling.items():
            if problem := future.result():
                lines.append({"compile": key, "variant": name(VARIANTS[key][index]), "causal": causal, "said": problem})
                print(f"{key} {name(VARIANTS[key][index])} causal={causal}: {problem}", flush=True)
    print(f"compiled {len(wanted)} in {time.monotonic() - began:.0f} s", flush=True)
    if args.compile_only:
        return None

    right = []
    tasks = [{"do": "check", "key": key, "index": index} for key, index in chosen]
    for task, answer in asked(tasks, args.checks):
        label = name(VARIANTS[task["key"]][task["index"]])
        lines.append({"check": task["key"], "variant": label, **answer})
        errors = {k: float(f"{v:.2g}") for k, v in answer.get("errors", {}).items()}
        print(f"{task['key']} {label}: {'right' if answer.get('right') else 'WRONG'} {answer.get('failed', errors)}")
        if answer.get("right"):
            right.append((task["key"], task["index"]))
    print(f"checked at {time.monotonic() - began:.0f} s", flush=True)

    causals = {"yes": [True], "no": [False], "both": [True, False]}[args.causal]
    tasks = []
    for row, causal in itertools.product(args.rows, causals):
        ours = [one for one in sorted(right) if one[0].endswith("-" + row.split(",")[3]) and matters(*one, causal)]
        tasks += [{"do": "time", "key": k, "index": i, "row": row, "causal": causal} for k, i in ours]
        tasks.append({"do": "time", "key": "sdpa_cudnn", "index": 0, "row": row, "causal": causal})
    found: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}
    for task, answer in asked(tasks, 1):
        label = "cudnn" if task["key"] == "sdpa_cudnn" else name(VARIANTS[task["key"]][task["index"]])
        lines.append({"time": task["key"], "variant": label, "row": task["row"], "causal": task["causal"], **answer})
        found.setdefault((task["row"], task["causal"]), {})[label] = answer
        if "failed" in answer:
            print(f"{task['row']} causal={task['causal']} {label}: {answer['failed']}")
    for (row, causal), times in found.items():
        show(row, causal, times)
    print(f"all in {time.monotonic() - began:.0f} s")
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return None


if __name__ == "__main__":
    main()
