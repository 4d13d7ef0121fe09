"""Tests of fp8 linear layers: the error bounds of fp8.py for quantized elements and all three products."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cs_systems
from cs_systems.analysis.comparison.dtypes import contradiction
from cs_systems.config import PRESETS, ConfigError, Mode, ModelConfig, Precision, RunConfig
from cs_systems.instrument.dtype_readings import DtypeReadings, reading
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.precision_error import run_parts
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.model.training import fp8, parts
from cs_systems.model.training.fp8 import E4M3, E5M2, Fp8Linear, Fp8Product, quantize, unavailable, use_fp8
from cs_systems.model.transformer import BasicTransformerLM, Linear

# dtype → (half a unit in the last place, half the smallest subnormal, the largest number) of the format
FORMATS = {E4M3: (2.0**-4, 2.0**-10, 448.0), E5M2: (2.0**-3, 2.0**-17, 57344.0)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, seq_len=16, precision=Precision.FP8, device="cpu")
OTHER = RunConfig(precision=Precision.FP8, device="cpu")


def distance(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d(x) of fp8.py for each element, in float64."""
    half_ulp, half_subnormal, largest = FORMATS[dtype]
    wide = x.double().abs()
    return (half_ulp + 2**-23) * wide + half_subnormal * wide.max() / largest


