"""Language model of the user's own by its class alone, at the sizes of the configuration, on random tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from cs_systems.core import plugins
from cs_systems.core.fields import declared
from cs_systems.core.shapes import ModelConfig
from cs_systems.machine.device import Device
from cs_systems.measure.workloads._setup import TrainingSetup
from cs_systems.model.training.losses import cross_entropy

SIZES = tuple(name for name in declared(ModelConfig) if name != "name")
FORM = f"a class of a language model, whose constructor takes sizes by the names {', '.join(SIZES)}"


def is_language_model(made: Any, own: Mapping[str, Any]) -> bool:
    """Return whether an object is the class of a module that sizes of a ModelConfig, vocab_size among them, make.

    own: further arguments of its constructor.
    """
    if not isinstance(made, type) or not issubclass(made, nn.Module) or "vocab_size" not in _sizes_of(made):
        return False
    return plugins.takes(made, **{**dict.fromkeys(_sizes_of(made)), **own})


def language_model(made: Any, config: Any, device: Device, own: Mapping[str, Any]) -> TrainingSetup:
    """Return the training step of the model on random tokens and targets, (batch, tokens), by cross-entropy.

    config: a RunConfig, of which only what the step needs is read.
    """
    model = made(**{**{name: getattr(config.model, name) for name in _sizes_of(made)}, **own})
    shape, vocabulary = (config.batch_size, config.tokens_per_sequence), config.model.vocab_size
    with device.torch:
        tokens, targets = torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)
    return TrainingSetup(model, tokens, loss=partial(cross_entropy, targets=targets))


def _sizes_of(made: Any) -> list[str]:
    """Return the sizes that a class takes by name."""
    if not plugins.signature(made):
        return []
    return [name for name in inspect.signature(made).parameters if name in SIZES]
