"""Kernels of the parts against the plain modules in float64: values, gradients, dtypes, odd sizes, layouts, no rows.

On a CPU the kernels run in Triton's interpreter; test_parts.py runs this file there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.config import RunConfig, preset
from cs_systems.model.training import fp8, parts
from cs_systems.model.training.parts import fused_embedding_gradient, fused_rmsnorm, fused_rotary, fused_swiglu
from cs_systems.model.training.triton_operators import has_rows
from cs_systems.model.transformer import BasicTransformerLM, RMSNorm, RotaryEmbedding, TransformerBlock

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")
COMPILED = pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set")
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=[pytest.mark.gpu, COMPILED])]
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One autograd function of a part.

    Attributes:
        inputs: (batch, tokens, width) → the shapes of the tensors that have gradients.
        fused: the function on them.
        plain: the same function by the plain modules.
    """

    inputs: Callable[[int, int, int], list[tuple[int, ...]]]
    fused: Callable[..., Any]
    plain: Callable[..., Any]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = RMSNorm(x.shape[-1], EPS)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))  # type: ignore[no-any-return]


def rope_of(x: Tensor, heads: int = 1) -> RotaryEmbedding:
    return RotaryEmbedding(x.shape[-1] // heads, 16, 100.0).to(x.device)


def rotated(q: Tensor, k: Tensor) -> Any:
    rope = rope_of(q)
    return fused_rotary.Rotated.apply(q, k, rope.cos, rope.sin)


def plain_product(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    q, k, v = fused_rotary._split(x @ weight.t(), 2)
    rope = rope_of(q)
    return rope(q), rope(k), v


def ids_of(table: Tensor) -> Tensor:
    """Return token ids (n, 2) for a table, with some ids repeated and some never used."""
    rows = table.shape[0]
    return (torch.arange(rows // 3 * 2, device=table.device) ** 2 % max(1, rows)).view(-1, 2)


CASES = {
    "gated": Case(
        lambda b, s, w: [(b, s, w)] * 2, fused_swiglu.Gated.apply, lambda a, b: nn.functional.silu(a) * b
    ),
    "joined gated": Case(
        lambda b, s, w: [(b, s, 2 * w)],
        fused_swiglu.JoinedGated.apply,
        lambda y: nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    ),
    "norm": Case(
        lambda b, s, w: [(b, s, w), (w,)], lambda x, g: fused_rmsnorm.Norm.apply(x, g, EPS), plain_norm
    ),
    "passed norm": Case(
        lambda b, s, w: [(b, s, w), (w,)],
        lambda x, g: fused_rmsnorm.PassedNorm.apply(x, g, EPS),
        lambda x, g: (x, plain_norm(x, g)),
    ),
    "add norm": Case(
        lambda b, s, w: [(b, s, w), (b, s, w), (w,)],
        lambda x, added, g: fused_rmsnorm.AddNorm.apply(x, added, g, EPS),
        lambda x, added, g: (x + added, plain_norm(x + added, g)),
    ),
    "rotated": Case(lambda b, s, w: [(b, 3, s, 2 * w)] * 2, rotated, lambda q, k: (rope_of(q)(q), rope_of(k)(k))),
    "rotated product": Case(
        lambda b, s, w: [(b, s, 5), (3 * 4 * w, 5)],
        lambda x, weight: fused_rotary.rotated_product(x, weight, rope=rope_of(weight.t()[:, ::3], 2), heads=2),
        plain_product,
    ),
    "embedding": Case(
        lambda b, s, w: [(3 * b * s, w)],
        lambda table: fused_embedding_gradient.Lookup.apply(ids_of(table), table),
        lambda table: nn.functional.embedding(ids_of(table), table),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CASES)
SHAPES = ((2, 3, 8), (1, 1, 1), (3, 3, 33), (1, 2, 300), (0, 4, 8))  # batch, tokens, width


def results(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a function and its gradients for all tensors, given fixed gradients of the outputs."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    random = torch.Generator().manual_seed(3)
    # Rounded, so that every dtype gets the same; the first also through another use, as the residual stream has.
    upstream = [torch.randn(y.shape, generator=random).bfloat16().to(y) for y in outputs]
    return [y.detach() for y in outputs] + [*torch.autograd.grad(outputs, inputs, upstream)]


def inputs_of(case: Case, shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=random).to(device, dtype) for size in case.inputs(*shape)]


def assert_near(found: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        norm = b.cpu().norm().clamp(min=1)  # the gradient of a norm of one element is a difference near 0
        assert (a.cpu().double() - b.cpu()).norm() <= tolerance * norm


@DEVICES
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EACH
def test_kernel_computes_values_and_gradients_of_the_plain_module(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    case = CASES[name]
    tensors = inputs_of(case, shape, device, dtype)
    found = results(case.fused, tensors)
    assert {x.dtype for x in found} == {dtype}
    assert_near(found, results(case.plain, [x.double() for x in tensors]), TOLERANCE[dtype])


@DEVICES
@EACH
def test_kernel_takes_any_layout(name: str, device: str) -> None:
    case = CASES[name]
    tensors = inputs_of(case, (2, 3, 20), device, torch.float32)
    spread = [torch.stack((x, x), -1)[..., 0] for x in tensors]  # elements two apart
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]
    padded = [nn.functional.pad(x, (0, 3))[..., : x.shape[-1]] for x in tensors]
    for other in (spread, turned, padded):
        assert_near(results(case.fused, other), [x.double() for x in results(case.fused, tensors)], 1e-6)


@DEVICES
def test_norm_adds_in_the_dtype_of_the_plain_addition(device: str) -> None:
    """Use the dtypes of autocast: the residual stream is float32, the output of attention bfloat16."""
    x, weight = torch.randn(2, 3, 20, device=device), torch.randn(20, device=device)
    added = torch.randn(2, 3, 20, device=device).bfloat16()
    case = CASES["add norm"]
    found, plain = (results(function, [x, added, weight]) for function in (case.fused, case.plain))
    assert [y.dtype for y in found] == [y.dtype for y in plain]
    assert_near(found, [y.double() for y in plain], 4e-3)


@DEVICES
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=str)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (160, 48), (272, 400)], ids=str)
def test_matrix_is_quantized_in_both_orders(
    shape: tuple[int, int], wide: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, wide)
    columns = nn.functional.pad(x, (16, 16))[:, 16:-16]
    expected, scale = fp8.quantize(x, dtype)
    for each in (x, columns):
        kept, turned = fp8._quantize_with_triton(each, scale, dtype)
        assert torch.equal(turned.view(torch.uint8), kept.t().contiguous().view(torch.uint8))
        if device == "cuda":
            assert torch.equal(kept.view(torch.uint8), expected.view(torch.uint8))
        else:  # the interpreter does not round to the nearest
            torch.testing.assert_close(kept.float(), expected.float(), rtol=0.5, atol=scale.item())


@DEVICES
def test_rotation_in_place_and_into_other_tensors_do_not_share_launches(device: str) -> None:
    heads, width = 2, 8
    x = torch.randn(3, 5, 6, device=device)
    weight = torch.randn(3 * heads * width, 6, device=device)
    rope = rope_of(weight.t()[:, ::3], heads)
    rotated_in_place = fused_rotary.rotated_product(x, weight, rope=rope, heads=heads)
    q, k, v = fused_rotary._split(x @ weight.t(), heads)  # has the layout that was just rotated in place
    q, k = fused_rotary.Rotated.apply(q, k, rope.cos, rope.sin)
    for a, b in zip(rotated_in_place, (q, k, v), strict=True):
        torch.testing.assert_close(a, b)


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text: `count` ids below `rows`; a share of them is the token `frequent`."""

    rows: int
    count: int
    share: float = 0.0
    frequent: int = 0

    def on(self, device: str) -> Tensor:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(self.rows, (self.count,), generator=random)
        return ids.where(torch.rand(self.count, generator=random) >= self.share, self.frequent).to(device)


TEXTS = {
    "one token": Tokens(7, 1),
    "no token": Tokens(7, 0),
    "whole pieces": Tokens(32, 128, 1.0, frequent=31),
    "part of a piece": Tokens(33, 63, 1.0, frequent=32),
    "one token everywhere": Tokens(40, 300, 1.0, frequent=39),
    "a frequent token": Tokens(100, 300, 0.6, frequent=64),
    "a vocabulary of one": Tokens(1, 70),
    "several ranges of rows": Tokens(290, 450, 0.6, frequent=256),  # the second range lists over 256 positions
    "more tokens than one scan": Tokens(30, 2100),
}


def embedding_gradient(ids: Tensor, d_out: Tensor, rows: int) -> Tensor:
    table = torch.zeros(rows, d_out.shape[-1], dtype=d_out.dtype, device=d_out.device, requires_grad=True)
    (found,) = torch.autograd.grad(fused_embedding_gradient.Lookup.apply(ids, table), table, d_out)
    return found


def exact_sums(ids: Tensor, d_out: Tensor, rows: int) -> Tensor:
    """Return the gradient of a table in float64."""
    width = d_out.shape[-1]
    zeros = torch.zeros(rows, width, dtype=torch.float64, device=d_out.device)
    return zeros.index_add_(0, ids.flatten().long(), d_out.double().reshape(-1, width))


@DEVICES
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *(pytest.param(text, torch.int64, id=name) for name, text in TEXTS.items()),
        *(
            pytest.param(TEXTS[name], torch.int32, id=f"{name}, int32")
            for name in ("part of a piece", "a frequent token")
        ),
    ],
)
def test_embedding_gradient_of_any_tokens_is_the_sum_per_row(text: Tokens, dtype: torch.dtype, device: str) -> None:
    ids = text.on(device).to(dtype)
    d_out = torch.randn(text.count, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    found, exact = embedding_gradient(ids, d_out, text.rows), exact_sums(ids, d_out, text.rows)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    absent = torch.ones(text.rows, dtype=torch.bool).index_fill_(0, ids.cpu().long(), False)
    assert not found[absent.to(device)].any()


@DEVICES
def test_embedding_gradient_takes_any_layout(device: str) -> None:
    ids = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)
    d_out = torch.randn(4, 6, 20, device=device)
    expected = exact_sums(ids, d_out, 9).float()
    spread, turned = torch.stack((d_out, d_out), -1)[..., 0], d_out.transpose(0, 1).contiguous().transpose(0, 1)
    for each in (spread, turned, nn.functional.pad(d_out, (0, 3))[..., :20]):
        torch.testing.assert_close(embedding_gradient(ids, each, 9), expected)
    torch.testing.assert_close(embedding_gradient(ids.t(), d_out.transpose(0, 1), 9), expected)
    same = d_out[0, 0].expand(4, 6, 20)
    torch.testing.assert_close(embedding_gradient(ids, same, 9), exact_sums(ids, same, 9).float())
    torch.testing.assert_close(
        embedding_gradient(ids[0, 0], d_out[0, 0], 9), exact_sums(ids[:1, 0], same[0, :1], 9).float()
    )


@DEVICES
def test_tables_of_several_sizes_with_equal_gradients_do_not_share_launches(device: str) -> None:
    ids, d_out = torch.arange(6, device=device), torch.randn(6, 8, device=device)
    for rows in (6, 40, 7):
        torch.testing.assert_close(embedding_gradient(ids, d_out, rows), exact_sums(ids, d_out, rows).float())


@DEVICES
def test_sum_of_a_frequent_token_is_not_rounded_between_additions(device: str) -> None:
    """A sum in bfloat16 would end at 256, to which 1 adds nothing."""
    found = embedding_gradient(torch.full((300,), 2, device=device), torch.ones(300, 8, device=device).bfloat16(), 4)
    assert found.dtype is torch.bfloat16
    assert found[2].tolist() == [300.0] * 8


@DEVICES
def test_embedding_gradient_under_autocast_has_the_dtype_of_the_table(device: str) -> None:
    table = torch.ones(5, 8, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        rows = fused_embedding_gradient.Lookup.apply(torch.tensor([1, 1, 3], device=device), table)
        (rows @ torch.ones(8, 8, device=device)).float().sum().backward()
    assert table.grad is not None
    assert table.grad.dtype is torch.float32
    assert table.grad[:, 0].tolist() == [0, 16, 0, 8, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("rows", "count", "width"), [(10_000, 8192, 768), (128_256, 16_384, 256), (10_007, 2049, 2560)]
)
def test_embedding_gradient_of_large_tables_is_exact_and_the_same_from_run_to_run(
    rows: int, count: int, width: int, share: float
) -> None:
    ids = Tokens(rows, count, share, frequent=rows - 1).on("cuda")
    d_out = torch.randn(count, width, device="cuda")
    found = embedding_gradient(ids, d_out, rows)
    assert_near([found], [exact_sums(ids, d_out, rows)], TOLERANCE[torch.float32])
    assert torch.equal(found, embedding_gradient(ids, d_out, rows))


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("width", [1280, 2560])
def test_gradients_of_large_tensors_are_the_same_from_run_to_run(name: str, width: int) -> None:
    case = CASES[name]
    tensors = inputs_of(case, (2, 16, width), "cuda", torch.bfloat16)
    first = results(case.fused, tensors)
    assert_near(first, results(case.plain, [x.double() for x in tensors]), TOLERANCE[torch.bfloat16])
    assert all(torch.equal(a, b) for a, b in zip(first, results(case.fused, tensors), strict=True))


@INTERPRETED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the same
def test_compiled_block_is_one_graph_with_the_same_results() -> None:
    def block() -> TransformerBlock:
        torch.manual_seed(0)
        lm = BasicTransformerLM(replace(preset("tiny"), num_layers=1))
        names = ("fused_rmsnorm", "fused_rotary", "fused_swiglu", "joined_projections")
        parts.apply(parts.chosen(names).values(), lm)
        (only,) = lm.layers
        assert isinstance(only, TransformerBlock)
        return only

    x = torch.randn(1, 3, preset("tiny").d_model)
    compiled = torch.compile(block(), backend="aot_eager", fullgraph=True)
    for a, b in zip(results(block(), [x]), results(compiled, [x]), strict=True):
        torch.testing.assert_close(a, b)


@INTERPRETED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the same
def test_compiled_model_is_one_graph_with_the_same_gradient_of_the_embedding() -> None:
    def gradients(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        lm = BasicTransformerLM(replace(preset("tiny"), num_layers=1), "sdpa_math")
        parts.apply(parts.chosen(["fused_embedding_gradient"]).values(), lm)
        run = torch.compile(lm, backend="aot_eager", fullgraph=True) if compiled else lm
        run(torch.tensor([[3, 5, 3]])).square().sum().backward()
        return [p.grad for p in lm.parameters() if p.grad is not None]

    for a, b in zip(gradients(compiled=True), gradients(compiled=False), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fused_embedding_gradient._gradient(torch.ones(2, 3), torch.zeros(3, dtype=torch.int64), 4),
            r"d_out has shape \(2, 3\) and tokens \(3,\); pass \(tokens, d_model\) and \(tokens,\)",
        ),
        (
            lambda: fused_swiglu.Gated.apply(torch.ones(2, 3), torch.ones(2, 4)),
            r"gate has shape \(2, 3\) and value \(2, 4\); pass both in one shape of two or more dimensions",
        ),
        (
            lambda: fused_swiglu.Gated.apply(torch.ones(2, 3), torch.ones(2, 3).half()),
            "the tensors of a fused kernel have dtypes float32, float16; cast all of them to one floating dtype",
        ),
        (
            lambda: fused_rmsnorm.Norm.apply(torch.ones(2, 3), torch.ones(3, device="meta"), EPS),
            "tensors are on cpu and meta; move them to one device",
        ),
        (
            lambda: fused_rmsnorm.Norm.apply(torch.ones(2, 3), torch.ones(4), EPS),
            r"x has shape \(2, 3\) and weight \(4,\); pass",
        ),
        (
            lambda: fused_rmsnorm.Norm.apply(torch.ones(1, 16385), torch.ones(16385), EPS),
            "d_model 16385 is over 16384; use the plain RMSNorm",
        ),
        (
            lambda: fused_rotary.Rotated.apply(*[torch.ones(1, 1, 9, 4)] * 2, *[torch.ones(8, 2)] * 2),
            r"cos has shape \(8, 2\) and sin \(8, 2\); for q of shape \(1, 1, 9, 4\) pass both with at least 9 rows",
        ),
        (
            lambda: fused_rotary.Rotated.apply(*[torch.ones(1, 1, 2, 3)] * 2, *[torch.ones(8, 1)] * 2),
            "pass one shape .batch, heads, seq, d_head., with an even d_head",
        ),
    ],
)
def test_unsupported_tensors_of_a_kernel_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_at_one_distance_are_recognised() -> None:
    x = torch.empty(2, 3, 8)
    assert all(map(has_rows, (x, x[..., :4], x[1:], x[:, :, 1:])))
    assert not any(map(has_rows, (x[..., ::2], x[:, :2], x[:, 1:2], x.transpose(0, 1), x.mT)))


@COMPILED
@pytest.mark.parametrize(
    "part", [m.PART for m in (fused_embedding_gradient, fused_swiglu, fused_rmsnorm, fused_rotary)]
)
def test_part_without_a_gpu_is_unavailable_with_the_remedy(part: parts.Part) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    assert part.unavailable(RunConfig(model=preset("tiny"), device="cpu")) == (
        "Triton compiles no kernels for a CPU; leave the part out of parts, or set TRITON_INTERPRET=1 (slow)"
    )


@DEVICES
@DTYPES
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 7), (5, 1000), (1, 16384), (2, 16385)])
def test_gradient_of_cross_entropy_replaces_the_logits(
    rows: int, vocabulary: int, dtype: torch.dtype, device: str
) -> None:
    from cs_systems.model.kernels.triton.cross_entropy import gradient_in_place

    random = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=random).mul(5).to(device, dtype)
    targets = torch.randint(vocabulary, (rows,), generator=random).to(device)
    wide = logits.double().requires_grad_()
    exact = nn.functional.cross_entropy(wide, targets, reduction="none")
    (exact.sum() / 4).backward()
    losses = torch.empty(rows, device=device)
    gradient_in_place(logits, targets, losses, 0.25)
    single = max(TOLERANCE[dtype], TOLERANCE[torch.float32])  # it computes in float32 at most
    assert wide.grad is not None
    assert_near([losses, logits], [exact.detach(), wide.grad], single)


@DEVICES
@DTYPES
@pytest.mark.parametrize("factor", [1.0, -3.0])
@pytest.mark.parametrize("programs", [1, 1000])
def test_multiply_in_place_scales_every_element(
    programs: int, factor: float, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cs_systems.model.kernels.triton import cross_entropy

    monkeypatch.setattr(cross_entropy, "SCALING_PROGRAMS", programs)
    for count in (0, 1, 5000):
        x = (torch.arange(count, device=device) % 50).to(dtype)  # exact: the interpreter truncates bfloat16
        expected = x * factor
        cross_entropy.multiply_in_place(x, torch.tensor(factor, device=device))
        assert torch.equal(x, expected)
