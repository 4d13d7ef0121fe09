"""Changes to a script's models, made when it creates an optimizer for them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any


def at_optimizer(change: Callable[[Any], bool | None]) -> Callable[[], bool]:
    """Call `change` with each model of every optimizer that the script makes from now on, once per model.

    It returns False if the model has nothing to change. Returns the function that tells whether any was changed.
    """
    from torch.optim import Optimizer

    made, met, changed = Optimizer.__init__, set[int](), set[int]()

    @functools.wraps(made)
    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for model in models_of(self):
            if id(model) not in met:
                met.add(id(model))
                if change(model) is not False:
                    changed.add(id(model))

    Optimizer.__init__ = followed  # type: ignore[method-assign]
    return lambda: bool(changed)


def models_of(optimizer: Any) -> list[Any]:
    """Return the outermost modules that hold parameters of an optimizer."""
    from torch import nn

    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    holding = [each for each in modules if any(id(parameter) in mine for parameter in each.parameters())]
    inside = {id(part) for each in holding for part in each.modules() if part is not each}
    return [each for each in holding if id(each) not in inside]


def has_convolutions(model: Any) -> bool:
    """Return whether a model has a convolution among its modules."""
    return any(map(_is_convolution, model.modules()))


def any_convolutions() -> bool:
    """Return whether this process has a module that is a convolution, trained or not."""
    return any(map(_is_convolution, gc.get_objects()))


def _is_convolution(thing: object) -> bool:
    from torch import nn

    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return issubclass(type(thing), kinds)
