"""Is the backward in CUDA C++ right, and how fast is it beside flash_gluon's?

Method: each variant below (macros of backward.cu) is held against float64 in a process of its own, which is killed
when a kernel hangs; on a mismatch the error is shown by blocks of 64 rows x 64 columns. What is right is timed on the
rows of the table beside flash_gluon's backward, in one process, as gluon_tune.py does: device events, launches hidden,
the L2 cache overwritten before each call, medians. A backward's time has all of its three kernels.
Output: lines of errors, then milliseconds: all, and (main); then where a tile's cycles go.

    python scripts/benchmarks/cuda_kernels.py
    python scripts/benchmarks/cuda_kernels.py --only 64 --rows 4,16,4096,64 --causal yes
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import gluon_tune
import torch
from gluon_tune import ROWS, TOLERANCE, Call, Shape, reference, timed
from torch import Tensor

from cs_systems.kernels import hopper
from cs_systems.kernels.flash_cuda import Problem
from cs_systems.kernels.hopper import Launch, Macros

VARIANTS: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {
    "64": (64, ()),
    "64 v": (64, (("ONE", 0), ("V_REGS", 0))),
    "64 some": (64, (("ONE", 0), ("AHEAD", 2))),
    "64 late": (64, (("ONE", 0), ("AHEAD", 0))),
    "64 red": (64, (("RED", 1),)),
    "64 v red": (64, (("ONE", 0), ("V_REGS", 0), ("RED", 1))),
    "64 det": (64, ()),
    "128": (128, ()),
    "128 late": (128, (("AHEAD", 0),)),
    "128 red": (128, (("RED", 1),)),
    "128 det": (128, ()),
}
DETERMINISTIC = "det"
"""At the end of a variant's name: with turns."""
CHECK_S = 75.0


@dataclass(frozen=True)
class Case:
    shape: Shape
    causal: bool
    narrower: int = 0  # than the d_head of the variant
    dtype: torch.dtype = torch.bfloat16


def cases(variant: str) -> list[Case]:
    square = Shape.square
    if " " in variant:
        few = [Case(shape, True) for shape in (square(1, 1, 128), Shape(1, 4, 2, 200, 457, 257), square(2, 9, 1500))]
        return [*few, Case(square(1, 2, 1024), False), Case(square(1, 2, 1024), True)]
    found = [Case(shape, causal) for shape in (square(1, 1, 128), square(1, 2, 1024)) for causal in (False, True)]
    odd = [square(2, 3, 333), Shape(1, 4, 2, 200, 457, 257), Shape(1, 2, 2, 457, 200, -257), Shape(1, 6, 1, 1000, 90)]
    found += [Case(shape, causal) for shape in odd for causal in (False, True)]
    return [*found, Case(square(2, 9, 1500), True), Case(square(1, 2, 300), True, 24, torch.float16)]


def cuda_problem(call: Call, variant: str) -> Problem:
    return Problem(call.q, call.k, call.v, call.causal, call.offset, call.scale, VARIANTS[variant][1])


