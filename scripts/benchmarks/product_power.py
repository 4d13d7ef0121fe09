"""Rate of each of cublasLt's algorithms for the products of a training step, once the board is at its power limit.

    python3 scripts/benchmarks/product_power.py --size 2.7B --context 2048 --json product_power.json

Question: could other algorithms than torch's compute a step's products in less time where power binds? Method: the
twelve products of a block (q, k and v joined; output; w1 and w3 joined; w2; each forward, for the input's gradient and
for the weight's), batch 4, bfloat16, random numbers. cublasLt proposes algorithms; the first ones are tried with every
shape of a cluster too. Those within 15% of the fastest by single calls then run back to back, torch's choice before and
after them, while NVML reads clock and power. In the end the twelve products run in turn for two seconds: by torch, and
each by its fastest. Output: a line a run, and the rows as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import ModelConfig, preset
from cs_systems.machine import environment
from cs_systems.machine.device import Device, resolve

BATCH = 4
ASSUMED_FLOPS = 700e12  # per second, to choose the calls of a run
IN_A_GRAPH = 20  # calls
SINGLE_S, WARMUP_S, RUN_S = 0.012, 0.2, 0.5
BLOCK_WARMUP_S, BLOCK_S, TURNS = 1.0, 2.0, 3
SLOWEST = 1.15  # times the fastest by single calls, of the algorithms that run back to back
MOST = 9  # of these
PROPOSED, VARIED = 48, 6  # algorithms asked for, and those of them that are tried with each cluster

# Numbers of cublasLt.h.
BF16, FP32, COMPUTE_FP32 = 14, 0, 68
TRANSPOSE_A, TRANSPOSE_B = 3, 4  # of a product
WORKSPACE_BYTES = 1  # of a preference
TILE, SPLIT_K, STAGES, CLUSTER = 1, 2, 6, 8  # of an algorithm
CLUSTERS = {2: "1x1", 3: "2x1", 4: "4x1", 5: "1x2", 6: "2x2", 7: "4x2", 8: "1x4", 9: "2x4"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="2.7B")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows, fastest = resolve("cuda"), list[dict[str, Any]](), dict[str, Callable[[], Any]]()
    print(f"{device.name}, torch {torch.__version__}, cublasLt {library().cublasLtGetVersion()}")
    products = [*products_of(preset(args.size), BATCH * args.context)]
    asked = {"device": device.name, "size": args.size, "context": args.context}
    for product in products:
        for row in compared(product, device, fastest):
            rows.append(asked | {"product": product.name} | row)
            print(line(rows[-1]), flush=True)
    flops = sum(product.flops for product in products)
    for turn in range(TURNS):
        for name, runs in (("torch", [p.by_torch for p in products]), ("fastest", [fastest[p.name] for p in products])):
            row = run_on(in_turn(runs), flops, device, BLOCK_WARMUP_S, BLOCK_S)
            rows.append(asked | {"product": "block", "by": name, "turn": turn} | row)
            print(line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def products_of(model: ModelConfig, tokens: int) -> Iterator[Product]:
    """Yield the products of a block, layer by layer: forward, of the input's gradient, of the weight's."""
    d, f = model.d_model, model.d_ff
    for name, rows, columns in (("qkv", 3 * d, d), ("output", d, d), ("w1 and w3", 2 * f, d), ("w2", d, f)):
        x, d_out, weight = (random(tokens, columns), random(tokens, rows, 1e-3), random(rows, columns, 0.02))
        yield Product(f"{name}, forward", x, weight.T)
        yield Product(f"{name}, input's gradient", d_out, weight)
        yield Product(f"{name}, weight's gradient", d_out.T, x)


def compared(product: Product, device: Device, fastest: dict[str, Callable[[], Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of a product back to back; put the fastest of them into `fastest`."""
    product.by_torch()
    expected = product.out.clone()
    single: list[tuple[float, Algorithm]] = []
    for algorithm in product.algorithms():
        product.out.zero_()
        product.by(algorithm)()
        torch.testing.assert_close(product.out, expected, rtol=0.02, atol=float(0.02 * expected.abs().max()))
        run = captured(product.by(algorithm))
        single.append((seconds_a_replay(run, calls_in(SINGLE_S, product.flops), device), algorithm))
    single.sort(key=lambda each: each[0])
    tried = [algorithm for seconds, algorithm in single if seconds < SLOWEST * single[0][0]][:MOST]
    runs: list[tuple[dict[str, Any], Callable[[], Any]]] = [({"by": "torch"}, product.by_torch)]
    runs += [({"by": "cublasLt"} | algorithm.described(), product.by(algorithm)) for algorithm in tried]
    runs.append(runs[0])
    run_on(product.by_torch, product.flops, device, WARMUP_S, RUN_S)
    best_s = float("inf")
    for description, run in runs:
        row = run_on(run, product.flops, device, WARMUP_S, RUN_S)
        if row["seconds"] < best_s:
            best_s, fastest[product.name] = row["seconds"], run
        yield description | row | {"algorithms": len(single)}