def product_bound(x: Tensor, x_dtype: torch.dtype, w: Tensor, w_dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """Return the error bound of x wᵀ, with the rounding of the sum and of the result.

    Hopper sums with about 14 bits, other devices with 24.
    """
    a, b, da, db = x.double().abs(), w.double().abs(), distance(x, x_dtype), distance(w, w_dtype)
    kept = (a + da) @ (b + db).T
    roundoff = 2.0**-13 if x.is_cuda else 2.0**-24
    return kept - a @ b.T + kept * (x.shape[1] * roundoff + torch.finfo(out).eps)


def spread(rows: int, columns: int, decades: float, seed: int, device: str = "cpu") -> Tensor:
    """Return random numbers of both signs with magnitudes over `decades`, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 10 ** (decades * (torch.rand(rows, columns, generator=generator) - 0.5))
    return (x * (torch.rand(rows, columns, generator=generator) > 0.1)).to(device)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([E4M3, E5M2]),
    wide=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.floats(-30, 30),
    decades=st.floats(0, 12),
    seed=st.integers(0, 2**31),
)
def test_quantized_element_is_within_stated_distance(
    dtype: torch.dtype, wide: torch.dtype, size: float, decades: float, seed: int
) -> None:
    x = (spread(16, 16, decades, seed) * 2.0**size).to(wide)
    q, scale = quantize(x, dtype)
    assert (q.dtype, scale.dtype, q.shape) == (dtype, torch.float32, x.shape)
    assert q.float().abs().max() == FORMATS[dtype][2], "the whole range must be used"
    once = (x.double() * scale.reciprocal().double()).float().to(dtype)
    assert torch.equal(q.float(), once.float()), "it must be rounded once, not to bf16 first"
    off = (q.double() * scale.double() - x.double()).abs()
    assert (off <= distance(x, dtype)).all()
    halves = (torch.arange(16, 32, dtype=wide) + 0.5).expand(16, -1)
    q, scale = quantize(halves, dtype)
    worst = ((q.double() * scale.double() - halves.double()).abs() / halves.double()).max()
    assert worst > FORMATS[dtype][0] / 3, "the bound must be tight"


def test_quantize_keeps_zeros_and_propagates_nan_and_infinity() -> None:
    q, scale = quantize(torch.zeros(16, 16), E4M3)
    assert (q.float() == 0).all()
    assert scale > 0
    assert quantize(torch.ones(16, 32).t(), E4M3)[0].is_contiguous(), "a scaled matmul needs a contiguous first operand"
    for broken in (float("inf"), float("nan")):
        x = torch.ones(16, 16)
        x[3, 5] = broken
        assert quantize(x, E5M2)[0].float().isnan().any()
        y = Fp8Product.apply(x, torch.ones(16, 16))
        assert y[3].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(16, 16), (48, 272)], ids=str)
def test_quantizing_both_ways_gives_the_same_elements(size: tuple[int, int], wide: torch.dtype, device: str) -> None:
    x = spread(*size, 0.0, 1, device).to(wide)
    for dtype in (E4M3, E5M2):
        q, scale = quantize(x, dtype)
        kept, turned, of_both = fp8.quantize_both_ways(x, dtype)
        assert kept.is_contiguous()
        assert turned.is_contiguous()
        for a, b in ((of_both, scale), (kept.float(), q.float()), (turned.float(), q.float().t())):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decades", [0.0, 3.0, 8.0])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (32, 48, 256), (64, 16, 768)])
def test_three_products_are_within_stated_bound(device: str, decades: float, m: int, n: int, k: int) -> None:
    x, w = spread(m, k, decades, 1, device).requires_grad_(), spread(n, k, decades, 2, device).requires_grad_()
    y = Fp8Product.apply(x, w)
    assert y.dtype is torch.bfloat16
    gradient = spread(m, n, decades, 3, device).bfloat16()
    y.backward(gradient)
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)
    with torch.no_grad():
        wide, bound = gradient.double(), product_bound
        of_y = (y.double() - x.double() @ w.double().T).abs()
        assert (of_y <= bound(x, E4M3, w, E4M3, torch.bfloat16)).all()
        of_x = (x.grad.double() - wide @ w.double()).abs()
        assert (of_x <= bound(gradient, E5M2, w.T, E4M3, torch.float32)).all()
        of_w = (w.grad.double() - wide.T @ x.double()).abs()
        assert (of_w <= bound(gradient.T, E5M2, x.T, E4M3, torch.float32)).all()
        assert of_y.max() > 2**-10 * y.double().abs().max(), "the product must be in fp8"


def test_products_get_row_and_column_major_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS needs a row-major first operand and a column-major second one, while a CPU accepts any layout."""
    seen: list[tuple[bool, bool]] = []
    multiply = fp8.product

    def recording_product(a: Tensor, a_scale: Tensor, b: Tensor, *rest: Any, **how: Any) -> Tensor:
        seen.append((a.is_contiguous(), b.t().is_contiguous()))
        return multiply(a, a_scale, b, *rest, **how)

    monkeypatch.setattr(fp8, "product", recording_product)
    x, w = torch.randn(96, 32).t().requires_grad_(), torch.randn(48, 96, requires_grad=True)
    Fp8Product.apply(x, w).backward(torch.randn(48, 32).t())
    assert seen == [(True, True)] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_layer_gives_same_output_under_autocast(device: str) -> None:
    layer = Fp8Linear(nn.Parameter(spread(32, 64, 1.0, 0, device)), nn.Parameter(torch.ones(32, device=device)))
    x = spread(32, 64, 1.0, 1, device).reshape(2, 16, 64)
    plain = layer(x)
    with torch.autocast(device, torch.bfloat16):
        cast = layer(x)
    assert plain.shape == (2, 16, 32)
    assert torch.equal(plain, cast)
    with pytest.raises(ConfigError, match=r"the number of rows \(batch × sequence\) is 17; make it 16 or 32, or use"):
        layer(torch.ones(17, 64, device=device))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_use_fp8_replaces_only_suitable_linear_layers() -> None:
    shared = nn.Linear(32, 16)
    model = nn.Sequential(
        OrderedDict(a=shared, b=nn.Linear(16, 20), c=nn.Sequential(shared, Doubled(16, 16)), d=nn.Linear(16, 32, False))
    )
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert use_fp8(model) == 2
    found = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False) if name}
    assert found == {
        "a": "Fp8Linear", "b": "Linear", "c": "Sequential", "c.0": "Fp8Linear", "c.1": "Doubled", "d": "Fp8Linear",
    }  # fmt: skip
    assert model.a is model.c[0]  # type: ignore[index]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_language_model_uses_fp8_in_linear_layers_of_blocks() -> None:
    step = TrainStep(Cell(TINY), resolve("cpu"))
    types = {name: type(module).__name__ for name, module in step.model.named_modules()}
    low = {name for name, kind in types.items() if kind == "Fp8Linear"}
    assert low == {
        f"layers.{i}.{name}"
        for i in range(2)
        for name in [f"attn.{x}_proj" for x in ("q", "k", "v", "output")] + ["ffn.w1", "ffn.w2", "ffn.w3"]
    }
    assert types["lm_head"] == "Linear"
    assert all(isinstance(step.model.get_submodule(name), Linear) for name in low), "tensor parallelism must find them"
    assert [n for n, _ in step.model.named_parameters()] == [
        n for n, _ in BasicTransformerLM(TINY.model).named_parameters()
    ]
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


