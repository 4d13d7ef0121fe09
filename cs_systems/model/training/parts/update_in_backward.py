"""Optimizer's update inside backward: a block is updated on a separate stream as soon as its gradients exist.

The update is limited by memory and the products of backward by arithmetic, so part of the update hides behind them. A
block's gradients are freed at once, so that all of them never exist together (Lv et al. 2023, "Full Parameter
Fine-tuning for Large Language Models with Limited Resources", section 3.1). The result equals an update after backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from cs_systems.config import Mode, RunConfig
from cs_systems.model.training.master_adamw import MOMENTS, MasterAdamW
from cs_systems.model.training.parts import Part


class UpdateInBackward:
    """Hooks on the parameters of a model that update each group of parameters once the group's gradients exist.

    Call `begin` before backward and `finish` after it, instead of the optimizer's `step`. By default each block is a
    group, and so is each other parameter.
    """

    def __init__(
        self, model: nn.Module, optimizer: MasterAdamW, groups_of_parameters: Iterable[list[Tensor]] | None = None
    ) -> None:
        self.optimizer = optimizer
        self.settings: dict[Tensor, dict[str, Any]] = {p: g for g in optimizer.param_groups for p in g["params"]}
        first = next(iter(self.settings))
        self.stream = torch.cuda.Stream(first.device) if first.is_cuda else None
        chosen = groups(model) if groups_of_parameters is None else groups_of_parameters
        self.groups = [[p for p in group if p in self.settings] for group in chosen]
        self.missing = [len(group) for group in self.groups]
        # a strong reference from a hook to its parameter would keep it alive: Python cannot collect a cycle through
        # autograd
        arrived = WeakMethod(self._arrived)
        for number, group in enumerate(self.groups):
            for p in group:
                p.register_post_accumulate_grad_hook(partial(call, arrived, number))

    def begin(self) -> None:
        """Count the step."""
        for group in self.optimizer.param_groups:
            self.optimizer.advance(group)

    def finish(self) -> None:
        """Let the current stream wait for the updates."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _arrived(self, number: int) -> None:
        """Count a gradient of a group, and update the group if it was the last one of this backward."""
        self.missing[number] -= 1
        if not self.missing[number]:
            self.missing[number] = len(self.groups[number])
            self._update(self.groups[number])

    def _update(self, parameters: list[Tensor]) -> None:
        if self.stream is None:
            self._run(parameters)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        for p in parameters:
            assert p.grad is not None
            p.grad.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            self._run(parameters)

    @torch.no_grad()
    def _run(self, parameters: list[Tensor]) -> None:
        self.optimizer.update(parameters, self.settings[parameters[0]])
        for p in parameters:
            p.grad = None


def call(arrived: WeakMethod[Any], number: int, p: Tensor) -> None:
    """Call a method as the hook of a tensor, unless its object is gone."""
    if method := arrived():
        method(number)


def groups(model: nn.Module) -> Iterable[list[Tensor]]:
    """Yield the trained parameters of each block, and each other parameter alone."""
    blocks: Any = model.layers
    for block in blocks.children():  # iterating over the layers may yield checkpoints instead
        yield [p for p in block.parameters() if p.requires_grad]
    yield from outside_blocks(model)


def outside_blocks(model: nn.Module) -> Iterable[list[Tensor]]:
    """Yield each trained parameter outside of blocks, alone."""
    for name, p in model.named_parameters():
        if not name.startswith("layers.") and p.requires_grad:
            yield [p]


def unavailable(config: RunConfig) -> str | None:
    if config.mode is not Mode.TRAIN_STEP:
        return f"mode {config.mode.value} does not update the parameters; use mode train-step"
    if config.optimizer not in MOMENTS:
        given = "the default optimizer" if config.optimizer == "default" else f"optimizer {config.optimizer}"
        return f"{given} updates all parameters at once; use optimizer {' or '.join(MOMENTS)}, and precision bf16-pure"
    return None


PART = Part(replaces="update", during_backward=UpdateInBackward, unavailable=unavailable)
