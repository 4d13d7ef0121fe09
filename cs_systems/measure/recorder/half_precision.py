"""Cost of half precision on a CPU, which may have no instructions for it: operators in it, compared with fp32."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import HALF_PRECISION, HalfPrecisionRow
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.recorder.subject import Subject

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZE = 128  # of the product; without instructions for bf16 it takes some milliseconds
IMAGES, CHANNELS, WIDTH, KERNEL = 4, 16, 16, 3  # of the convolution
ROUNDS = 3  # of each precision; the fastest counts
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class HalfPrecision(FewSteps):
    """Observer of models that compute in half precision on a CPU."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._dtype: torch.dtype | None = None
        self._is_autocast = False

    def look_at_call(self, call: ModelCall) -> None:
        if self._subject.device.is_cuda or self._dtype is not None:
            return
        self._is_autocast = torch.is_autocast_enabled("cpu")
        weights = (p.dtype for model in self._subject.models for p in model.parameters())
        dtype = torch.get_autocast_dtype("cpu") if self._is_autocast else next(weights, None)
        self._dtype = dtype if dtype in NAMES else None

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        if self._dtype is not None:
            self.keep(HALF_PRECISION, [*self._rows(self._dtype)])

    def _rows(self, dtype: torch.dtype) -> Iterator[HalfPrecisionRow]:
        modules = [module for model in self._subject.models for module in model.modules()]
        of_product = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
        of_image = torch.ones(IMAGES, CHANNELS, WIDTH, WIDTH), torch.ones(CHANNELS, CHANNELS, KERNEL, KERNEL)
        if any(isinstance(module, nn.Linear) for module in modules):
            yield self._row(dtype, "matrix product", torch.mm, of_product)
        if any(isinstance(module, CONVOLUTIONS) for module in modules):
            yield self._row(dtype, "convolution", torch.conv2d, of_image)

    def _row(
        self, dtype: torch.dtype, name: str, function: Callable[..., Tensor], operands: tuple[Tensor, Tensor]
    ) -> HalfPrecisionRow:
        times_s = [_fastest_s(function, [each.to(of) for each in operands]) for of in (dtype, torch.float32)]
        return {"precision": NAMES[dtype], "is_autocast": self._is_autocast, "operator": name, "time_s": times_s[0],
                "float32_s": times_s[1]}  # fmt: skip


def _fastest_s(function: Callable[..., Tensor], operands: Sequence[Tensor]) -> float:
    """Return the time of an operator with its backward pass."""
    leaves, least_s = [each.requires_grad_() for each in operands], math.inf
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        for _ in range(ROUNDS + 1):  # the first one prepares the kernels, and may be the slowest
            begin_s = time.perf_counter()
            result = function(*leaves)
            torch.autograd.grad(result, leaves, torch.ones_like(result))
            least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s
