"""Training steps under nsys: ranges of two blocks by hooks, and ranges placed by hand around the same work.

Command: reference_ranges.py STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.instrument.annotate import NvtxRanges, annotate
from cs_systems.instrument.hooks import annotated

ranges = NvtxRanges()


class Marker(torch.autograd.Function):
    """Identity with a backward that calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = Marker.apply(x, ranges.pop)
            ranges.push(f"forward of blocks.{number} by hand")
            x = block(x)
            ranges.pop()
            x = Marker.apply(x, partial(ranges.push, f"backward of blocks.{number} by hand"))
        return x


if __name__ == "__main__":
    net, x = Net(), torch.randn(512, 256, requires_grad=True)  # otherwise nothing ends the first block's backward
    with annotated(ranges, net):
        for _ in range(int(sys.argv[1])):
            with annotate("step"):
                with annotate("forward"):
                    y = net(x)
                with annotate("backward"):
                    y.sum().backward()