def gradients(config: RunConfig) -> dict[str, Any]:
    step = TrainStep(Cell(config), resolve(config.device))
    run_parts(step)
    return {name: p.grad for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("change", [{"checkpoint": "every:1"}, {"checkpoint": "selective:matmul"}])
def test_checkpointed_gradients_are_bit_identical(change: dict[str, str]) -> None:
    config = replace(TINY, mode=Mode.FORWARD_BACKWARD)
    plain, other = gradients(config), gradients(replace(config, **change))
    assert [name for name in plain if not torch.equal(plain[name], other[name])] == []


# torch's compiler instantiates the autograd Function and causes torch's own warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_step_gives_same_gradients() -> None:
    one = replace(TINY, model=replace(TINY.model, num_layers=1))
    plain, compiled = gradients(one), gradients(replace(one, compile="aot_eager"))
    for name, gradient in plain.items():
        assert torch.linalg.vector_norm(compiled[name] - gradient) <= 2**-6 * torch.linalg.vector_norm(gradient)


def test_step_without_fp8_layers_contradicts_requested_precision() -> None:
    def contradiction_of(precision: Precision) -> str | None:
        readings = DtypeReadings()
        with reading(readings):
            run_parts(TrainStep(Cell(replace(TINY, precision=precision)), resolve("cpu")))
        return contradiction(Precision.FP8, readings.rows, readings.contexts)

    assert contradiction_of(Precision.FP8) is None
    assert contradiction_of(Precision.BF16) == (
        "requested fp8, but no layer computes in it; call cs_systems.model.training.fp8.use_fp8(model), or use another "
        "precision"
    )
    assert "requested bfloat16, but the step enters no autocast" in str(contradiction_of(Precision.FP32))


class OldGpu(Device):
    def capability(self) -> tuple[int, int]:
        return (8, 0)


def reason(config: RunConfig) -> str | None:
    record = cs_systems.run(replace(config, warmup=0, steps=1), in_process=True)
    assert (record.status, record.measurement) == ("unavailable", None)
    return record.reason


def test_unavailable_fp8_has_reason_and_remedy() -> None:
    assert unavailable(OldGpu(torch.device("cpu"))) == (
        "fp8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), this GPU has 8.0; use "
        "bf16"
    )
    assert unavailable(resolve("cpu")) is None, "torch emulates fp8 products on a CPU"
    assert reason(replace(TINY, seq_len=24)) == (
        "fp8 products need multiples of 16, and batch × context is 24; make it 16 or 32, or use bf16"
    )
    odd = ModelConfig(d_model=16, d_ff=40, num_layers=1, num_heads=2, vocab_size=10, context_length=16)
    assert reason(replace(TINY, model=odd)) == (
        "fp8 products need multiples of 16, and d_ff is 40; make it 32 or 48, or use bf16"
    )
    assert reason(replace(OTHER, workload="toy")) == (
        "fp8 replaces each plain nn.Linear (no subclass) whose sizes are multiples of 16, and the module has none; use "
        "bf16, or give the module such layers"
    )
    assert reason(replace(OTHER, workload="attention", mode=Mode.FORWARD)) == (
        "no attention backend computes in fp8, which is for linear layers; use bf16"
    )


@pytest.mark.parametrize("names", [(), ("joined_projections",)], ids=str)
def test_part_computes_the_layers_of_blocks_in_fp8(names: tuple[str, ...]) -> None:
    master: dict[str, Any] = {"precision": Precision.BF16_PURE, "optimizer": "adamw_master"}
    config = replace(TINY, **master, parts=names)

    def losses(config: RunConfig) -> list[float]:
        train, found = TrainStep(Cell(config), resolve("cpu")), []
        for _ in range(4):
            train.prepare()
            for _, run in train.step():
                run()
            assert train.loss is not None
            found.append(float(train.loss.detach()))
        return found

    exact, low = losses(config), losses(replace(config, parts=(*names, "fp8_linear")))
    assert low != exact
    assert low == pytest.approx(exact, rel=0.02)
    assert replace(config, parts=(*names, "fp8_linear")).computes_in is Precision.FP8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.parametrize("names", [(), ("joined_projections",)], ids=str)
def test_compiled_block_in_fp8_is_one_graph_with_the_same_gradients(names: tuple[str, ...]) -> None:
    def gradients(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        lm = BasicTransformerLM(replace(PRESETS["tiny"], num_layers=1))
        parts.apply(parts.chosen((*names, "fp8_linear")).values(), lm)
        block: Any = lm.layers[0]
        y = (torch.compile(block, backend="aot_eager", fullgraph=True) if compiles else block)(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), [*block.parameters()])]

    x = torch.randn(1, 16, PRESETS["tiny"].d_model)
    for eager, compiled in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(eager, compiled)


def test_part_refuses_matrices_that_fp8_cannot_multiply() -> None:
    odd = replace(TINY, precision=Precision.BF16, seq_len=17, parts=("fp8_linear",))
    assert parts.unavailable(odd, parts.chosen(odd.parts)) == (
        "fp8_linear: fp8 products need multiples of 16, and batch × context is 17; make it 16 or 32, or leave "
        "fp8_linear out of parts"
    )
    twice = replace(TINY, parts=("fp8_linear",))
    assert (
        parts.unavailable(twice, parts.chosen(twice.parts))
        == "fp8_linear: precision fp8 already replaces the linear layers; leave fp8_linear out of parts"
    )


def test_use_fp8_does_not_replace_root_linear_layer() -> None:
    assert use_fp8(nn.Linear(16, 16)) == 0


def test_model_that_is_a_linear_layer_is_refused_with_the_remedy_to_wrap_it() -> None:
    def run(model: nn.Module) -> cs_systems.RunRecord:
        config = RunConfig(precision=Precision.FP8, mode=Mode.FORWARD, device="cpu", warmup=0, steps=1)
        return cs_systems.run(config, model=model, inputs=torch.randn(32, 64), in_process=True)

    refused = run(nn.Linear(64, 64))
    assert (refused.status, refused.reason) == (
        "unavailable",
        "fp8 replaces the linear layers inside the module, and the module itself is one; wrap it in "
        "nn.Sequential, or use bf16",
    )
    assert run(nn.Sequential(nn.Linear(64, 64))).status == "ok"
