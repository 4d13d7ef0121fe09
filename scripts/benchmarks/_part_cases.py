"""Functions of the training step's parts that part_kernels measures: inputs, plain function, ours, and their work.

The number of tokens of a sequence is the model's context length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ModelConfig
from cs_systems.model.training import fp8
from cs_systems.model.training.parts import (
    Part,
    fp8_linear,
    fused_cross_entropy,
    fused_embedding_gradient,
    fused_rmsnorm,
    fused_rotary,
    fused_swiglu,
)
from cs_systems.model.transformer import RMSNorm, RotaryEmbedding

BATCH, EPS = 4, 1e-5
ELEMENT_BYTES = 2  # of bfloat16

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One function of a part.

    Attributes:
        inputs: model → the tensors that have gradients, in bfloat16, on the current device.
        plain: model → the function by the plain modules, which is compiled; in float64 it is the reference.
        ours: model → the function by our kernels.
        moved: pass → elements moved for each token and unit of `width`; None: a matrix product.
        flops: model → pass → FLOPs of the matrix products.
        width: field of the model, d_model or d_ff.
        of_vocabulary: pass → elements moved for each row of the vocabulary and unit of `width`.
        has_eager: measure the plain function also as torch runs it, which the step does outside of its blocks.
        tolerance: largest error of an output or gradient, as a share of its norm.
    """

    inputs: Callable[[ModelConfig], list[Tensor]]
    plain: Callable[[ModelConfig], Function]
    ours: Callable[[ModelConfig], Function]
    moved: dict[str, int] = field(default_factory=dict)
    flops: Callable[[ModelConfig], dict[str, int]] | None = None
    width: str = "d_model"
    of_vocabulary: dict[str, int] = field(default_factory=dict)
    has_eager: bool = False
    tolerance: float = 8e-3  # of the kernels' tests: 4 roundings to bfloat16

    def work(self, model: ModelConfig) -> tuple[str, dict[str, int]]:
        """Return the unit of the work, bytes or flops, and pass → its amount."""
        if self.flops is not None:
            return "flops", self.flops(model)
        rows = {n: count * tokens_of(model) for n, count in self.moved.items()}
        rows |= {n: rows[n] + count * model.vocab_size for n, count in self.of_vocabulary.items()}
        return "bytes", {n: ELEMENT_BYTES * count * getattr(model, self.width) for n, count in rows.items()}


def tokens_of(model: ModelConfig) -> int:
    """Return the number of tokens of the batch."""
    return BATCH * model.context_length


def normal(*shape: int) -> Tensor:
    """Return a standard normal tensor in bfloat16 that has a gradient."""
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def weight(d_out: int, d_in: int) -> Tensor:
    """Return a weight (d_out, d_in) whose product with a standard normal tensor has the variance 1."""
    return torch.randn(d_out, d_in, dtype=torch.bfloat16).mul_(d_in**-0.5).requires_grad_()


def tokens(model: ModelConfig, *shape: int) -> Tensor:
    return normal(BATCH, model.context_length, *shape)


def hidden(model: ModelConfig) -> Tensor:
    return normal(tokens_of(model), model.d_model)


def gated(gate: Tensor, value: Tensor) -> Tensor:
    return nn.functional.silu(gate) * value


def feed_forward(joined_gate: Function) -> Function:
    """Return (x, joined weight of gate and value, weight of the output) → the output."""
    linear = nn.functional.linear
    return lambda x, joined, out: linear(joined_gate(linear(x, joined)), out)


def plain_norm(model: ModelConfig) -> Function:
    norm = RMSNorm(model.d_model, EPS)
    return lambda x, weight: (x, torch.func.functional_call(norm, {"weight": weight}, (x,)))


def plain_add_norm(model: ModelConfig) -> Function:
    norm = plain_norm(model)
    return lambda x, added, weight: norm(x + added, weight)


def rope_of(model: ModelConfig) -> RotaryEmbedding:
    return RotaryEmbedding(model.d_head, model.context_length, model.rope_theta)


def plain_rotation(model: ModelConfig) -> Function:
    rope = rope_of(model)
    return lambda q, k: (rope(q.transpose(1, 2)), rope(k.transpose(1, 2)))


def our_rotation(model: ModelConfig) -> Function:
    rope = rope_of(model)
    return lambda q, k: fused_rotary.Rotated.apply(q.transpose(1, 2), k.transpose(1, 2), rope.cos, rope.sin)


