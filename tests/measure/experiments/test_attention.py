"""Unfused attention calls of a step: found however they are written, repeated as they are, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cs_systems.machine.device import Device
from cs_systems.measure.experiments import attention
from cs_systems.measure.experiments.attention import Call, distinct_calls
from cs_systems.measure.runtime.experimenting import Step
from cs_systems.record import Measurement, Sample

CPU = Device(torch.device("cpu"))
B, H, S, D = 2, 3, 8, 4
CAUSAL = torch.ones(S, S).tril().bool()
BAND = CAUSAL & ~CAUSAL.tril(-3)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
    return scores.masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores.mul_(D**-0.5).masked_fill_(~CAUSAL, -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", nn.functional.dropout(scores.softmax(-1), 0.25), v)


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(S, S).masked_fill(~BAND, -math.inf)
    return (q @ k.transpose(-2, -1) * D**-0.5 + bias).softmax(-1) @ v


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(torch.tensor(True), q @ k.mT, 0.0).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).relu() @ v


def step_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, trains: bool = True, times: int = 2) -> Step:
    leaves = [torch.randn(B, H, S, D, requires_grad=trains) for _ in "qkv"]
    out: list[Tensor] = []

    def forward() -> None:
        x, k, v = leaves
        for _ in range(times):
            x = attend(x, k, v)
        out[:] = [x]

    phases = [("forward", forward), *([("backward", lambda: out[0].sum().backward())] if trains else [])]
    sample = Sample(0, False, 1.0, {"forward": 1.0}, {"forward": 1.0})
    return Step(CPU, Measurement("monotonic", (sample,), 0.0), lambda: phases)


@pytest.mark.parametrize(
    ("attend", "mask", "dropout"),
    [(filled, "is_causal", 0.0), (in_place, "is_causal", 0.0), (added, "attn_mask", 0.0), (unmasked, "", 0.0)],
)
def test_unfused_call_is_found_with_its_mask(attend: Callable[..., Tensor], mask: str, dropout: float) -> None:
    calls = distinct_calls(step_of(attend))
    ((call, count),) = calls.counts
    assert (count, calls.has_backward, call.dropout) == (2, True, dropout)
    assert call.query.shape == (B * H, S, D)
    assert call.key.shape == (B * H, D, S)
    assert call.value is not None
    query, key = call.query.random(CPU), call.key.random(CPU)
    hidden = attention._mask(call, query, key)
    assert "".join(hidden) == mask
    if mask == "attn_mask":
        assert torch.equal(hidden["attn_mask"][0, 0], BAND)


@pytest.mark.parametrize("attend", [filled, added, unmasked])
def test_repeated_call_computes_what_the_program_does(attend: Callable[..., Tensor]) -> None:
    ((call, _),) = distinct_calls(step_of(attend)).counts
    q, k, v = (torch.randn(B, H, S, D) for _ in "qkv")
    flat = [each.reshape(B * H, S, D) for each in (q, k, v)]
    again = torch.bmm(call.weights(flat[0], flat[1].mT).reshape(B * H, S, S), flat[2])
    assert torch.allclose(again, attend(q, k, v).reshape(B * H, S, D), atol=1e-6)


@pytest.mark.parametrize("attend", [fused, without_softmax])
def test_step_without_unfused_attention_has_no_row(attend: Callable[..., Tensor]) -> None:
    assert attention.EXPERIMENT.run(step_of(attend)) == []


@pytest.mark.parametrize("trains", [True, False])
def test_call_is_timed_unchanged_and_in_each_supported_kernel(trains: bool) -> None:
    rows = attention.EXPERIMENT.run(step_of(filled, trains=trains))
    assert "flash" in {row["instead"] for row in rows}
    passes = "forward and backward" if trains else "forward"
    for row in rows:
        assert row["of"] == "attention"
        assert row["time_s"] is not None
        assert row["baseline_s"] is not None
        assert row["time_s"] > 0
        assert row["stands_for"] == (
            f"2 calls of scaled_dot_product_attention, 1 distinct, {passes}, by the kernel {row['instead']}"
        )


def test_calls_that_differ_in_length_are_distinct() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        short = (q[..., :4, :] @ k[..., :4, :].mT).softmax(-1) @ v[..., :4, :]
        return filled(q, k, v) + short.mean()

    counts = {call.query.shape[1]: count for call, count in distinct_calls(step_of(attend)).counts}
    assert counts == {S: 2, 4: 2}


def test_finder_keeps_no_call_with_overwritten_tensors() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(20):
            scores = q @ k.mT
            del scores
        return torch.randn(B, H, S, S).softmax(-1) @ v

    assert distinct_calls(step_of(attend, times=1)).counts == []
    assert isinstance(distinct_calls(step_of(filled)).counts[0][0], Call)
