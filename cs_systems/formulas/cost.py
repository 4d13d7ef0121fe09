"""Cost of a step or an attention call by formula: parameters, FLOPs, bytes.

There are two counts of FLOPs. Both count a multiply-add as 2, and only matrix products: elementwise operations are
limited by bytes, not by FLOPs.

- model (credited) FLOPs: required by the mathematics, over the scores that the mask shows. Causal attention is credited
  with half of the score matrix, S²/2 and not S(S+1)/2: see `twice_credited_scores`. Backward has twice the products of
  forward; recomputation, such as scores inside a flash attention, is not counted.
- hardware (executed) FLOPs: computed by the algorithm, including whole tiles, padded lengths and head sizes, and scores
  recomputed in backward. An implementation that masks a full score matrix executes twice its credited FLOPs.

Bytes are the least possible memory traffic: every matrix product reads its operands and writes its result once, and
everything between two products (norms, rotary embedding, activation, residual, casts) counts as fused into them. A
tiled attention is one product that never writes its scores; an attention over the full matrix is two, with the score
matrix between them.

The memory that a step needs is in `memory.model`, the peaks of known devices are in `peaks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import NotRequired, TypedDict

from cs_systems.config import AttentionShape, Mode, ModelConfig, Phase, Precision
from cs_systems.core import statistics
from cs_systems.core.checkpoint_plan import Segment, segments
from cs_systems.core.optimizers import DEFAULT, optimizer
from cs_systems.core.tables import Table


class CostRow(TypedDict):
    """Cost of a phase by formula, in `cost`; `step` is the sum of the phases."""

    phase: str
    model_flops: int | None
    hardware_flops: int | None
    bytes: int | None
    score_flops: NotRequired[int | None]  # FLOPs of the matrix products over the attention scores
    score_bytes: NotRequired[int | None]


@dataclass(frozen=True)
class AttentionAlgorithm:
    """Computation and memory use of an attention implementation, as declared by its backend.

    block_q, block_k: tile of the score matrix; None means that the whole matrix is computed, including masked elements.
        Tiles in which no query sees a key are skipped.
    d_head: the head size that the kernel computes with, if it pads; None: the call's head size.
    backward_matmuls: score-sized matrix products in backward: 4, or 5 where the scores are recomputed.
    score_matrices: numbers of (heads, seq_q, seq_k) matrices of the call's dtype that are alive at the peak of forward,
        between forward and backward, and at the peak of backward; (0, 0, 0) for a tiled algorithm.
    autocast_score_matrices: the same under CUDA's autocast, which widens a softmax that is a separate operation to fp32
        (one such matrix counts as two); None: unchanged, as for an implementation that is one operation to autocast.
    dq_accumulator_bytes: bytes per element of a buffer in which backward accumulates the query's gradient (4 if it is
        fp32, as in FlashAttention-2); 0: no such buffer.
    dq_accumulator_d_head: the head size in that buffer; None: `d_head`.
    padded_queries: backward rounds the number of queries up to a multiple of this, in that buffer and in its per-query
        values.
    copies_by_head: backward copies the output and its gradient if the query is stored as (batch, heads, seq, d_head),
        because it needs heads after positions.
    output_by_position: the output is stored as (batch, seq, heads, d_head), so that a model's output projection reads
        it without a copy. Otherwise it is stored like the query, and the model copies it to put heads after positions.
    torch_matmul: its products are calls of torch.matmul, which on CUDA uses cuBLAS and its workspace.
    """

    block_q: int | None = None
    block_k: int | None = None
    d_head: int | None = None
    backward_matmuls: int = 4
    score_matrices: tuple[float, float, float] = (0, 0, 0)
    autocast_score_matrices: tuple[float, float, float] | None = None
    dq_accumulator_bytes: int = 0
    dq_accumulator_d_head: int | None = None
    padded_queries: int = 1
    copies_by_head: bool = False
    output_by_position: bool = False
    torch_matmul: bool = False

    def padded_rows(self, batch_heads: int, length: int) -> int:
        """Return the number of queries, over all heads, for which backward stores values."""
        return batch_heads * -(-length // self.padded_queries) * self.padded_queries

    def dq_accumulator(self, batch_heads: int, length: int, d_head: int) -> int:
        """Return the bytes of the buffer in which backward accumulates the query's gradient."""
        held = self.dq_accumulator_d_head or self.d_head or d_head
        return self.padded_rows(batch_heads, length) * held * self.dq_accumulator_bytes


