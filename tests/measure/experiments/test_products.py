"""Products of a step: each distinct one is found with its number, and timed alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cs_systems.machine.device import Device
from cs_systems.measure.experiments import products
from cs_systems.measure.experiments._calls import Layout
from cs_systems.measure.experiments.products import distinct_products
from cs_systems.measure.runtime.experimenting import Skipped, Step
from cs_systems.record import Measurement, Sample

CPU = Device(torch.device("cpu"))


def step_of(model: nn.Module, x: torch.Tensor, device: Device = CPU) -> Step:
    def forward() -> None:
        nonlocal y
        y = model(x)

    y = torch.empty(0)
    sample = Sample(0, False, 1.0, {"forward": 1.0}, {"forward": 1.0})
    phases = [("forward", forward), ("backward", lambda: y.square().mean().backward())]
    return Step(device, Measurement("monotonic", (sample,), 0.0), lambda: phases)


def test_distinct_products_include_forward_and_both_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    found = distinct_products(step_of(model, torch.randn(4, 8)))
    names = {(each.function.name(), each.is_backward): count for each, count in found.items()}
    # The gradient of the first layer's input is not needed; those of weights and inputs differ in layout.
    assert sum(found.values()) == 3 + 3 + 2
    assert names["aten::mm", False] == 3
    assert {each.operands[0].dtype for each in found} == {torch.float32}


def test_products_of_a_compiled_model_are_found() -> None:
    model = torch.compile(nn.Linear(8, 8), backend="aot_eager")
    assert sum(distinct_products(step_of(model, torch.randn(4, 8))).values()) == 2


def test_step_in_bf16_has_no_product_in_fp32() -> None:
    model = nn.Linear(8, 8).bfloat16()
    with pytest.raises(Skipped, match=r"^no matrix product of the step is in fp32$"):
        products.EXPERIMENT.run(step_of(model, torch.randn(4, 8, dtype=torch.bfloat16)))


def test_row_of_each_precision_has_the_same_baseline() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    rows = products.EXPERIMENT.run(step_of(nn.Linear(64, 64), torch.randn(64, 64)))
    assert [each["instead"] for each in rows] == ["bf16", "tf32"]
    assert rows[0]["baseline_s"] == rows[1]["baseline_s"]
    assert rows[0]["stands_for"] == "2 matrix products, 2 distinct, in bf16 under autocast"
    for each in rows:
        assert each["time_s"] is not None
        assert each["low_s"] is not None
        assert each["high_s"] is not None
        assert 0 < each["low_s"] <= each["high_s"]
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize(
    "tensor", [torch.randn(3, 5).t(), torch.randn(5).expand(3, 5), torch.randn(2, 6, 4)[:, ::2, 1:], torch.ones(())]
)
def test_random_tensor_has_the_layout_of_the_original(tensor: torch.Tensor) -> None:
    made = Layout.of(tensor).random(CPU)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
