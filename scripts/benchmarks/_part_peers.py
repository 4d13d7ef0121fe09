"""Functions of other libraries that compute a case of part_kernels, imported when they are measured.

What is left out: quack computes SwiGLU only inside a matrix product (case feed-forward); its loss of given logits, and
torchao's optimizers, are functions that no case has. Transformer Engine is built from source with the torch at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

import torch
from _part_cases import EPS, Function, rope_of, token_ids, with_targets
from torch import nn

from cs_systems.config import ModelConfig


@dataclass(frozen=True)
class Peer:
    """One library, or one way of it.

    Attributes:
        title: its name in a sentence.
        package: its name for pip.
        functions: case → model → the function; raises ImportError if the library lacks it.
    """

    title: str
    package: str
    functions: Mapping[str, Callable[[ModelConfig], Function]]

    def version(self) -> str | None:
        """Return the installed version; None: not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def liger_gated(model: ModelConfig) -> Function:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply  # type: ignore[no-any-return]


def liger_norm(model: ModelConfig) -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: (x, LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False))


def liger_add_norm(model: ModelConfig) -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    # It returns the normalized rows first.
    return lambda x, added, weight: LigerFusedAddRMSNormFunction.apply(x, added, weight, EPS, 0.0, "llama", False)[::-1]


def liger_embedding(model: ModelConfig) -> Function:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    ids = token_ids(model)
    return lambda table: LigerEmbeddingFunction.apply(table, ids)


def liger_loss(model: ModelConfig) -> Function:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return with_targets(lambda *tensors: LigerFusedLinearCrossEntropyFunction.apply(*tensors)[0], model)


def quack_norm(model: ModelConfig) -> Function:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: (x, rmsnorm(x, weight, eps=EPS))


def quack_add_norm(model: ModelConfig) -> Function:
    from quack.rmsnorm import rmsnorm

    # It returns the normalized rows first.
    return lambda x, added, weight: rmsnorm(added, weight, residual=x, eps=EPS, prenorm=True)[::-1]


def quack_rotation(model: ModelConfig) -> Function:
    from quack.rotary import apply_rotary_emb

    rope = rope_of(model)
    return lambda *qk: tuple(apply_rotary_emb(x, rope.cos, rope.sin, interleaved=True).transpose(1, 2) for x in qk)


def quack_feed_forward(model: ModelConfig) -> Function:
    from quack.mlp import mlp_func

    return lambda x, joined, out: mlp_func(x, joined, out, "swiglu", concat_layout=True)


def quack_loss(model: ModelConfig) -> Function:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return with_targets(chunked_linear_cross_entropy, model)


def torchao_linear(recipe: str) -> Callable[[ModelConfig], Function]:
    """Return model → its linear layer in fp8, compiled as torchao's documentation asks for."""

    def linear(model: ModelConfig) -> Function:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        plain = nn.Linear(model.d_model, model.d_ff, bias=False, device="meta")
        layer = Float8Linear.from_float(plain, Float8LinearConfig.from_recipe_name(recipe))

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, {"weight": weight}, (x,))  # type: ignore[no-any-return]

        return torch.compile(product, dynamic=False)

    return linear


PEERS = {
    "liger": Peer(
        "Liger",
        "liger-kernel",
        {
            "swiglu": liger_gated,
            "norm": liger_norm,
            "addition and norm": liger_add_norm,
            "embedding": liger_embedding,
            "linear and loss": liger_loss,
        },
    ),
    "quack": Peer(
        "quack",
        "quack-kernels",
        {
            "norm": quack_norm,
            "addition and norm": quack_add_norm,
            "rotation": quack_rotation,
            "feed-forward": quack_feed_forward,
            "linear and loss": quack_loss,
        },
    ),
    "torchao": Peer("torchao", "torchao", {"linear in fp8": torchao_linear("tensorwise")}),
    "torchao rowwise": Peer("torchao (row-wise)", "torchao", {"linear in fp8": torchao_linear("rowwise")}),
}
