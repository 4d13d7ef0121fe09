"""Which options make the CUDA C++ FlashAttention forward fastest on a Hopper GPU, and is each of them right?

Method: that of gluon_tune.py. Every variant is compiled in as many processes as the machine has cores; then held
against float64 in worker processes that are killed when a kernel hangs, with a map of where it is wrong; what is
right, causal or not, is timed on the rows of its kind, alone on the GPU, beside flash_gluon's forward.
Output: a line a check, a table of milliseconds and TFLOP/s of the credited work (4 · B·H·S²·d, causal halved).

    python scripts/benchmarks/cuda_forward.py
    python scripts/benchmarks/cuda_forward.py --rows 4,16,4096,64 --variants 0 3 --causal no
    python scripts/benchmarks/cuda_forward.py --once 0 --rows 4,16,4096,64 --causal no    # one launch, for ncu
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gluon_tune import Call, Shape, error, reference, timed
from torch import Tensor

from cs_systems.kernels import flash_cuda_forward as ours
from cs_systems.kernels import hopper
from cs_systems.kernels.flash_cuda_forward import OPTIONS, ForwardOptions
from cs_systems.kernels.flash_layout import padded_d_head
from cs_systems.kernels.hopper import Macros

VARIANTS: dict[int, list[ForwardOptions]] = {
    depth: [options, replace(options, ping_pong=not options.ping_pong)] for depth, options in OPTIONS.items()
}
ROWS = ["4,16,1024,64", "4,16,4096,64", "1,16,16384,64", "4,16,4096,128", "2,16,8192,128", "1,32,16384,128"]
HANG_S = 20.0
TOLERANCE = 1e-2
FAILURES = 2  # of a variant: after as many no more of its checks are asked


@dataclass(frozen=True)
class Case:
    """A small call. growth: keys get larger towards the first one, so that the maximum of the last tile is left far
    behind."""

    shape: Shape
    d_head: int
    causal: bool
    fp16: bool = False
    growth: float = 0.0


def cases(d_head: int) -> list[Case]:
    square, both = Shape.square, (False, True)
    shapes = [
        square(1, 1, 128), square(1, 2, 1024), square(2, 3, 333), Shape(1, 4, 2, 200, 457, 257),
        Shape(1, 2, 1, 130, 700, 500),
    ]  # fmt: skip
    found = [Case(shape, d_head, causal) for shape in shapes for causal in both]
    found += [Case(Shape(1, 2, 2, 457, 200, -257), d_head, True), Case(Shape(3, 20, 5, 513, 1000), d_head, True)]
    found += [Case(square(1, 2, 640), d_head, causal, growth=growth) for causal in both for growth in (1.0, 30.0)]
    found += [Case(square(1, 2, 640), d_head, True, fp16=True), Case(square(1, 2, 640), d_head, True, True, 3.0)]
    return [*found, Case(square(1, 2, 300), d_head - 24, True), Case(square(1, 2, 300), d_head - 24, False)]


def name(options: ForwardOptions) -> str:
    text = f"{options.consumers}x64 n{options.keys} s{options.k_stages}{options.v_stages}"
    return text + " pingpong" * options.ping_pong + " q-registers" * options.q_in_registers


def code_file(folder: Path, macros: Macros) -> Path:
    return folder / ("-".join(f"{name}{value}" for name, value in macros) + ".cubin")


def compiled(folder: Path, macros: Macros) -> str | None:
    try:
        code_file(folder, macros).write_bytes(hopper.machine_code("forward", macros))
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[-600:]}"
    return None


def call_of(case: Case, device: str = "cuda") -> Call:
    call = Call(case.shape, case.d_head, case.causal, device)
    if case.growth:
        size = torch.linspace(case.growth, 0, case.shape.seq_k, device=device)[:, None]
        call.k *= (1 + size).to(call.k.dtype)
    if case.fp16:
        call.q, call.k, call.v, call.do, call.o = (x.half() for x in (call.q, call.k, call.v, call.do, call.o))
    return call


def launch(call: Call, options: ForwardOptions) -> hopper.Launch:
    return ours.forward(
        call.q, call.k, call.v, call.o, call.lse,
        causal=call.causal, offset=call.offset, scale=call.scale, options=options,
        multiprocessors=torch.cuda.get_device_properties("cuda").multi_processor_count,
    )  # fmt: skip


def check(case: Case, options: ForwardOptions) -> dict[str, Any]:
    call = call_of(case)
    ref = reference(call)
    call.o.fill_(torch.nan)
    call.lse.fill_(torch.nan)
    made = launch(call, options)
    for _ in range(2):  # the second finds the counter as the first left it
        made.run()
    torch.cuda.synchronize()
    errors = {x: error(getattr(call, x), ref[x]) for x in ("o", "lse")}
    wrong = [x for x, e in errors.items() if not e <= TOLERANCE]
    return {"errors": errors, "right": not wrong, "maps": {x: where(getattr(call, x), ref[x]) for x in wrong}}


def where(got: Tensor, ref: Tensor) -> str:
    """The largest error of each block of 64 rows x 16 columns of each head, in tenths of the largest value; N: a number
    that is none."""
    if got.ndim == 3:
        got, ref = got[..., None], ref[..., None]
    finite = ref.isfinite()
    size = ref[finite].abs().max()
    off = torch.where(finite, (got.double() - ref).abs() / size, (got.double() != ref).double())
    lines = []
    for b, h, first in itertools.product(*map(range, got.shape[:2]), range(0, got.shape[2], 64)):
        parts = off[b, h, first : first + 64].split(16, -1)
        cells = ["N" if bool(p.isnan().any()) else "*" if p.max() > 1 else str(int(p.max() * 10)) for p in parts]
        rows = (~(off[b, h, first : first + 64].amax(-1) < 0.03)).nonzero().flatten().tolist()
        lines.append(f"{b},{h} rows {first}: {''.join(cells)} wrong {rows[:8]}{'…' * (len(rows) > 8)} of {len(rows)}")
    return "\n".join(lines[:24])


def serve(folder: Path) -> None:
    """A worker: a JSON task a line in, a JSON answer a line out."""
    hopper.machine_code = lambda _, macros: code_file(folder, macros).read_bytes()  # type: ignore[assignment]
    torch.zeros(1, device="cuda")
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        d_head, index = task["variant"]
        options = VARIANTS[d_head][index] if index >= 0 else None
        try:
            if task["do"] == "check":
                assert options is not None
                answer = check(cases(d_head)[task["case"]], options)
            else:
                batch, heads, seq, _ = map(int, task["row"].split(","))
                call = Call(Shape.square(batch, heads, seq), d_head, task["causal"], "cuda")
                run = launch(call, options).run if options else call.forward().run
                answer = {"s": median(timed(run))}
        except Exception as problem:
            lost = "CUDA error" in str(problem)  # the context with it
            first_line = (str(problem).splitlines() or [""])[0]
            print(json.dumps({"failed": f"{type(problem).__name__}: {first_line}", "lost": lost}), flush=True)
            if lost:
                os._exit(1)
            continue
        torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


class Worker:
    """A process that serves, replaced when it hangs or dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(self.folder)]
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
        answer: dict[str, Any] = json.loads(line) if line else {"failed": f"no answer in {HANG_S:.0f} s", "lost": True}
        if answer.get("lost"):
            self.close()
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def asked(folder: Path, tasks: list[list[dict[str, Any]]], workers: int) -> list[list[dict[str, Any]]]:
    """The answers of each list of tasks, which one worker is given in turn, until some have failed."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: list[list[dict[str, Any]]] = [[] for _ in tasks]
    for i in range(len(tasks)):
        waiting.put(i)

    def work() -> None:
        worker = Worker(folder)
        while not waiting.empty():
            i = waiting.get()
            for task in tasks[i]:
                answers[i].append(worker.ask(task))
                if sum(not x.get("right") for x in answers[i]) >= FAILURES:
                    break
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def needed(variant: tuple[int, int], rows: list[str], causals: list[bool]) -> set[Macros]:
    """What its checks and rows are compiled with."""
    depth, options = variant[0], VARIANTS[variant[0]][variant[1]]
    found = {options.macros(depth, x.causal, x.shape.seq_k, x.fp16) for x in cases(depth)}
    for row, causal in itertools.product(rows, causals):
        _, _, seq, d_head = map(int, row.split(","))
        if padded_d_head(d_head) == depth:
            found.add(options.macros(depth, causal, seq, False))
    return found


def show_checks(variant: tuple[int, int], answers: list[dict[str, Any]]) -> set[bool]:
    """Whether causal, not causal, or both are right: the kinds that are worth timing."""
    checked = list(zip(cases(variant[0]), answers, strict=False))
    failed = {case.causal for case, answer in checked if not answer.get("right")}
    right = {case.causal for case, _ in checked} - failed
    worst = {x: max((a["errors"][x] for a in answers if "errors" in a), default=math.nan) for x in ("o", "lse")}
    label = name(VARIANTS[variant[0]][variant[1]])
    verdict = f"{'WRONG' if failed else 'right'} in {len(answers)} checks"
    print(f"d {variant[0]} #{variant[1]} {label}: {verdict} {worst}", flush=True)
    for case, answer in checked:
        if not answer.get("right"):
            print(f"  {case}: {answer.get('failed', answer.get('errors'))}")
            for output, text in answer.get("maps", {}).items():
                print(f"  {output}:\n    " + text.replace("\n", "\n    "))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="batch,heads,seq,d_head")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--variants", nargs="+", type=int, help="their numbers, of each d_head")
    parser.add_argument("--checks", type=int, default=6, help="processes that check at a time")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--once", type=int, help="only launch this variant once on the first row, for ncu")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    causals = {"yes": [True], "no": [False], "both": [True, False]}[args.causal]
    if args.once is not None:
        batch, heads, seq, d_head = map(int, args.rows[0].split(","))
        call = Call(Shape.square(batch, heads, seq), d_head, causals[0], "cuda")
        launch(call, VARIANTS[d_head][args.once]).run()
        return torch.cuda.synchronize()
    began = time.monotonic()
    depths = sorted({int(row.split(",")[3]) for row in args.rows})
    chosen = [(d, i) for d in depths for i in range(len(VARIANTS[d])) if args.variants is None or i in args.variants]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        wanted = sorted(set().union(*(needed(variant, args.rows, causals) for variant in chosen)))
        with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
            for macros, problem in zip(wanted, pool.map(compiled, [folder] * len(wanted), wanted), strict=True):
                if problem:
                    print(f"{macros}: {problem}", flush=True)
        print(f"compiled {len(wanted)} in {time.monotonic() - began:.0f} s", flush=True)
        if args.compile_only:
            return None
        checks = [[{"do": "check", "variant": x, "case": i} for i in range(len(cases(x[0])))] for x in chosen]
        answers = asked(folder, checks, args.checks)
        right = {x: show_checks(x, found) for x, found in zip(chosen, answers, strict=True)}
        print(f"checked at {time.monotonic() - began:.0f} s", flush=True)
        timer = Worker(folder)
        for row, causal in itertools.product(args.rows, causals):
            time_row(timer, row, causal, [x for x in chosen if causal in right[x]])
        timer.close()
    print(f"all in {time.monotonic() - began:.0f} s")
    return None


def time_row(timer: Worker, row: str, causal: bool, right: list[tuple[int, int]]) -> None:
    """The variants from the fastest, flash_gluon among them; one after the other, in one process."""
    batch, heads, seq, d_head = map(int, row.split(","))
    work = 4 * batch * heads * seq**2 * d_head / (2 if causal else 1)
    found = {}
    for variant in [(d_head, -1), *(x for x in right if x[0] == d_head)]:
        answer = timer.ask({"do": "time", "variant": variant, "row": row, "causal": causal})
        label = f"#{variant[1]} {name(VARIANTS[d_head][variant[1]])}" if variant[1] >= 0 else "GLUON"
        if "s" in answer:
            found[label] = answer["s"]
        else:
            print(f"{row} {label}: {answer}")
    ranked = sorted(found.items(), key=lambda item: item[1])
    print(f"{row} {'causal' if causal else 'full'}:", flush=True)
    for label, s in ranked:
        print(f"    {s * 1e3:.3f} ms {work / s / 1e12:4.0f} TFLOP/s  {label}")


if __name__ == "__main__":
    main()
