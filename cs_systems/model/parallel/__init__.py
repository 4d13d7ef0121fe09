"""Parallel strategies, one file each; a new file exports `STRATEGY = ParallelStrategy(...)`.

A strategy trains one model on N ranks, each on its share of the batch, and reaches the parameters that one process
reaches on the whole batch. Each rank calls

    strategy = compose("ddp_bucketed+zero1", bucket_size_mb=25)
    part, parts = strategy.part_of_batch(rank, world_size)
    model = strategy.wrap(model)
    optimizer = strategy.make_optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(model(batch.chunk(parts)[part])).backward()
    strategy.finish_gradients(model)
    optimizer.step()

after `torch.distributed.init_process_group` (NCCL on GPUs, gloo on CPUs). `fsdp+tp` arranges the ranks in two
dimensions: `tp_degree` neighbours take the same rows and divide the blocks, the others take other rows. Ψ below is the
bytes of all trainable parameters. Volumes, in `formulas/communication`, are the bytes that a rank sends in a step, with
ring collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError, RunConfig, one_of
from cs_systems.core import own_strategy, plugins
from cs_systems.core.fields import Subject
from cs_systems.core.validation import did_you_mean, shown
from cs_systems.formulas.communication import Payload
from cs_systems.formulas.rank_layout import (
    Takes,
    check_division,
    check_layout,
    options_of,
    require_tp_degree,
    splits_of,
)
from cs_systems.model.parallel._unwrapped import unwrapped_state

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


_NARROW = {"compute_dtype", "comm_dtype"}  # options with the values bf16 and fp16


@dataclass(frozen=True)
class ParallelStrategy:
    """Strategy for dividing the work of a step among ranks.

    A hook that is not given does nothing, so that strategies compose.

    splits: objects that are divided, so that each rank has only a share: "batch", "optimizer", "gradients",
        "parameters", "features" (heads and d_ff of each block: tensor parallelism). Must be literals, like `overlaps`,
        `compared` and `options`, because a process without torch reads them from the file.
    overlaps: whether it sends gradients while backward computes others.
    counted: whether this package starts all its collectives, so that they can be counted.
    wrap: `(model, **options) -> model`, before the optimizer is made.
    after_wrap: `(wrapped model)`, once every strategy of a composition has wrapped it.
    before_forward: `(wrapped model)`, before the forward of each step.
    finish_gradients: `(wrapped model)`, after backward and before the optimizer's step.
    make_optimizer: `(params, cls, **kw)` returns an optimizer that steps like `cls(params, **kw)`.
    whole_parameters: `(wrapped model)` returns the whole parameters by their names without the wrapper.
    sent_bytes: `(payload of a rank's rows, world size)` → bytes that a rank sends in a step by formula; None if
        unknown.
    options: the options of `wrap` by name, with their allowed values: a "flag", a "count" (a whole number of at least
        1), a "size" (a number above 0), "any", or one of these names. "… for NCCL": omit it on a CPU.
    one_dtype: whether it takes only models with a single dtype of parameters.
    for_unused: the options that it needs if a batch may leave a parameter without a gradient.
    buckets: bytes that it always holds in addition to the parameters, in Ψ. bucket_view: the option that makes
        gradients views of the buckets; None without such an option, or if it is off in a composition.
    gradient_copies: bytes of copies of gradients that it holds after backward in addition to the gradients, in Ψ.
    tp_degree: the number of neighbouring ranks that take the same rows; None: all.
    compared: its place among the strategies that `cs-systems parallel` compares if none is named; None: it is left out.
    """

    splits: frozenset[str] = frozenset({"batch"})
    overlaps: bool = False
    counted: bool = True
    wrap: Callable[..., nn.Module] = _unchanged
    after_wrap: Callable[[nn.Module], None] = _nothing
    before_forward: Callable[[nn.Module], None] = _nothing
    finish_gradients: Callable[[nn.Module], None] = _nothing
    make_optimizer: Callable[..., torch.optim.Optimizer] = _plain_optimizer
    whole_parameters: Callable[[nn.Module], Mapping[str, torch.Tensor]] = unwrapped_state
    sent_bytes: Callable[[Payload, int], float] | None = None
    options: Mapping[str, Takes] = field(default_factory=dict)
    one_dtype: bool = False
    for_unused: Mapping[str, Any] = field(default_factory=dict)
    buckets: float = 0.0
    bucket_view: str | None = None
    gradient_copies: float = 0.0
    tp_degree: int | None = 1
    compared: int | None = None

    def part_of_batch(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return (index, count) of the equal parts of the batch's rows, for the part that this rank takes."""
        degree = check_layout(world_size, self.tp_degree, self.splits)
        return rank // degree, world_size // degree

    def grad_scaler(self, device: str, *, enabled: bool = True) -> torch.amp.GradScaler:
        """Return fp16's gradient scaler for a type of device; it does nothing unless enabled.

        If each rank has only a share of the gradients, all ranks skip a step that overflows on one rank.
        """
        if not enabled or not {"gradients", "parameters", "features"} & self.splits:
            from torch.amp import GradScaler

            return GradScaler(device, enabled=enabled)
        from cs_systems.model.parallel._scaler import PartsScaler

        return PartsScaler(device)


