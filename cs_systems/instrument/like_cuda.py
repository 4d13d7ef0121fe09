"""Operations as CUDA runs them, for predicting its memory with fake tensors on a machine without a GPU.

PyTorch without CUDA cannot run autograd on fake CUDA tensors, so the fake tensors are on the CPU. Where an operation
keeps other tensors there than on CUDA, this mode calls what has the tensors of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from cs_systems.instrument import recurrent

# Functions that CUDA's autocast runs in fp32 and the CPU's does not. Source: aten/src/ATen/autocast_mode.h.
_WIDENED = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus, F.nll_loss, F.mse_loss, F.smooth_l1_loss,
    F.l1_loss, F.kl_div, F.cosine_similarity, F.binary_cross_entropy_with_logits, torch.softmax, torch.log_softmax,
    torch.layer_norm, torch.group_norm, torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.cumsum,
    torch.cumprod, torch.prod, torch.sum, torch.norm, Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log,
    Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal, Tensor.cumsum, Tensor.cumprod, Tensor.prod,
    Tensor.sum, Tensor.norm,
}  # fmt: skip
_DROPOUTS: tuple[Callable[..., Any], ...] = (F.dropout, torch.dropout)
_LOW = (torch.bfloat16, torch.float16)


class _LikeCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in recurrent.GATES:
            return recurrent.run(func, *args)
        if torch.is_autocast_enabled("cpu"):
            if func is F.cross_entropy and _is_by_class(args):
                return _cross_entropy(*args, **kwargs)
            if func in _WIDENED:
                args = tuple(_widened(value) for value in args)
                kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **given: Any) -> Tensor:
    """Run dropout as one operation that keeps a mask of one byte per element."""
    training = given.get("train", training)
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **given: Any
) -> Tensor:
    """Run fused attention. On CUDA it also draws dropout and trains a mask; on a CPU both need the scores in memory."""
    if attn_mask is None or not attn_mask.requires_grad:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **given)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask.detach(), 0.0, **given)
    scores = (*query.shape[:-1], key.shape[-2])
    trained: Tensor = _TrainsMask.apply(output, attn_mask, scores)
    return trained


class _TrainsMask(torch.autograd.Function):
    """Identity of an output whose backward makes a gradient of the size of all scores for the mask."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, mask: Tensor, scores: tuple[int, ...]) -> Tensor:
        ctx.mask_shape, ctx.scores = mask.shape, scores
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_scores = gradients[0].new_zeros(ctx.scores)
        return gradients[0], of_scores.sum_to_size(ctx.mask_shape), None


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Run cross entropy with the log-softmax in the dtype of the logits, and a wide copy for the loss."""
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    classes = 1 if input.dim() > 1 else 0
    logs: Tensor = torch.ops.aten._log_softmax(input, classes, False)
    loss: Tensor = F.nll_loss(logs.float(), target, weight, ignore_index=ignore_index, reduction=reduction)
    if not label_smoothing:
        return loss
    is_kept = target != ignore_index
    weighted = logs if weight is None else logs * weight.view(-1, *[1] * (logs.dim() - classes - 1))
    smooth = -weighted.sum(classes, dtype=torch.float32) * is_kept
    if reduction != "none":
        smooth = smooth.sum()
    if reduction == "mean":
        smooth = smooth / (is_kept.sum() if weight is None else (weight[target.where(is_kept, 0)] * is_kept).sum())
    return (1 - label_smoothing) * loss + label_smoothing / input.shape[classes] * smooth


def _inside(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _is_by_class(args: tuple[Any, ...]) -> bool:
    return len(args) >= 2 and not args[1].is_floating_point()


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


@contextmanager
def like_cuda() -> Iterator[None]:
    """Run operations on the CPU inside with the tensors that they have on CUDA."""
    devices = [*_get_foreach_kernels_supported_devices(), "cpu"]
    with ExitStack() as stack:
        # torch's optimizers update all parameters at once on CUDA, and one after the other on a CPU.
        stack.enter_context(patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: devices))
        stack.enter_context(mode := _LikeCuda())
        # torch calls the engine with the mode off, and checkpoints run forward again inside.
        run_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        stack.enter_context(patch("torch.autograd._engine_run_backward", _inside(mode, run_engine)))
        yield
