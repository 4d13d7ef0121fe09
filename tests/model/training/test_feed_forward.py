"""Tests of fused SwiGLU: its requirements, its parameters, and its kernels on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs_systems.config import Precision, RunConfig, preset
from cs_systems.model import BasicTransformerLM
from cs_systems.model.kernels.cuda.launch_gated import backward_options
from cs_systems.model.training import parts
from cs_systems.model.training.parts import fused_feed_forward

CELL = RunConfig(model=preset("tiny"), batch_size=2, seq_len=16, device="cpu", precision=Precision.BF16_PURE)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "a Hopper GPU is required; use fused_swiglu"),
        ({"precision": Precision.FP32}, "its kernels compute in bf16, and the cell in fp32; use precision bf16"),
        (
            {"parts": ("fp8_linear", "fused_feed_forward")},
            "fp8_linear replaces the same products; leave one of them out",
        ),
        ({"checkpoint": "selective:products"}, "selective:products cannot keep the result of its fused product"),
        ({"model": replace(preset("tiny"), d_ff=96)}, "d_ff 96 must be multiples of 64; use fused_swiglu"),
    ],
    ids=str,
)
def test_part_that_cannot_run_has_a_reason_and_a_remedy(changed: dict[str, Any], reason: str) -> None:
    assert reason in (fused_feed_forward.unavailable(replace(CELL, **changed)) or "")


@pytest.mark.parametrize("before", [(), ("joined_projections",)], ids=str)
def test_rows_of_gate_and_value_are_interleaved_in_one_weight(before: tuple[str, ...]) -> None:
    lm = BasicTransformerLM(preset("tiny"))
    plain = {name: value.clone() for name, value in lm.state_dict().items()}
    parts.apply(parts.chosen((*before, "fused_feed_forward")).values(), lm)
    joined = lm.get_parameter("layers.1.ffn.w13.weight")
    assert torch.equal(joined[0::2], plain["layers.1.ffn.w1.weight"])
    assert torch.equal(joined[1::2], plain["layers.1.ffn.w3.weight"])
    assert {*lm.state_dict()} == {*plain}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("tokens", "columns"), [(128, 128), (2048, 128), (8192, 256), (100_000, 256)])
def test_tiles_of_backward_are_narrow_where_a_block_has_few(tokens: int, columns: int) -> None:
    assert backward_options((tokens, 3072), 132).columns == columns


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 64, 64), (300, 128, 192), (1000, 768, 3072), (129, 2560, 320), (5000, 128, 3072)], ids=str
)
def test_kernels_match_float64(shape: tuple[int, int, int]) -> None:
    tokens, d_model, d_ff = shape
    torch.manual_seed(0)
    wide = torch.randn(tokens, d_model + 64, device="cuda").bfloat16()
    x, d_out = wide[:, 64:], torch.randn(tokens, d_model, device="cuda").bfloat16()
    w13 = (torch.randn(2 * d_ff, d_model, device="cuda") / d_model**0.5).bfloat16()
    w2 = (torch.randn(d_model, d_ff, device="cuda") / d_ff**0.5).bfloat16()
    both, h = fused_feed_forward._forward(x, w13)
    assert error(both, x.double() @ w13.double().T) < 3e-3
    gate, value = both.double().unflatten(-1, (-1, 2)).unbind(-1)  # the kernels also see gate and value in bfloat16
    gate.requires_grad_()
    value.requires_grad_()
    exact = torch.nn.functional.silu(gate) * value
    assert error(h, exact.detach()) < 3e-3
    exact.backward(d_out.double() @ w2.double())
    assert gate.grad is not None
    assert value.grad is not None
    d_gate, d_value = fused_feed_forward._backward(d_out, w2, both).unflatten(-1, (-1, 2)).unbind(-1)
    assert error(d_gate, gate.grad) < 5e-3
    assert error(d_value, value.grad) < 5e-3


@pytest.mark.gpu
def test_kernels_refuse_float32() -> None:
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(128, 64, device="cuda")
    with pytest.raises(ValueError, match=r"take bfloat16 tensors, got torch.float32; cast them to bfloat16"):
        fused_feed_forward._forward(x, w)