def launches(call: Call, variant: str) -> list[Launch]:
    p = cuda_problem(call, variant)
    turns = None
    if variant.endswith(DETERMINISTIC):
        turns = torch.empty(call.summed.numel() // 1024, dtype=torch.int32, device="cuda")
    return [
        p.prepare(call.o, call.lse, call.do, call.lse_log2, call.delta, call.summed, turns),
        p.backward(call.do, call.lse_log2, call.delta, call.summed, call.dk, call.dv, turns),
        p.finish(call.summed, call.dq),
    ]


def call_of(case: Case, d_head: int) -> Call:
    call = Call(case.shape, d_head - case.narrower, case.causal, "cuda")
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        setattr(call, name, getattr(call, name).to(case.dtype))
    if case.narrower:  # dq is summed with padded columns
        call.summed = torch.empty(*call.summed.shape[:2], d_head, device="cuda")
    return call


def error(got: Tensor, ref: Tensor) -> float:
    if not bool(got.isfinite().all()):
        return math.inf
    return float((got.double() - ref).norm() / ref.norm())


def error_map(got: Tensor, ref: Tensor) -> str:
    """The relative error of each block of 64 x 64, a line for 64 rows of a head; ∞ where a number is not finite."""
    lines = []
    for b, h in itertools.product(range(got.shape[0]), range(got.shape[1])):
        for row in range(0, got.shape[2], 64):
            cells = []
            for column in range(0, got.shape[3], 64):
                at = (b, h, slice(row, row + 64), slice(column, column + 64))
                cells.append(f"{error(got[at], ref[at]):.1e}")
            lines.append(f"      batch {b} head {h} row {row}: {' '.join(cells)}")
    return "\n".join(lines[:12])


def columns_and_rows(got: Tensor, ref: Tensor) -> str:
    """Which rows and columns of the first wrong block of 64 x 64 are off, as 0 and 1."""
    for b, h, row, column in itertools.product(
        range(got.shape[0]), range(got.shape[1]), range(0, got.shape[2], 64), range(0, got.shape[3], 64)
    ):
        at = (b, h, slice(row, row + 64), slice(column, column + 64))
        if not error(got[at], ref[at]) <= TOLERANCE:
            off = ~((got[at].double() - ref[at]).abs() <= 0.05 * ref.abs().max())
            rows, columns = ("".join(str(int(x)) for x in off.any(axis)) for axis in (1, 0))
            return f"      ({b},{h},{row},{column}) rows {rows}\n      columns {columns}"
    return ""


def check(variant: str) -> None:
    """In a process of its own: a line for each case."""
    d_head = VARIANTS[variant][0]
    right = True
    for case in cases(variant):
        call = call_of(case, d_head)
        ref = reference(call)
        call.o.copy_(ref["o"])
        call.lse.copy_(ref["lse"])
        for name in ("dq", "dk", "dv", "summed", "lse_log2", "delta"):
            getattr(call, name).fill_(torch.nan)
        print(f"  {variant} {dataclasses.astuple(case)}: ", end="", flush=True)
        results = []
        for _ in range(2):  # a second time, as the first one left everything
            for launch in launches(call, variant):
                launch.run()
            torch.cuda.synchronize()
            results.append(call.dq.clone())
        errors = {name: error(getattr(call, name), ref[name]) for name in ("dq", "dk", "dv")}
        wrong = [name for name, found in errors.items() if not found <= TOLERANCE]
        if variant.endswith(DETERMINISTIC) and not torch.equal(*results):
            print("DIFFERS FROM TIME TO TIME ", end="")
            right = False
        right = right and not wrong
        print(" ".join(f"{name} {found:.2e}" for name, found in errors.items()), "WRONG" if wrong else "")
        for name in wrong:
            print(f"    {name}\n{error_map(getattr(call, name), ref[name])}")
            print(columns_and_rows(getattr(call, name), ref[name]), flush=True)
    print("ALL RIGHT" if right else "NOT RIGHT")


def checked(variant: str) -> bool:
    process = subprocess.Popen(
        [sys.executable, __file__, "--check", variant], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        text, _ = process.communicate(timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[0] + "\nno answer"
    right = "ALL RIGHT" in text
    lines = text.splitlines()
    print(f"{variant}: {'right' if right else 'WRONG'}", *(lines if right else lines[:90]), sep="\n", flush=True)
    return right


def run_all(steps: list[Any]) -> None:
    for step in steps:
        step.run()


def time_row(row: str, causal: bool, variants: list[str], gluon: bool) -> None:
    batch, heads, seq, d_head = map(int, row.split(","))
    call = Call(Shape.square(batch, heads, seq), d_head, causal, "cuda")
    call.forward().run()
    found: list[tuple[float, str]] = []
    parts: list[Any] = []
    for name in [*["gluon"] * gluon, *(v for v in variants if VARIANTS[v][0] == d_head)]:
        steps: list[Any] = call.backward() if name == "gluon" else launches(call, name)
        run_all(steps)
        parts = parts or [median(timed(x.run, 0.02)) * 1e3 for x in (steps[0], steps[2])]
        whole = median(timed(functools.partial(run_all, steps), 0.06)) * 1e3
        found.append((whole, f"{name} {whole:.3f}"))
        if not name.endswith(DETERMINISTIC):
            found[-1] = (whole, f"{name} {whole:.3f} ({median(timed(steps[1].run, 0.02)) * 1e3:.3f})")
    ranked = "; ".join(text for _, text in sorted(found))
    print(f"{row}{' causal' if causal else ''}: {ranked}; before {parts[0]:.3f}, after {parts[1]:.3f}", flush=True)


STEPS = {
    64: "top; dp a, s b out; s a done; p a, dv a out; dp a done; ds a; ds before seen; dk a, dp b, dq out; s b done; "
    "p b, dv b out; dp b done; ds b, dk b out; dq done",
    128: "top; dp out; s done; p, dv out; dp done; ds; ds before seen; dq, dk out; dq done",
}


def profile(row: str, causal: bool, variant: str) -> None:
    """Cycles from each place of a tile to the next, medians over tiles 8 to 55 of a block in the middle, both
    warpgroups; how far apart they are; and of the block: before its first tile, its tiles, after them.
    """
    batch, heads, seq, d_head = map(int, row.split(","))
    call = Call(Shape.square(batch, heads, seq), d_head, causal, "cuda")
    stamps = torch.zeros(2, 64, 16, dtype=torch.int32, device="cuda")
    tensors = (call.do, call.lse_log2, call.delta, call.summed, call.dk, call.dv)
    call.forward().run()
    for step in launches(call, variant):
        step.run()
    cuda_problem(call, variant).stamped(*tensors, stamps=stamps).run()
    at = stamps.cpu().double()
    places = STEPS[d_head].split("; ")
    first, last = (8, 56) if seq * d_head >= 2**19 else (1, 6)
    for w in range(2):
        tiles = torch.cat([at[w, first:last, : len(places)], at[w, first + 1 : last + 1, :1]], 1)
        means = ((tiles[:, 1:] - tiles[:, :-1]) % 2**32).median(0).values
        whole = ((tiles[:, -1] - tiles[:, 0]) % 2**32).median()
        text = ", ".join(f"{name} {x:.0f}" for name, x in zip([*places[1:], "rest"], means.tolist(), strict=True))
        begin, end, left = at[w, 63, :3].tolist()
        block = [(y - x) % 2**32 for x, y in ((begin, float(at[w, 0, 0])), (float(at[w, 0, 0]), end), (end, left))]
        print(f"{variant} {row} {w}: {whole:.0f} a tile: {text}; block {' '.join(f'{x:.0f}' for x in block)}")
    apart = (at[1, :48:6, 0] - at[0, :48:6, 0]).tolist()
    print("  warpgroup 1 behind 0 at tiles 0, 6, ...: " + " ".join(f"{x:.0f}" for x in apart), flush=True)


def compiled(source: str, macros: Macros) -> bytes:
    return hopper.machine_code(source, macros)


def compile_all(causals: list[bool], variants: list[str], pool: ProcessPoolExecutor) -> None:
    """The kernels that time_row and profile will want, several at a time."""
    codes: dict[tuple[str, Macros], bytes] = {}

    def known(source: str, macros: Macros) -> bytes:
        return codes[source, macros]

    hopper.machine_code = known
    calls = [
        (v, Call(Shape.square(1, 1, 128), VARIANTS[v][0], causal, "cuda"), stamps)
        for v, causal, stamps in itertools.product(variants, causals, (False, True))
        if not stamps or (not causal and not v.endswith(DETERMINISTIC))
    ]
    while True:
        missing = set()
        for variant, call, stamps in calls:
            try:
                if stamps:
                    tensors = (call.do, call.lse_log2, call.delta, call.summed, call.dk, call.dv)
                    cuda_problem(call, variant).stamped(*tensors, stamps=call.lse_log2)
                else:
                    launches(call, variant)
            except KeyError as error:
                missing.add(error.args[0])
        if not missing:
            return
        futures = {key: pool.submit(compiled, *key) for key in missing}
        codes.update({key: future.result() for key, future in futures.items()})


def warm(key: str, index: int, causal: bool, row: str) -> None:
    batch, heads, seq, _ = map(int, row.split(","))
    gluon_tune.compiled(key, index, causal, Shape.square(batch, heads, seq))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rows", nargs="+", default=ROWS, help="batch,heads,seq,d_head")
    parser.add_argument("--gluon", type=int, choices=(0, 1), default=1, help="beside flash_gluon")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--check", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        return check(args.check)
    began = time.monotonic()
    causals = {"yes": [True], "no": [False], "both": [True, False]}[args.causal]
    depths = {VARIANTS[v][0] for v in args.only}
    rows = [row for row in args.rows if int(row.split(",")[3]) in depths]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 4), multiprocessing.get_context("spawn")) as pool:
        compiling = [
            pool.submit(warm, f"{kind}-{row.split(',')[3]}", i, causal, row)
            for row, causal in itertools.product({row.split(",")[3]: row for row in rows}.values(), causals)
            for kind, i in (("forward", 0), ("forward", 1), ("backward", 2 if row.endswith("64") else 1))
            if args.gluon or kind == "forward"
        ]
        with ThreadPoolExecutor(12) as threads:
            checks = [threads.submit(checked, v) for v in args.only]
            compile_all(causals, args.only, pool)
            right = [v for v, check in zip(args.only, checks, strict=True) if check.result()]
        for one in compiling:
            one.result()
    print(f"checked at {time.monotonic() - began:.0f} s", flush=True)
    for row, causal in itertools.product(rows, causals):
        time_row(row, causal, right, bool(args.gluon))
    for variant in right:
        if not variant.endswith(DETERMINISTIC):
            profile("2,16,8192,128" if VARIANTS[variant][0] == 128 else "1,16,16384,64", False, variant)
    if "64" in right:
        profile("4,16,1024,64", False, "64")
    print(f"all in {time.monotonic() - began:.0f} s")
    return None


if __name__ == "__main__":
    main()
