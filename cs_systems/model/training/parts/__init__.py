"""Alternative implementations of parts of the built-in model, one file each.

A part exports `PART = Part(...)`; the file's name is its name for `--parts`. The plain modules of `transformer.py` are
the reference: a part computes the same function, within its tolerance, with the parameters of the same names in
`state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.parts import PACKAGE as PACKAGE
from cs_systems.core.parts import one_of_each
from cs_systems.model.training.master_adamw import MasterAdamW
from cs_systems.model.transformer import BasicTransformerLM


class Update(Protocol):
    """Update of the parameters that runs during backward."""

    def begin(self) -> None:
        """Prepare the update, before backward."""

    def finish(self) -> None:
        """Complete the update, after backward."""


HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def always_available(config: RunConfig) -> str | None:
    return None


@dataclass(frozen=True)
class Part:
    """Alternative implementation of something that the plain model computes.

    Attributes:
        replaces: name of the replaced computation; two parts with the same name exclude each other. One word, such as
            "projections", as a literal keyword, because a process without torch reads it from the file.
        apply: changes a BasicTransformerLM in place.
        classes: class of a module → class that replaces it, with the same parameters. `apply` of all parts runs first,
            so that a part can replace modules made by another.
        in_blocks: like `classes`, but only for modules in blocks.
        head_loss: `(hidden (rows, D), lm_head's weight (V, D), targets (rows,)) -> loss`, in place of lm_head and
            cross-entropy; None for a part of the model.
        during_backward: `(model, optimizer) -> Update`, in place of the optimizer's step; None for other parts.
        unavailable: returns the reason why the part cannot run in a cell, with the remedy, or None.
        keeps_buffers: whether it reads tensors of a compiled block after the block has run, so that the block must not
            reuse their memory.
        computes_in: the precision of its matrix products, if it differs from the cell's; a literal, like `replaces`.
        on_ranks: whether it works under a strategy of several ranks.
        tolerance: dtype name → largest relative error of outputs and gradients against float64.
    """

    replaces: str
    apply: Callable[[nn.Module], None] = lambda model: None
    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    in_blocks: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    head_loss: HeadLoss | None = None
    during_backward: Callable[[nn.Module, MasterAdamW], Update] | None = None
    unavailable: Callable[[RunConfig], str | None] = always_available
    keeps_buffers: bool = False
    computes_in: str | None = None
    on_ranks: bool = False
    tolerance: Mapping[str, float] = field(
        default_factory=lambda: {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}
    )


def chosen(names: Iterable[str]) -> dict[str, Part]:
    """Return the parts with these names. Raises ConfigError for an unknown name, and for two that replace the same."""
    parts: dict[str, Part] = {name: plugins.get(PACKAGE, name) for name in names}
    for name, part in parts.items():
        if not isinstance(part, Part):
            raise ConfigError(
                f"{name} is of type {type(part).__name__}; make it a Part of cs_systems.model.training.parts"
            )
    one_of_each({name: part.replaces for name, part in parts.items()})
    return parts


def apply(chosen: Iterable[Part], model: nn.Module) -> None:
    """Apply the parts to a BasicTransformerLM in place; names of parameters stay the same."""
    assert isinstance(model, BasicTransformerLM)
    chosen = tuple(chosen)
    for part in chosen:
        part.apply(model)
    for part in chosen:
        _replace(model, part.classes)
    for part in chosen:
        _replace(model.layers, part.in_blocks)


def _replace(root: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    for module in root.modules():
        if replacing := classes.get(type(module)):
            module.__class__ = replacing  # parameters, hooks and names stay the same


def unavailable(config: RunConfig, parts: Mapping[str, Part]) -> str | None:
    """Return the reason why the parts of a cell, given by name, cannot run, with the remedy, or None."""
    for name, part in parts.items():
        if config.is_distributed and not part.on_ranks:
            return (
                f"{name} does not support several ranks; leave it out of parts, or use one process without a strategy"
            )
        if reason := part.unavailable(config):
            return f"{name}: {reason}"
    return None
