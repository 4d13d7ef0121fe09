"""Toy model (fc1 → relu → LayerNorm → fc2) and its training step, small enough to show everything that autocast does.

Classification: inputs (BATCH, IN) fp32, targets (BATCH,), cross-entropy. It uses precision, mode, optimizer, device and
seed of the configuration, and ignores its language model.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads._module import ModuleStep
from cs_systems.measure.workloads._setup import TrainingSetup
from cs_systems.model.training.losses import cross_entropy

BATCH, IN, HIDDEN, OUT = 32, 20, 10, 5


class ToyModel(nn.Module):
    """Model fc1 → relu → LayerNorm → fc2: (B, IN) → (B, OUT)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


def toy(cell: Cell, device: Device) -> ModuleStep:
    torch.manual_seed(cell.config.seed)
    with device.torch:
        model, inputs, targets = ToyModel(), torch.randn(BATCH, IN), torch.randint(OUT, (BATCH,))
    setup = TrainingSetup(model, inputs, loss=partial(cross_entropy, targets=targets))
    return ModuleStep(cell, device, setup)


WORKLOAD = toy
