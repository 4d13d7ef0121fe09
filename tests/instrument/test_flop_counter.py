"""Tests of attention's FLOPs by its visible scores, for every way to write the mask and every operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from cs_systems.config import Mode, ModelConfig, Phase, Precision, preset
from cs_systems.core import plugins
from cs_systems.core.shapes import ALIGNMENTS, AttentionCall
from cs_systems.formulas import cost
from cs_systems.formulas.cost import twice_credited_scores
from cs_systems.instrument.attention_calls import attention_flops
from cs_systems.instrument.flop_counter import FlopCounter
from cs_systems.instrument.module_costs import MeasuredCost, measured_cost
from cs_systems.instrument.score_masks import shown_in
from cs_systems.model import BasicTransformerLM
from cs_systems.model.attention._mask import hidden_keys

B, H, S, D, W = 2, 4, 40, 16, 7
CAUSAL = twice_credited_scores(S, S, 0)


def counted(run: Callable[[], Any]) -> tuple[int, int, int]:
    """Return (model FLOPs, executed FLOPs, calls with an unknown mask) of a function."""
    counter = FlopCounter(lambda: ("all",))
    with counter.counting():
        run()
    return counter.model["all"], counter.hardware["all"], counter.unknown


def hidden(*, window: int | None = None) -> Tensor:
    return hidden_keys(S, S, "upper_left", torch.device("cpu"), window)


def packed() -> Tensor:
    """Return the mask of two causal sequences, of 25 and 15, in one row."""
    document = (torch.arange(S) >= 25).int()
    return hidden() | (document[:, None] != document)


PADDED = torch.arange(S) >= torch.tensor([[S], [30]])[:, None, None]  # keys of the second row from 30 on are padding
# Hidden scores → twice the credited ones, over both rows of the batch.
MASKS = {
    "causal": (hidden(), 2 * CAUSAL),
    "window": (hidden(window=W), 2 * twice_credited_scores(S, S, 0, W)),
    "packed": (packed(), 2 * (25**2 + 15**2)),
    "padded": (PADDED.expand(B, 1, S, S), 2 * S * S + 2 * S * 30),
    "causal and padded": (hidden() | PADDED, S * S + 30 * 30 + 2 * 10 * 30),
    "nothing": (torch.zeros(S, S, dtype=torch.bool), 2 * 2 * S * S),
}


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lowest: float | None) -> Tensor:
    if lowest is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(mask.shape).masked_fill(mask, lowest))


def by_filling(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lowest: float | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(D)
    return scores.masked_fill(mask, -math.inf if lowest is None else lowest).softmax(-1) @ v


def by_choosing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lowest: float | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    weights = torch.where(mask, -math.inf if lowest is None else lowest, scores).softmax(-1, dtype=torch.float64)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(weights.to(q.dtype), 0.5), v)


def by_adding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lowest: float | None) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(mask, -math.inf if lowest is None else lowest)
    flat, bias = (x.flatten(0, 1) for x in (k, bias.expand(B, H, S, S)))
    weights = torch.baddbmm(bias, q.flatten(0, 1), flat.mT).unflatten(0, (B, H)).softmax(dim=-1)
    return weights @ v


def _inputs(device: str = "cpu", heads_kv: int = H, d_value: int = D) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, S, D), (B, heads_kv, S, D), (B, heads_kv, S, d_value))
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lowest", [None, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("attention", [by_sdpa, by_filling, by_choosing, by_adding])
def test_model_flops_count_scores_visible_under_the_mask(
    attention: Callable[..., Tensor], lowest: float | None, mask: str
) -> None:
    hides, twice = MASKS[mask]
    forward = 2 * H * D * twice
    model, hardware, unknown = counted(lambda: attention(*_inputs(), hides, lowest).sum().backward())
    assert (model, unknown) == (3 * forward, 0)
    whole = 2 * H * D * 2 * B * S * S
    assert hardware == (3.5 * whole if attention is by_sdpa else 3 * whole)


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("heads_kv", [H, 2, 1])
def test_is_causal_counts_half_with_grouped_heads_too(kernel: SDPBackend, heads_kv: int) -> None:
    def run() -> None:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(*_inputs(heads_kv=heads_kv), is_causal=True, enable_gqa=heads_kv < H)
        out.sum().backward()

    model, hardware, unknown = counted(run)
    assert (model, unknown) == (3 * 2 * B * H * D * CAUSAL, 0)
    assert hardware >= model


def test_causality_without_values_follows_is_causal() -> None:
    q, k, v = _inputs("meta")
    model, _, unknown = counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert (model, unknown) == (3 * 2 * B * H * D * CAUSAL, 0)
    mask = hidden().to("meta")
    model, hardware, unknown = counted(
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=~mask).sum().backward()
    )
    assert unknown == 1
    assert model == hardware


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / 4).masked_fill(hidden(), -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def by_its_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 4).masked_fill(hidden(), -math.inf).log_softmax(-1).exp() @ v


def along_another_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((k @ q.mT / 4).masked_fill(hidden().mT, -math.inf).softmax(-2)).mT @ v


def with_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqkh", q, k).masked_fill(hidden()[:, :, None], -math.inf)
    return torch.einsum("bqkh,bhkd->bhqd", scores.softmax(2), v)


def with_heads_after_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqhk", q, k).masked_fill(hidden()[:, None], -1e9)
    return torch.einsum("bqhk,bhkd->bhqd", scores.softmax(-1), v)


def with_a_steep_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.arange(S) * 30.0).masked_fill(hidden(), -math.inf).softmax(-1) @ v


def with_the_mask_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(hidden(), -1e4) / math.sqrt(128)).softmax(-1) @ v


@pytest.mark.parametrize(
    "attention",
    [by_hand, by_its_logarithm, along_another_dimension, with_heads_last, with_heads_after_queries, with_a_steep_bias,
     with_the_mask_divided],
)  # fmt: skip
def test_causal_attention_counts_half_however_it_is_written(attention: Callable[..., Tensor]) -> None:
    model, hardware, unknown = counted(lambda: attention(*_inputs()).sum().backward())
    assert (model, unknown) == (3 * 2 * B * H * D * CAUSAL, 0)
    assert hardware == 2 * model


@pytest.mark.parametrize("pad", [(1, 0), (0, 1)])
def test_products_of_scores_with_a_sink_count_alike_in_both_directions(pad: tuple[int, int]) -> None:
    def run() -> None:
        q, k, v = _inputs()
        scores = (q @ k.mT / 4).masked_fill(hidden(), -math.inf)
        weights = F.pad(scores, pad).softmax(-1)
        (weights[..., pad[0] : pad[0] + S] @ v).sum().backward()

    model, hardware, _ = counted(run)
    assert model % 3 == 0
    assert hardware / 2 < model < hardware / 2 * (1 + 3 / S)


def test_rows_that_a_finite_mask_hides_count_nothing() -> None:
    hides = hidden() | (torch.arange(S) < 10)  # padding on the left
    model, _, _ = counted(lambda: by_filling(*_inputs(), hides, -1e9))
    assert model == 2 * 2 * H * D * 30 * 30


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_counts_scores_left_by_its_score_function() -> None:
    q, slopes = torch.randn(B, H, S, D), torch.arange(H) / H

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where((q >= k) & (k >= 10 * b), score + slopes[h] * (k - q), -math.inf)

    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model, _, unknown = counted(lambda: flex_attention(q, q, q, score_mod=score))
    assert (model, unknown) == (2 * H * D * (S * S + 30 * 30), 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("mask", "twice", "tiles"),
    [
        (lambda b, h, q, k: q >= k, twice_credited_scores(256, 256, 0), 3),
        (lambda b, h, q, k: (q >= k) & (q - k < 9), twice_credited_scores(256, 256, 0, 9), 3),
        (lambda b, h, q, k: (q >= k) & (k >= 100 * b), 256**2 // 2 + 156**2 // 2, 3),
        (None, 2 * 256 * 256, 4),
    ],
)
def test_flex_attention_counts_scores_visible_under_its_mask(mask: Any, twice: int, tiles: int) -> None:
    q = torch.randn(B, H, 256, D)
    blocks = mask and create_block_mask(mask, B, None, 256, 256, device="cpu")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model, hardware, unknown = counted(lambda: flex_attention(q, q, q, block_mask=blocks))
    assert (model, unknown) == (2 * B * H * D * twice, 0)
    assert hardware == 4 * B * H * D * tiles * 128 * 128


def test_recomputation_counts_as_executed_flops_only() -> None:
    q, k, v = _inputs()
    plain = counted(lambda: by_filling(q, k, v, hidden(), None).sum().backward())
    again = counted(lambda: by_filling(q, k, v, hidden(), None))
    counter = FlopCounter(lambda: ("all",), is_again=lambda: in_backward[0] and torch.is_grad_enabled())
    in_backward = [False]
    with counter.counting():
        out = checkpoint(by_filling, q, k, v, hidden(), None, use_reentrant=False).sum()
        in_backward[0] = True
        out.backward()
    assert counter.model["all"] == plain[0]
    assert counter.hardware["all"] == plain[1] + again[1] // 2  # the product with the values needs no repetition


def test_products_of_a_masked_vocabulary_are_credited_in_full() -> None:
    head, x = nn.Linear(8, 40, bias=False), torch.randn(5, 8, requires_grad=True)
    hides = torch.arange(40) >= 30
    model, hardware, _ = counted(
        lambda: F.cross_entropy(head(x).masked_fill(hides, -math.inf), torch.arange(5)).backward()
    )
    assert model == hardware == 3 * 2 * 5 * 8 * 40


def test_products_without_a_mask_are_credited_in_full() -> None:
    router, experts, x = nn.Linear(8, 6), nn.Linear(8, 8), torch.randn(5, 8)

    def run() -> None:
        chosen = router(x).masked_fill(torch.arange(6) > 3, -math.inf).softmax(-1).topk(2).values
        (experts(x) * chosen.sum(-1, keepdim=True)).log_softmax(-1).sum()

    model, hardware, _ = counted(run)
    assert model == hardware == 2 * 5 * 8 * (6 + 8)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (8, 40), (40, 8), (2, 3)])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_content_of_a_mask_counts_as_the_formula(queries: int, keys: int, align: str, window: int | None) -> None:
    if window and align == "upper_left" and queries > keys:
        pytest.skip("past the last key, the formula has a corner that no element of the mask shows")
    shows = ~hidden_keys(queries, keys, align, torch.device("cpu"), window)
    offset = keys - queries if align == "lower_right" else 0
    assert shown_in(shows).twice == twice_credited_scores(queries, keys, offset, window)
    scores = torch.randn(3, queries, keys).masked_fill(~shows, -math.inf)
    assert shown_in(scores).twice == 3 * shown_in(shows).twice
    assert shown_in(scores.half()).twice == 3 * shown_in(shows).twice


aten: Any = torch.ops.aten
STARTS = torch.tensor([0, 10, 40], dtype=torch.int32)
ROWS = torch.empty(40, H, D)
OPTIONS = {"bias": None, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 30, "max_seqlen_k": 30}
_FLASH = (aten._flash_attention_forward.default, (ROWS, ROWS, ROWS, STARTS, STARTS, 30, 30, 0.0))
_WHOLE = torch.empty(B, S, H, D)
_ALONE = (aten._flash_attention_forward.default, (_WHOLE, _WHOLE, _WHOLE, None, None, S, S, 0.0))


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "twice"),
    [
        (*_FLASH, {"is_causal": True}, H * (10**2 + 30**2)),
        (*_FLASH, {"is_causal": False}, H * 2 * (10**2 + 30**2)),
        (*_ALONE, {"is_causal": True, "window_size_left": W - 1, "window_size_right": 0},
         B * H * twice_credited_scores(S, S, 0, W)),
        (*_ALONE, {"is_causal": False, "window_size_left": -1, "window_size_right": -1}, B * H * 2 * S * S),
        (*_ALONE, {"is_causal": False, "window_size_left": 3, "window_size_right": 3},
         B * H * twice_credited_scores(S, S, 3, 7)),
        (*_ALONE, {"is_causal": False, "window_size_left": 3, "window_size_right": -1},
         B * H * (2 * S * S - twice_credited_scores(S, S, -4))),
        (aten._efficient_attention_forward.default, (ROWS[None], ROWS[None], ROWS[None]),
         {**OPTIONS, "dropout_p": 0.0, "custom_mask_type": 1}, H * (10**2 + 30**2)),
        (aten._efficient_attention_forward.default, (_WHOLE, _WHOLE, _WHOLE),
         {"bias": None, "cu_seqlens_q": None, "dropout_p": 0.0, "custom_mask_type": 0}, B * H * 2 * S * S),
    ],
)  # fmt: skip
def test_packed_sequences_and_windows_of_fused_kernels(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twice: int
) -> None:
    found = attention_flops(operator, args, kwargs, None)
    assert found.model == 2 * D * twice
    assert found.hardware >= found.model
    assert found.known


_HEADS = torch.empty(B, H, S, D)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "fused_overrideable"])
@pytest.mark.parametrize("how", ["causal", "mask", "bias", "whole"])
@pytest.mark.parametrize("heads_kv", [H, 1])
def test_fused_kernels_of_a_gpu_count_by_their_arguments(name: str, how: str, heads_kv: int) -> None:
    """Forward and backward of every kernel of scaled_dot_product_attention, which need no GPU to be counted."""
    stem = (
        "_scaled_dot_product_fused_attention_overrideable" if "_" in name else f"_scaled_dot_product_{name}_attention"
    )
    mask = {"mask": ~hidden(), "bias": torch.zeros(S, S).masked_fill(hidden(), -math.inf)}.get(how)
    if mask is not None and name == "flash":
        pytest.skip("it takes no mask")
    twice = 2 * S * S if how == "whole" else CAUSAL
    for operator, times in ((stem, 1), (f"{stem}_backward", 2)):
        kernel = getattr(aten, operator).default
        names = [argument.name for argument in kernel._schema.arguments]
        given = {
            "query": _HEADS,
            "key": _HEADS[:, :heads_kv],
            "value": _HEADS[:, :heads_kv],
            "is_causal": how == "causal",
        }
        found = attention_flops(kernel, (), {**dict.fromkeys(names), **given, "attn_bias": mask}, None)
        assert found.model == times * 2 * B * H * D * twice
        whole = 2 * B * H * D * 2 * S * S
        assert found.hardware >= (whole if mask is not None else found.model)
        assert found.known


NAMES = [name for name in plugins.names("attention") if name not in ("flex", "compiled")]
ALGORITHMS = {name: plugins.get("attention", name).algorithm for name in plugins.names("attention")}


def live(model: nn.Module, tokens: Tensor) -> MeasuredCost:
    found: dict[str, Tensor] = {}

    def loss() -> None:
        found["loss"] = F.cross_entropy(found["logits"].flatten(0, 1), tokens.flatten())

    phases = [
        (Phase.FORWARD.value, lambda: found.update(logits=model(tokens))),
        (Phase.LOSS.value, loss),
        (Phase.BACKWARD.value, lambda: found["loss"].backward()),
    ]
    return measured_cost(model, phases, kept=False, algorithm=lambda name, call: ALGORITHMS[name](call))


@pytest.mark.parametrize("name", NAMES)
def test_a_live_model_counts_as_the_built_in_one(name: str) -> None:
    config = replace(preset("tiny"), num_layers=2, context_length=300)
    call = AttentionCall("cpu", "float32", config.d_head, 300, 300, config.num_heads, config.num_heads, causal=True)
    if reason := plugins.get("attention", name).unavailable(call):
        pytest.skip(reason)
    model, tokens = BasicTransformerLM(config, attention=name), torch.zeros(2, 300, dtype=torch.int64)
    expected = cost.step_cost(config, 2, 300, Mode.FORWARD_BACKWARD, ALGORITHMS[name](call), Precision.FP32)
    found = live(model, tokens)
    assert found.unknown_masks == 0
    for phase, counted_cost in found.phases.items():
        assert counted_cost.model_flops == expected[phase].model_flops
        assert counted_cost.hardware_flops == expected[phase].hardware_flops


def test_a_7b_model_at_32k_counts_as_the_formula() -> None:
    """6 FLOPs for each weight and token, and 12·L·d·T²/2 for causal attention; tensors on meta take no memory."""
    length = 32_768
    config = ModelConfig(
        d_model=4096, d_ff=11008, num_layers=32, num_heads=32, vocab_size=32_000, context_length=length
    )
    with torch.device("meta"):
        found = live(BasicTransformerLM(config, "sdpa_flash"), torch.zeros(1, length, dtype=torch.int64))
    flops = 6 * cost.matmul_weights(config) * length + 12 * 32 * 4096 * length**2 // 2
    assert sum(phase.model_flops or 0 for phase in found.phases.values()) == flops
    assert found.unknown_masks == 0
