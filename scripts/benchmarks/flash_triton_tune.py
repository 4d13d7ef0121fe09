"""Search for the fastest tiles of the FlashAttention-2 Triton kernels on this GPU.

Method: every candidate of the grid below is compiled, in as many processes as the machine has cores, without the GPU;
those that spill registers or do not fit the shared memory are dropped. The others are timed one after the other, each
kernel alone, by device events with the launches hidden, and held against the result of the tiles in the table.
Output: JSON lines, for each shape and kernel from the fastest to the slowest, then one line `best` per shape with the
three winners, as they would stand in cs_systems/model/kernels/triton/configs.py, and the sum of their medians.

    python scripts/benchmarks/flash_triton_tune.py --shape 4,16,4096,64 --shape 4,16,4096,128 --causal
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import CallableWorkload
from cs_systems.model.kernels.compile import SHARED_LIMIT_BYTES, KernelResources, compile_for
from cs_systems.model.kernels.triton.configs import Tile, Tiles
from cs_systems.model.kernels.triton.launch import Launch, Problem

# block_m, block_n, num_warps, num_stages, descriptors
GRID: dict[str, tuple[tuple[Any, ...], ...]] = {
    "forward": ((64, 128), (64, 128), (4, 8), (2, 3, 4), (False, True)),
    "dq": ((64, 128), (32, 64, 128), (4, 8), (2, 3), (False, True)),
    "dkdv": ((32, 64, 128), (64, 128), (4, 8), (2, 3), (False, True)),
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    seq: int
    d_head: int


@dataclass(frozen=True)
class Candidate:
    shape: Shape
    dtype: str
    causal: bool
    kernel: str
    tile: Tile | None  # None: the table's


class OneLaunch(CallableWorkload):
    hides_launches = True

    def __init__(self, launch: Launch, prepare: Callable[[], None]) -> None:
        super().__init__(launch.run)
        self.prepare = prepare  # type: ignore[method-assign]


def tensors(candidate: Candidate, device: str) -> dict[str, Tensor]:
    """Return every tensor that the three kernels read or write; the statistics are valid only after they ran."""
    s = candidate.shape
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": getattr(torch, candidate.dtype)}
    made = {name: torch.randn(s.batch, s.heads, s.seq, s.d_head, **like) for name in ("q", "k", "v", "do")}
    made |= {name: torch.empty_like(made["q"]) for name in ("o", "dq", "dk", "dv")}
    return made | {n: torch.empty(made["q"].shape[:3], device=device) for n in ("lse", "lse_log2", "delta")}


def launch(candidate: Candidate, t: dict[str, Tensor]) -> Launch:
    tile = candidate.tile
    tiles = None if tile is None else Tiles(tile, tile, tile)
    problem = Problem(t["q"], t["k"], t["v"], candidate.causal, 0, candidate.shape.d_head**-0.5, tiles)
    if candidate.kernel == "forward":
        return problem.forward(t["o"], t["lse"])
    if candidate.kernel == "dq":
        return problem.dq(t["o"], t["lse"], t["do"], t["lse_log2"], t["delta"], t["dq"])
    return problem.dkdv(t["do"], t["lse_log2"], t["delta"], t["dk"], t["dv"])


def compiled(candidate: Candidate, capability: int) -> KernelResources | None:
    """Compile into Triton's cache on disk, where the launch finds it; return None if that fails."""
    one = launch(candidate, tensors(candidate, "meta"))
    try:
        return compile_for(capability, one.kernel, one.arguments, one.options)
    except Exception:  # triton and ptxas raise what they like; a candidate that fails is no candidate
        return None


def candidates(shapes: list[Shape], kernels: list[str], dtype: str, causal: bool) -> Iterator[Candidate]:
    for shape, kernel in itertools.product(shapes, kernels):
        for values in itertools.product(*GRID[kernel]):
            yield Candidate(shape, dtype, causal, kernel, Tile(*values))


