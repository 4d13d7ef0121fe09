"""State of a live model and its optimizer that a measurement must leave unchanged: `ObjectState(setup).restore()`.

A measurement works on the caller's own objects and not on copies of them, which would take the device's memory twice.
The values are kept on the host meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cs_systems.config import ConfigError
from cs_systems.workloads._setup import TrainingSetup


class ObjectState:
    """Values and structure of the objects of a setup.

    Covers parameters, buffers, gradients, devices, dtypes, submodules, hooks, the mode (train or eval), and the state
    of the optimizer and the scheduler. Of a module's other attributes, the values are restored, but not what a list
    among them holds.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        """Keep the state. Raises ConfigError for a model whose parameters do not exist yet."""
        if any(is_lazy(parameter) for parameter in setup.model.parameters()):
            raise ConfigError("the model has lazy parameters without a shape; call it once before it is measured")
        if on_meta := next((name for name, parameter in setup.model.named_parameters() if parameter.is_meta), None):
            raise ConfigError(
                f"parameter {on_meta} of the model is on the meta device, without values; load the model without "
                "offloading. If all of it is on meta, call model.to_empty(device='cpu') and initialise it"
            )
        self._undo = [*_undo_all(setup)]

    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _undo_all(setup: TrainingSetup) -> Iterator[Callable[[], object]]:
    """Yield the functions that put back what was found now, in the order of their calls."""
    roots = [part for part in (setup.model, setup.loss) if isinstance(part, nn.Module)]
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        yield _attributes(module)
    for tensor in dict.fromkeys(chain(*(chain(root.parameters(), root.buffers()) for root in roots))):
        yield _tensor(tensor)
    config: Any = getattr(setup.model, "config", None)
    if hasattr(config, "use_cache"):  # which checkpointing switches off
        yield partial(setattr, config, "use_cache", config.use_cache)
    if isinstance(setup.optimizer, torch.optim.Optimizer):
        yield from _optimizer(setup.optimizer)
    made: Any = None if isinstance(setup.scheduler, type) else setup.scheduler
    if callable(load := getattr(made, "load_state_dict", None)):
        state = copy.deepcopy(made.state_dict())
        yield lambda: load(state)


def _attributes(owner: Any) -> Callable[[], object]:
    """Return a function that gives an object its attributes back; dictionaries among them keep their identity."""
    attributes = dict(owner.__dict__)
    inner = [(value, value.copy()) for value in attributes.values() if isinstance(value, dict)]

    def undo() -> None:
        owner.__dict__.clear()
        owner.__dict__.update(attributes)
        for value, content in inner:
            value.clear()
            value.update(content)

    return undo


def _tensor(tensor: Tensor) -> Callable[[], object]:
    """Return a function that gives a parameter or buffer its values, device, dtype and gradient back."""
    device, dtype, requires_grad = tensor.device, tensor.dtype, tensor.requires_grad
    gradient = tensor.grad
    restore_gradient = None if gradient is None else _tensor(gradient)
    memory = tensor.data if device.type == "cpu" else None  # a device's memory is not held: it belongs to the peak
    values = tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def undo() -> None:
        tensor.grad = None
        if memory is not None:
            tensor.data = memory
        elif tensor.device != device or tensor.dtype != dtype:
            tensor.data = values.to(device)
        tensor.data.copy_(values)
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if restore_gradient is not None:
            restore_gradient()
        tensor.grad = gradient

    return undo


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], object]]:
    yield _attributes(optimizer)
    for owner in (*optimizer.param_groups, *optimizer.state.values()):
        yield _mapping(owner)


def _mapping(owner: Any) -> Callable[[], object]:
    """Return a function that gives a parameter group, or the state of a parameter, its content back."""
    content: Mapping[str, Any] = dict(owner)
    tensors = [_tensor(value) for value in content.values() if isinstance(value, Tensor)]

    def undo() -> None:
        owner.clear()
        owner.update(content)
        for each in tensors:
            each()

    return undo
