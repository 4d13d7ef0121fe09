"""Parameters of a module, also where its class replaces `parameters` by a method of its own, as in meta-learning."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a module and of the modules inside it; None without any.

    A replaced method may return a list, which is no iterator, or the parameters of another module.
    """
    return next(nn.Module.parameters(module), None)


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a module without those of the modules inside it."""
    return nn.Module.parameters(module, recurse=False)
