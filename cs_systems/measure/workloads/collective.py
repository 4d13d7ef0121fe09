"""One collective between all ranks, without a model: its cost once all ranks have arrived.

A step has these phases:

- `skew`: the ranks meet in an all-reduce of one element. No rank leaves before the last one has arrived, so a rank's
time is its wait for the last rank plus the latency of the meeting. The step's time is the longest of all ranks. No
clocks of different machines are compared.
- `queue` (GPUs only): the device is kept busy until the host has launched all calls, then the devices meet again.
  Without it a small call would take as long as its launch from Python.
- `transfer`: `calls` calls in a row, as nccl-tests times them; divided by `calls` it is the time of one. A rank that
arrives late lengthens `skew` and not this. On a CPU, where nothing is launched, it includes Python's share of a call.

`collectives` defines sizes and rates. Buffers hold zeros, which stay zeros however often they are summed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cs_systems.config import RunConfig
from cs_systems.core.collectives import CollectiveShape
from cs_systems.core.tables import Tables
from cs_systems.formulas import peaks
from cs_systems.formulas.communication import LINK, SETUP, LinkRow, SetupRow
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.record import Ran

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
# longer than a usual launch; a slower host gets the caveat launch-bound
LAUNCH_S = 100e-6
GLOO_LACKS = ("fp8",)
# fragments of errors by which gloo and NCCL refuse a dtype
_REFUSALS = ("scalar type", "float8", "nccl type", "data type")
# newer torch has renamed these two and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective(Workload):
    """Workload of one collective, without a `cost`: the rates of links describe it, not memory's.

    `sent` and `received` are this rank's buffers; they are the same tensor where the collective works in place.
    """

    judged_phase = "transfer"

    def __init__(self, cell: Cell, device: Device) -> None:
        self.shape, self.device, self.ranks = shape_of(cell.config), device, dist.get_world_size()
        self.shape.check(self.ranks)
        self.sent, self.received = self._buffers()
        self._token = torch.zeros(1, device=device.torch)
        self.setup = {**process_group.set_up(), "new_group_s": _new_group_s(device)}
        self.meet()
        self.setup["first_call_s"] = _once_s(self._first_call, device)

    @staticmethod
    def preflight(cell: Cell, device: Device) -> int:
        """Return the bytes that a rank holds; on a CPU the bytes of all ranks, which share its memory."""
        shape, ranks = shape_of(cell.config), cell.config.world_size
        if not device.is_cuda and shape.dtype in GLOO_LACKS:
            raise refusal("gloo", shape)
        held = shape.held_bytes(ranks)
        return held if device.is_cuda else held * ranks

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "skew", self.meet
        if self.device.is_cuda:
            yield "queue", self._queue
        yield "transfer", self._calls

    def meet(self) -> None:
        """Wait until all ranks have arrived; on a GPU the device waits, not the host."""
        dist.all_reduce(self._token)

    def call(self) -> None:
        """Make one call of the collective; on a GPU, launch it."""
        if self.shape.collective == "all_reduce":
            dist.all_reduce(self.sent)
        elif self.shape.collective == "all_gather":
            _all_gather(self.received, self.sent)
        elif self.shape.collective == "reduce_scatter":
            _reduce_scatter(self.received, self.sent)
        elif self.shape.collective == "broadcast":
            dist.broadcast(self.sent, 0)
        elif self.shape.collective == "all_to_all":
            dist.all_to_all_single(self.received, self.sent)
        else:
            raise NotImplementedError(f"no call for the collective {self.shape.collective}")

    def describe(self) -> Ran:
        return {
            "tokens": None,
            "backend": backend(),
            "world_size": self.ranks,
            "calls": self.shape.calls,
            "sent_bytes": self.sent.nbytes,
            "received_bytes": self.received.nbytes,
        }

    def tables(self) -> Tables:
        """Return the tables `setup` and `link`."""
        on_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks)) == self.ranks
        peak = peaks.peak_link(self.device.name) if on_one_machine and self.device.is_cuda else None
        link: LinkRow = {"peak_bytes_per_s": peak.per_s if peak else None, "source": peak.source if peak else None}
        return {**SETUP.filled([self._longest(self.setup)]), **LINK.filled([link])}

    def _buffers(self) -> tuple[Tensor, Tensor]:
        whole, part = self._zeros(self.shape.elements), self.shape.elements // self.ranks
        if self.shape.collective == "all_gather":
            return self._zeros(part), whole
        if self.shape.collective == "reduce_scatter":
            return whole, self._zeros(part)
        return whole, self._zeros(self.shape.elements) if self.shape.collective == "all_to_all" else whole

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, dtype=DTYPES[self.shape.dtype], device=self.device.torch)

    def _calls(self) -> None:
        for _ in range(self.shape.calls):
            self.call()

    def _queue(self) -> None:
        self.device.occupy(self.shape.calls * LAUNCH_S)
        self.meet()

    def _first_call(self) -> None:
        try:
            self.call()
        except (RuntimeError, TypeError, ValueError) as error:
            message = str(error).strip().splitlines()[0]
            if not any(refusal in message.lower() for refusal in _REFUSALS):
                raise
            raise refusal(backend(), self.shape, f" ({message})") from error

    def _longest(self, durations: Mapping[str, float | None]) -> SetupRow:
        """Return the longest of each duration over all ranks."""
        known = {name: value for name, value in durations.items() if value is not None}
        longest = torch.tensor([*known.values()], dtype=torch.float64, device=self.device.torch)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return cast(SetupRow, dict.fromkeys(durations) | dict(zip(known, longest.tolist(), strict=True)))


def shape_of(config: RunConfig) -> CollectiveShape:
    return config.collective or CollectiveShape()


def backend() -> str:
    """Return the name of the backend with its version: `gloo`, `nccl 2.28.9`."""
    name = str(dist.get_backend())
    return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def refusal(backend: str, shape: CollectiveShape, why: str = "") -> Unavailable:
    return Unavailable(f"{backend} does not support {shape.collective} of {shape.dtype}{why}; choose another dtype")


@cache
def _new_group_s(device: Device) -> float:
    """Return the seconds to create a further group of the same ranks, measured once per process.

    This includes its communicator, which the sum of one element creates.
    """
    groups: list[Any] = []

    def make() -> None:
        groups.append(dist.new_group())
        dist.all_reduce(torch.zeros(1, device=device.torch), group=groups[0])

    taken = _once_s(make, device)
    process_group.wait_for_all(device)
    dist.destroy_process_group(groups[0])
    return taken


def _once_s(work: Callable[[], object], device: Device) -> float:
    """Return the seconds of one-time work that is not a step; all ranks start it together."""
    process_group.wait_for_all(device)
    started = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - started


WORKLOAD = Collective
