"""Experiment: each distinct matrix product of a step in fp32, and the same in TF32 and in bf16.

In bf16, a product in forward casts its operands, as under autocast; in backward they are already cast. The shortest
time assumes no casts in any product, the longest assumes casts in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems.config import Precision
from cs_systems.core.experiments import ExperimentRow
from cs_systems.core.units import counted
from cs_systems.machine import device as devices
from cs_systems.machine.device import Device
from cs_systems.measure.experiments._calls import ROUNDS, Layout, add, in_backward, layouts, times_s, watched
from cs_systems.measure.runtime.experimenting import Experiment, Skipped, Spread, Step, row

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
FIRST_CAPABILITY = (8, 0)  # first compute capability with tensor cores for TF32 and bf16
COST_STEPS = 8.0


class Product(NamedTuple):
    """Distinct product: the operator, the layouts of its operands, and the pass that computes it."""

    function: Any
    operands: tuple[Layout, ...]
    numbers: tuple[tuple[str, Any], ...]
    is_backward: bool


class _Products(TorchDispatchMode):
    """Counter of the products in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[Product]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().partition(".")[0] in PRODUCTS and args[-1].dtype == torch.float32:
            numbers = tuple(sorted((kwargs or {}).items()))
            self.found[Product(function, tuple(layouts(args)), numbers, in_backward())] += 1
        return function(*args, **(kwargs or {}))


def distinct_products(step: Step) -> Counter[Product]:
    """Run one more step, and return its products in fp32 with their counts."""
    mode = _Products()
    watched(step, mode)
    return mode.found


def _concerns(step: Step) -> bool:
    capability = step.device.capability()
    return capability is not None and capability >= FIRST_CAPABILITY and step.precision in (None, Precision.FP32)


def _run(step: Step) -> list[ExperimentRow]:
    found = distinct_products(step)
    if not found:
        raise Skipped("no matrix product of the step is in fp32")
    if devices.float32_matmul() == "tf32":
        raise Skipped("the products in fp32 are computed in TF32 already")
    return _timed(step.device, found)


@torch.no_grad()
def _timed(device: Device, found: Counter[Product]) -> list[ExperimentRow]:
    now, tf32, cast, plain, usual = ([0.0] * ROUNDS for _ in range(5))
    for product, count in found.items():
        with_casts, without = _bf16_s(device, product)
        add(now, _times_s(device, product), count)
        with _tf32():
            add(tf32, _times_s(device, product), count)
        add(cast, with_casts, count)
        add(plain, without, count)
        add(usual, without if product.is_backward else with_casts, count)
    what = f"{counted(sum(found.values()), 'matrix product')}, {len(found)} distinct, in"
    baseline_s = Spread.of(now).value
    bf16 = Spread(Spread.of(usual).value, min(plain), max(cast), len(usual))
    return [
        row("bf16", "matrix products", bf16, baseline_s, f"{what} bf16 under autocast"),
        row("tf32", "matrix products", Spread.of(tf32), baseline_s, f"{what} TF32"),
    ]


def _times_s(device: Device, product: Product) -> list[float]:
    operands = [layout.random(device) for layout in product.operands]
    return times_s(device, _call(product, lambda: operands))


def _bf16_s(device: Device, product: Product) -> tuple[list[float], list[float]]:
    """Return the times of a product in bf16 with the casts of its operands, and without."""
    operands = [layout.random(device) for layout in product.operands]
    with_casts = times_s(device, _call(product, lambda: [operand.to(torch.bfloat16) for operand in operands]))
    cast = [layout.random(device, torch.bfloat16) for layout in product.operands]
    return with_casts, times_s(device, _call(product, lambda: cast))


def _call(product: Product, operands: Callable[[], list[Tensor]]) -> Callable[[], object]:
    numbers = dict(product.numbers)
    return lambda: product.function(*operands(), **numbers)


@contextmanager
def _tf32() -> Iterator[None]:
    before = devices.float32_matmul()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


EXPERIMENT = Experiment(_concerns, lambda step: COST_STEPS * step.step_s, _run)
