"""Error of a user's own model in low precision against fp32, over one step; not a timing.

`precision_error` has the same columns. The reference is in fp32, because code that converts tensors to a fixed
dtype does not run in float64. The two steps have the same parameters, batch and seed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cs_systems.analysis.comparison.precision import PrecisionErrorRow
from cs_systems.config import ConfigError, Mode, Precision
from cs_systems.core.validation import shown
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads._batches import tensors_in
from cs_systems.measure.workloads._foreign import built
from cs_systems.measure.workloads._module import ModuleStep
from cs_systems.measure.workloads.precision_error import PrecisionError
from cs_systems.record import Ran


class ForeignErrors(PrecisionError):
    """Workload that compares one step of a user's own model with the same step in fp32."""

    def __init__(self, cell: Cell, device: Device) -> None:
        if cell.config.precision is Precision.FP32:
            raise Unavailable(
                "fp32 is the reference of the numerical errors, and is not compared with "
                "itself; choose another precision"
            )
        if cell.config.is_distributed:
            raise Unavailable(
                "the numerical error of a precision is measured on one process only; use strategy single and "
                "world_size 1"
            )
        self.cell = Cell(replace(cell.config, mode=Mode.FORWARD_BACKWARD))
        self.device, self.tokens = device, None
        self._begin(torch.float32)

    def _make(self, cell: Cell) -> ModuleStep:
        torch.manual_seed(cell.config.seed)
        made = built(cell, self.device)
        if not isinstance(made.inner, ModuleStep):
            raise Unavailable(
                f"{cell.config.workload} runs the step itself, so its outputs and gradients cannot be compared; name a "
                "function (config, device) that returns (model, batch, loss)"
            )
        made.check()
        torch.manual_seed(cell.config.seed)  # the first step has the same dropout as the reference
        return made.inner

    def _errors(self, low: Any, scale: float | None) -> PrecisionErrorRow:
        if low.loss is not None:  # further steps would use the next batch
            low = self._make(self.cell)
        return super()._errors(low, scale)

    def _outputs(self, step: Any) -> Tensor:
        leaves = tree_leaves(dict(step.output) if hasattr(step.output, "keys") else step.output)
        # also tensors in dataclasses
        found = [x for leaf in leaves for x in tensors_in(leaf) if x.is_floating_point() and x.dim()]
        if not found:
            what = f"{shown(step.output)} without a floating-point tensor of one or more dimensions"
            what = "only a scalar" if isinstance(step.output, Tensor) else what
            raise ConfigError(
                f"the model returned {what}, so there are no outputs to compare; return a dict such as {{'loss': loss, "
                "'logits': logits}, so that the loss is found by its key"
            )
        return torch.cat([leaf.detach().flatten().to(self.reference_dtype) for leaf in found])

    def describe(self) -> Ran:
        return {"loss": self.low_loss}
