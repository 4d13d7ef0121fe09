"""Traces with columns made by hand: with times in s that floats hold exactly, limits can be tried to the digit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.readers.forms.columns import Categorical, Range, Ranges
from cs_systems.readers.forms.operators import Operators, Signature
from cs_systems.readers.forms.trace import Call, Calls, Copies, Copy, Function, Kernels, Trace

MAIN = 1
LAUNCH_S = 2.0**-20
PRODUCT, ADD, FLASH = "nvjet_tst_128x256_64x4", "vectorized_elementwise_kernel<add>", "flash::flash_fwd_kernel"


class Launched(NamedTuple):
    """Kernel with its launch."""

    name: str
    start_s: float
    end_s: float
    launched_s: float
    device: int = 0
    stream: int = 7
    thread: int = MAIN
    launching_s: float = LAUNCH_S
    grid: tuple[int, int, int] = (132, 1, 1)


class Made:
    """Kernels, copies, calls, ranges and operators of one process, in the order in which they are added."""

    def __init__(self, gpu: str = "NVIDIA H100 80GB HBM3") -> None:
        self.gpu = gpu
        self.kernels: list[Launched] = []
        self.copies: list[Copy] = []
        self.calls: list[Call] = []
        self.ranges: list[Range] = []
        self.functions: list[Range] = []
        self.operators: list[tuple[Signature, float, float]] = []

    def kernel(self, name: str, start_s: float, end_s: float, launched_s: float | None = None, **known: Any) -> None:
        self.kernels.append(Launched(name, start_s, end_s, start_s if launched_s is None else launched_s, **known))

    def call(self, name: str, start_s: float, end_s: float) -> None:
        self.calls.append(Call(name, start_s, end_s, MAIN))

    def copy(self, name: str, start_s: float, end_s: float, size: int | None = 1) -> None:
        self.copies.append(Copy("memcpy", start_s, end_s, 0, 7, size, None, name))

    def range(self, name: str, start_s: float, end_s: float) -> None:
        self.ranges.append(Range(name, start_s, end_s, MAIN))

    def function(self, name: str, start_s: float, end_s: float) -> None:
        self.functions.append(Range(name, start_s, end_s, MAIN))

    def operator(self, name: str, start_s: float, end_s: float, *shapes: Any) -> None:
        self.operators.append((Signature(name, shapes or None), start_s, end_s))

    def trace(self, **known: Any) -> Trace:
        launches = [
            Call("cudaLaunchKernel", one.launched_s, one.launched_s + one.launching_s, one.thread)
            for one in self.kernels
        ]
        calls = sorted([*self.calls, *launches], key=lambda call: call.start_s)
        rows = [
            (Function(one.name, one.grid, None, None, None), one.start_s, one.end_s, one.device, one.stream, False,
             calls.index(launch))
            for one, launch in zip(self.kernels, launches, strict=True)
        ]  # fmt: skip
        operators = None
        if self.operators:
            signature, start, end = zip(*self.operators, strict=True)
            threads = np.full(len(start), MAIN)
            operators = Operators(Categorical.of(signature), np.array(start), np.array(end), threads)
        made = Calls.of(calls)
        return Trace(
            source="made",
            profiler=known.pop("profiler", "kineto"),
            devices={0: self.gpu},
            kernels=Kernels.of(rows, made),
            copies=Copies.of(self.copies),
            calls=made,
            ranges=Ranges.of(self.ranges),
            overheads=known.pop("overheads", []),
            ops=None,
            limitations=(),
            operators=operators,
            functions=Ranges.of(self.functions),
            **known,
        )

    def profile(self, step: str | None = None, **known: Any) -> Profile:
        return profile(self.trace(**known), step)
