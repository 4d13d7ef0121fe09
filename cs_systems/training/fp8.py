"""Linear layers whose three matrix products run in fp8, with one scale a tensor that is found anew each time.

y = x Wᵀ multiplies e4m3 by e4m3, backward's two products e5m2 (the gradient of y, which spans more) by e4m3
(Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). A tensor x is kept as q = fp8(x / s), s = max|x| / F, F the
largest number of the format, and the product, which torch's scaled matmul accumulates, is multiplied by both scales.
Parameters stay in fp32, y comes out in bf16, a gradient in the dtype of its tensor.

Error. With u half a unit in the last place and h half the smallest subnormal (e4m3: u = 2⁻⁴, h = 2⁻¹⁰, F = 448; e5m2:
u = 2⁻³, h = 2⁻¹⁷, F = 57,344), what is kept of an element is off by at most

    |s q − x| ≤ d(x) = (u + 2⁻²³) |x| + h s,

and so each of the products by |ŷ − y| ≤ Σ (|x| + d(x)) (|w| + d(w)) − Σ |x| |w|, beside the accumulation's and the
result's own rounding. In short: (u_x + u_w + u_x u_w) Σ |x| |w|, and what underflows, which is less than max|x| / 2¹⁸.

On Hopper an fp8 product keeps about 14 bits of its sums on the way (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.2)
unless it is told to add them up in fp32. Forward takes the fast way and backward the exact one, as in NVIDIA's and
PyTorch's recipes. A CPU adds up in fp32; it computes the same function, and nothing is gained there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.machine.device import Device
from cs_systems.model import Linear

MULTIPLE = 16  # of each dimension that a scaled matmul takes
CAPABILITY = (8, 9)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a tensor of zeros


def unavailable(device: Device) -> str | None:
    """Why the device has no fp8 matrix products, and what to do; None where it has them."""
    found = device.capability()
    if found is None or found >= CAPABILITY:
        return None
    return (
        f"fp8 needs an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer (Ada, Hopper, "
        f"Blackwell), this one has {found[0]}.{found[1]}: use bf16"
    )


def misfit(sizes: Mapping[str, int]) -> str | None:
    """Which of the named sizes a scaled matmul does not take, and the nearest that it does; None where it takes all."""
    for name, size in sizes.items():
        if left := size % MULTIPLE:
            near = [n for n in (size - left, size - left + MULTIPLE) if n]
            return (
                f"fp8 products take multiples of {MULTIPLE}, and {name} is {size}: make it "
                f"{' or '.join(map(str, near))}, or use bf16"
            )
    return None


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x → (q of the same shape in fp8, row by row, s of shape (1,) in fp32): x ≈ s q.

    An inf or NaN in x makes a NaN in q. With 1 dimension rather than 0, s takes the division of a bf16 x to fp32.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).reshape(1)
    scale = (largest / torch.finfo(dtype).max).clamp_(min=_SMALLEST_SCALE)
    return (x.contiguous() / scale).to(dtype), scale


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """(m, k) row by row times (k, n) column by column, both fp8, times both scales → (m, n) of `dtype`."""
    # A CPU widens both and calls mm, which an autocast around it would hand bf16 operands.
    with nullcontext() if a.is_cuda else torch.autocast(a.device.type, enabled=False):
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)


def _columns(x: Tensor) -> Tensor:
    """The same matrix, laid out column by column."""
    return x.t().contiguous().t()


class Fp8Product(torch.autograd.Function):
    """`apply(x, weight)`: (m, k), (n, k) → x weightᵀ (m, n) in bf16. Keeps both operands in fp8 for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantize(x, E4M3)
        w8, w_scale = quantize(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = x.dtype, weight.dtype
        return product(x8, x_scale, w8.t(), w_scale, torch.bfloat16, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantize(gradients[0], E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(g8, g_scale, _columns(w8), w_scale, ctx.dtypes[0], fast=False)
        if ctx.needs_input_grad[1]:
            of_weight = product(g8.t().contiguous(), g_scale, _columns(x8), x_scale, ctx.dtypes[1], fast=False)
        return of_x, of_weight


class Fp8Linear(Linear):
    """y = x Wᵀ + b in fp8, b in bf16: (..., in) → (..., out) in bf16. It has the parameters of the layer that it
    replaces.

    Raises ConfigError where the rows of x are no multiple of 16.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # the weight is there
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if reason := misfit({"the number of rows (batch × sequence)": rows.shape[0]}):  # backward sums over them
            raise ConfigError(reason)
        y: Tensor = Fp8Product.apply(rows, self.weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], -1)


def use_fp8(model: nn.Module) -> int:
    """Put an Fp8Linear in the place of each linear layer within whose sizes are multiples of 16; how many there were.

    A linear layer that several modules share is shared afterwards. A model that is one itself has none within: nothing
    can be put in its own place.
    """
    made: dict[nn.Module | None, Fp8Linear] = {}
    for module in model.modules():
        if module is model or type(module) not in (nn.Linear, Linear):  # a subclass may do more than a product
            continue
        weight = module.get_parameter("weight")
        if all(size % MULTIPLE == 0 for size in weight.shape):
            made[module] = Fp8Linear(weight, getattr(module, "bias", None))
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])
    return len(made)
