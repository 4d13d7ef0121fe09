"""Small loops for the tests of the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cs_systems import Recorder

CLEAN = {"profile": "none", "stacks": False, "warmup": 1, "steps": 3}


class Ticks:
    """Clock that advances by one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(3, 4, generator=source), torch.randint(2, (3,), generator=source)


def loader(count: int) -> DataLoader[Any]:
    inputs, labels = (torch.cat(column) for column in zip(*batches(count), strict=True))
    return DataLoader(TensorDataset(inputs, labels), batch_size=3)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(
    out: Path, count: int = 10, *, model: Any = None, optimizer: Any = None, **options: Any
) -> tuple[Recorder, list[float]]:
    """Run the usual loop under a recorder; return it and the losses."""
    model = net() if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    losses = []
    with Recorder(model, optimizer, out=out, **CLEAN | options) as recorder:
        for batch in loader(count):
            with recorder.step():
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.detach())
    return recorder, [float(x) for x in losses]
