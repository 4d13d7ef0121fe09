"""Updates of copies of some of an optimizer's parameters, which leave the program's own as they are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def copied(value: Any) -> Any:
    """Return a copy of a value that an optimizer keeps."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


class CopiedUpdate:
    """Optimizer of the same kind with copies of some parameters and of their states, without the program's hooks.

    chosen: the parameters. gradient_of: returns the gradient of the copy of a parameter. state_of: copies a value of
    its state. form: options of the optimizer and all its groups in place of theirs.
    """

    def __init__(
        self,
        like: Optimizer,
        chosen: Sequence[Tensor],
        gradient_of: Callable[[Tensor], Tensor],
        state_of: Callable[[Any], Any] = copied,
        form: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        groups, states, known = list[dict[str, Any]](), dict[Tensor, dict[str, Any]](), {*map(id, chosen)}
        for group in like.param_groups:
            copies = []
            for parameter in (each for each in group["params"] if id(each) in known):
                own = nn.Parameter(parameter.detach().clone())
                own.grad = gradient_of(parameter)
                if state := like.state.get(parameter):
                    states[own] = {name: state_of(value) for name, value in state.items()}
                copies.append(own)
            if copies:
                groups.append({**group, "params": copies, **form})
        kind: Any = type(like)  # each subclass has defaults of its own
        self.optimizer: Optimizer = kind(groups, **form)
        self.optimizer.state.update(states)
        self._step = inspect.unwrap(type(like).step)

    def update(self) -> None:
        self._step(self.optimizer)
