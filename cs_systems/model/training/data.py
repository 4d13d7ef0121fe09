"""Batches of a language model, by name of the function that samples them: `windows`, or a user's own.

`windows` takes (batch_size, context_length) tokens at random places of one long array; the targets are the tokens one
position later. A user's own function, `path.py:name`, is called as `get_batch(dataset, batch_size, context_length,
device)`, with a numpy array of int64 tokens and the name of a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.validation import shown

if TYPE_CHECKING:
    Dataset = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

KIND = "training.data"
ARGUMENTS = "dataset, batch_size, context_length, device"
FORM = f"a function ({ARGUMENTS}) that returns (inputs, targets)"
TOKENS = 1 << 20  # tokens of the dataset; 4 contexts if that is more

Batch = tuple[Tensor, Tensor]


def random_batches(
    name: str, vocab_size: int, shape: tuple[int, int], device: torch.device, seed: int, rank: int = 0
) -> Callable[[], Batch]:
    """Return a function that samples the next batch of shape (batch, context) from random tokens on the host.

    Each rank samples different windows of the same tokens. Raises ConfigError like `batch_function`.
    """
    sample = batch_function(name)
    dataset = numpy.random.default_rng(seed).integers(0, vocab_size, max(TOKENS, 4 * (shape[1] + 1)))
    random.seed(seed + rank)
    numpy.random.seed(seed + rank)
    return lambda: sample(dataset, *shape, device)


def windows(dataset: Dataset, batch_size: int, context_length: int, device: str) -> Batch:
    """Return inputs and targets, each (batch_size, context_length), from random places of the dataset."""
    places = torch.randint(len(dataset) - context_length, (batch_size, 1)) + torch.arange(context_length)
    tokens = torch.from_numpy(dataset)
    return tokens[places].to(device), tokens[places + 1].to(device)


def batch_function(name: str) -> Callable[[Dataset, int, int, torch.device], Batch]:
    """Return the function of that name; its tokens are moved to the device, if they are elsewhere, as int64.

    Raises:
        ConfigError: the function, or its result when it is called, has another form.
    """
    made = plugins.own_function(KIND, name, ARGUMENTS, FORM) if plugins.is_foreign(name) else windows

    def sample(dataset: Dataset, batch_size: int, context_length: int, device: torch.device) -> Batch:
        found: Any = made(dataset, batch_size, context_length, str(device))
        if not isinstance(found, tuple | list) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
            raise ConfigError(f"data {name} returned {shown(found)}; return a tuple of two tensors, (inputs, targets)")
        shape = (batch_size, context_length)
        if wrong := next((tuple(x.shape) for x in found if tuple(x.shape) != shape), None):
            raise ConfigError(
                f"data {name} returned a tensor of shape {wrong}; return two of shape {shape}, (batch_size, "
                "context_length)"
            )
        inputs, targets = (x.to(device, torch.int64) for x in found)
        return inputs, targets

    return sample
