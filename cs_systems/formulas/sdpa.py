"""Prediction of the kernel that PyTorch's scaled_dot_product_attention chooses on CUDA, by PyTorch's own rules.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and ../sdp_utils_cpp.h of PyTorch 2.11 to 2.14. A test on a
GPU compares these rules with torch's answers. Nested tensors and ROCm are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
KERNELS = (CUDNN, FLASH, EFFICIENT, MATH)
_HALF = ("float16", "bfloat16")
_MOST_HEAD_DIM = 256


@dataclass(frozen=True)
class Gpu:
    """Properties of GPU and libraries that determine the choice; by default an H100 with PyTorch 2.11's wheel.

    enabled: kernels that the program has not disabled.
    """

    capability: tuple[int, int] = (9, 0)
    cudnn: int = 91900
    torch: tuple[int, int] = (2, 11)
    enabled: tuple[str, ...] = KERNELS
    deterministic: bool = False

    @property
    def prefers_cudnn(self) -> bool:
        """Return whether PyTorch tries cuDNN first: on Hopper and Blackwell, from cuDNN 9.15.1 on."""
        return self.cudnn > 91500 and self.capability[0] in (9, 10)


@dataclass(frozen=True)
class SdpaCall:
    """Call with the properties that decide its kernel; shapes are (batch, heads, length, head size).

    dtypes: dtypes of query, key and value, by torch's names. trains: one of the three requires a gradient. mask_trains:
    the mask does. rows_are_dense: the last dimension of query, key and value has stride 1. mask_rows_are_dense: the
    mask's too.
    """

    dtypes: tuple[str, str, str]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    is_causal: bool = False
    enable_gqa: bool = False
    dropout: float = 0.0
    trains: bool = True
    mask_trains: bool = False
    rows_are_dense: bool = True
    mask_rows_are_dense: bool = True


def chosen(call: SdpaCall, gpu: Gpu) -> str | None:
    """Return the kernel that runs the call; None if every suitable kernel is disabled."""
    order = (CUDNN, FLASH, EFFICIENT, MATH) if gpu.prefers_cudnn else (FLASH, EFFICIENT, MATH)
    return next((kernel for kernel in order if refusal(kernel, call, gpu) is None), None)


def refusal(kernel: str, call: SdpaCall, gpu: Gpu) -> str | None:
    """Return the first reason why a kernel cannot run the call, or None."""
    rules = {CUDNN: _of_cudnn, FLASH: _of_flash, EFFICIENT: _of_efficient, MATH: lambda *_: iter(())}
    if kernel not in gpu.enabled:
        return f"{kernel} attention is switched off"
    return next(rules[kernel](call, gpu), None)


def _of_every_fused_kernel(call: SdpaCall) -> Iterator[str]:
    if not len(call.query) == len(call.key) == len(call.value) == 4:
        yield "query, key and value must have 4 dimensions"
        return
    if not call.query[0] == call.key[0] == call.value[0]:
        yield "query, key and value must have one batch size"
    if not call.query[2] or not call.key[2]:
        yield "a sequence is empty"
    if call.mask is not None and not call.mask_rows_are_dense:
        yield "the last dimension of the mask must have stride 1"


def _of_heads(call: SdpaCall, *, groups: bool, key_and_value_differ: bool = False) -> Iterator[str]:
    """Yield the problems with the numbers of heads.

    groups: query heads may share a key head.
    """
    query, key, value = (shape[1] for shape in (call.query, call.key, call.value))
    if not (call.enable_gqa and groups):
        if not query == key == value:
            yield "query, key and value must have as many heads"
    elif query % key or query % value or (key != value and not key_and_value_differ):
        yield "the key heads must divide the query heads"


def _of_half_precision(call: SdpaCall, gpu: Gpu) -> Iterator[str]:
    allowed = _HALF if gpu.capability >= (8, 0) else _HALF[:1]
    if len(set(call.dtypes)) > 1 or call.dtypes[0] not in allowed:
        yield f"query, key and value must be {' or '.join(allowed)}"
    if not (8, 0) <= gpu.capability <= (12, 1):
        yield "the GPU must have compute capability 8.0 to 12.1"


def _of_cudnn(call: SdpaCall, gpu: Gpu) -> Iterator[str]:
    yield from _of_every_fused_kernel(call)
    yield from _of_half_precision(call, gpu)
    if gpu.deterministic:
        yield "deterministic algorithms are asked for"
    if call.dropout and 91100 < gpu.cudnn < 91400:
        yield "cuDNN 9.11 to 9.13 has no dropout"
    if call.dropout and gpu.torch >= (2, 14) and (call.dropout * 16) % 1:
        yield "the dropout must be a multiple of 1/16"
    if call.mask is not None and (call.mask_trains or not _is_broadcast(call)):
        yield "the mask requires a gradient, or has another shape"
    if not call.rows_are_dense and call.query[3] != 1:
        yield "the last dimension of query, key and value must have stride 1"
    yield from _of_heads(call, groups=True, key_and_value_differ=True)
    of_key, of_value = call.query[3], call.value[3]
    most = _MOST_HEAD_DIM if gpu.capability == (9, 0) and gpu.torch < (2, 14) else 128
    if gpu.capability in ((9, 0), (10, 0), (10, 3)) and (of_key, of_value) == (192, 128):
        most = 192
    if max(of_key, of_value) > most or of_key % 8 or of_value % 8:
        yield f"the head sizes must be multiples of 8 up to {most}"
    if call.key[2] == 1 or (call.query[2] == 1 and call.dropout):
        yield "the sequence has one element"


def _is_broadcast(call: SdpaCall) -> bool:
    """Return whether the mask has 2 or 4 dimensions, each of size 1 or as large as the scores'."""
    assert call.mask is not None
    scores = (*call.query[:3], call.key[2])[-len(call.mask) :]
    return len(call.mask) in (2, 4) and all(size in (1, all_) for size, all_ in zip(call.mask, scores, strict=True))


