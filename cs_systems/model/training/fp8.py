"""Linear layers with their three matrix products in fp8 and one scale per tensor, recomputed at each use.

y = x Wᵀ multiplies e4m3 by e4m3; backward's two products multiply e5m2 (the gradient of y, which has the wider range)
by e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). A tensor x is kept as q = fp8(x / s), s = max|x| /
F, F the largest number of the format. The product, accumulated by torch's scaled matmul, is multiplied by both scales.
Parameters stay in fp32, y is bf16, a gradient has the dtype of its tensor.

Error. With u half a unit in the last place and h half the smallest subnormal (e4m3: u = 2⁻⁴, h = 2⁻¹⁰, F = 448; e5m2: u
= 2⁻³, h = 2⁻¹⁷, F = 57,344), the error of a stored element is at most

    |s q − x| ≤ d(x) = (u + 2⁻²³) |x| + h s,

so the error of each product is at most |ŷ − y| ≤ Σ (|x| + d(x)) (|w| + d(w)) − Σ |x| |w|, plus the rounding of the
accumulation and of the result. In short: (u_x + u_w + u_x u_w) Σ |x| |w|, plus underflow, which is less than max|x| /
2¹⁸.

On Hopper an fp8 product keeps about 14 bits of its partial sums (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.2) unless
it accumulates in fp32. Forward uses the fast accumulation and backward the exact one, as in NVIDIA's and PyTorch's
recipes. A CPU accumulates in fp32: it computes the same function, with no speedup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.machine.device import Device
from cs_systems.model.training.triton_operators import check_one_device, has_rows, operator, prepared
from cs_systems.model.transformer import Linear

MULTIPLE = 16  # a scaled matmul's dimensions must be multiples of this
CAPABILITY = (8, 9)
REPLACED = (nn.Linear, Linear)  # subclasses are not replaced, because they may do more than a product
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HAS_TRITON = find_spec("triton") is not None
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # the scale of a tensor of zeros, to avoid a division by 0


def unavailable(device: Device, instead: str = "use bf16") -> str | None:
    """Return the reason why the device has no fp8 matrix products, with the remedy `instead`; None if it has them."""
    found = device.capability()
    if found is None or found >= CAPABILITY:
        return None
    return (
        f"fp8 needs an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer (Ada, Hopper, "
        f"Blackwell), this GPU has {found[0]}.{found[1]}; {instead}"
    )


def misfit(sizes: Mapping[str, int], instead: str = "use bf16") -> str | None:
    """Return the reason why a scaled matmul rejects one of the named sizes, or None.

    Its remedy names the nearest valid sizes and the alternative `instead`.
    """
    for name, size in sizes.items():
        if left := size % MULTIPLE:
            near = [n for n in (size - left, size - left + MULTIPLE) if n]
            return (
                f"fp8 products need multiples of {MULTIPLE}, and {name} is {size}; make it "
                f"{' or '.join(map(str, near))}, or {instead}"
            )
    return None


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x to fp8 with one scale: x → (q, s), x ≈ s q.

    q has the shape of x, row-major, in fp8; s has shape (1,), in fp32. An inf or NaN in x gives a NaN in q. s has 1
    dimension rather than 0 so that its product with a bf16 x is computed in fp32.
    """
    scale = scale_of(x, dtype)
    return (x.contiguous() * scale.reciprocal()).to(dtype), scale


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of x for an fp8 format: max|x| / its largest number, in fp32, of shape (1,)."""
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).reshape(1)
    scale: Tensor = (largest / torch.finfo(dtype).max).clamp_(min=_SMALLEST_SCALE)
    return scale


def quantize_both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (m, n) as `quantize` does: x → (q, qᵀ, s), where q (m, n) and qᵀ (n, m) are both row-major.

    On a GPU with triton one kernel writes both if x has 16 bits: it transposes the 16-bit tile before rounding,
    because Triton 3.6 loses elements when it transposes a tile of 8 bits.
    """
    if not (x.is_cuda and HAS_TRITON and x.itemsize == 2):
        q, scale = quantize(x, dtype)
        return q, q.t().contiguous(), scale
    scale = scale_of(x, dtype)
    q, turned = _quantize_with_triton(x, scale, dtype)
    return q, turned, scale


def _fake_pair(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


@operator("quantize", "(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)", _fake_pair)
def _quantize_with_triton(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x · (1 / scale) in `dtype`, and its transpose, both row-major."""
    outputs = _fake_pair(x, scale, dtype)
    _QUANTIZE.run((x, scale), outputs, dtype)
    return outputs


def _check(x: Tensor, scale: Tensor) -> None:
    check_one_device(x, scale)


_QUANTIZE = prepared("quantize.quantize", ("x", "scale"), ("kept", "turned"), _check, has_rows)


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Multiply (m, k) row-major by (k, n) column-major, both fp8, and by both scales: (m, n) of `dtype`."""
    # a CPU converts both and calls mm, to which an enclosing autocast would pass bf16 operands
    with nullcontext() if a.is_cuda else torch.autocast(a.device.type, enabled=False):
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)


class Fp8Product(torch.autograd.Function):
    """Matrix product in fp8: `apply(x, weight)`, (m, k), (n, k) → x weightᵀ (m, n) in bf16.

    Keeps both operands in fp8 for backward, transposed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, turned_x, x_scale = quantize_both_ways(x, E4M3)
        w8, turned_w, w_scale = quantize_both_ways(weight, E4M3)
        ctx.save_for_backward(turned_x, x_scale, turned_w, w_scale)
        ctx.dtypes = x.dtype, weight.dtype
        return product(x8, x_scale, w8.t(), w_scale, torch.bfloat16, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        turned_x, x_scale, turned_w, w_scale = ctx.saved_tensors
        g8, turned_g, g_scale = quantize_both_ways(gradients[0], E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(g8, g_scale, turned_w.t(), w_scale, ctx.dtypes[0], fast=False)
        if ctx.needs_input_grad[1]:
            of_weight = product(turned_g, g_scale, turned_x.t(), x_scale, ctx.dtypes[1], fast=False)
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., in) by weight (out, in) in fp8: (..., out) in bf16.

    Raises ConfigError unless the number of rows of x is a multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if reason := misfit({"the number of rows (batch × sequence)": rows.shape[0]}):  # backward sums over the rows
        raise ConfigError(reason)
    if torch.is_grad_enabled():
        y: Tensor = Fp8Product.apply(rows, weight)
    else:
        (x8, x_scale), (w8, w_scale) = quantize(rows, E4M3), quantize(weight, E4M3)
        y = product(x8, x_scale, w8.t(), w_scale, torch.bfloat16, fast=True)
    return y.reshape(*x.shape[:-1], -1)


class Fp8Linear(Linear):
    """Linear layer y = x Wᵀ + b in fp8, b in bf16: (..., in) → (..., out) in bf16.

    It has the parameters of the layer that it replaces. Raises ConfigError unless the number of rows of x is a multiple
    of 16.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # Linear.__init__ would allocate another weight
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_fp8(model: nn.Module) -> int:
    """Replace each linear layer with sizes that are multiples of 16 by an Fp8Linear; return their number.

    A linear layer that several modules share stays shared. A model that is itself a linear layer is not replaced.
    """
    made: dict[nn.Module | None, Fp8Linear] = {}
    for module in model.modules():
        if module is model or type(module) not in REPLACED:
            continue
        weight = module.get_parameter("weight")
        if all(size % MULTIPLE == 0 for size in weight.shape):
            made[module] = Fp8Linear(weight, getattr(module, "bias", None))
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])
    return len(made)
