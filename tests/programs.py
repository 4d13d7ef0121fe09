"""Traces of programs with given times: a host that launches kernels, and a GPU that runs them in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_TNN"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
LAUNCH_US, LATENCY_US, GAP_US = 4.0, 4.0, 1.0


class Program:
    """Events of one process in Kineto's form; times are in µs, and `now` is the host's clock."""

    def __init__(self, gpu: str = "NVIDIA A100-SXM4-80GB") -> None:
        self.now, self.free, self.number = 1000.0, 0.0, 0
        self.events: list[dict[str, Any]] = []
        self.gpu = gpu

    def event(self, category: str, name: str, start: float, lasts: float, **args: Any) -> None:
        thread = args.pop("thread", 1)
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": lasts}
        self.events.append(event | {"args": args})

    def launch(self, lasts: float, name: str = PRODUCT, call: float = LAUNCH_US, then: float = 4.0) -> None:
        """Launch a kernel of this duration; the call itself and the host's time after it may be long."""
        self.number += 1
        self.event("cuda_runtime", "cudaLaunchKernel", self.now, call, correlation=self.number)
        start = max(self.now + call + LATENCY_US, self.free + GAP_US)
        where = {"device": 0, "stream": 7, "correlation": self.number, "thread": 7}
        self.event("kernel", name, start, lasts, grid=[132, 1, 1], block=[256, 1, 1], **where)
        self.free = start + lasts
        self.now += call + then

    def wait(self, call: str = "cudaDeviceSynchronize") -> None:
        """Wait until every kernel has ended."""
        self.number += 1
        end = max(self.now, self.free) + 5.0
        self.event("cuda_runtime", call, self.now, end - self.now, correlation=self.number)
        self.now = end

    def during(self, name: str, start: float, category: str = "user_annotation") -> None:
        """Name what the host has done since `start`."""
        self.event(category, name, start, self.now - start)

    def write(self, path: Path) -> Path:
        properties = [{"id": 0, "name": self.gpu}]
        path.write_text(json.dumps({"deviceProperties": properties, "traceEvents": self.events}))
        return path
