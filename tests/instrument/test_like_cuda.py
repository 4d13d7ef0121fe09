"""Tests of the tensors that operations keep on CUDA, predicted on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cs_systems.instrument.like_cuda import like_cuda
from cs_systems.instrument.storages import StorageTracker

BATCH, HEADS, LENGTH, D_HEAD = 2, 4, 64, 8
SCORES = BATCH * HEADS * LENGTH**2


def _kept(run: Callable[[], Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that forward keeps for backward, in elements, and run backward."""
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage()._cdata, t) is None or t, lambda t: t
    ):
        output = run()
    output.sum().backward()
    return {key: t.untyped_storage().nbytes() // t.element_size() for key, t in kept.items()}


def _tensor(heads: int = HEADS, d_head: int = D_HEAD, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, heads, LENGTH, d_head, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["none", "fixed", "trained"])
def test_fused_attention_keeps_no_scores(mask: str, dropout: float) -> None:
    with FakeTensorMode(), like_cuda():
        query = _tensor()
        bias = None if mask == "none" else torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=mask == "trained")
        kept = _kept(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=bias, dropout_p=dropout))
        if bias is not None:
            kept.pop(bias.untyped_storage()._cdata, None)
    assert max(kept.values()) == query.numel()
    if mask == "trained":
        assert bias is not None
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_heads_smaller_than_key_heads_keep_no_scores(dtype: torch.dtype) -> None:
    with FakeTensorMode(), like_cuda():
        query, value = _tensor(d_head=24, dtype=dtype), _tensor(d_head=16, dtype=dtype)
        kept = _kept(lambda: F.scaled_dot_product_attention(query, query, value, is_causal=True))
    assert max(kept.values()) == query.numel()


@pytest.mark.parametrize(("dtype", "keeps"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_keep_scores_in_fp32_alone(dtype: torch.dtype, keeps: bool, key_heads: int) -> None:
    with FakeTensorMode(), like_cuda():
        query, key = _tensor(dtype=dtype), _tensor(key_heads, dtype=dtype)
        kept = _kept(lambda: F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True))
    assert [*kept.values()].count(SCORES) == keeps
    if keeps:  # scaled query, and key and value for each query head
        assert [*kept.values()].count(query.numel()) == 3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_unfused_attention_widens_low_precision_and_keeps_a_mask_of_bytes(dropout: float) -> None:
    with FakeTensorMode(), like_cuda(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        query = _tensor(dtype=torch.bfloat16)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            output = F.scaled_dot_product_attention(query, query, query, dropout_p=dropout)
    assert output.dtype == torch.bfloat16
    scores = {t.untyped_storage()._cdata: str(t.dtype) for t in kept if t.numel() == SCORES}
    assert sorted(scores.values()) == ["torch.bool"] * bool(dropout) + ["torch.float32"] * (2 if dropout else 1)


@pytest.mark.parametrize("case", ["causal", "mask", "grouped", "broadcast", "scale"])
def test_unfused_attention_equals_torchs(case: str) -> None:
    torch.manual_seed(0)
    key_heads = {"grouped": 2, "broadcast": 1}.get(case, HEADS)
    query, key, value = _tensor(), _tensor(key_heads), _tensor(key_heads)
    given: dict[str, Any] = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.rand(LENGTH, LENGTH) > 0.3},
        "grouped": {"enable_gqa": True},
        "broadcast": {},
        "scale": {"scale": 0.3},
    }[case]
    right = F.scaled_dot_product_attention(query, key, value, **given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), like_cuda():
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, **given), right)


def test_attention_without_a_kernel_raises_an_error() -> None:
    with (
        FakeTensorMode(),
        like_cuda(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"on CUDA .*; switch on another with torch\.nn\.attention\.sdpa"),
    ):
        F.scaled_dot_product_attention(_tensor(), _tensor(), _tensor())


def test_attention_inside_a_torch_module_keeps_the_tensors_of_cuda() -> None:
    with FakeTensorMode(), like_cuda():
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        x = torch.randn(BATCH, LENGTH, 32)
        kept = _kept(lambda: layer(x))
    assert max(kept.values()) < BATCH * 4 * LENGTH**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [(HEADS, HEADS, 24, 16), (HEADS, 2, 24, 24), (HEADS, HEADS, 20, 20)])
def test_real_and_fake_tensors_need_equal_memory(dtype: torch.dtype, shapes: tuple[int, int, int, int]) -> None:
    heads, key_heads, d_head, d_value = shapes
    peaks, flops = [], []
    for fake in (True, False):
        tracker = StorageTracker("cpu", like_cuda=True)
        with like_cuda(), FakeTensorMode() if fake else torch.enable_grad(), tracker, tracker.phase(1, "forward"):
            query = _tensor(heads, d_head, dtype)
            key, value = _tensor(key_heads, d_head, dtype), _tensor(key_heads, d_value, dtype)
            F.scaled_dot_product_attention(query, key, value, enable_gqa=heads != key_heads).sum().backward()
        peaks.append(tracker.rows[-1]["peak_components"])
        flops.append(tracker.flops)
    assert peaks[0] == peaks[1]
    assert flops[0] == flops[1] > 0


def test_loss_of_ctc_keeps_a_table_of_times_and_positions() -> None:
    with FakeTensorMode(), like_cuda():
        logs = torch.randn(50, BATCH, 32, requires_grad=True)
        kept = _kept(lambda: F.ctc_loss(logs, torch.ones(20, dtype=torch.long), [50, 50], [12, 8]))
    assert BATCH * 50 * (2 * 12 + 1) in kept.values()
    assert logs.grad is not None
