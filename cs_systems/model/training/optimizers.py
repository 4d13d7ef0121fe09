"""Optimizers, by name: those in config.OPTIMIZERS, and a user's own, `path.py:name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.optimizers import OPTIMIZERS, Form
from cs_systems.core.validation import shown
from cs_systems.model.training.adamw import AdamW as AdamW
from cs_systems.model.training.master_adamw import MOMENTS, MasterAdamW

KIND = "training.optimizers"
FORMS = "a class such as AdamW(params, lr=1e-3, weight_decay=0.01), or a function of the parameters that returns one"
# values of the built-in optimizers, which a user's own gets if its signature accepts them
HYPERPARAMETERS = {
    name: parameter.default
    for name, parameter in inspect.signature(AdamW).parameters.items()
    if parameter.default is not parameter.empty
}


def optimizer_class(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return (class, options) of the optimizer `name`.

    `default` is not accepted: the caller resolves it.

    Raises:
        ConfigError: a user's own optimizer cannot be called with parameters.
    """
    if plugins.is_foreign(name):
        return _own(name)
    if name in MOMENTS:
        return MasterAdamW, {"moments": MOMENTS[name]}
    if (form := OPTIMIZERS[name].form) is Form.EACH:
        return AdamW, {}
    return torch.optim.AdamW, {"fused": form is Form.FUSED, "foreach": form is Form.FOREACH}


def make_optimizer(name: str, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of that name for one process."""
    cls, own = optimizer_class(name)
    return cls(params, **own, **options)


def _own(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return a user's own optimizer, with those HYPERPARAMETERS that its signature accepts."""
    made = plugins.get(KIND, name)
    if callable(made) and not isinstance(made, type) and plugins.takes(made) and not plugins.takes(made, []):
        made = made()  # such as get_adamw_cls of a course's adapters
    if not callable(made):
        raise ConfigError(f"optimizer {name} is {shown(made)}; name {FORMS}")
    written = plugins.signature(made)
    others = [*inspect.signature(made).parameters.values()][1:] if written else []
    by_name = {p.name for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    options = {option: value for option, value in HYPERPARAMETERS.items() if option in by_name}
    if plugins.takes(made, [], **options):
        return made, options
    needed = [p.name for p in others if p.default is p.empty and p.name in by_name - {*options}]
    if any(plugins.takes_a_class(argument) for argument in needed):
        raise ConfigError(
            f"optimizer {name}{written} wraps the class of another optimizer; name it as strategy, such as "
            f"ddp_bucketed+{name}"
        )
    what = f"requires {', '.join(needed)}" if needed else "does not take the parameters as its first argument"
    raise ConfigError(f"optimizer {name}{written} {what}; name {FORMS}")
