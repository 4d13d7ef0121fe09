"""Layouts that a model allows under each strategy, and their efficiency by formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from _simulated_step import (
    Cluster,
    Layout,
    Sharing,
    Step,
    binding_ranks,
    binding_tensor_ranks,
    one_gpu_s,
    step,
)

from cs_systems.config import ModelConfig, preset
from cs_systems.formulas.communication import payload
from cs_systems.formulas.scaling import TOKENS

SIZES = ("medium", "xl", "2.7B", "8B")
MOST_RANKS = 2**16
GPUS_PER_NODE = 8
DEVICE = "NVIDIA H200"
DEVICE_MEMORY_BYTES = 141e9  # number from the GPU's data sheet
STATE_BYTES = 16  # bytes per parameter: fp32 value, its gradient and AdamW's two moments
PEAK_SHARE = 0.4  # share of the data sheet's rate that is assumed if no GPU was measured
LINK_BYTES_PER_S, LINK_SOURCE = 450e9, "NVIDIA H200 data sheet, NVLink in one direction"
LATENCY_S = 10e-6  # seconds of latency of a collective between two ranks, assumed if none was measured
ANYWHERE = math.inf
NETWORKS = {  # bytes/s from one node to the others
    "NVLink throughout": ANYWHERE,
    "50 GB/s a GPU": 50e9 * GPUS_PER_NODE,
    "50 GB/s a node": 50e9,
}
# strategy → what data-parallel ranks share, bytes per element sent, whether blocks are divided
STRATEGIES = {
    "ddp": (Sharing.AVERAGED, 4, False),
    "fsdp": (Sharing.SHARDED, 2, False),
    "tp": (Sharing.AVERAGED, 4, True),
    "fsdp+tp": (Sharing.SHARDED, 2, True),
}


@dataclass(frozen=True)
class Inputs:
    """Rates of one GPU and of the link between two, measured or assumed, with their sources."""

    flops_per_s: float
    rate_source: str
    link_bytes_per_s: float
    latency_s: float
    link_source: str

    def cluster(self, network_bytes_per_s: float = ANYWHERE, flops_per_s: float | None = None) -> Cluster:
        size = MOST_RANKS if network_bytes_per_s == ANYWHERE else GPUS_PER_NODE
        rate = flops_per_s or self.flops_per_s
        return Cluster(rate, self.link_bytes_per_s, network_bytes_per_s, self.latency_s, size)


@dataclass(frozen=True)
class Point:
    """Efficiency of a step of the whole batch on a given number of GPUs."""

    layout: Layout
    efficiency: float


@cache
def points(size: str, strategy: str, network: str, given: Inputs) -> tuple[Point, ...]:
    """Return the efficiency for each number of GPUs, with the most efficient layout of each."""
    model, cluster = preset(size), given.cluster(NETWORKS[network])
    rows, found = whole_rows(model), {}
    for layout in layouts(model, strategy):
        seconds = step_of(model, strategy, layout, rows / layout.dp, cluster).simulate().makespan_s
        alone = one_gpu_s(model, rows, model.context_length, cluster)
        point = Point(layout, alone / (layout.ranks * seconds))
        if layout.ranks not in found or point.efficiency > found[layout.ranks].efficiency:
            found[layout.ranks] = point
    return tuple(found[ranks] for ranks in sorted(found))


def whole_rows(model: ModelConfig) -> int:
    return TOKENS // model.context_length


def layouts(model: ModelConfig, strategy: str) -> Iterator[Layout]:
    """Yield the layouts: data-parallel ranks in powers of two, one row of the batch or more each.

    2-D divides blocks within a node.
    """
    sharing, _, divides = STRATEGIES[strategy]
    common = math.gcd(model.num_heads, model.d_ff)
    degrees = [n for n in range(1, common + 1) if common % n == 0] if divides else [1]
    if strategy == "tp":
        yield from (Layout(sharing, 1, tp) for tp in degrees)
        return
    for tp in degrees:
        if GPUS_PER_NODE % tp == 0 and (tp > 1 or not divides):
            dp = 1
            while dp <= whole_rows(model) and dp * tp <= MOST_RANKS:
                yield Layout(sharing, dp, tp)
                dp *= 2


def step_of(
    model: ModelConfig, strategy: str, layout: Layout, rows: float, cluster: Cluster, optimizer_s: float = 0.0
) -> Step:
    sent = STRATEGIES[strategy][1]
    seq_len = model.context_length
    return step(model, layout, rows, seq_len, cluster, parameter_bytes=sent, optimizer_s=optimizer_s)


def farthest(found: Sequence[Point], efficiency: float) -> Point | None:
    return next((point for point in reversed(found) if point.efficiency >= efficiency), None)


def binds_at(model: ModelConfig, strategy: str, cluster: Cluster, gradient_bytes: int | None = None) -> float | None:
    """Return the number of GPUs at which sending takes as long as computing, in closed form.

    gradient_bytes: bytes per gradient element as sent; None: the strategy's own number.
    """
    _, sent, divides = STRATEGIES[strategy]
    sent = gradient_bytes or sent
    rows = whole_rows(model)
    if strategy == "tp":
        return binding_tensor_ranks(model, rows, model.context_length, cluster)
    degrees = [layout.tp for layout in layouts(model, strategy)]
    if not degrees:
        return None
    tp = max(degrees) if divides else 1
    return tp * binding_ranks(model, tp, rows, model.context_length, cluster, parameter_bytes=sent)


def fits_from(model: ModelConfig, strategy: str) -> int | None:
    """Return the fewest GPUs that hold a layout's parameters, gradients and moments. Activations are not counted."""
    whole = payload(model, 0, STATE_BYTES, 0)
    for layout in sorted(layouts(model, strategy), key=lambda layout: layout.ranks):
        state = whole.on_tensor_rank(layout.tp).parameter_bytes
        if state / (layout.dp if layout.sharing is Sharing.SHARDED else 1) <= DEVICE_MEMORY_BYTES:
            return layout.ranks
    return None
