"""Is the backward in CUDA C++ right, and how fast is it beside flash_gluon's?

Method: each variant below (macros of backward.cu) is held against float64 in a process of its own, which is killed
when a kernel hangs; on a mismatch the error is shown by blocks of 64 rows x 64 columns. What is right is timed on the
rows of the table beside flash_gluon's backward, in one process, as gluon_tune.py does: device events, launches hidden,
the L2 cache overwritten before each call, medians. A backward's time has all of its three kernels.
Output: lines of errors, then milliseconds: all, and (before, main, after); then where a tile's cycles go.

    python scripts/benchmarks/cuda_kernels.py
    python scripts/benchmarks/cuda_kernels.py --only 64 --rows 4,16,4096,64 --causal yes
"""

from __future__ import annotations

import argparse
import dataclasses
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

from cs_systems.kernels.flash_cuda import Problem
from cs_systems.kernels.flash_triton import Launch

VARIANTS: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {
    "64": (64, ()),
    "128": (128, ()),
}
CHECK_S = 75.0


@dataclass(frozen=True)
class Case:
    shape: Shape
    causal: bool
    narrower: int = 0  # than the d_head of the variant
    dtype: torch.dtype = torch.bfloat16


def cases() -> list[Case]:
    square = Shape.square
    found = [Case(shape, causal) for shape in (square(1, 1, 128), square(1, 2, 1024)) for causal in (False, True)]
    odd = [square(2, 3, 333), Shape(1, 4, 2, 200, 457, 257), Shape(1, 2, 2, 457, 200, -257), Shape(1, 6, 1, 1000, 90)]
    found += [Case(shape, causal) for shape in odd for causal in (False, True)]
    return [*found, Case(square(2, 9, 1500), True), Case(square(1, 2, 300), True, 24, torch.float16)]


def cuda_problem(call: Call, macros: Any) -> Problem:
    return Problem(call.q, call.k, call.v, call.causal, call.offset, call.scale, macros)


def launches(call: Call, macros: Any) -> list[Any]:
    p = cuda_problem(call, macros)
    return [
        p.prepare(call.o, call.lse, call.do, call.lse_log2, call.delta, call.summed),
        p.backward(call.do, call.lse_log2, call.delta, call.summed, call.dk, call.dv),
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
    d_head, macros = VARIANTS[variant]
    right = True
    for case in cases():
        call = call_of(case, d_head)
        ref = reference(call)
        call.o.copy_(ref["o"])
        call.lse.copy_(ref["lse"])
        for name in ("dq", "dk", "dv", "summed", "lse_log2", "delta"):
            getattr(call, name).fill_(torch.nan)
        print(f"  {variant} {dataclasses.astuple(case)}: ", end="", flush=True)
        for _ in range(2):  # a second time, as the first one left everything
            for launch in launches(call, macros):
                launch.run()
            torch.cuda.synchronize()
        errors = {name: error(getattr(call, name), ref[name]) for name in ("dq", "dk", "dv")}
        wrong = [name for name, found in errors.items() if not found <= TOLERANCE]
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


def time_row(row: str, causal: bool, variants: list[str]) -> None:
    batch, heads, seq, d_head = map(int, row.split(","))
    call = Call(Shape.square(batch, heads, seq), d_head, causal, "cuda")
    call.forward().run()
    found: list[tuple[float, str]] = []
    for name in ["gluon", *(v for v in variants if VARIANTS[v][0] == d_head)]:
        steps: list[Launch] = call.backward() if name == "gluon" else launches(call, VARIANTS[name][1])
        parts = [median(timed(x.run, 0.03)) * 1e3 for x in steps]
        whole = median(timed(lambda steps=steps: [x.run() for x in steps])) * 1e3
        found.append((whole, f"{name} {whole:.3f} ({parts[0]:.3f} {parts[1]:.3f} {parts[2]:.3f})"))
    print(f"{row}{' causal' if causal else ''}: " + "; ".join(text for _, text in sorted(found)), flush=True)


STEPS = {
    64: "top; dp a, s b out; s a done; p a, dv a out; dp a done; ds a; ds before seen; dk a, dp b, dq out; s b done; "
    "p b, dv b out; dp b done; ds b, dk b out; dq done",
    128: "top; dp out; s done; p, dv out; dp done; ds; ds before seen; dq, dk out; dq done",
}


def profile(row: str, causal: bool, variant: str) -> None:
    """Cycles from each place of a tile to the next, means over tiles 8 to 55 of a block in the middle, both warpgroups;
    and how far apart they are.
    """
    batch, heads, seq, d_head = map(int, row.split(","))
    call = Call(Shape.square(batch, heads, seq), d_head, causal, "cuda")
    stamps = torch.zeros(2, 64, 16, dtype=torch.int32, device="cuda")
    tensors = (call.do, call.lse_log2, call.delta, call.summed, call.dk, call.dv)
    call.forward().run()
    for step in launches(call, VARIANTS[variant][1]):
        step.run()
    cuda_problem(call, VARIANTS[variant][1]).stamped(*tensors, stamps=stamps).run()
    at = stamps.cpu().double()
    places = STEPS[d_head].split("; ")
    for w in range(2):
        tiles = at[w, 8:56, : len(places)]
        means = ((tiles[:, 1:] - tiles[:, :-1]) % 2**32).median(0).values
        whole = ((at[w, 9:57, 0] - tiles[:, 0]) % 2**32).median()
        text = ", ".join(f"{name} {x:.0f}" for name, x in zip(places[1:], means.tolist(), strict=True))
        print(f"{variant} {row} causal={causal} warpgroup {w}: {whole:.0f} a tile: {text}")
    apart = (at[1, :48:6, 0] - at[0, :48:6, 0]).tolist()
    print("  warpgroup 1 behind 0 at tiles 0, 6, ...: " + " ".join(f"{x:.0f}" for x in apart), flush=True)


def warm(key: str, index: int, causal: bool, row: str) -> None:
    batch, heads, seq, _ = map(int, row.split(","))
    gluon_tune.compiled(key, index, causal, Shape.square(batch, heads, seq))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rows", nargs="+", default=ROWS, help="batch,heads,seq,d_head")
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
        ]
        with ThreadPoolExecutor(4) as threads:
            right = [v for v, ok in zip(args.only, threads.map(checked, args.only), strict=True) if ok]
        for one in compiling:
            one.result()
    print(f"checked at {time.monotonic() - began:.0f} s", flush=True)
    for row, causal in itertools.product(rows, causals):
        time_row(row, causal, right)
    for variant in right:
        d_head = VARIANTS[variant][0]
        profile("2,16,8192,128" if d_head == 128 else "1,16,16384,64", False, variant)
    print(f"all in {time.monotonic() - began:.0f} s")
    return None


if __name__ == "__main__":
    main()
