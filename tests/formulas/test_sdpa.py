"""Tests of the rules by which PyTorch chooses the kernel of scaled_dot_product_attention on CUDA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.formulas.sdpa import CUDNN, EFFICIENT, FLASH, KERNELS, MATH, Gpu, SdpaCall, chosen, refusal

HOPPER, AMPERE, TURING = Gpu(), Gpu((8, 0)), Gpu((7, 5))


def _call(
    dtype: str = "bfloat16", heads: int = 8, key_heads: int = 8, d: int = 64, d_v: int | None = None, **more: Any
):
    length, keys = more.pop("length", 128), more.pop("keys", 128)
    key = (2, key_heads, keys, d)
    value = (2, key_heads, keys, d if d_v is None else d_v)
    return SdpaCall((dtype,) * 3, (2, heads, length, d), key, value, **more)


@pytest.mark.parametrize(
    ("gpu", "call", "kernel"),
    [
        (HOPPER, _call(), CUDNN),
        (replace(HOPPER, cudnn=91000), _call(), FLASH),
        (replace(HOPPER, deterministic=True), _call(), FLASH),
        (AMPERE, _call(), FLASH),
        (TURING, _call(), MATH),  # no bf16 there
        (TURING, _call("float16"), EFFICIENT),
        (HOPPER, _call("float32"), EFFICIENT),
        (HOPPER, _call("float64"), MATH),
        (HOPPER, _call("float32", key_heads=2, enable_gqa=True), MATH),
        (replace(HOPPER, torch=(2, 14)), _call("float32", key_heads=2, enable_gqa=True), EFFICIENT),
        (HOPPER, _call("float32", heads=12, key_heads=1, enable_gqa=True), MATH),
        (AMPERE, _call(key_heads=2, enable_gqa=True), FLASH),
        (HOPPER, _call(key_heads=3, enable_gqa=True), MATH),
        (HOPPER, _call("float32", d=192, d_v=128), EFFICIENT),
        (AMPERE, _call(d=192, d_v=128), EFFICIENT),
        (HOPPER, _call(d=192, d_v=128), CUDNN),
        (HOPPER, _call("float32", d=6), MATH),
        (AMPERE, _call(d=20), FLASH),  # padded to 24
        (AMPERE, _call(d=20, mask=(128, 128)), MATH),
        (AMPERE, _call(mask=(2, 1, 128, 128)), EFFICIENT),
        (HOPPER, _call(mask=(2, 1, 128, 128)), CUDNN),
        (HOPPER, _call(mask=(2, 1, 128, 128), mask_trains=True), EFFICIENT),
        (HOPPER, _call(mask=(2, 1, 128, 128), mask_rows_are_dense=False), MATH),
        (AMPERE, _call(is_causal=True, keys=256), EFFICIENT),
        (AMPERE, _call(d=264), EFFICIENT),
        (Gpu((8, 6)), _call(d=200), EFFICIENT),
        (Gpu((8, 6)), _call(d=200, trains=False), FLASH),
        (AMPERE, _call(rows_are_dense=False), MATH),
        (AMPERE, _call(length=0), MATH),
        (AMPERE, SdpaCall(("bfloat16",) * 3, (8, 128, 64), (8, 128, 64), (8, 128, 64)), MATH),
        (replace(AMPERE, enabled=(EFFICIENT, MATH)), _call(), EFFICIENT),
        (replace(AMPERE, enabled=(FLASH,)), _call("float32"), None),
    ],
)  # fmt: skip
def test_sdpa_kernel_is_predicted_for_a_call(gpu: Gpu, call: SdpaCall, kernel: str | None) -> None:
    assert chosen(call, gpu) == kernel


def test_refusal_states_the_reason() -> None:
    assert refusal(FLASH, _call("float32"), AMPERE) == "query, key and value must be float16 or bfloat16"
    assert refusal(EFFICIENT, _call("float32", key_heads=1, enable_gqa=True), AMPERE) == (
        "query, key and value must have as many heads"
    )
    assert refusal(CUDNN, _call(), replace(AMPERE, enabled=(MATH,))) == "cudnn attention is switched off"


@pytest.mark.gpu
def test_predicted_kernel_equals_torchs_choice() -> None:
    import torch
    from torch.backends import cuda

    gpu = Gpu(
        torch.cuda.get_device_capability(),
        torch.backends.cudnn.version() or 0,
        tuple(int(part) for part in torch.__version__.split(".")[:2]),  # type: ignore[arg-type]
    )
    asked = {
        CUDNN: cuda.can_use_cudnn_attention,
        FLASH: cuda.can_use_flash_attention,
        EFFICIENT: cuda.can_use_efficient_attention,
    }
    numbers = {CUDNN: 3, FLASH: 1, EFFICIENT: 2, MATH: 0}  # torch.nn.attention.SDPBackend
    wrong = []
    grid = itertools.product(
        ("float32", "float16", "bfloat16"), ((8, 8), (8, 2), (12, 1), (8, 3)), (True, False),
        ((64, 64), (192, 128), (20, 20), (256, 256), (264, 264), (6, 6)), (None, "fixed", "trained"), (True, False),
        ((128, 128), (128, 256), (1, 128), (128, 1)), (0.0, 0.1),
    )  # fmt: skip
    for dtype, (heads, key_heads), gqa, (d, d_v), mask, causal, (length, keys), dropout in grid:
        if (mask and causal) or (heads != key_heads and not gqa):
            continue
        shapes = (2, heads, length, d), (2, key_heads, keys, d), (2, key_heads, keys, d_v)
        q, k, v = (torch.empty(s, device="cuda", dtype=getattr(torch, dtype), requires_grad=True) for s in shapes)
        bias = None
        if mask:
            bias = torch.zeros(2, 1, length, keys, device="cuda", dtype=q.dtype, requires_grad=mask == "trained")
        call = SdpaCall(
            (dtype,) * 3, *shapes, mask=None if bias is None else tuple(bias.shape), is_causal=causal, enable_gqa=gqa,
            dropout=dropout, mask_trains=mask == "trained",
        )  # fmt: skip
        params = cuda.SDPAParams(q, k, v, bias, dropout, causal, gqa)
        wrong += [
            (kernel, call) for kernel, ask in asked.items() if ask(params) != (refusal(kernel, call, gpu) is None)
        ]
        found = torch._fused_sdp_choice(q, k, v, bias, dropout, causal, enable_gqa=gqa)
        wrong += [("chosen", call)] * (numbers.get(chosen(call, gpu) or "") != found)
    assert not wrong[:5], f"{len(wrong)} differ"


def test_every_kernel_has_rules() -> None:
    assert all(refusal(kernel, _call(), HOPPER) is None for kernel in KERNELS)
