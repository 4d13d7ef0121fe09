"""RMSNorm as one Triton kernel, with the addition of the residual stream before it, and its backward as one kernel.

A block's second norm adds the output of attention and normalizes the sum in one pass. Both norms also return the
residual stream, so that backward adds its gradient in the same pass. The weight's gradient is summed by each program
over its rows, and then over the programs in a fixed order: results are the same from run to run. The arithmetic is in
float32, or in float64 for float64, and the sum is first rounded to the dtype of the stream, as in the plain model.

Bytes per token and block in bfloat16, with d_model D: forward 4 D and 8 D, backward 8 D each. Inductor's kernels move
as much in forward; in backward 12 D each, because the sum over the rows is a kernel that reads both tensors again. Both
passes of both norms of a block of 2.7B, 8192 tokens on one H200, take 0.16 ms at 3.5 to 3.9 TB/s, and 0.26 ms by
Inductor's kernels (profiles/part_kernels).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cs_systems.config import RunConfig
from cs_systems.model.training import triton_operators
from cs_systems.model.training.parts import Part
from cs_systems.model.training.triton_operators import check_one_device, has_rows, operator, prepared
from cs_systems.model.transformer import RMSNorm, TransformerBlock

LARGEST_WIDTH = 16384  # a program holds a row in registers


def _like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty tensor like x, and an empty tensor for the scales of its rows."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=dtype)


def _sum_like(x: Tensor, added: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))


@operator("rms_norm", "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", lambda x, *_: _like(x))
def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized rows and their scales."""
    y, scale = _like(x)
    _NORM.run((x, weight), (y, scale), eps)
    return y, scale


def _fake_add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = _sum_like(x, added)
    return total, *_like(total)


@operator(
    "add_rms_norm", "(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)", _fake_add_norm
)
def _add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + added, its normalized rows, and their scales."""
    total = _sum_like(x, added)
    y, scale = _like(total)
    _ADD_NORM.run((x, weight, added), (total, y, scale), eps)
    return total, y, scale


def _like_inputs(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@operator("rms_norm_backward", "(Tensor x, Tensor weight, Tensor scale, Tensor d_y) -> (Tensor, Tensor)", _like_inputs)
def _norm_backward(x: Tensor, weight: Tensor, scale: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    gradients = _like_inputs(x, weight)
    _NORM_BACKWARD.run((x, weight, scale, d_y), gradients)
    return gradients


@operator(
    "add_rms_norm_backward",
    "(Tensor x, Tensor weight, Tensor scale, Tensor d_y, Tensor d_total) -> (Tensor, Tensor)",
    _like_inputs,
)
def _add_norm_backward(x: Tensor, weight: Tensor, scale: Tensor, d_y: Tensor, d_total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, including x's other gradient d_total, and of the weight."""
    gradients = _like_inputs(x, weight)
    _ADD_NORM_BACKWARD.run((x, weight, scale, d_y, d_total), gradients)
    return gradients


def _check(x: Tensor, weight: Tensor, *rest: Tensor) -> None:
    check_one_device(x, weight, *rest)
    if x.ndim < 2 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; pass (..., rows, d_model) and (d_model,)"
        )
    if x.shape[-1] > LARGEST_WIDTH:
        raise ValueError(f"d_model {x.shape[-1]} is over {LARGEST_WIDTH}; use the plain RMSNorm")


_NORM = prepared("rms_norm.forward", ("x", "weight"), ("y", "scale"), _check, has_rows)
_ADD_NORM = prepared("rms_norm.add_forward", ("x", "weight", "added"), ("total", "y", "scale"), _check, has_rows)
_GRADIENTS = ("d_x", "d_weight")
_NORM_BACKWARD = prepared("rms_norm.backward", ("x", "weight", "scale", "d_y"), _GRADIENTS, _check, has_rows)
_ADD_NORM_BACKWARD = prepared(
    "rms_norm.add_backward", ("x", "weight", "scale", "d_y", "d_total"), _GRADIENTS, _check, has_rows
)


class Norm(torch.autograd.Function):
    """Autograd function `apply(x, weight, eps)`: (..., D) → the normalized rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor
        y, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = _norm_backward(*ctx.saved_tensors, gradients[0])
        return d_x, d_weight, None


class PassedNorm(torch.autograd.Function):
    """Autograd function `apply(x, weight, eps)`: (..., D) → x itself and the normalized rows.

    Backward adds the gradient that x gets from elsewhere in the same pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        d_total, d_y = gradients
        d_x, d_weight = _add_norm_backward(*ctx.saved_tensors, d_y, d_total)
        return d_x, d_weight, None


class AddNorm(torch.autograd.Function):
    """Autograd function `apply(x, added, weight, eps)`: (..., D) → x + added and its normalized rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, scale = _add_norm(x, added, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.dtypes = x.dtype, added.dtype
        return total, y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        d_total, d_y = gradients
        d, d_weight = _add_norm_backward(*ctx.saved_tensors, d_y, d_total)
        d_x, d_added = (d.to(dtype) for dtype in ctx.dtypes)
        return d_x, d_added, d_weight, None


class FusedRMSNorm(RMSNorm):
    """RMSNorm with the kernels."""

    def forward(self, x: Tensor, added: Tensor | None = None, *, with_stream: bool = False) -> Any:
        """Normalize (..., D): return y; with_stream: the residual stream x + added, and y."""
        if not with_stream:
            return Norm.apply(x, self.weight, self.eps)
        if added is None:
            return PassedNorm.apply(x, self.weight, self.eps)
        return AddNorm.apply(x, added, self.weight, self.eps)


class FusedBlock(TransformerBlock):
    """TransformerBlock with fused norms: the second one adds the output of attention, and both return the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x, normalized = self.ln1(x, with_stream=True)
        x, normalized = self.ln2(x, self.attn(normalized), with_stream=True)
        out: Tensor = x + self.ffn(normalized)
        return out


def unavailable(config: RunConfig) -> str | None:
    if config.model.d_model > LARGEST_WIDTH:
        return f"d_model {config.model.d_model} is over {LARGEST_WIDTH}; leave the part out of parts"
    return triton_operators.unavailable(config)


PART = Part(
    replaces="norm",
    classes={RMSNorm: FusedRMSNorm, TransformerBlock: FusedBlock},
    unavailable=unavailable,
    on_ranks=True,
)
