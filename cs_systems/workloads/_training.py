"""What the training steps of a language model and of any other module share: phases, scaler, optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import Mode, Phase, Precision, RunConfig
from cs_systems.device import Device
from cs_systems.optim import optimizer_class
from cs_systems.parallel import ParallelStrategy, compose


def strategy_of(config: RunConfig) -> ParallelStrategy:
    return compose(config.strategy, **config.strategy_options)


class Training:
    """`config.mode` says how many of the phases run; forward and loss are the subclass's own.

    model, wrapped: as it was given, and as `config.strategy` wraps it, which is what a step calls.
    optimizer, optimizer_name: None where nothing is updated. loss: of the last step, a scalar.
    """

    def __init__(self, config: RunConfig, device: Device, model: nn.Module) -> None:
        self.config, self.device, self.model = config, device, model
        self.strategy = strategy_of(config)
        self.wrapped = self.strategy.wrap(model)
        self.scaler = torch.amp.GradScaler(device.torch.type, enabled=config.precision is Precision.FP16)
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_name: str | None = None
        if config.mode is Mode.TRAIN_STEP:
            self.optimizer_name = "adamw_fused" if config.optimizer == "default" else config.optimizer
            cls, options = optimizer_class(self.optimizer_name)
            self.optimizer = self.strategy.make_optimizer(self.wrapped.parameters(), cls, **options)
        self.loss: Tensor | None = None

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        if self.config.mode is not Mode.FORWARD:
            yield Phase.LOSS, self._compute_loss
            yield Phase.BACKWARD, self._backward
            if self.strategy.splits:
                yield Phase.SYNCHRONIZE, self._synchronize
        if self.config.mode is Mode.TRAIN_STEP:
            yield Phase.OPTIMIZER, self._update

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _compute_loss(self) -> None: ...

    def _backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()

    def _synchronize(self) -> None:
        self.strategy.finish_gradients(self.wrapped)

    def _update(self) -> None:
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