def check(name: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the strategies in a name such as "ddp_bucketed+zero1"; read their files without importing them or torch.

    Raises ConfigError for an unknown strategy or option, for an invalid value of an option, and for an invalid
    composition.
    """
    options, parts = options or {}, name.split("+")
    if any(part.partition(":")[0] in plugins.names("parallel") for part in parts if ":" in part):
        raise ConfigError(
            f"strategy {name!r} has a colon after a built-in strategy; give its options as strategy_args, such as "
            "strategy_args=('comm_dtype=bf16',)"
        )
    declared = {part: own_strategy.declared(part) for part in parts}
    splits = {part: frozenset(found.get("splits", {"batch"})) for part, found in declared.items()}
    known: dict[str, Mapping[str, Takes]] = {part: found.get("options", {}) for part, found in declared.items()}
    any_of = {option: takes for of_part in known.values() for option, takes in of_part.items()}
    for option, value in options.items():
        if option not in any_of:
            others = f", or choose among {', '.join(any_of)}" if any_of else ""
            remedy = did_you_mean(option, any_of) or f"leave out {option}{others}"
            raise ConfigError(f"strategy {name} has no option {option!r}; {remedy}")
        _check_value(option, value, any_of[option])
    _check_mesh(name, splits, known, has_degree="tp_degree" in options)
    _check_composition(name, splits)
    return parts


def check_config(config: RunConfig) -> None:
    """Raise ConfigError unless a cell's strategy, ranks, model and device fit together, without importing torch.

    This includes the checks of `check`.
    """
    options = config.strategy_options
    check(config.strategy, options)
    if options and config.device == "cpu":
        known = options_of(config.strategy)
        for option in (name for name, value in options.items() if value and "for NCCL" in known[name]):
            raise ConfigError(f"{option} requires NCCL, which needs GPUs; leave it out on a CPU")
    if "features" in (splits := splits_of(config.strategy)):
        check_layout(config.world_size, config.tp_degree, splits)
        if config.subject is not Subject.OWN:  # layers of other models are known only after they are built
            degree = config.tp_degree if "batch" in splits else None
            check_division(config.model.num_heads, config.model.d_ff, config.world_size, degree)


def compose(name: str, **options: Any) -> ParallelStrategy:
    """Return the strategy of that name, or several joined by `+`; `options` go to the wrap of each that declares them.

    Raises ConfigError as `check` does.
    """
    parts = {part: _found(part) for part in check(name, options)}
    # tensor parallelism wraps first; the others shard, average and update the parameters that remain on a rank
    inside_out = sorted(parts.values(), key=lambda part: "features" not in part.splits)
    splits = frozenset[str]().union(*(part.splits for part in parts.values()))
    tp_degree = options.get("tp_degree") if "features" in splits else 1
    given = {key for key, value in options.items() if value is not None}

    def wrap(model: nn.Module) -> nn.Module:
        require_tp_degree(tp_degree, splits)
        for part in inside_out:
            model = part.wrap(model, **{key: value for key, value in options.items() if key in part.options})
        for part in inside_out:
            part.after_wrap(model)
        return model

    def before_forward(model: nn.Module) -> None:
        for part in parts.values():
            part.before_forward(model)

    def finish_gradients(model: nn.Module) -> None:
        for part in parts.values():
            part.finish_gradients(model)

    def make_optimizer(
        params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        for part in reversed(inside_out):
            if part.make_optimizer is not _plain_optimizer:
                cls = _making(part.make_optimizer, cls)
        return cls(params, **options)

    gathering = [part.whole_parameters for part in parts.values() if part.whole_parameters is not unwrapped_state]

    def sent_bytes(payload: Payload, world_size: int) -> float:
        degree = check_layout(world_size, tp_degree, splits)
        volume = 0.0
        for part in parts.values():
            assert part.sent_bytes is not None
            own = payload.narrowed() if _NARROW & given & {*part.options} else payload
            if "features" in part.splits:
                volume += part.sent_bytes(own, degree)
            else:
                volume += part.sent_bytes(own.on_tensor_rank(degree), world_size // degree)
        return volume

    return ParallelStrategy(
        splits=splits,
        overlaps=any(part.overlaps for part in parts.values()),
        counted=all(part.counted for part in parts.values()),
        wrap=wrap,
        before_forward=before_forward,
        finish_gradients=finish_gradients,
        whole_parameters=next(iter(gathering), unwrapped_state),
        make_optimizer=make_optimizer,
        sent_bytes=None if any(part.sent_bytes is None for part in parts.values()) else sent_bytes,
        options={option: takes for part in parts.values() for option, takes in part.options.items()},
        one_dtype=any(part.one_dtype for part in parts.values()),
        buckets=sum(part.buckets for part in parts.values()),
        gradient_copies=sum(part.gradient_copies for part in parts.values()),
        bucket_view=next((part.bucket_view for part in parts.values() if options.get(part.bucket_view or "")), None),
        for_unused={key: value for part in parts.values() for key, value in part.for_unused.items()},
        tp_degree=tp_degree,
    )


def _found(name: str) -> ParallelStrategy:
    """Return one strategy, built-in or the user's own."""
    made = plugins.get("parallel", name)
    if isinstance(made, ParallelStrategy):
        return made
    from cs_systems.model.parallel._own import fields_of  # imports torch

    return ParallelStrategy(**fields_of(name, made))


def _making(make: Callable[..., Any], cls: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, **options: make(params, cls, **options)


def _check_value(option: str, value: Any, takes: Takes) -> None:
    """Raise ConfigError unless an option's value is allowed.

    Dtypes and None, which only programs give, are not checked.
    """
    if not isinstance(value, str | bool | int | float):
        return
    if not isinstance(takes, str):
        one_of(option, str(value), takes)
        return
    if takes == "any":
        return
    kind, is_number = takes.removesuffix(" for NCCL"), not isinstance(value, str | bool)
    suits, remedy = {
        "flag": (isinstance(value, bool), "it must be true or false in small letters, or in Python True or False"),
        "count": (is_number and isinstance(value, int) and value >= 1, "it must be a whole number of at least 1"),
        "size": (is_number and float(value) > 0, "it must be a number above 0"),
    }[kind]
    if not suits:
        raise ConfigError(f"{option} is {shown(value)}; {remedy}")


def _check_composition(name: str, parts: Mapping[str, frozenset[str]]) -> None:
    """Raise ConfigError unless a composition splits each quantity at most once, and all ranks get the same gradients.

    The gradients are the same if the batch or each block is split, or nothing is.
    """
    if len(parts) < name.count("+") + 1:
        raise ConfigError(f"strategy {name} names a part twice; name each once")
    owners: dict[str, str] = {}
    for part, splits in parts.items():
        if not splits and len(parts) > 1:
            raise ConfigError(f"{name} cannot be combined, because {part} divides nothing; leave out {part}")
        for thing in sorted(splits):
            if thing in owners:
                both = f"{owners[thing]} and {part} both divide the {thing}"
                raise ConfigError(f"{name} cannot be combined, because {both}; choose one")
            owners[thing] = part
    if owners and "batch" not in owners and set(owners) != {"features"}:
        raise ConfigError(f"strategy {name} alone does not average gradients over the ranks; use ddp_bucketed+{name}")


def _check_mesh(
    name: str, splits: Mapping[str, frozenset[str]], known: Mapping[str, Mapping[str, Takes]], has_degree: bool
) -> None:
    """Raise ConfigError if a strategy that shares the ranks with tensor parallelism has no option `tp_degree`.

    Such a strategy does not support ranks in two dimensions. Also raised for a `tp_degree` without tensor parallelism.
    """
    divider = next((part for part, things in splits.items() if "features" in things), None)
    if divider is None:
        if has_degree:
            fits = all("tp_degree" in options for options in known.values())
            remedy = f"use {name}+tp, or leave out tp_degree" if fits else "leave out tp_degree, or use fsdp+tp"
            raise ConfigError(
                f"tp_degree requires tensor parallelism, which {name} does not include; {remedy}", "tp_degree"
            )
        return
    for part, options in known.items():
        if "tp_degree" not in options:
            raise ConfigError(
                f"{name} cannot be combined, because {part} does not support {divider}; leave out {part} or {divider}, "
                f"or use fsdp+{divider} with tp_degree",
                "tp_degree",
            )
