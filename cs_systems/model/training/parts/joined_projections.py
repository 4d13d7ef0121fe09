"""Projections of one input as one product: q, k and v together, and w1 and w3 together.

One product with a wide output fills the GPU better than three with narrow outputs, and reads its input once. The joined
weight is one parameter; `state_dict` has the names of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import Precision, RunConfig
from cs_systems.model.training.parts import Part
from cs_systems.model.transformer import BasicTransformerLM, Linear, RotaryEmbedding, SelfAttention, SwiGLU

Product = Callable[[Tensor, Tensor], Any]


class JoinedLinear(nn.Module):
    """Linear layers of one input with their weights stacked: (..., in) → the output of each, (..., out)."""

    def __init__(self, layers: Iterable[Linear]) -> None:
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.count = len(weights)
        self.weight = nn.Parameter(torch.cat(weights))

    def forward(self, x: Tensor, *, whole: bool = False, product: Product = nn.functional.linear) -> Any:
        """Return the outputs of the layers, or with `whole` the undivided result of `product`."""
        y = product(x, self.weight)
        return y if whole else y.chunk(self.count, dim=-1)


def keep_names(module: nn.Module, joined: str, names: Sequence[str]) -> None:
    """Let `state_dict` of a module name the plain layers instead of its JoinedLinear `joined`."""

    def split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        rows = state.pop(f"{prefix}{joined}.weight").chunk(len(names))
        state |= {f"{prefix}{name}.weight": part for name, part in zip(names, rows, strict=True)}

    def join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        plain = [f"{prefix}{name}.weight" for name in names]
        if all(name in state for name in plain):
            state[f"{prefix}{joined}.weight"] = torch.cat([state.pop(name) for name in plain])

    module.register_state_dict_post_hook(split)
    module.register_load_state_dict_pre_hook(join)


class JoinedAttention(SelfAttention):
    """SelfAttention with q, k and v from one product: (B, S, D) → (B, S, D)."""

    def __init__(self, plain: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.attention = plain.num_heads, plain.attention
        self.qkv_proj = JoinedLinear((plain.q_proj, plain.k_proj, plain.v_proj))
        self.output_proj = plain.output_proj
        self.rope: RotaryEmbedding = plain.rope
        keep_names(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv_proj(x))


class JoinedSwiGLU(SwiGLU):
    """SwiGLU with gate and value from one product: (B, S, D) → (B, S, D)."""

    def __init__(self, plain: SwiGLU) -> None:
        nn.Module.__init__(self)
        self.w13 = JoinedLinear((plain.w1, plain.w3))
        self.w2 = plain.w2
        keep_names(self, "w13", ("w1", "w3"))

    def gated(self, x: Tensor) -> Tensor:
        gate, value = self.w13(x)
        gated: Tensor = nn.functional.silu(gate) * value
        return gated


def join(model: nn.Module) -> None:
    """Replace the attention and the feed-forward layer of each block."""
    assert isinstance(model, BasicTransformerLM)
    layers: Iterable[Any] = model.layers
    for layer in layers:
        layer.attn = JoinedAttention(layer.attn)
        if type(layer.ffn) is SwiGLU:  # another part may have joined the products in another way
            layer.ffn = JoinedSwiGLU(layer.ffn)


def unavailable(config: RunConfig) -> str | None:
    if config.precision is Precision.FP8:
        return "fp8 replaces the same linear layers; leave joined_projections out of parts, or use precision bf16"
    return None


PART = Part(replaces="projections", apply=join, unavailable=unavailable)