def token_ids(model: ModelConfig) -> Tensor:
    """Return the same random token ids for every implementation."""
    random, shape = torch.Generator().manual_seed(0), (BATCH, model.context_length)
    return torch.randint(model.vocab_size, shape, generator=random, device="cpu").to(torch.get_default_device())


def plain_embedding(model: ModelConfig) -> Function:
    ids = token_ids(model)
    return lambda table: nn.functional.embedding(ids, table)


def our_embedding(model: ModelConfig) -> Function:
    ids = token_ids(model)
    return lambda table: fused_embedding_gradient.Lookup.apply(ids, table)


def with_targets(loss: Callable[[Tensor, Tensor, Tensor], Tensor], model: ModelConfig) -> Function:
    """Return (hidden, weight) → the loss of targets that are the same for every implementation."""
    targets = token_ids(model).flatten()
    return lambda hidden, weight: loss(hidden, weight, targets)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = nn.functional.linear(hidden, weight)
    return nn.functional.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), targets)


def product_flops(model: ModelConfig, *weights: int) -> dict[str, int]:
    """Return pass → FLOPs of products of all tokens with weights of these sizes; backward has two for each."""
    forward = 2 * tokens_of(model) * sum(weights)
    return {"forward": forward, "backward": 2 * forward}


def our_fp8_linear(model: ModelConfig) -> Function:
    return torch.compile(fp8.linear, dynamic=False)  # as in a compiled block


def allowed(part: Part) -> float:
    return part.tolerance["bfloat16"]


CASES = {
    "swiglu": Case(
        lambda m: [tokens(m, m.d_ff) for _ in range(2)], lambda m: gated, lambda m: fused_swiglu.Gated.apply,
        {"forward": 3, "backward": 5}, width="d_ff",
    ),
    "swiglu, joined": Case(
        lambda m: [tokens(m, 2 * m.d_ff)], lambda m: lambda y: gated(*y.chunk(2, -1)),
        lambda m: fused_swiglu.JoinedGated.apply, {"forward": 3, "backward": 5}, width="d_ff",
    ),
    "norm": Case(
        lambda m: [tokens(m, m.d_model), normal(m.d_model)], plain_norm,
        lambda m: lambda x, w: fused_rmsnorm.PassedNorm.apply(x, w, EPS), {"forward": 2, "backward": 4},
    ),
    "addition and norm": Case(
        lambda m: [*(tokens(m, m.d_model) for _ in range(2)), normal(m.d_model)], plain_add_norm,
        lambda m: lambda x, a, w: fused_rmsnorm.AddNorm.apply(x, a, w, EPS), {"forward": 4, "backward": 4},
    ),
    "rotation": Case(
        lambda m: [tokens(m, m.num_heads, m.d_head) for _ in range(2)], plain_rotation, our_rotation,
        {"forward": 4, "backward": 4},
    ),
    "feed-forward": Case(
        lambda m: [tokens(m, m.d_model), weight(2 * m.d_ff, m.d_model), weight(m.d_model, m.d_ff)],
        lambda m: feed_forward(lambda y: gated(*y.chunk(2, -1))),
        lambda m: feed_forward(fused_swiglu.JoinedGated.apply),
        flops=lambda m: product_flops(m, 3 * m.d_model * m.d_ff), tolerance=allowed(fused_swiglu.PART),
    ),
    "linear in fp8": Case(
        lambda m: [hidden(m), weight(m.d_ff, m.d_model)], lambda m: nn.functional.linear, our_fp8_linear,
        flops=lambda m: product_flops(m, m.d_model * m.d_ff), tolerance=allowed(fp8_linear.PART),
    ),
    "embedding": Case(
        lambda m: [normal(m.vocab_size, m.d_model)], plain_embedding, our_embedding,
        {"forward": 2, "backward": 1}, of_vocabulary={"backward": 1}, has_eager=True,
    ),
    # In one pass, because the fused ones compute the gradients in forward.
    "linear and loss": Case(
        lambda m: [hidden(m), weight(m.vocab_size, m.d_model)], lambda m: with_targets(plain_loss, m),
        lambda m: with_targets(fused_cross_entropy.head_loss, m),
        flops=lambda m: {"both": sum(product_flops(m, m.vocab_size * m.d_model).values())},
        tolerance=allowed(fused_cross_entropy.PART),
    ),
}  # fmt: skip