def _of_flash(call: SdpaCall, gpu: Gpu) -> Iterator[str]:
    yield from _of_every_fused_kernel(call)
    if call.mask is not None:
        yield "flash attention has no mask"
    d_head = call.query[3]
    if not d_head == call.key[3] == call.value[3] or d_head > _MOST_HEAD_DIM:
        yield f"query, key and value must have one head size up to {_MOST_HEAD_DIM}"
    yield from _of_half_precision(call, gpu)
    is_small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
    if call.trains and is_small and d_head > 192 and (d_head <= 224 or call.dropout):
        yield f"a head size of {d_head} is not trained on this GPU"
    if call.is_causal and call.query[2] != call.key[2]:
        yield "the causal mask needs as many queries as keys"
    yield from _of_heads(call, groups=True)
    if not call.rows_are_dense and d_head != 1:
        yield "the last dimension of query, key and value must have stride 1"


def _of_efficient(call: SdpaCall, gpu: Gpu) -> Iterator[str]:
    yield from _of_every_fused_kernel(call)
    is_half = call.dtypes[0] in _HALF
    alignment = (8 if is_half else 4) if gpu.capability >= (8, 0) else 8 if is_half and gpu.capability >= (7, 0) else 1
    of_query, of_key, of_value = (shape[3] for shape in (call.query, call.key, call.value))
    if of_query != of_key or not of_query or not of_value or of_query % alignment or of_value % alignment:
        yield f"the head sizes must be multiples of {alignment}, and those of query and key equal"
    allowed = ("float32", *(_HALF if gpu.capability >= (8, 0) else _HALF[:1]))
    if len(set(call.dtypes)) > 1 or call.dtypes[0] not in allowed:
        yield f"query, key and value must be {', '.join(allowed)}"
    if not (5, 0) <= gpu.capability <= (12, 1):
        yield "the GPU must have compute capability 5.0 to 12.1"
    yield from _of_heads(call, groups=gpu.torch >= (2, 14))
    if not call.rows_are_dense:
        yield "the last dimension of query, key and value must have stride 1"
