"""Drawn inputs of the analysis: traces, programs, jobs, histories of memory and series of steps, each by its seed.

Times are multiples of a power of two and sizes are few, so that sums are exact and equal values, at which a limit
decides, are frequent.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.analysis.attribution.distribution import SEARCH
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.comparison.loop_ranks import RankReport
from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.readers.forms.jobs import Job, Message
from cs_systems.readers.forms.trace import Allocations
from cs_systems.readers.snapshot import read
from tests.analysis.attribution.made import ADD, FLASH, LAUNCH_S, MAIN, PRODUCT, Made
from tests.analysis.comparison.test_loop_ranks import MIB, call, python, report, step
from tests.analysis.memory.caching_allocator import CachingAllocator
from tests.analysis.memory.test_categories import BACKWARD, FORWARD, LOSS, OPTIMIZER, SETUP, frame
from tests.analysis.memory.test_categories import MAIN as OF_PROGRAM
from tests.analysis.replay.simulated import (
    AUTOGRAD,
    Close,
    Copied,
    Free,
    Graph,
    Host,
    Launch,
    Open,
    Record,
    Run,
    Sync,
    Wait,
)

TICK_S = 2.0**-13
KERNELS = (
    *(PRODUCT, PRODUCT, ADD, ADD, FLASH, "softmax_warp_forward<float>", "triton_poi_fused_0", "sm80_xmma_gemm_f32f32"),
    *("at::native::reduce_kernel<512>", "multi_tensor_apply_kernel<FusedAdamMathFunctor>", "cutlass_dgemm_64x64"),
    *("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllGather_RING_LL", "indexing_backward_kernel<float>"),
)
CALLS = ("cudaStreamSynchronize", "cudaMalloc", "cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaHostAlloc",
         "cudaEventQuery", "cudaModuleLoadData")  # fmt: skip
PHASES = ("input", "forward", "loss", "backward", "clip", "optimizer")
MATRICES = ((64, 256), (256, 1024)), ((8, 4), (4, 8)), ((4096, 4096), (4096, 4096))


class _Host:
    """Host that launches work of a step, one tick or more after the other, while the device runs ahead or behind."""

    def __init__(self, drawn: random.Random) -> None:
        self.drawn, self.made, self.at = drawn, Made(), 1.0
        self.free_s = dict.fromkeys(((0, 7), (0, 20), (1, 7)), 0.0)
        self.queues = drawn.choice([[(0, 7)], [(0, 7)], [(0, 7)] * 3 + [(0, 20)], [(0, 7)] * 3 + [(1, 7)]])
        self.blocks = drawn.choice([1, 2, 3])
        self.is_slow = drawn.choice([1, 1, 4])
        self.launching_s = drawn.choice([0, 0, 1 / 512, 1 / 128])  # of the first launch of each kernel
        self.known = set[str]()

    def work(self, times: int, thread: int) -> None:
        """Launch kernels and copies, wait for the device, or work alone."""
        drawn, made, begun_s = self.drawn, self.made, self.at
        for _ in range(drawn.choice([1, 2, 3]) * times):
            kind, lasts_s = drawn.random(), TICK_S * drawn.choice([1, 1, 2, 4, 8])
            if kind < 0.75:
                self.launch(drawn.choice(KERNELS), lasts_s, thread)
            elif kind < 0.85:
                start_s = max(self.free_s[0, 7], self.at)
                made.copy(
                    drawn.choice(["HtoD pinned", "HtoD pageable", "DtoH pageable", "DtoD"]), start_s, start_s + lasts_s
                )
                self.free_s[0, 7] = start_s + lasts_s
            else:
                name = drawn.choice(CALLS)
                until_s = max(self.at, *self.free_s.values()) if name.endswith("Synchronize") else self.at
                made.call(name, self.at, until_s + lasts_s)
                self.at = until_s + lasts_s
            self.at += TICK_S * drawn.choice([0.25, 0.5, 1, 1, 2]) * self.is_slow
        if drawn.random() < 0.5:
            made.operator(
                drawn.choice(["aten::mm", "aten::mm", "aten::add_", SEARCH]), begun_s, self.at, *drawn.choice(MATRICES)
            )
        if drawn.random() < 0.3:
            made.range(drawn.choice(["attention", "mlp", "evaluate"]), begun_s, self.at)
        if drawn.random() < 0.2:
            made.function(drawn.choice(["train.py(12): load", "train.py(40): log"]), begun_s, self.at)

    def try_products(self) -> None:
        """Run products of several kernels one after the other, waiting for each."""
        begun_s = self.at
        for name in (PRODUCT, "sm80_xmma_gemm_f32f32", "cutlass_dgemm_64x64"):
            self.launch(name, self.drawn.choice([1, 2]) * TICK_S)
            self.wait()
        self.made.operator("aten::mm", begun_s, self.at, *MATRICES[0])

    def update_on_host(self) -> None:
        """Copy down, compute for long, and copy up."""
        self.wait()
        for name, ticks in (("DtoH pageable", 1), ("", 16), ("HtoD pageable", self.drawn.choice([1, 4, 5]))):
            if name:
                self.made.copy(name, self.at, self.at + ticks * TICK_S)
            self.at += ticks * TICK_S

    def wait(self) -> None:
        until_s = max(self.at, *self.free_s.values()) + TICK_S
        self.made.call("cudaDeviceSynchronize", self.at, until_s)
        self.at = until_s

    def repeat(self, kernels: Sequence[tuple[str, int]]) -> None:
        """Launch kernels in this order, each of so many ticks."""
        for name, ticks in kernels:
            self.launch(name, ticks * TICK_S)
            self.at += TICK_S * (self.drawn.random() < 0.3)

    def launch(self, name: str, lasts_s: float, thread: int = MAIN) -> None:
        drawn, queue = self.drawn, self.drawn.choice(self.queues)
        launching_s = LAUNCH_S if name in self.known else max(LAUNCH_S, self.launching_s)
        start_s = max(self.free_s[queue], self.at + launching_s + drawn.choice([0, 0, 1, 2]) * TICK_S / 4)
        grid = (drawn.choice([1, 8, 132, 1024]), 1, 1)
        self.made.kernel(name, start_s, start_s + lasts_s, self.at, device=queue[0], stream=queue[1], thread=thread,
                         launching_s=launching_s, grid=grid)  # fmt: skip
        self.free_s[queue] = start_s + lasts_s
        self.known.add(name)
        self.at += launching_s


def profile_of(seed: int) -> Profile:
    """Return a profile of some steps, of which the first or each third may be slow; some do not mark their steps."""
    drawn = random.Random(seed)
    host, count = _Host(drawn), drawn.choice([1, 2, 3, 5, 8, 12])
    is_cold, every = drawn.random() < 0.3, drawn.choice([3, 4, 99, 99])
    marks = drawn.choice(["step", "step", "step", "epoch", ""])
    phases = drawn.choice([PHASES, PHASES, PHASES[1:], ("forward", "optimizer"), ()]) if marks else ()
    repeated = [
        (PRODUCT, 2),
        *((drawn.choice(KERNELS), drawn.choice([1, 2, 4])) for _ in range(drawn.choice([0, 3, 8]))),
    ]
    extra = drawn.choice(["forward", "optimizer", "", ""])
    names_layers = drawn.random() < 0.6
    if drawn.random() < 0.3:  # before the first step
        host.made.range(drawn.choice(["forward", "evaluate"]), host.at, host.at + 8 * TICK_S)
        host.launch(PRODUCT, TICK_S)
        host.at += 8 * TICK_S
    for number in range(count):
        begun_s, times = host.at, 6 if (is_cold and not number) or number % every == every - 1 else 1
        for phase in phases:
            since_s, in_layers = host.at, phase in ("forward", "backward")
            thread = AUTOGRAD if phase == "backward" and seed % 2 else MAIN
            for block in range(host.blocks * (1 if names_layers else 2)):
                layer_s = host.at
                if names_layers or not in_layers:
                    host.work(times, thread)
                else:
                    host.repeat(repeated)
                if names_layers and in_layers and thread == MAIN:
                    host.made.range(f"layers.{block}", layer_s, host.at)
            if drawn.random() < 0.2:  # again inside, as when a model is recomputed
                host.made.range(drawn.choice(["forward", phase]), since_s, (since_s + host.at) / 2)
            if phase == extra == "forward":
                host.try_products()
            if phase == extra == "optimizer":
                host.update_on_host()
            host.made.range(phase, since_s, host.at)
        if not phases:
            host.repeat(repeated * times)
        if drawn.random() < 0.3:
            host.wait()
        if marks:
            host.made.range(marks, begun_s, host.at)
        host.at += TICK_S * drawn.choice([0, 1, 8])
    collectives = [n for n, one in enumerate(host.made.kernels) if "nccl" in one.name]
    messages = {
        n: Message(drawn.choice(["_allgather_base", "allreduce"]), "0", 2, k, 1024, drawn.choice([1024, 2048]), "Float")
        for k, n in enumerate(collectives)
    }
    changes = [drawn.choice([-512, 512, 4096]) for _ in range(20)]
    times_s = np.sort([drawn.randrange(1024, int(host.at * 1024) + 1) / 1024 for _ in changes])
    delays = [] if drawn.random() < 0.5 else sorted(drawn.sample(range(8192, int(host.at * 8192) + 1), 8))
    return host.made.profile(
        overheads=[(at * TICK_S, at * TICK_S + TICK_S / 2) for at in delays],
        profiler=drawn.choice(["kineto", "nsys"]),
        job=Job(0, 2) if drawn.random() < 0.5 else None,
        messages=messages if drawn.random() < 0.7 else {},
        allocations=Allocations(times_s, np.full(len(changes), MAIN), np.array(changes)),
    )


def program_of(seed: int) -> tuple[Any, ...]:
    """Return the operations of one step of a simulated program."""
    drawn = random.Random(seed)

    def times_s(*ticks: int) -> float:
        return drawn.choice(ticks) / 2**20

    def some(count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(count):
            match drawn.randrange(9):
                case 0:
                    found += [Host(times_s(16, 64, 256))]
                case 1 | 2 | 3:
                    name, stream = (
                        drawn.choice(["gemm", "gemm", "softmax", "vectorized_elementwise"]),
                        drawn.choice([7, 7, 7, 20]),
                    )
                    found += [Launch(times_s(2, 8, 32), stream, name, times_s(4, 8))] * drawn.choice([1, 5, 20])
                case 4:
                    found += [
                        Copied(times_s(8, 64), drawn.choice([7, 20]), drawn.choice(["HtoD pinned", "DtoH pageable"]))
                    ]
                case 5:
                    found += [
                        Record("made", 7),
                        Launch(times_s(8, 32), 7),
                        Wait(20, "made"),
                        Launch(times_s(8, 32), 20),
                    ]
                case 6:
                    found += [drawn.choice([Sync(), Sync(stream=7)])]
                case 7:
                    found += [Graph((times_s(2, 8),) * drawn.choice([3, 10]))]
                case 8:
                    found += [drawn.choice([Free(times_s(16, 32)), Host(times_s(8))])]
        return found

    phases = [(Open(phase), *some(3), Close()) for phase in drawn.sample(PHASES, 3)]
    backward = (Run(AUTOGRAD, (Host(times_s(16)), *some(2))),) if drawn.random() < 0.5 else ()
    return (Launch(times_s(8, 32)), *(one for phase in phases for one in phase), *backward, *some(2), Sync())


def reports_of(seed: int) -> list[RankReport]:
    """Return the reports of two to four ranks of a loop."""
    drawn = random.Random(seed)
    ranks, count, late = drawn.choice([2, 2, 3, 4]), drawn.choice([2, 3, 4, 8]), drawn.choice([0, 1, 1, None])
    buckets = drawn.choice([[], [], [MIB // 2] * 4, [4 * MIB, MIB - 1], [MIB] * 3])
    names = drawn.choice(
        [("all_reduce",), ("all_reduce", "all_gather", "barrier"), ("all_to_all", "all_reduce", "send")]
    )
    made: list[dict[str, Any]] = [
        {
            "name": drawn.choice(names), "size_bytes": drawn.choice([0, MIB - 1, MIB, 4 * MIB]), "ranks": ranks,
            "phase": drawn.choice(["forward", "backward", "other"]), "is_early": drawn.random() < 0.3,
            "is_gradients": bool(buckets) and drawn.random() < 0.5, "group": str(drawn.choice([0, 0, 0, 1])),
            "place": drawn.choice([None, "train.py:7", "train.py:9"]), "callee": None, "option": None,
        } for _ in range(drawn.choice([1, 2, 5, 12]))
    ]  # fmt: skip
    if drawn.random() < 0.5:
        made.append({"name": "broadcast", "size_bytes": drawn.choice([MIB - 1, 4 * MIB]), "ranks": ranks,
                     "phase": "forward", "is_early": False, "is_gradients": False, "group": "0",
                     "place": "train.py:6", "callee": "model", "option": "forward_sync_buffers"})  # fmt: skip
    extra, writes = drawn.choice(["forward", "backward", "other", "input"]), drawn.choice([0, 1, None])
    found = []
    for rank in range(ranks):
        steps = []
        for _ in range(count):
            behind = rank == late and drawn.random() < 0.9
            lasts = [0, 1, 1, 2] if behind else [1, 2, 3, 4]
            calls = [call(drawn.choice(lasts) / 64, queued_s=drawn.choice([0, 0, 0, 1]) / 64,
                          changed_bytes=drawn.choice([None, 0, 8 * (rank == writes)]) if one["option"] else None,
                          received=drawn.choice([0, 64, 96 * (rank + 1)]), **one) for one in made]  # fmt: skip
            more = {extra: 0.5 + drawn.choice([0, 0.125])} if behind else {}
            steps.append(step(*calls, queued_s=drawn.choice([0, 0, 0.0625]), passes=drawn.choice([1, 1, 2]),
                              search_s=drawn.choice([0, 0.03125]), **{"input": 0.125, **more}))  # fmt: skip
        lines = [
            python(name, drawn.choice([1, 2, 8]) / 32)
            for name in drawn.sample(["load", "log", "save"], drawn.choice([0, 1, 3]))
        ]
        found.append(report(rank, steps, own_python=lines, bucket_bytes=buckets, marked=drawn.choice([0, 10]),
                            marking_s=drawn.choice([0.0, 1 / 64]), unused=drawn.choice([None, 0, 3]), wrapper="DDP",
                            elements=drawn.choice([100.0, 100.0, 120.0, 400.0, None])))  # fmt: skip
    return found


def memory_of(seed: int) -> Attribution:
    """Return the memory in a drawn history of a training loop, of which some blocks stay."""
    drawn, allocator = random.Random(seed), CachingAllocator()
    sizes = [512, 64 << 10, MIB, 2 * MIB, 6 * MIB, 12 * MIB]
    weights = [drawn.choice(sizes) for _ in range(drawn.choice([2, 4]))]
    kept = [allocator.alloc(size) for size in drawn.choices(sizes, k=drawn.choice([0, 2]))]
    allocator.start()
    kept += [allocator.alloc(size, SETUP) for size in weights]
    for number in range(drawn.choice([1, 2, 3, 5])):
        activations = [
            allocator.alloc(drawn.choice(sizes), (frame("forward", line=line), *FORWARD)) for line in (1, 2, 3)
        ]
        activations.append(allocator.alloc(drawn.choice(sizes), LOSS))
        if drawn.random() < 0.8:
            gradients = [allocator.alloc(size, BACKWARD) for size in weights]
            drawn.shuffle(activations)
            left = drawn.choice([0, 0, 1])
            for address in activations[left:]:
                allocator.free(address, BACKWARD)
            if not number or drawn.random() < 0.1:
                kept += [allocator.alloc(size, OPTIMIZER) for size in weights]
            for address in gradients[drawn.choice([0, 0, 1]) :]:
                allocator.free(address, OPTIMIZER)
        else:
            for address in activations:
                allocator.request_free(address, OF_PROGRAM)
                allocator.complete_free(address, OF_PROGRAM)
        if drawn.random() < 0.2:
            allocator.empty_cache()
    data = allocator.snapshot()
    if drawn.random() < 0.5:
        asked = drawn.choice([MIB, 12 * MIB, 64 * MIB])
        failed = {"action": "oom", "addr": 0, "size": asked, "device_free": drawn.choice([0, MIB, 32 * MIB])}
        data["device_traces"][0].append(failed | {"stream": 0, "frames": [*FORWARD], "time_us": 2_000_000})
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "made.pickle")).write_bytes(pickle.dumps(data))
        return attribute(replay(read(path)))


def durations_of(seed: int) -> list[float]:
    """Return durations of steps on a coarse grid: growing, with a slow begin, with slow steps, or alike."""
    drawn = random.Random(seed)
    count, rise = drawn.choice([5, 9, 10, 11, 20, 30, 61, 125]), drawn.choice([0, 0, 1, 2])
    slow, every = drawn.choice([0, 0, 3, 4, 10]), drawn.choice([3, 10, 99])
    return [
        (16 + rise * step + drawn.choice([0, 0, 0, 1, 4]) + 20 * (step < slow) + 24 * (step % every == every - 1))
        / 1024
        for step in range(count)
    ]


def readings_of(seed: int) -> Sequence[tuple[int, float]]:
    """Return bytes of memory by step: growing all along, up to a step, or not at all."""
    drawn = random.Random(seed)
    count, rise, until = drawn.choice([9, 10, 30, 64, 130]), drawn.choice([0, 1e6, 4e6]), drawn.choice([8, 30, 200])
    return [(2 * n, 1e9 + rise * min(n, until) + drawn.choice([0, 0, 0, 3e6])) for n in range(count)]
