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
from cs_systems.measure.recorder.stacks import CoreQueue
from cs_systems.measure.recorder.subject import Subject

SIZE = 384  # size of the timed product: a few milliseconds on a slow core
ROUNDS = 5  # rounds of each precision, in turns; the fastest counts
# operations per weight element and input row: of forward, and of the two products in backward
FORWARD, BACKWARD = 2, 4
LEAST_S = 1e-6  # of a product, if waiting for a core is all that was timed


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
    of_products = (p for p in double if p.dim() >= 2 and id(p) not in looked_up)
    operations = sum(p.numel() * (FORWARD + BACKWARD * p.requires_grad) for p in of_products)
    rows = max((_rows(shape, is_ids=bool(looked_up)) for shape in shapes), default=0)
    rates = _rates((torch.float64, torch.float32), device)
    return {
        "parameters": len(double),
        "of_parameters": len(weights),
        "flops": operations * rows,
        "flops_per_s": rates[0],
        "float32_flops_per_s": rates[1],
    }


def _rows(shape: tuple[int, ...], *, is_ids: bool) -> int:
    """Return a lower bound of the rows that a weight is multiplied with: an image may count as one."""
    if len(shape) == 3 or (is_ids and len(shape) == 2):
        return math.prod(shape[:2])
    return shape[0] if shape else 0


def _rates(dtypes: Sequence[torch.dtype], device: Device) -> list[float]:
    """Return the rate of a square product in each precision, in operations per second, without waits for a core."""
    ones = [torch.ones(SIZE, SIZE, dtype=dtype, device=device.torch) for dtype in dtypes]
    least_s, queue = [math.inf for _ in dtypes], CoreQueue()
    with torch.autocast(device.torch.type, enabled=False):
        for _ in range(ROUNDS):
            for at, one in enumerate(ones):
                device.synchronize()
                begin_s, waited_s = time.perf_counter(), queue.total_s()
                torch.mm(one, one)
                device.synchronize()
                lasted_s = time.perf_counter() - begin_s - (queue.total_s() - waited_s)
                least_s[at] = min(least_s[at], max(LEAST_S, lasted_s))
    queue.close()
    return [2 * SIZE**3 / lasted_s for lasted_s in least_s]
