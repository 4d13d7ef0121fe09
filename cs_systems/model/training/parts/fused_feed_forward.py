"""SwiGLU fused into the products around it, by CUDA kernels for Hopper: gate, value and activation from one kernel.

The weights of gate and value are one matrix with interleaved rows, so that a tile of their product has the pairs that
the activation needs. Forward writes gate and value, which backward needs, and the activation from the same tile. In
backward the gradient of the activation stays on the chip: the kernel that computes it by a product writes the gradients
of gate and value. `state_dict` has the names and rows of the plain model.

Bytes that the activation moves per token in bfloat16, with F = d_ff: forward 2 F instead of 6 F, backward 6 F instead
of 10 F, all of them while the tensor cores compute. On a CPU torch computes the same.
"""

from __future__ import annotations

from typing import Any

import einx
import torch
from torch import Tensor, nn

from cs_systems.config import Precision, RunConfig
from cs_systems.core.checkpoint_plan import segments
from cs_systems.core.parts import declared
from cs_systems.model.kernels.driver import multiprocessors
from cs_systems.model.kernels.prepared import PreparedPass
from cs_systems.model.training.hopper_operators import product_pass, products_unavailable
from cs_systems.model.training.parts import Part
from cs_systems.model.training.parts._deferred import Place, keep
from cs_systems.model.training.parts.joined_projections import JoinedSwiGLU
from cs_systems.model.training.triton_operators import operator
from cs_systems.model.transformer import BasicTransformerLM, SwiGLU


