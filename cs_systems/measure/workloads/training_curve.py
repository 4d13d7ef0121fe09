"""Training curve over `config.steps` steps on seeded data, to compare learning between precisions.

The data are the same for every precision, and every step has a new batch. Each token has SUCCESSORS equally likely
successors, so there is something to learn, and no model gets below a loss of ln SUCCESSORS.

This workload does not measure time, because it reads the loss after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.precision import TRAINING_CURVE, TrainingCurveRow
from cs_systems.core.tables import Tables
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Workload
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.record import Ran

ALPHABET, SUCCESSORS = 64, 4


class TrainingCurve(Workload):
    """Workload of `config.steps` training steps; its table holds the loss of each."""

    def __init__(self, cell: Cell, device: Device) -> None:
        self.config = config = cell.config
        self.train = TrainStep(cell, device)
        self.device = device
        self.random = torch.Generator().manual_seed(config.seed)
        self.alphabet = min(ALPHABET, config.model.vocab_size)
        self.successors = torch.rand(self.alphabet, self.alphabet, generator=self.random).argsort()[:, :SUCCESSORS]
        self.rows: list[TrainingCurveRow] = []

    @staticmethod
    def preflight(cell: Cell, device: Device) -> int | None:
        return TrainStep.preflight(cell, device)

    def prepare(self) -> None:
        batch = self.batch()
        self.train.tokens.copy_(batch[:, :-1])  # in place: a CUDA graph reads the tensors that it was captured with
        self.train.targets.copy_(batch[:, 1:])
        self.train.prepare()

    def batch(self) -> Tensor:
        """Return the next (B, S + 1) tokens, from the CPU's generator: the same on every device."""
        shape = (self.config.batch_size, self.config.tokens_per_sequence + 1)
        tokens = torch.empty(shape, dtype=torch.int64)
        tokens[:, 0] = torch.randint(self.alphabet, shape[:1], generator=self.random)
        chosen = torch.randint(SUCCESSORS, shape, generator=self.random)
        for i in range(1, shape[1]):
            tokens[:, i] = self.successors[tokens[:, i - 1], chosen[:, i]]
        return tokens

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        scaler = self.train.scaler
        scale = scaler.get_scale() if scaler.is_enabled() else None
        yield from self.train.step()
        assert self.train.loss is not None
        loss, skipped = float(self.train.loss.detach()), scale is not None and scaler.get_scale() < scale
        self.rows.append({"step": len(self.rows), "loss": loss, "loss_scale": scale, "skipped": skipped})

    def tables(self) -> Tables:
        return TRAINING_CURVE.filled(self.rows)

    def describe(self) -> Ran:
        loss = self.rows[-1]["loss"] if self.rows else None
        return {"tokens": self.train.tokens.numel(), "loss": loss}


WORKLOAD = TrainingCurve
