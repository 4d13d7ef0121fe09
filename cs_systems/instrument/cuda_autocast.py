"""CUDA's autocast on a CPU: runs in fp32 the operations that CUDA's autocast, but not the CPU's, runs in fp32.

Both run products in low precision. The CPU's autocast runs fewer of the other operations in fp32: a layer norm gives
bf16 there and fp32 on CUDA. Operations inside a composed function of torch.nn.functional are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = (torch.bfloat16, torch.float16)
# Source: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and the norms of aten/src/ATen/autocast_mode.h.
_LISTED = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa prod "
    "softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm"
)
# names by which Python calls them: `x ** 2`, and functions that are composed of one of them
_ALIASES = {"__pow__": "pow", "__rpow__": "pow", "cross_entropy": "log_softmax"}


@cache
def fp32_operations() -> frozenset[str]:
    """Return the listed operations that autocast of the installed torch handles; older versions know fewer."""
    handled = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    return frozenset(_LISTED.split()) & handled


def widens(function: Any) -> bool:
    """Return whether CUDA's autocast runs a function of torch in fp32."""
    name = getattr(function, "__name__", "")
    return _ALIASES.get(name, name) in fp32_operations()


def widened(value: Any) -> Any:
    """Return a tensor of low precision in fp32, and anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


class _CudaAutocast(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_autocast_enabled("cpu") and widens(func):
            args = tuple(map(widened, args))
            kwargs = {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def cuda_autocast() -> AbstractContextManager[None]:
    """Make autocast on a CPU give the dtypes of CUDA's autocast, inside the block."""
    return also_in_backward(_CudaAutocast())


@contextmanager
def also_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Turn a mode on inside the block, also where checkpoints run forward again in a backward pass.

    torch itself calls autograd's engine with the mode off.
    """
    run_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_engine(*args, **kwargs)

    with mode, patch("torch.autograd._engine_run_backward", run):
        yield
