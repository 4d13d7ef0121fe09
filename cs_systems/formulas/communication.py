"""Bytes that a rank sends in a step, and its share of the computation, by strategy and by formula.

Volumes are for ring algorithms (Patarasuk & Yuan 2009, which are optimal), with n bytes in the whole tensor and N
ranks. An all-reduce sends 2 n (N−1)/N from each rank. A reduce-scatter, an all-gather and, averaged over the ranks, a
broadcast send n (N−1)/N. Ψ is the bytes of all trainable parameters. Padding is not counted, nor is the one byte per
parameter by which ranks tell each other which parameters have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, TypedDict

from cs_systems.config import ModelConfig, Phase
from cs_systems.core.tables import Column, Table
from cs_systems.formulas.cost import PhaseCost, parameter_count
from cs_systems.formulas.memory.tables import PeaksRow

NARROW_BYTES = 2  # bytes of one bf16 or fp16 element


class RankRow(PeaksRow):
    """Phase of one rank, in `ranks`: medians over the timed steps; the phase `step` holds the peaks."""

    rank: int
    phase: str
    median_s: Annotated[float, Column("time")]
    # For the last rank to begin the phase; None for `step`.
    wait_s: Annotated[float | None, Column("wait for the last rank")]


class SentRow(TypedDict):
    """Communication of a step by one rank, in `sent`.

    The first two are counted if this package's strategies start all collectives, and None if torch starts some.
    """

    collectives: int | None
    sent_bytes: float | None
    formula_sent_bytes: float | None


class SetupRow(TypedDict):
    """Set-up of a process group, in `setup`: times of the slowest rank. All but the last belong to its process."""

    start_s: float | None
    init_process_group_s: Annotated[float | None, Column("init")]
    new_group_s: float | None
    first_call_s: float | None  # first call of this cell


class LinkRow(TypedDict):
    """Ceiling of the rate between GPUs on one board, in `link`."""

    peak_bytes_per_s: float | None
    source: str | None


@dataclass(frozen=True)
class Payload:
    """Sizes from which the volumes of the strategies follow.

    parameter_bytes: Ψ, in the dtype of the parameters and of their gradients.
    divided_bytes: the bytes of Ψ in the blocks' matrices, which tensor parallelism divides over its ranks.
    blocks: number of blocks in the model.
    residual_bytes: size of the residual stream, (rows, sequence, d_model), for one rank's rows, in the dtype in which
        activations are sent.
    narrow_share: fraction of Ψ that is sent by a strategy that communicates in two bytes per element.
    """

    parameter_bytes: float
    divided_bytes: float = 0
    blocks: int = 0
    residual_bytes: float = 0
    narrow_share: float = 1.0

    def narrowed(self) -> Payload:
        """Return the payload of a strategy that communicates in a narrower dtype."""
        share = self.narrow_share
        return replace(self, parameter_bytes=self.parameter_bytes * share, divided_bytes=self.divided_bytes * share)

    def on_tensor_rank(self, ranks: int) -> Payload:
        """Return the data-parallel payload on one of `ranks` ranks that divide the blocks' matrices."""
        divided = self.divided_bytes / ranks
        return replace(self, parameter_bytes=self.parameter_bytes - self.divided_bytes + divided, divided_bytes=divided)


def payload(model: ModelConfig, tokens: int, parameter_bytes: int, activation_bytes: int) -> Payload:
    """Return the payload of a BasicTransformerLM with all parameters trained.

    Args:
        model: the model.
        tokens: rows × sequence length of a rank.
        parameter_bytes: bytes of one element of the parameters.
        activation_bytes: bytes of one element of the activations.
    """
    block_matrices = model.num_layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
    return Payload(
        parameter_bytes * parameter_count(model),
        parameter_bytes * block_matrices,
        model.num_layers,
        activation_bytes * tokens * model.d_model,
        NARROW_BYTES / parameter_bytes,
    )


