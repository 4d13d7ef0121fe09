"""Training step of any module on given inputs, in any precision: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError, Mode, Precision, RunConfig
from cs_systems.core.rows import Ran
from cs_systems.machine.device import Device
from cs_systems.training import fp8
from cs_systems.workloads import Unavailable
from cs_systems.workloads._calls import check_precision
from cs_systems.workloads._training import Training

Loss = Callable[[Any], Tensor]


def mean_square(output: Any) -> Tensor:
    """Return the mean square of a module's output, the default loss.

    Raises ConfigError where the output is not a tensor.
    """
    if not isinstance(output, Tensor):
        found = type(output).__name__
        raise ConfigError(f"the module returned a {found}, not a tensor; let the factory return (module, inputs, loss)")
    return output.square().mean()


class ModuleStep(Training):
    """Training step of any module. It uses mode, precision, optimizer and device of the config.

    In fp8, the linear layers whose sizes allow it are replaced. inputs: a tensor, or a tuple of the module's arguments.
    loss: a function from the module's output to a scalar.
    """

    def __init__(self, config: RunConfig, device: Device, model: nn.Module, inputs: Any, loss: Loss = mean_square):
        check_precision(config, device)
        if config.precision is Precision.FP8 and not fp8.use_fp8(model):
            raise Unavailable(
                f"fp8 requires an nn.Linear whose sizes are multiples of {fp8.MULTIPLE}, and the module has none; "
                "widen its layers, or use bf16"
            )
        self.loss_of = loss
        pure = config.precision is Precision.BF16_PURE
        super().__init__(config, device, (model.bfloat16() if pure else model).to(device.torch))
        self.inputs = tuple(self._placed(x, pure) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
        self.output: Any = None

    def _placed(self, value: Any, pure: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device.torch, torch.bfloat16 if pure and value.is_floating_point() else value.dtype)

    def prepare(self) -> None:
        self.output = self.loss = None
        self.wrapped.zero_grad(set_to_none=True)

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.config.mode is not Mode.FORWARD), self.device.autocast(self.config.precision):
            self.output = self.wrapped(*self.inputs)

    def _compute_loss(self) -> None:
        with self.device.autocast(self.config.precision):
            self.loss = self.loss_of(self.output)

    def cost(self) -> None:
        return None

    def describe(self) -> Ran:
        return {
            "tokens": None,
            "precision": self.config.precision.value,
            "mode": self.config.mode.value,
            "optimizer": self.optimizer_name,
            "loss": None if self.loss is None else float(self.loss.detach()),
        }
