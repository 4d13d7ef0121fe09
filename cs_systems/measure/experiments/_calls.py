"""Calls of operators, taken from one more step and repeated alone on random tensors of the same layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cs_systems.machine.device import Device
from cs_systems.measure.runtime.experimenting import Step

ROUNDS = 3
MOST_CALLS, ROUND_S = 10, 2e-3  # most calls of a round, and its duration: enough to time them by events
HOLD_S = 1e-3  # seconds for which the device is held while a round is launched


class Layout(NamedTuple):
    """Tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def random(self, device: Device, dtype: torch.dtype | None = None) -> Tensor:
        """Return a random tensor of this layout, in another dtype on request.

        Elements share memory like the original's.
        """
        size = 1 + sum((count - 1) * step for count, step in zip(self.shape, self.stride, strict=True) if count)
        flat = torch.randn(size, device=device.torch, dtype=dtype or self.dtype)
        return flat.as_strided(self.shape, self.stride)


def layouts(values: Any) -> Any:
    """Return arguments with a Layout in place of each tensor."""
    return tree_map(lambda value: Layout.of(value) if isinstance(value, Tensor) else value, values)


def add(sums: list[float], times: Sequence[float], count: int) -> None:
    """Add the times of `count` calls to the sums, round by round."""
    for index, time_s in enumerate(times):
        sums[index] += count * time_s


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def watched(step: Step, mode: TorchDispatchMode) -> None:
    """Run one step inside a mode that sees every operator; compiled code runs uncompiled."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code dispatches no operator
        stack.enter_context(mode)
        step.run()


def times_s(device: Device, call: Callable[[], object]) -> list[float]:
    """Return the durations of a call on the device, one per round, after a warm-up."""
    call()
    once_s = _round_s(device, call, 1)
    count = max(1, min(MOST_CALLS, int(ROUND_S / once_s))) if once_s > 0 else MOST_CALLS
    return [_round_s(device, call, count) for _ in range(ROUNDS)]


def _round_s(device: Device, call: Callable[[], object], count: int) -> float:
    device.synchronize()
    device.occupy(HOLD_S)
    begin = device.mark()
    for _ in range(count):
        call()
    end = device.mark()
    device.synchronize()
    return device.between_s(begin, end) / count
