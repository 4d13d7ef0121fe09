"""Mode that gives operations the tensors that they have on CUDA, to predict CUDA's memory by fake tensors on a CPU.

PyTorch without CUDA cannot run autograd on fake CUDA tensors, so the fake tensors are on the CPU. If an operation keeps
other tensors there than on CUDA, this mode replaces it by operations that keep CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from cs_systems.formulas import sdpa
from cs_systems.instrument import recurrent
from cs_systems.instrument.cuda_autocast import also_in_backward, widened, widens
from cs_systems.machine.device import resolve

_DROPOUTS: tuple[Callable[..., Any], ...] = (F.dropout, torch.dropout)
_aten: Any = torch.ops.aten


class _LikeCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        # written in Python: the functions that it calls are intercepted as well
        if func is F.multi_head_attention_forward:
            with patch("torch.nn.functional.has_torch_function", lambda _: False), self:
                return func(*args, **kwargs)
        if func in (F.ctc_loss, torch.ctc_loss):
            return _ctc_loss(*args, **kwargs)
        if func in recurrent.GATES:
            return recurrent.run(func, *args)
        if torch.is_autocast_enabled("cpu"):
            if func is F.cross_entropy and _is_by_class(args):
                return _cross_entropy(*args, **kwargs)
            if widens(func):
                args = tuple(map(widened, args))
                kwargs = {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **given: Any) -> Tensor:
    """Run dropout as one operation that keeps a mask of one byte per element."""
    training = given.get("train", training)
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that CUDA would choose. Source: aten/src/ATen/native/transformers/attention.cpp."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = (_cast(tensor, low) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else _cast(attn_mask, low)
    tensors = (query, key, value)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    call = sdpa.SdpaCall(
        dtypes=(_name(query), _name(key), _name(value)),
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        mask=None if attn_mask is None else tuple(attn_mask.shape),
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        dropout=dropout_p,
        trains=trains,
        mask_trains=attn_mask is not None and attn_mask.requires_grad,
        rows_are_dense=all(tensor.stride(-1) == 1 for tensor in tensors),
        mask_rows_are_dense=attn_mask is None or attn_mask.stride(-1) == 1,
    )
    kernel = sdpa.chosen(call, _gpu())
    if kernel is None:
        raise RuntimeError(
            "scaled_dot_product_attention finds no kernel on CUDA among those that are switched on; switch on another "
            "with torch.nn.attention.sdpa_kernel"
        )
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    with torch.autocast("cpu", enabled=False):
        if kernel == sdpa.MATH:
            return _unfused(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        output: Tensor
        if kernel == sdpa.FLASH:
            padding = -query.shape[-1] % 8
            query, key, value = (F.pad(tensor, (0, padding)) if padding else tensor for tensor in tensors)
            output = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return output[..., : output.shape[-1] - padding]
        if mask is not None:
            if kernel == sdpa.EFFICIENT and any(stride % 8 for stride in mask.stride()[:-1]):
                mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        fused = _aten._scaled_dot_product_efficient_attention
        if kernel == sdpa.CUDNN:
            fused = _aten._scaled_dot_product_cudnn_attention
        output = fused(query, key, value, mask, trains, dropout_p, is_causal, scale=scale)[0]
        return output


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Run attention that keeps its scores, in fp32 for low precision, and repeats key heads for grouped queries.

    torch's own `_scaled_dot_product_attention_math` is not called, because on a CPU and on fake tensors it keeps
    another dropout mask and one more matrix.
    """
    dtype = query.dtype
    query, key, value = (widened(tensor) for tensor in (query, key, value))
    query = query * scale**0.5
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.where(seen, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
    if enable_gqa and query.shape[-3] != key.shape[-3]:  # the products broadcast a single key head
        key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
    scores = query @ (key.transpose(-2, -1) * scale**0.5)
    if mask is not None:
        scores = scores.add_(mask)
    weights = _aten._safe_softmax(scores, -1)
    output: Tensor = _dropout(weights, dropout_p) @ value
    return output.to(dtype)


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
    logs: Tensor = _aten._log_softmax(input, classes, False)
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


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return a loss of 0 with the tensors of PyTorch's CUDA kernel. Source: aten/src/ATen/native/cuda/LossCTC.cu."""
    lengths = target_lengths.tolist() if isinstance(target_lengths, Tensor) else list(target_lengths)
    losses: Tensor = _CtcLoss.apply(log_probs, targets, max(lengths, default=0))
    return losses if reduction in ("none", 0) else losses.mean()


class _CtcLoss(torch.autograd.Function):
    """CTC losses of a batch: forward keeps a table of every time step and position, backward makes a second one."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor, longest: int) -> Tensor:
        time, batch = (log_probs.shape[0], log_probs.shape[1]) if log_probs.dim() == 3 else (log_probs.shape[0], 1)
        table = log_probs.new_zeros(batch, time, 2 * longest + 1)
        ctx.save_for_backward(log_probs, targets, table)
        return log_probs.new_zeros(batch)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        log_probs, _, table = ctx.saved_tensors
        second = torch.zeros_like(table)
        gradient = torch.zeros_like(log_probs)
        del second
        return gradient, None, None


def _gpu() -> sdpa.Gpu:
    """Return this machine's GPU, or the assumed GPU on a machine without one, with the program's switches."""
    kernels = torch.backends.cuda
    switches = {
        sdpa.CUDNN: kernels.cudnn_sdp_enabled(),
        sdpa.FLASH: kernels.flash_sdp_enabled(),
        sdpa.EFFICIENT: kernels.mem_efficient_sdp_enabled(),
        sdpa.MATH: kernels.math_sdp_enabled(),
    }
    gpu = sdpa.Gpu(
        torch=_release(),
        enabled=tuple(name for name, is_on in switches.items() if is_on),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    capability = resolve("auto").capability()
    return gpu if capability is None else replace(gpu, capability=capability, cudnn=torch.backends.cudnn.version() or 0)


def _release() -> tuple[int, int]:
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor cast as autocast does for an operation in low precision."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _is_by_class(args: tuple[Any, ...]) -> bool:
    return len(args) >= 2 and not args[1].is_floating_point()


@contextmanager
def like_cuda() -> Iterator[None]:
    """Run the CPU's operations inside the block with the tensors that they have on CUDA."""
    devices = [*_get_foreach_kernels_supported_devices(), "cpu"]
    # torch's optimizers update all parameters at once on CUDA, and one by one on a CPU.
    at_once = patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: devices)
    with at_once, also_in_backward(_LikeCuda()):
        yield
