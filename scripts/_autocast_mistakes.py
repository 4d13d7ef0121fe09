"""Steps that seem to run under bf16 autocast but run in fp32, for the study autocast_dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from cs_systems.config import RunConfig
from cs_systems.machine.device import Device
from cs_systems.measure.workloads.toy import BATCH, IN, ToyModel

Step = Callable[[], None]


def other_device(config: RunConfig, device: Device) -> Step:
    """Enter autocast for a device type that the tensors are not on."""
    other = "cpu" if device.is_cuda else "cuda"
    return _step(device, lambda model, x: _under(other, lambda: model(x)))


def outside(config: RunConfig, device: Device) -> Step:
    """Call the model after the context has ended."""

    def forward(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
        ready = _under(device.torch.type, lambda: x * 2)
        return model(ready)

    return _step(device, forward)


def no_context(config: RunConfig, device: Device) -> Step:
    """Make a context and never enter it."""

    def forward(model: ToyModel, x: torch.Tensor) -> torch.Tensor:
        torch.autocast(device.torch.type, torch.bfloat16)
        return model(x)

    return _step(device, forward)


def _under(device: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it disables autocast, easily missed in a log
        with torch.autocast(device, torch.bfloat16):
            return call()


def _step(device: Device, forward: Callable[[ToyModel, torch.Tensor], torch.Tensor]) -> Step:
    with device.torch:
        model, x = ToyModel(), torch.randn(BATCH, IN)

    def step() -> None:
        forward(model, x).square().mean().backward()

    return step
