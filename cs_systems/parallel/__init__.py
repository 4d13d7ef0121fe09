"""Parallel strategies, one file each. Adding one is one new file that exports `STRATEGY = ParallelStrategy(...)`.

A strategy trains one model on N ranks, each with its part of the batch, to the parameters that one process reaches on
the whole batch. Each rank calls

    strategy = compose("ddp_bucketed+zero1", bucket_size_mb=25)
    model = strategy.wrap(model)
    optimizer = strategy.make_optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(model(part of the batch)).backward()
    strategy.finish_gradients(model)
    optimizer.step()

after `torch.distributed.init_process_group` (NCCL on GPUs, gloo on CPUs). Ψ below is the bytes of all trainable
parameters; volumes are bytes that a rank sends in a step, in rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cs_systems import plugins
from cs_systems.config import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


def _unchanged(model: nn.Module, **options: Any) -> nn.Module:
    return model


def _nothing(model: nn.Module) -> None:
    pass


def _plain_optimizer(
    params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    return cls(params, **options)


@dataclass(frozen=True)
class ParallelStrategy:
    """One way to share the work of a step. Each hook is the identity unless given, so that strategies compose.

    splits: what each rank has only a part of: "batch", "optimizer", "gradients", "parameters". Written out as it is
        here, like `options`: a process without torch reads both from the file.
    wrap: `(model, **options) -> model`, before the optimizer is made.
    finish_gradients: `(wrapped model)`, after backward and before the optimizer's step.
    make_optimizer: `(params, cls, **kw)` makes what steps like `cls(params, **kw)`.
    sent_bytes: `(Ψ in bytes, world size)` → bytes that a rank sends in a step by formula; None where it is not known.
    options: what `wrap` can be told, by name.
    one_dtype: whether it takes only models whose parameters share one dtype.
    for_unused: the options that it needs where a batch may leave a parameter without a gradient.
    """

    splits: frozenset[str] = frozenset({"batch"})
    wrap: Callable[..., nn.Module] = _unchanged
    finish_gradients: Callable[[nn.Module], None] = _nothing
    make_optimizer: Callable[..., torch.optim.Optimizer] = _plain_optimizer
    sent_bytes: Callable[[int, int], float] | None = None
    options: tuple[str, ...] = ()
    one_dtype: bool = False
    for_unused: Mapping[str, Any] = field(default_factory=dict)


def check(name: str, options: Iterable[str] = ()) -> list[str]:
    """The parts of `"ddp_bucketed+zero1"`. Reads their files, and imports none of them, nor torch.

    Raises ConfigError for an unknown strategy or option and for a composition that makes no sense.
    """
    parts = [plugins.check("parallel", part) for part in name.split("+")]
    declared = {part: plugins.declared("parallel", part) for part in parts}
    _check_sense(name, {part: frozenset(said.get("splits", {"batch"})) for part, said in declared.items()})
    known = [option for said in declared.values() for option in said.get("options", ())]
    for option in options:
        if option not in known:
            raise ConfigError(f"{name} has no option {option!r}: it knows {', '.join(known) or 'none'}")
    return parts


def compose(name: str, **options: Any) -> ParallelStrategy:
    """The strategy of that name, or several joined by `+`; `options` go to the wrap of the part that knows them.

    Raises ConfigError as `check` does.
    """
    parts: dict[str, ParallelStrategy] = {part: plugins.get("parallel", part) for part in check(name, options)}
    volumes = [part.sent_bytes for part in parts.values()]

    def wrap(model: nn.Module) -> nn.Module:
        for part in parts.values():
            model = part.wrap(model, **{key: value for key, value in options.items() if key in part.options})
        return model

    def finish_gradients(model: nn.Module) -> None:
        for part in parts.values():
            part.finish_gradients(model)

    def sent_bytes(parameter_bytes: int, world_size: int) -> float:
        return sum(volume(parameter_bytes, world_size) for volume in volumes if volume is not None)

    makers = [part.make_optimizer for part in parts.values() if part.make_optimizer is not _plain_optimizer]
    return ParallelStrategy(
        splits=frozenset().union(*(part.splits for part in parts.values())),
        wrap=wrap,
        finish_gradients=finish_gradients,
        make_optimizer=makers[0] if makers else _plain_optimizer,
        sent_bytes=None if None in volumes else sent_bytes,
        options=tuple(option for part in parts.values() for option in part.options),
        one_dtype=any(part.one_dtype for part in parts.values()),
        for_unused={key: value for part in parts.values() for key, value in part.for_unused.items()},
    )


def _check_sense(name: str, parts: Mapping[str, frozenset[str]]) -> None:
    """Every quantity is split once, and the batch is: else nobody would average the gradients."""
    if len(parts) < name.count("+") + 1:
        raise ConfigError(f"{name} names a strategy twice: name each once")
    owners: dict[str, str] = {}
    for part, splits in parts.items():
        if not splits and len(parts) > 1:
            raise ConfigError(f"{name} makes no sense: {part} shares nothing, leave it out")
        for thing in sorted(splits):
            if thing in owners:
                raise ConfigError(f"{name} makes no sense: {owners[thing]} and {part} both split the {thing}: take one")
            owners[thing] = part
    if owners and "batch" not in owners:
        raise ConfigError(f"{name} leaves the gradients of the ranks different: write ddp_bucketed+{name}")