def run_on(run: Callable[[], Any], flops: int, device: Device, warmup_s: float, timed_s: float) -> dict[str, Any]:
    """Return the time of a call among calls back to back, and the median clock and power meanwhile."""
    run, calls = captured(run), calls_in(timed_s, flops)
    seconds_a_replay(run, calls_in(warmup_s, flops), device)
    start = device.mark()
    for _ in range(calls):
        run()
    end = device.mark()
    readings = []
    while not end.query():
        readings.append((environment.sm_clock_hz(device), environment.power_w(device)))
        time.sleep(0.02)
    seconds = device.between_s(start, end) / calls / IN_A_GRAPH
    clock, power = (median(x for x in each if x is not None) for each in zip(*readings, strict=True))
    return {"seconds": seconds, "flops_per_s": flops / seconds, "sm_clock_hz": clock, "power_w": power}


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays IN_A_GRAPH calls: a small product takes less time than the host takes to launch it."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            run()
    return graph.replay


def calls_in(seconds: float, flops: int) -> int:
    return max(3, round(seconds * ASSUMED_FLOPS / flops / IN_A_GRAPH))


def seconds_a_replay(run: Callable[[], Any], calls: int, device: Device) -> float:
    start = device.mark()
    for _ in range(calls):
        run()
    end = device.mark()
    device.synchronize()
    return device.between_s(start, end) / calls


def in_turn(runs: list[Callable[[], Any]]) -> Callable[[], None]:
    def run() -> None:
        for each in runs:
            each()

    return run


def line(row: dict[str, Any]) -> str:
    by = " ".join(str(row[name]) for name in ("by", *Algorithm.NAMES) if name in row)
    return (
        f"{row['product']:<28} {by:<36} {1e3 * row['seconds']:7.4f} ms {row['flops_per_s'] / 1e12:6.1f} TFLOP/s "
        f"{row['power_w']:.0f} W {row['sm_clock_hz'] / 1e6:.0f} MHz"
    )


def random(rows: int, columns: int, size: float = 1.0) -> Tensor:
    return (torch.randn(rows, columns, device="cuda") * size).bfloat16()