def tensor_rank_cost(
    costs: Mapping[str, PhaseCost], model: ModelConfig, tokens: int, ranks: int
) -> dict[str, PhaseCost]:
    """Return the cost by phase on one of `ranks` ranks that divide the blocks of a BasicTransformerLM.

    Args:
        costs: cost of the whole step, by phase.
        model: the model.
        tokens: tokens of the whole step.
        ranks: number of ranks that divide each block.

    The rank is credited with its share of the whole step. It executes its share of the blocks and the whole head. The
    bytes of the phases with blocks are unknown (None).
    """
    head = 2 * tokens * model.d_model * model.vocab_size
    in_loss = bool(costs.get(Phase.LOSS) and costs[Phase.LOSS].hardware_flops)
    heads = {Phase.LOSS.value: 3 * head} if in_loss else {Phase.FORWARD.value: head, Phase.BACKWARD.value: 2 * head}
    return {
        phase: replace(
            cost,
            model_flops=_share(cost.model_flops, ranks),
            hardware_flops=_share(cost.hardware_flops, ranks, whole=heads.get(phase, 0)),
            bytes=cost.bytes if phase == Phase.LOSS else None,
            score_flops=_share(cost.score_flops, ranks),
            score_bytes=_share(cost.score_bytes, ranks),
        )
        for phase, cost in costs.items()
    }


def _share(count: int | None, ranks: int, whole: int = 0) -> int | None:
    """Return one rank's share of a count, if its portion `whole` is not divided."""
    return None if count is None else (count - whole) // ranks + whole


def all_reduce_bytes(whole_bytes: float, ranks: int) -> float:
    return 2 * shard_bytes(whole_bytes, ranks)


def shard_bytes(whole_bytes: float, ranks: int) -> float:
    """Return the bytes sent by a reduce-scatter, an all-gather, or (mean over the ranks) a broadcast."""
    return whole_bytes * (ranks - 1) / ranks


def averaging_bytes(payload: Payload, ranks: int) -> float:
    """Return 2 Ψ (N−1)/N, the bytes a rank sends to average the gradients.

    They are all-reduced, or reduce-scattered with an all-gather of the updated parameters (ZeRO 1).
    """
    return all_reduce_bytes(payload.parameter_bytes, ranks)


def owners_bytes(payload: Payload, ranks: int) -> float:
    """Return Ψ (N−1)/N, sent in addition to the averaging: each owner broadcasts the parameters that it updated."""
    return shard_bytes(payload.parameter_bytes, ranks)


def fully_sharded_bytes(payload: Payload, ranks: int) -> float:
    """Return 3 Ψ (N−1)/N, less the all-gather that parameters outside the blocks save.

    Parameters are all-gathered for forward and again for backward, and gradients are reduce-scattered (Rajbhandari et
    al. 2020, P_os+g+p, section 7.2.2). Parameters outside the blocks stay gathered from forward to backward, so one
    all-gather of them is subtracted where their size is known.
    """
    kept = payload.parameter_bytes - payload.divided_bytes if payload.divided_bytes else 0.0
    return shard_bytes(3 * payload.parameter_bytes - kept, ranks)


def tensor_parallel_bytes(payload: Payload, ranks: int) -> float:
    """Return the bytes of 4 all-reduces of the residual stream per block.

    They come after attention and feed-forward in forward, and before them in backward (Shoeybi et al. 2019, section 3).
    """
    return 4 * payload.blocks * all_reduce_bytes(payload.residual_bytes, ranks)


RANKS = Table(
    "ranks",
    RankRow,
    "ranks: median time of each phase",
    "rank phase median_s wait_s peak_allocated_bytes peak_reserved_bytes",
    headings={"peak_allocated_bytes": "peak allocated", "peak_reserved_bytes": "peak reserved"},
)
SENT = Table("sent", SentRow, "communication of a step by one rank")
SETUP = Table("setup", SetupRow, "set-up of the process group")
LINK = Table("link", LinkRow, "highest rate between GPUs on one board")