def fitting(
    wanted: list[Candidate], capability: int, jobs: int, max_spills: int
) -> list[tuple[Candidate, KernelResources]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        found = pool.map(compiled, wanted, [capability] * len(wanted))
        return [
            (candidate, resources)
            for candidate, resources in zip(wanted, found, strict=True)
            if resources and resources.spills <= max_spills and resources.shared_bytes <= SHARED_LIMIT_BYTES[capability]
        ]


OUTPUTS = {"forward": ("o", "lse"), "dq": ("dq",), "dkdv": ("dk", "dv")}


def timed(
    fit: list[tuple[Candidate, KernelResources]], device: Device, steps: int, clear: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row a candidate of ONE shape. difference: the largest ‖result − table's‖ / ‖table's‖ of its outputs."""
    t = tensors(fit[0][0], str(device.torch))
    for kernel in OUTPUTS:  # each needs what the one before it wrote
        launch(dataclasses.replace(fit[0][0], kernel=kernel, tile=None), t).run()
    reference = {name: t[name].clone() for names in OUTPUTS.values() for name in names}
    prepare = device.l2_clearer() if clear else lambda: None
    for candidate, resources in fit:
        for name in OUTPUTS[candidate.kernel]:
            t[name].fill_(torch.nan)
        samples = list(measure(OneLaunch(launch(candidate, t), prepare), device, warmup=3, steps=steps))
        durations = [sample.phases_s["call"] for sample in samples if not sample.warmup]
        difference = max(float((t[n] - reference[n]).norm() / reference[n].norm()) for n in OUTPUTS[candidate.kernel])
        for name in OUTPUTS[candidate.kernel]:
            t[name].copy_(reference[name])
        assert candidate.tile is not None
        yield {
            "kernel": candidate.kernel, **dataclasses.asdict(candidate.shape), "dtype": candidate.dtype,
            "causal": candidate.causal, **dataclasses.asdict(candidate.tile), "registers": resources.registers,
            "spills": resources.spills, "shared_bytes": resources.shared_bytes, "median_s": median(durations),
            "best_s": min(durations), "difference": difference,
        }  # fmt: skip


def best(rows: list[dict[str, Any]], tolerance: float = 0.02) -> dict[str, Any]:
    """Return the fastest tile of each kernel, among those whose result agrees with the table's."""
    winners = {}
    for row in sorted(rows, key=lambda row: row["median_s"], reverse=True):
        if row["difference"] <= tolerance:  # False for NaN
            winners[row["kernel"]] = row
    tiles = {k: repr(Tile(*(w[f.name] for f in dataclasses.fields(Tile)))) for k, w in winners.items()}
    shape = {f.name: rows[0][f.name] for f in dataclasses.fields(Shape)}
    return {"best": tiles, **shape, "sum_s": sum(w["median_s"] for w in winners.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch,heads,seq,d_head; the option may be repeated")
    parser.add_argument("--kernel", nargs="+", choices=tuple(GRID), default=list(GRID))
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clear-l2", action="store_true", help="fill the L2 cache with other data before each launch")
    parser.add_argument("--max-spills", type=int, default=0, help="largest number of spill instructions of a candidate")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes that compile")
    args = parser.parse_args()
    device = resolve("cuda")
    major, minor = device.capability() or (0, 0)
    shapes = [Shape(*map(int, text.split(","))) for text in args.shape or ["4,16,4096,64", "4,16,4096,128"]]
    wanted = list(candidates(shapes, args.kernel, args.dtype, args.causal))
    fit = fitting(wanted, 10 * major + minor, args.jobs, args.max_spills)
    for shape in shapes:
        rows = list(timed([f for f in fit if f[0].shape == shape], device, args.steps, args.clear_l2))
        for row in sorted(rows, key=lambda row: (row["kernel"], row["median_s"])):
            print(json.dumps(row), flush=True)
        print(json.dumps(best(rows)), flush=True)


if __name__ == "__main__":
    main()