def _forward_shapes(x: Tensor, w13: Tensor) -> tuple[Tensor, Tensor]:
    width = w13.shape[0]
    return x.new_empty(*x.shape[:-1], width), x.new_empty(*x.shape[:-1], width // 2)


@operator("gated_product", "(Tensor x, Tensor w13) -> (Tensor, Tensor)", _forward_shapes)
def _forward(x: Tensor, w13: Tensor) -> tuple[Tensor, Tensor]:
    """Return x w13ᵀ, gate and value interleaved (..., 2 F), and silu(gate) · value (..., F)."""
    if not x.is_cuda:
        both = nn.functional.linear(x, w13)
        gate, value = both.unflatten(-1, (-1, 2)).unbind(-1)
        return both, nn.functional.silu(gate) * value
    both, h = _forward_shapes(x, w13)
    _FORWARD.run((x.flatten(0, -2), w13), (both.flatten(0, -2), h.flatten(0, -2)))
    return both, h


@operator(
    "gated_product_backward",
    "(Tensor d_out, Tensor w2, Tensor both) -> Tensor",
    lambda d_out, w2, both: both.new_empty(both.shape),
)
def _backward(d_out: Tensor, w2: Tensor, both: Tensor) -> Tensor:
    """Return the gradients of gate and value interleaved, (..., 2 F), for the gradient d_out w2 of the activation."""
    if not d_out.is_cuda:
        gate, value = both.unflatten(-1, (-1, 2)).unbind(-1)
        d_h, sigmoid = d_out @ w2, torch.sigmoid(gate)
        d_gate = d_h * value * (sigmoid + gate * sigmoid * (1 - sigmoid))
        return torch.stack((d_gate, d_h * gate * sigmoid), dim=-1).flatten(-2)
    d_both = torch.empty_like(both)
    _BACKWARD.run((d_out.flatten(0, -2), w2, both.flatten(0, -2)), (d_both.flatten(0, -2),))
    return d_both


def _forward_launches(device: int, x: Tensor, w: Tensor, both: Tensor, h: Tensor) -> Any:
    from cs_systems.model.kernels.cuda.launch_gated import gated_forward

    return [gated_forward(x, w, both, h, multiprocessors(device))], {}


def _backward_launches(device: int, d_out: Tensor, w2: Tensor, both: Tensor, d_both: Tensor) -> Any:
    from cs_systems.model.kernels.cuda.launch_gated import gated_backward

    return [gated_backward(d_out, w2, both, d_both, multiprocessors(device))], {}


_FORWARD: PreparedPass = product_pass(("x", "w"), ("both", "h"), _forward_launches)
_BACKWARD: PreparedPass = product_pass(("d_out", "w2", "both"), ("d_both",), _backward_launches)


class FeedForward(torch.autograd.Function):
    """Autograd function `apply(x, w13, w2, token13, number13, token2, number2)`: (..., D) → (..., D).

    With the tokens and numbers of two Places, the update computes the gradients of the weights; without, they are
    None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w13: Tensor, w2: Tensor, *places: Tensor | None) -> Tensor:
        both, h = _forward(x, w13)
        _, number13, _, number2 = places
        ctx.save_for_backward(x, w13, w2, both, h, number13, number2)
        return nn.functional.linear(h, w2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w13, w2, both, h, number13, number2 = ctx.saved_tensors
        d_out = gradients[0].contiguous()
        d_both = _backward(d_out, w2, both)
        d_x = d_both @ w13
        if number13 is not None:
            return d_x, None, None, keep(d_both, x, number13), None, keep(d_out, h, number2), None
        d_w13 = d_both.flatten(0, -2).t() @ x.flatten(0, -2)
        return d_x, d_w13, d_out.flatten(0, -2).t() @ h.flatten(0, -2), None, None, None, None


IN_TURNS, APART = "f d, f d -> (f (1 + 1)) d", "(f (1 + 1)) d -> f d, f d"  # rows of two weights interleaved, for einx


class InterleavedLinear(nn.Module):
    """Two linear layers of one input, with interleaved rows in one weight (2 F, D)."""

    weight: Tensor
    place: Place | None = None

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(einx.id(IN_TURNS, first.detach(), second.detach()))


class FusedFeedForward(SwiGLU):
    """SwiGLU with the kernels, instead of the plain or the joined one: (B, S, D) → (B, S, D)."""

    def __init__(self, plain: SwiGLU) -> None:
        nn.Module.__init__(self)
        if isinstance(plain, JoinedSwiGLU):
            first, second = plain.w13.weight.chunk(2)
        else:
            first, second = plain.w1.weight, plain.w3.weight
        self.w13 = InterleavedLinear(first, second)
        self.w2 = plain.w2
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: Tensor) -> Tensor:
        w13: Tensor = self.w13.weight
        w2: Tensor = self.w2.weight
        place13, place2 = self.w13.place, getattr(self.w2, "place", None)
        places: tuple[Tensor | None, ...] = (None,) * 4
        if place13 is not None and place2 is not None:
            w13, w2 = w13.detach(), w2.detach()
            places = (place13.token, place13.number, place2.token, place2.number)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
        out: Tensor = FeedForward.apply(x, w13, w2, *places)
        return out


def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    first, second = einx.id(APART, state.pop(f"{prefix}w13.weight"))
    state |= {f"{prefix}w1.weight": first, f"{prefix}w3.weight": second}


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    plain = [f"{prefix}{name}.weight" for name in ("w1", "w3")]
    if all(name in state for name in plain):
        state[f"{prefix}w13.weight"] = einx.id(IN_TURNS, *(state.pop(name) for name in plain))


def replace(model: nn.Module) -> None:
    """Replace the feed-forward layer of each block."""
    assert isinstance(model, BasicTransformerLM)
    for layer in model.layers.children():
        block: Any = layer
        block.ffn = FusedFeedForward(block.ffn)


def unavailable(config: RunConfig) -> str | None:
    if others := [*declared(config.parts, "computes_in")]:
        return f"{others[0]} replaces the same products; leave one of them out of parts"
    if config.computes_in not in (Precision.BF16, Precision.BF16_PURE):
        return f"its kernels compute in bf16, and the cell in {config.computes_in.value}; use precision bf16"
    plan = segments(config.checkpoint, config.model.num_layers)
    if any(segment.keeps in ("matmul", "products") for segment in plan):
        return f"checkpoint {config.checkpoint} cannot keep the result of its fused product; use fused_swiglu instead"
    return products_unavailable(config, "fused_swiglu")


PART = Part(replaces="activation", apply=replace, unavailable=unavailable)
