"""Limits by sending: most ranks for a feed-forward layer by strategy, and the time of an all-reduce around a ring."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple, TypedDict

from cs_systems.config import preset
from cs_systems.core.tables import Column, table
from cs_systems.formulas.communication import all_reduce_bytes

TOKENS = 2**20  # tokens of the whole batch
LAYER = "xl-2026"  # size of the one feed-forward layer
RING_BYTES = 1e9  # of the tensor that is reduced around a ring
LOW_BYTES = 2  # bytes of an element in bf16
# machine → dense bf16 FLOP/s, and bytes/s that a GPU sends by NVLink, from data sheets
MACHINES = {"H100": (989.5e12, 450e9), "B200": (2250e12, 900e9)}


class LayerLimit(NamedTuple):
    """Largest number of ranks for one feed-forward layer before sending takes longer than computing."""

    strategy: str
    phase: str
    formula: str
    ranks: float


def feed_forward_limits(
    tokens: float, d_ff: int, element_bytes: float, flops_per_s: float, bytes_per_s: float
) -> list[LayerLimit]:
    """Return the limits of each strategy for w2(silu(w1 x) · w3 x), by ring collectives without latency.

    Each of the three products has 2 B D F FLOPs in forward and 4 B D F in backward, so that a rank computes 6 B D F/N
    and 12 B D F/N of them. It sends at W bytes/s:

    - averaged gradients: 6 e D F (N−1)/N bytes in backward; sharded: half of these in forward, all in backward;
    - tensor parallel: one all-reduce of the activations in each phase, 2 e B D (N−1)/N bytes;
    - both, with gathers and all-reduces at the same time: each dimension at its own limit; one after the other: their
      sum equals computing, which is best where each takes half.

    Args:
        tokens: B, of the whole batch.
        d_ff: F.
        element_bytes: e, of a weight, gradient or activation as sent.
        flops_per_s: C of one rank.
        bytes_per_s: W that a rank sends.
    """
    ratio = bytes_per_s / (element_bytes * flops_per_s)  # W/(e C), in elements per FLOP
    data, tensor = 1 + 2 * tokens * ratio, 1 + 3 * d_ff * ratio
    # a n + b m ≤ c + a + b with n, m ranks of each dimension, a = 3 F, b = 2 B, c = 6 B F W/(e C); n m is largest at
    # a n = b m.
    a, b = 3.0 * d_ff, 2.0 * tokens
    apart = (a * b * ratio + a + b) ** 2 / (4 * a * b)
    return [
        LayerLimit("ddp", "backward", "1 + 2 B W/(e C)", data),
        LayerLimit("fsdp", "forward and backward", "1 + 2 B W/(e C)", data),
        LayerLimit("tp", "forward", "1 + 3 F W/(e C)", tensor),
        LayerLimit("tp", "backward", "1 + 6 F W/(e C)", 2 * tensor - 1),
        LayerLimit("fsdp+tp", "forward, sending at once", "(1 + 2 B W/(e C)) (1 + 3 F W/(e C))", data * tensor),
        LayerLimit("fsdp+tp", "forward, one after the other", "(6 B F W/(e C) + 3 F + 2 B)²/(24 B F)", apart),
    ]


class LayerLimitRow(TypedDict):
    """Limit of one strategy on one machine; `formula` gives the largest number of ranks."""

    machine: str
    strategy: str
    phase: str
    formula: Annotated[str, Column("most ranks")]
    ranks: Annotated[int, Column(form=",d")]


@table(
    "most ranks before sending a feed-forward layer's data takes longer than computing",
    notes=(
        f"of {LAYER}, with {TOKENS:,} tokens in all; B: tokens; F: d_ff; e: {LOW_BYTES} bytes of an element",
        "W: bytes/s that a rank sends; C: FLOP/s of a rank",
    ),
)
def layer_limits(strategies: Collection[str] = ()) -> list[LayerLimitRow]:
    """Return the limits of one feed-forward layer, everything sent in bf16, at the rates of data sheets.

    strategies: the strategies to show; all by default.
    """
    return [
        {
            "machine": machine,
            "strategy": limit.strategy,
            "phase": limit.phase,
            "formula": limit.formula,
            "ranks": round(limit.ranks),
        }
        for machine, (flops_per_s, bytes_per_s) in MACHINES.items()
        for limit in feed_forward_limits(TOKENS, preset(LAYER).d_ff, LOW_BYTES, flops_per_s, bytes_per_s)
        if not strategies or limit.strategy in strategies
    ]


class RingRow(TypedDict):
    """Time of an all-reduce of one tensor around a ring, in pieces and whole."""

    machine: str
    ranks: int
    pieces_s: Annotated[float, Column("in pieces")]
    whole_s: Annotated[float, Column("whole tensors")]
    times: Annotated[float, Column("times as long", form=".2f")]


@table(
    "time of an all-reduce around a ring, without latency",
    notes=(
        f"in pieces: 2 (N−1)/N S/W; whole tensors: (N−1) S/W; S: {RING_BYTES / 1e9:g} GB; W: bytes/s that a rank sends",
    ),
)
def ring_times(ranks: Sequence[int]) -> list[RingRow]:
    """Return the times of S/W with a reduce-scatter and an all-gather of pieces, and with whole tensors passed on.

    In pieces each rank sends 2 (N−1)/N S bytes (Patarasuk & Yuan 2009); whole tensors are S bytes in each of N − 1
    steps. Both are at the rates of data sheets.
    """
    rows: list[RingRow] = []
    for machine, (_, bytes_per_s) in MACHINES.items():
        for count in ranks:
            pieces_s = all_reduce_bytes(RING_BYTES, count) / bytes_per_s
            whole_s = RING_BYTES * (count - 1) / bytes_per_s
            times = {"pieces_s": pieces_s, "whole_s": whole_s, "times": whole_s / pieces_s}
            rows.append({"machine": machine, "ranks": count, **times})  # type: ignore[typeddict-item]
    return rows
