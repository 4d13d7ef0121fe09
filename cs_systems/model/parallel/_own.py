"""Hooks of a parallel strategy from a user's own code, in the forms of `core.own_strategy`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.own_strategy import AFTER, BEFORE, FORMS, GATHER, Form, companions, form_of
from cs_systems.core.validation import shown
from cs_systems.formulas.communication import averaging_bytes, owners_bytes
from cs_systems.model.parallel._unwrapped import unwrapped_state

FINISH = "finish_gradient_synchronization"
OWN = "own_object"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SENT = {frozenset({"batch"}): averaging_bytes, frozenset({"optimizer"}): owners_bytes}


def fields_of(name: str, made: Any) -> dict[str, Any]:
    """Return the fields of a ParallelStrategy for the object named `path.py:name`.

    Raises ConfigError if it has no form.
    """
    if not callable(made):
        raise ConfigError(f"strategy {name} is {shown(made)}; name {FORMS}")
    form = form_of(name)
    functions = {part: plugins.sibling(name, each) for part, each in companions(name.rpartition(":")[2]).items()}
    own = {"make_optimizer": made} if form.kind == "optimizer" else _Own(name, made, form, functions).hooks_of_a_step()
    return {**form.declared, "counted": False, "sent_bytes": SENT.get(form.splits), **own}


class _Own:
    """Hooks of a user's own module or functions; it holds the optimizer, which the functions of a step take.

    made: the class or function. functions: the functions that belong to it, by BEFORE, AFTER and GATHER.
    """

    def __init__(self, name: str, made: Callable[..., Any], form: Form, functions: Mapping[str, Any]) -> None:
        self.name, self.made, self.form = name, made, form
        self.before, self.after, self.gather = functions[BEFORE], functions[AFTER], functions[GATHER]
        self.optimizer: Any = None

    def hooks_of_a_step(self) -> dict[str, Any]:
        return {
            "wrap": self.wrap,
            "before_forward": self.before_forward,
            "finish_gradients": self.finish_gradients,
            "make_optimizer": self.make_optimizer,
            "whole_parameters": self.whole_parameters,
        }

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the wrapped model; the model itself if the code only registers hooks, or has no module."""
        if self.form.kind == "functions":
            return model
        if missing := [each for each, is_needed in self.form.options.items() if is_needed and each not in options]:
            raise ConfigError(
                f"strategy {self.name}{plugins.signature(self.made)} requires {', '.join(missing)}; add "
                f"{' and '.join(map(self._given_as, missing))}"
            )
        before = sum(p.numel() for p in model.parameters())
        wrapped = self.made(model, **{key: _value(key, value) for key, value in options.items()})
        wrapped = model if wrapped is None else wrapped
        if callable(wrapped) and getattr(wrapped, "module", None) is model:
            wrapped = wrapped if isinstance(wrapped, nn.Module) else _AsModule(model, wrapped)
        if not isinstance(wrapped, nn.Module):
            raise ConfigError(f"strategy {self.name} returned {shown(wrapped)}, which is not a module; name {FORMS}")
        if "parameters" not in self.form.splits and sum(p.numel() for p in wrapped.parameters()) < before:
            raise ConfigError(
                f"strategy {self.name} leaves a rank fewer parameters, but its name does not say so; name a class or "
                f"function with fsdp in its name, or add a method {GATHER}() that returns the whole parameters by name"
            )
        return wrapped

    def _given_as(self, option: str) -> str:
        return "--bucket-size-mb 25" if option == "bucket_size_mb" else f":{option}=VALUE to its name"

    def make_optimizer(
        self, params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        self.optimizer = made = cls(params, **options)
        return made

    def before_forward(self, model: nn.Module) -> None:
        if self.before:
            self.before(getattr(model, OWN, model), self.optimizer)

    def finish_gradients(self, model: nn.Module) -> None:
        model = getattr(model, OWN, model)
        if self.after:
            arguments = (model, self.optimizer) if plugins.takes(self.after, model, self.optimizer) else (model,)
            self.after(*arguments)
        elif finish := getattr(model, FINISH, None):
            finish()

    def whole_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        own = getattr(model, OWN, model)
        if self.gather:
            return self.gather(own)  # type: ignore[no-any-return]
        gather = getattr(own, GATHER, None)
        return gather() if gather else unwrapped_state(model)


class _AsModule(nn.Module):
    """Module around a user's object that holds the model as `module` and calls it, but is not an nn.Module."""

    def __init__(self, model: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.module = model
        self.own_object = own

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.own_object(*inputs, **named)


def _value(option: str, value: Any) -> Any:
    """Return an option's value: a torch.dtype for options with names such as compute_dtype."""
    return DTYPES.get(value, value) if option.endswith("dtype") else value
