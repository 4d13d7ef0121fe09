"""Changes to a script's models, made when it creates an optimizer for them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any


def at_optimizer(change: Callable[[Any], object]) -> Callable[[], bool]:
    """Call `change` with each model of every optimizer that the script makes from now on, once per model.

    Returns the function that tells whether there was any.
    """
    from torch.optim import Optimizer

    made, changed = Optimizer.__init__, set[int]()

    @functools.wraps(made)
    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for model in models_of(self):
            if id(model) not in changed:
                changed.add(id(model))
                change(model)

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
