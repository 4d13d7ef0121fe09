"""A toy model, fc1 → relu → LayerNorm → fc2, and a training step of it: small enough to read all that autocast does.

Classification: inputs (BATCH, IN) fp32, targets (BATCH,), cross-entropy, AdamW. Of the configuration it uses precision,
mode, device and seed; nothing of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import Mode, Phase, Precision, RunConfig
from cs_systems.cost import PhaseCost
from cs_systems.device import Device
from cs_systems.losses import cross_entropy
from cs_systems.record import Row
from cs_systems.workloads import Unavailable

BATCH, IN, HIDDEN, OUT = 32, 20, 10, 5


class ToyModel(nn.Module):
    """(B, IN) → (B, OUT)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


class Toy:
    """`config.mode` says how many of the phases run."""

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.config, self.device = config, device
        if config.precision is Precision.TF32:
            raise Unavailable("the toy model is about dtypes, and tf32 is none: use fp32")
        torch.manual_seed(config.seed)
        with device.torch:
            self.model = ToyModel()
            self.inputs, self.targets = torch.randn(BATCH, IN), torch.randint(OUT, (BATCH,))
        if config.precision is Precision.BF16_PURE:
            self.model, self.inputs = self.model.bfloat16(), self.inputs.bfloat16()
        self.scaler = torch.amp.GradScaler(device.torch.type, enabled=config.precision is Precision.FP16)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.logits: Tensor | None = None
        self.loss: Tensor | None = None

    def prepare(self) -> None:
        self.logits = self.loss = None
        self.model.zero_grad(set_to_none=True)

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        if self.config.mode is not Mode.FORWARD:
            yield Phase.LOSS, self._compute_loss
            yield Phase.BACKWARD, self._backward
        if self.config.mode is Mode.TRAIN_STEP:
            yield Phase.OPTIMIZER, self._update

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.config.mode is not Mode.FORWARD), self.device.autocast(self.config.precision):
            self.logits = self.model(self.inputs)

    def _compute_loss(self) -> None:
        assert self.logits is not None
        with self.device.autocast(self.config.precision):
            self.loss = cross_entropy(self.logits, self.targets)

    def _backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def cost(self) -> Mapping[str, PhaseCost] | None:
        return None

    def describe(self) -> Row:
        return {
            "tokens": None,
            "precision": self.config.precision.value,
            "mode": self.config.mode.value,
            "optimizer": "AdamW" if self.config.mode is Mode.TRAIN_STEP else None,
            "loss": None if self.loss is None else float(self.loss.detach()),
        }


WORKLOAD = Toy