# Forward holds scores and weights and keeps the weights; backward holds the weights and the gradients of both. Autocast
# adds an fp32 copy of the scores, and computes fp32 weights and their copy in the compute dtype; it keeps both weights.
FULL_MATRIX = AttentionAlgorithm(score_matrices=(2, 1, 3), autocast_score_matrices=(5, 3, 6), torch_matmul=True)
# CUDA's softmax backward allocates a matrix for gradient × weights before it writes the gradient of the scores.
FULL_MATRIX_CUDA = replace(FULL_MATRIX, score_matrices=(2, 1, 4), autocast_score_matrices=(5, 3, 8))

COMPUTE_BYTES = {
    Precision.FP32: 4,
    Precision.TF32: 4,
    Precision.BF16: 2,
    Precision.FP16: 2,
    Precision.BF16_PURE: 2,
    Precision.FP8: 2,
}
"""Bytes of an element that a matrix product writes, and reads where it is not one of the blocks' linear layers."""

OPERAND_BYTES = COMPUTE_BYTES | {Precision.FP8: 1}
"""Bytes of an element that a product of the blocks' linear layers reads."""

PARAMETER_BYTES = {precision: 2 if precision is Precision.BF16_PURE else 4 for precision in Precision}
"""Bytes of an element of the parameters, and so of their gradients and of both of AdamW's moments."""


TARGET_BYTES = 8
"""A token id is an int64."""

STEP_PHASES = {
    Mode.FORWARD: (Phase.FORWARD,),
    Mode.FORWARD_BACKWARD: (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD),
    Mode.TRAIN_STEP: (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER),
}
ATTENTION_PHASES = {
    Mode.FORWARD: (Phase.FORWARD,),
    Mode.BACKWARD: (Phase.BACKWARD,),
    Mode.FORWARD_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
}


@dataclass(frozen=True)
class PhaseCost:
    """Cost of one phase, counted as the module's docstring defines; None is unknown.

    `score_flops` and `score_bytes` are the shares of hardware_flops and bytes in the products over the score matrix, or
    in a fused attention, if there is one. The rest belongs to the other matrix products.
    """

    model_flops: int | None
    hardware_flops: int | None
    bytes: int | None
    score_flops: int | None = None
    score_bytes: int | None = None


def total(costs: Iterable[PhaseCost]) -> PhaseCost:
    """Return the sum of several phases' costs; a quantity that is unknown in one of them is unknown in the sum."""
    costs = list(costs)
    return PhaseCost(*(statistics.total([getattr(cost, f.name) for cost in costs]) for f in fields(PhaseCost)))


