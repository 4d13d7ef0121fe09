"""User's own language model given only by its class: built at the sizes of the configuration, on random tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cs_systems.core import plugins
from cs_systems.core.fields import declared
from cs_systems.core.shapes import ModelConfig
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.measure.workloads._setup import TrainingSetup
from cs_systems.model.training.data import random_batches
from cs_systems.model.training.losses import loss_function

SIZES = tuple(name for name in declared(ModelConfig) if name != "name")
FORM = f"a class of a language model, whose constructor takes sizes by the names {', '.join(SIZES)}"


def is_language_model(made: Any, own: Mapping[str, Any]) -> bool:
    """Return whether an object is a module class that can be built from sizes of a ModelConfig, including vocab_size.

    own: further arguments of its constructor.
    """
    if not isinstance(made, type) or not issubclass(made, nn.Module) or "vocab_size" not in _sizes_of(made):
        return False
    return plugins.takes(made, **{**dict.fromkeys(_sizes_of(made)), **own})


def language_model(made: Any, config: Any, device: Device, own: Mapping[str, Any]) -> TrainingSetup:
    """Return the training step of the model on random tokens and targets, (batch, tokens), or on `config.data`.

    config: a RunConfig; only fields that the step needs are read.
    """
    model, loss = of_sizes(made, config.model, own), loss_function(config.loss_function)
    shape, vocabulary = (config.batch_size, config.tokens_per_sequence), config.model.vocab_size
    if config.data != "fixed":
        rank = process_group.rank()
        batches = iter(random_batches(config.data, vocabulary, shape, device.torch, config.seed, rank), None)
        return TrainingSetup(
            model, batches=batches, loss=lambda output, batch: loss(logits_of(output), batch[1]), forward=_on_inputs
        )
    with device.torch:
        tokens, targets = torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)
    return TrainingSetup(model, tokens, loss=lambda output: loss(logits_of(output), targets))


def of_sizes(made: Any, sizes: Any, own: Mapping[str, Any]) -> nn.Module:
    """Return a model of the class, built with those sizes of a ModelConfig that its constructor accepts."""
    model: nn.Module = made(**{**{name: getattr(sizes, name) for name in _sizes_of(made)}, **own})
    return model


def logits_of(output: Any) -> Any:
    """Return the logits of a language model that returns them alone, or first in a tuple, such as with losses."""
    return output[0] if isinstance(output, tuple) else output


def _on_inputs(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


def _sizes_of(made: Any) -> list[str]:
    """Return the names of the sizes that a class accepts."""
    if not plugins.signature(made):
        return []
    return [name for name in inspect.signature(made).parameters if name in SIZES]
