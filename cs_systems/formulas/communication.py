"""What a rank sends in a step, by strategy and by formula, and its part of the computing.

Volumes are of rings (Patarasuk & Yuan 2009, which is optimal), with n bytes in the whole tensor and N ranks: an
all-reduce sends 2 n (N−1)/N from each rank; a reduce-scatter, an all-gather and, in the mean over the ranks, a
broadcast n (N−1)/N. Ψ is the bytes of all trainable parameters. Nothing here counts padding, nor the byte a parameter
that tells the ranks who had a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cs_systems.config import ModelConfig, Phase
from cs_systems.formulas.cost import PhaseCost, parameter_count

NARROW_BYTES = 2  # of an element of bf16 or fp16


@dataclass(frozen=True)
class Payload:
    """What the strategies' volumes are made of.

    parameter_bytes: Ψ, in the dtype of the parameters and of their gradients.
    divided_bytes: of Ψ, the blocks' matrices, which tensor parallelism divides over its ranks.
    blocks: how many the model has.
    residual_bytes: of the residual stream, (rows, sequence, d_model), of the rows that a rank takes, in the dtype in
        which activations are sent.
    narrow_share: of Ψ, what a strategy sends that is told to send in two bytes an element.
    """

    parameter_bytes: float
    divided_bytes: float = 0
    blocks: int = 0
    residual_bytes: float = 0
    narrow_share: float = 1.0

    def narrowed(self) -> Payload:
        """As a strategy sends it that is told a narrower dtype."""
        share = self.narrow_share
        return replace(self, parameter_bytes=self.parameter_bytes * share, divided_bytes=self.divided_bytes * share)

    def on_tensor_rank(self, ranks: int) -> Payload:
        """What is left for data parallelism on one of `ranks` that divide the blocks' matrices."""
        divided = self.divided_bytes / ranks
        return replace(self, parameter_bytes=self.parameter_bytes - self.divided_bytes + divided, divided_bytes=divided)


def payload(model: ModelConfig, tokens: int, parameter_bytes: int, activation_bytes: int) -> Payload:
    """Of a BasicTransformerLM that trains all its parameters. tokens: rows × sequence of a rank; the rest: bytes of
    an element."""
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
    """What one of `ranks` that divide the blocks does of a step of a BasicTransformerLM, by phase.

    costs: of the whole step, which has so many tokens. Credited is its share of the whole; executed its share of the
    blocks, and the head, which every rank computes. Bytes of the phases with blocks are not known.
    """
    head = 2 * tokens * model.d_model * model.vocab_size
    heads = {Phase.FORWARD.value: head, Phase.BACKWARD.value: 2 * head}
    return {
        phase: replace(
            cost,
            model_flops=_share(cost.model_flops, ranks),
            hardware_flops=_share(cost.hardware_flops, ranks, whole=heads.get(phase, 0)),
            bytes=None if phase in (*heads, Phase.OPTIMIZER) else cost.bytes,
            score_flops=_share(cost.score_flops, ranks),
            score_bytes=_share(cost.score_bytes, ranks),
        )
        for phase, cost in costs.items()
    }


def _share(count: int | None, ranks: int, whole: int = 0) -> int | None:
    """`whole` of the count is not divided."""
    return None if count is None else (count - whole) // ranks + whole


def all_reduce_bytes(whole_bytes: float, ranks: int) -> float:
    return 2 * shard_bytes(whole_bytes, ranks)


def shard_bytes(whole_bytes: float, ranks: int) -> float:
    """Of a reduce-scatter, an all-gather, or, in the mean over the ranks, a broadcast."""
    return whole_bytes * (ranks - 1) / ranks


def averaging_bytes(payload: Payload, ranks: int) -> float:
    """2 Ψ (N−1)/N: gradients all-reduced, or reduce-scattered with the stepped parameters all-gathered (ZeRO 1)."""
    return all_reduce_bytes(payload.parameter_bytes, ranks)


def owners_bytes(payload: Payload, ranks: int) -> float:
    """Ψ (N−1)/N, beside the averaging: every owner broadcasts the parameters that it has stepped."""
    return shard_bytes(payload.parameter_bytes, ranks)


def fully_sharded_bytes(payload: Payload, ranks: int) -> float:
    """3 Ψ (N−1)/N: all-gathered for forward, again for backward, gradients reduce-scattered (Rajbhandari et al. 2020,
    P_os+g+p, section 7.2.2); less one gathering of what is outside of the blocks, where that is known: it is kept from
    forward to backward."""
    kept = payload.parameter_bytes - payload.divided_bytes if payload.divided_bytes else 0.0
    return shard_bytes(3 * payload.parameter_bytes - kept, ranks)


def tensor_parallel_bytes(payload: Payload, ranks: int) -> float:
    """Of each block 4 all-reduces of the residual stream: after attention and feed-forward in forward, before them in
    backward (Shoeybi et al. 2019, section 3)."""
    return 4 * payload.blocks * all_reduce_bytes(payload.residual_bytes, ranks)