def parameters_by_component(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by name in the model, summed over all layers."""
    layers, d, d_ff = model.num_layers, model.d_model, model.d_ff
    return {
        "token_embeddings": model.vocab_size * d,
        **{f"{name}_proj": layers * d * d for name in ("q", "k", "v", "output")},
        **dict.fromkeys(("w1", "w2", "w3"), layers * d * d_ff),
        "norms": (2 * layers + 1) * d,
        "lm_head": d * model.vocab_size,
    }


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of a BasicTransformerLM."""
    return sum(parameters_by_component(model).values())


def block_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of one block: its linear layers and its two norms."""
    return 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * model.d_model


def matmul_weights(model: ModelConfig) -> int:
    """Return the number of parameters that multiply every token: all but the embedding and the norms."""
    components = parameters_by_component(model)
    return sum(components.values()) - components["token_embeddings"] - components["norms"]


def step_cost(
    model: ModelConfig,
    batch_size: int,
    seq_len: int,
    mode: Mode,
    algorithm: AttentionAlgorithm,
    precision: Precision,
    checkpoint: str = "none",
    *,
    head_in_loss: bool = False,
    update_bytes: int | None = None,
) -> dict[str, PhaseCost]:
    """Return the cost of each phase of one step of a BasicTransformerLM with causal attention, in execution order.

    Args:
        model: the model.
        batch_size: rows of the batch.
        seq_len: tokens of a row.
        mode: the phases that run.
        algorithm: the attention implementation.
        precision: the precision of the step.
        checkpoint: a plan of `checkpoint_plan`. Recomputation is executed in backward, and not credited.
        head_in_loss: whether the phase loss computes the last layer and at once its gradients.
        update_bytes: bytes that the optimizer moves for each parameter; None: as a plain AdamW.

    Backward, attention's included, is credited with twice the forward, because model FLOPs exclude recomputation
    (Chowdhery et al. 2022, appendix B). The optimizer is AdamW. It has no matrix product; a plain one reads the
    parameter, the gradient and both moments, and writes all but the gradient.
    """
    update_bytes = bytes_of_update(DEFAULT, precision) if update_bytes is None else update_bytes
    tokens, layers, element = batch_size * seq_len, model.num_layers, COMPUTE_BYTES[precision]
    shape = AttentionShape(batch_size, model.num_heads, seq_len, model.d_head, causal=True)
    linear_flops = 2 * tokens * matmul_weights(model)
    model_flops = linear_flops + layers * credited_attention_flops(shape)
    score_product = layers * score_product_flops(shape, algorithm)
    scores_moved = layers * attention_bytes(shape, algorithm, element)
    moved = _linear_bytes(model, tokens, precision) + scores_moved
    again = recomputed_flops(model, batch_size, seq_len, algorithm, checkpoint)
    scores_again = recomputed_flops(model, batch_size, seq_len, algorithm, checkpoint, scores_only=True)
    backward_scores = algorithm.backward_matmuls * score_product
    costs = {
        Phase.FORWARD: PhaseCost(model_flops, linear_flops + 2 * score_product, moved, 2 * score_product, scores_moved),
        Phase.LOSS: PhaseCost(0, 0, tokens * (model.vocab_size * element + TARGET_BYTES), 0, 0),
        Phase.BACKWARD: PhaseCost(
            2 * model_flops,
            2 * linear_flops + backward_scores + again,
            2 * moved,
            backward_scores + scores_again,
            2 * scores_moved,
        ),
        Phase.OPTIMIZER: PhaseCost(0, 0, update_bytes * parameter_count(model), 0, 0),
    }
    if head_in_loss:
        head_flops, head_bytes = 2 * tokens * model.d_model * model.vocab_size, _head_bytes(model, tokens, precision)
        for phase, times in ((Phase.FORWARD, -1), (Phase.LOSS, 3), (Phase.BACKWARD, -2)):
            costs[phase] = _with(costs[phase], times * head_flops, times * head_bytes)
    return {phase.value: costs[phase] for phase in STEP_PHASES[mode]}


def bytes_of_update(name: str, precision: Precision) -> int:
    """Return the bytes that an optimizer moves for each parameter; a gradient has the parameter's dtype."""
    return optimizer(name).update_bytes(PARAMETER_BYTES[precision])


def _with(cost: PhaseCost, flops: int, moved: int) -> PhaseCost:
    """Return the cost plus FLOPs, both credited and executed, and plus bytes."""
    assert cost.model_flops is not None
    assert cost.hardware_flops is not None
    assert cost.bytes is not None
    return replace(
        cost,
        model_flops=cost.model_flops + flops,
        hardware_flops=cost.hardware_flops + flops,
        bytes=cost.bytes + moved,
    )


def _linear_bytes(model: ModelConfig, tokens: int, precision: Precision) -> int:
    """Return the least traffic of forward in all linear layers: those in the blocks, and lm_head."""
    d, d_ff, layers = model.d_model, model.d_ff, model.num_layers
    operands = layers * (block_parameter_count(model) - 2 * d + tokens * (6 * d + d_ff))
    results = layers * tokens * (5 * d + 2 * d_ff)
    return (
        OPERAND_BYTES[precision] * operands + COMPUTE_BYTES[precision] * results + _head_bytes(model, tokens, precision)
    )


def _head_bytes(model: ModelConfig, tokens: int, precision: Precision) -> int:
    """Return the least traffic of lm_head's product."""
    d, vocabulary = model.d_model, model.vocab_size
    return COMPUTE_BYTES[precision] * (d * vocabulary + tokens * (d + vocabulary))


def recomputed_flops(
    model: ModelConfig,
    batch_size: int,
    seq_len: int,
    algorithm: AttentionAlgorithm,
    checkpoint: str,
    scores_only: bool = False,
) -> int:
    """Return the FLOPs of a step that checkpointing executes a second time (nested: a third time).

    With `scores_only`, count only the products over the score matrix.
    """
    tokens = batch_size * seq_len
    shape = AttentionShape(batch_size, model.num_heads, seq_len, model.d_head, causal=True)
    w2 = 0 if scores_only else 2 * tokens * model.d_model * model.d_ff
    linear = 0 if scores_only else 2 * tokens * 4 * model.d_model**2 + 3 * w2
    attention = 2 * score_product_flops(shape, algorithm)

    def again(segment: Segment) -> int:
        if segment.keeps == "products":
            return 0
        if segment.keeps == "matmul":
            return segment.blocks * attention
        if segment.keeps == "attention":
            return segment.blocks * linear - w2
        if not segment.inner:  # it stops before the last block's w2, because backward needs only w2's input
            return segment.blocks * (linear + attention) - w2
        # Recomputation stops at the input of the last inner checkpoint.
        before = segment.blocks - segment.inner[-1].blocks
        return before * (linear + attention) + sum(map(again, segment.inner))

    return sum(map(again, segments(checkpoint, model.num_layers)))


def attention_cost(
    shape: AttentionShape, mode: Mode, algorithm: AttentionAlgorithm, dtype_bytes: int
) -> dict[str, PhaseCost]:
    """Return the cost of one attention call by phase: forward, backward, or both, according to `mode`.

    Forward is credited with 4·B·H·Sq·Sk·d, halved when causal, and backward with twice that. flash-attention's
    benchmark credits backward with 2.5 times forward, because its fifth product computes the scores again: that product
    is executed, and not credited.
    """
    credited = credited_attention_flops(shape)
    product = score_product_flops(shape, algorithm)
    moved = attention_bytes(shape, algorithm, dtype_bytes)
    counted = {
        Phase.FORWARD: (credited, 2 * product, moved),
        Phase.BACKWARD: (2 * credited, algorithm.backward_matmuls * product, 2 * moved),
    }
    return {
        phase.value: PhaseCost(model, executed, least, executed, least)
        for phase in ATTENTION_PHASES[mode]
        for model, executed, least in (counted[phase],)
    }


def credited_attention_flops(shape: AttentionShape) -> int:
    """Return the credited FLOPs of one forward call: two products of 2·d per credited score and head."""
    shown = twice_credited_scores(shape.seq, shape.key_length, shape.offset, shape.window)
    return 2 * shape.batch * shape.heads * shape.d_head * shown


def twice_credited_scores(queries: int, keys: int, offset: int | None, window: int | None = None) -> int:
    """Return twice the scores of one head that are credited to the model.

    They are the area of the score matrix that the mask shows, where a diagonal edge cuts its elements in half: S²/2 of
    a causal S × S matrix, as in flash-attention's benchmark, and S·W − W²/2 with a window of W ≤ S keys. The area is
    never larger than the number of elements that are shown.

    Args:
        queries: Rows of the matrix.
        keys: Columns of the matrix.
        offset: Query i sees the keys up to i + offset; None: all of them.
        window: Each query sees only the last `window` keys up to its own.
    """
    if offset is None:
        return 2 * queries * keys

    def before(query: int) -> int:  # twice the area below a diagonal, from the query at which it begins
        inside = min(max(query, 0), keys)
        return inside * (2 * query - inside)

    def below(diagonal: int) -> int:
        return before(queries + diagonal) - before(diagonal)

    return below(offset) - (0 if window is None else below(offset - window))


def score_product_flops(shape: AttentionShape, algorithm: AttentionAlgorithm) -> int:
    """Return the executed FLOPs of one product over the score matrix, with whole tiles and padded heads.

    Forward has two such products.
    """
    d_head = algorithm.d_head or shape.d_head
    return 2 * shape.batch * shape.heads * computed_scores(shape, algorithm) * d_head


def computed_scores(shape: AttentionShape, algorithm: AttentionAlgorithm) -> int:
    """Return the elements of one head's score matrix that the tiles cover: see `tiled_scores`."""
    return tiled_scores(shape.seq, shape.key_length, shape.offset, shape.window, algorithm)


@functools.lru_cache(maxsize=1024)
def tiled_scores(queries: int, keys: int, offset: int | None, window: int | None, algorithm: AttentionAlgorithm) -> int:
    """Return the elements of one head's score matrix that the tiles cover; arguments as in `twice_credited_scores`.

    Elements of a computed tile that are masked, or past the edge of the matrix, are included.
    """
    block_q, block_k = algorithm.block_q or queries, algorithm.block_k or keys
    if offset is None:
        return math.ceil(queries / block_q) * math.ceil(keys / block_k) * block_q * block_k
    # Query r sees the keys 0 … r + offset; a row of tiles extends to the last key that its last query sees, and with a
    # window begins at the first key that its first query sees.
    visited = 0
    for first in range(0, queries, block_q):
        last_key = min(min(first + block_q, queries) - 1 + offset, keys - 1)
        first_key = 0 if window is None else max(0, first + offset - window + 1)
        if first_key <= last_key:
            visited += last_key // block_k - first_key // block_k + 1
    return visited * block_q * block_k


def attention_bytes(shape: AttentionShape, algorithm: AttentionAlgorithm, dtype_bytes: int) -> int:
    """Return the least traffic of one forward call in bytes; backward has twice that.

    A tiled forward reads q, k, v and writes the output. Its backward reads those, the output and its gradient, and
    writes three gradients. Over a full matrix, forward writes the scores and reads the probabilities. Of backward's
    four products, one reads the probabilities, one writes their gradient, and two read the gradient of the scores.
    """
    queries = 2 * shape.batch * shape.heads * shape.seq * shape.d_head
    keys = 2 * shape.batch * shape.kv_heads * shape.key_length * shape.d_head
    tiled = algorithm.block_q is not None
    scores = 0 if tiled else 2 * shape.batch * shape.heads * shape.seq * shape.key_length
    return dtype_bytes * (queries + keys + scores)


COST = Table("cost", CostRow, "cost by formula, by phase")
