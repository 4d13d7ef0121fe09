"""Cost of double precision: a lower bound of the work of float64 products, and this device's rates of products."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

import torch
from torch import nn

from cs_systems.analysis.comparison.loop_findings import DOUBLE, DoubleRow
from cs_systems.machine.device import Device
from cs_systems.measure.recorder.observers import Observer
from cs_systems.measure.recorder.subject import Subject

SIZE = 384  # size of the timed product: a few milliseconds on a slow core
ROUNDS = 3  # number of rounds; the fastest counts
PER_ELEMENT = 6  # operations per weight element and input row: forward, and two products in backward


class Double(Observer):
    """Observer of models that compute in float64."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        row = double_row(self._subject.models, shapes, self._subject.device)
        self.keep(DOUBLE, [row] if row else [])


def double_row(models: Sequence[nn.Module], shapes: Collection[tuple[int, ...]], device: Device) -> DoubleRow | None:
    """Return the float64 weights, and a lower bound of a training step's work with them; None if there are none.

    shapes: the shapes of the first inputs of the models' calls in a step.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    looked_up = {id(m.weight) for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    weights = {id(p): p for model in models for p in model.parameters() if p.is_floating_point()}
    double = [p for p in weights.values() if p.dtype is torch.float64]
    if not double:
        return None
    products = sum(p.numel() for p in double if p.dim() >= 2 and id(p) not in looked_up)
    rows = max((_rows(shape, is_ids=bool(looked_up)) for shape in shapes), default=0)
    return {
        "parameters": len(double),
        "of_parameters": len(weights),
        "flops": PER_ELEMENT * products * rows,
        "flops_per_s": _rate(torch.float64, device),
        "float32_flops_per_s": _rate(torch.float32, device),
    }


def _rows(shape: tuple[int, ...], *, is_ids: bool) -> int:
    """Return a lower bound of the rows that a weight is multiplied with: an image may count as one."""
    if len(shape) == 3 or (is_ids and len(shape) == 2):
        return math.prod(shape[:2])
    return shape[0] if shape else 0


def _rate(dtype: torch.dtype, device: Device) -> float:
    """Return the rate of a square matrix product, in operations per second."""
    one = torch.ones(SIZE, SIZE, dtype=dtype, device=device.torch)
    least_s = math.inf
    with torch.autocast(device.torch.type, enabled=False):
        for _ in range(ROUNDS):
            device.synchronize()
            begin_s = time.perf_counter()
            torch.mm(one, one)
            device.synchronize()
            least_s = min(least_s, time.perf_counter() - begin_s)
    return 2 * SIZE**3 / least_s