# ---- cublasLt, by its C interface ----


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and what cublasLt says of it."""

    _fields_ = [
        *(("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int)),
        *(("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)),
    ]
    NAMES = ("tile", "split_k", "stages", "cluster")

    def described(self) -> dict[str, Any]:
        """Return numbers of cublasLt.h by NAMES; the cluster in blocks."""
        tile, split_k, stages = (self._get(what, ctypes.c_int32) for what in (TILE, SPLIT_K, STAGES))
        cluster = self._get(CLUSTER, ctypes.c_uint16)
        return dict(zip(self.NAMES, (tile, split_k, stages, CLUSTERS.get(cluster, cluster)), strict=True))

    def _get(self, what: int, kind: type[Any]) -> int:
        value, written = kind(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(kind))
        call("MatmulAlgoConfigGetAttribute", self.start(), what, ctypes.byref(value), size, ctypes.byref(written))
        return int(value.value)

    def start(self) -> Any:
        """Return the address of the algorithm, which is that of this structure too."""
        return ctypes.byref(self)

    def with_cluster(self, cluster: int) -> Algorithm:
        copy, value = Algorithm.from_buffer_copy(self), ctypes.c_uint16(cluster)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        call("MatmulAlgoConfigSetAttribute", copy.start(), CLUSTER, ctypes.byref(value), size)
        return copy


@dataclass
class Product:
    """out = a b of two matrices in bfloat16, each contiguous or the transpose of one that is."""

    name: str
    a: Tensor
    b: Tensor
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.empty(self.a.shape[0], self.b.shape[1], dtype=torch.bfloat16, device="cuda")
        self.flops = 2 * self.a.shape[0] * self.a.shape[1] * self.b.shape[1]
        self.product = made("MatmulDescCreate", COMPUTE_FP32, FP32)
        # A matrix by rows is its transpose by columns, cublasLt's order: it computes outᵀ = bᵀ aᵀ.
        for attribute, operand in ((TRANSPOSE_A, self.b), (TRANSPOSE_B, self.a)):
            value = ctypes.c_int32(not operand.is_contiguous())
            call("MatmulDescSetAttribute", self.product, attribute, ctypes.byref(value), ctypes.c_size_t(4))
        self.layouts = [layout(self.b), layout(self.a), layout(self.out), layout(self.out)]

    def by_torch(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def by(self, algorithm: Algorithm) -> Callable[[], None]:
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        b, a, out = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.b, self.a, self.out))
        described = [*zip((b, a, out, out), self.layouts, strict=True)]
        arguments = (
            *(self.product, ctypes.byref(one), *described[0], *described[1], ctypes.byref(zero), *described[2]),
            *(*described[3], algorithm.start(), ctypes.c_void_p(workspace().data_ptr())),
            ctypes.c_size_t(workspace().nbytes),
        )
        return lambda: call("Matmul", handle(), *arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def algorithms(self) -> Iterator[Algorithm]:
        """Yield what cublasLt proposes, and the first of them with each cluster that it can have."""
        preference, size = made("MatmulPreferenceCreate"), ctypes.c_size_t(workspace().nbytes)
        call("MatmulPreferenceSetAttribute", preference, WORKSPACE_BYTES, ctypes.byref(size), ctypes.c_size_t(8))
        results, number = (Algorithm * PROPOSED)(), ctypes.c_int()
        asked = (handle(), self.product, *self.layouts)
        call("MatmulAlgoGetHeuristic", *asked, preference, PROPOSED, results, ctypes.byref(number))
        proposed = [each for each in results[: number.value] if each.status == 0]
        varied = [each.with_cluster(cluster) for each in proposed[:VARIED] for cluster in CLUSTERS]
        varied = [
            each for each in varied if not library().cublasLtMatmulAlgoCheck(*asked, each.start(), Algorithm().start())
        ]
        yield from {bytes(each.algorithm): each for each in proposed + varied}.values()


@cache
def library() -> Any:
    """Return cublasLt as torch has loaded it."""
    torch.mm(*[torch.ones(8, 8, device="cuda")] * 2)  # torch loads it
    mapped = Path("/proc/self/maps").read_text().split()
    return ctypes.CDLL(next(word for word in mapped if "libcublasLt.so" in word))


@cache
def handle() -> ctypes.c_void_p:
    return made("Create")


@cache
def workspace() -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def call(name: str, *arguments: Any) -> None:
    """Call a function of cublasLt.

    Raises:
        RuntimeError: it failed; with its status.
    """
    if status := getattr(library(), f"cublasLt{name}")(*arguments):
        raise RuntimeError(f"cublasLt{name}: status {status}")


def made(name: str, *arguments: Any) -> ctypes.c_void_p:
    """Return the object that a function of cublasLt makes."""
    found = ctypes.c_void_p()
    call(name, ctypes.byref(found), *arguments)
    return found


def layout(matrix: Tensor) -> ctypes.c_void_p:
    """Return the layout of the contiguous matrix that `matrix` is, or is the transpose of."""
    rows, columns = (matrix if matrix.is_contiguous() else matrix.T).shape
    return made("MatrixLayoutCreate", BF16, ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns))


if __name__ == "__main__":
    sys.exit(main())
