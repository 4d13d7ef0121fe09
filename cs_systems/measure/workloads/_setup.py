"""Parts of a training step that a workload factory may give: a model, its batches, a loss, an optimizer and more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.validation import choices, did_you_mean, fields_checked, of_type, shown

_MAKES = {
    "optimizer": "a class such as torch.optim.AdamW, a function that takes the parameters and returns an optimizer, or "
    "a torch.optim.Optimizer of this model's parameters",
    "scheduler": "a function that takes the optimizer and returns a scheduler, or a scheduler of the optimizer that is "
    "given too",
}


def instance_or(other: str, model: Any) -> str:
    """Return what to give instead of an object that is not a module: an instance of the class, else `other`."""
    return f"give an instance, such as {model.__name__}(…)" if isinstance(model, type) else other


@fields_checked
@dataclass(frozen=True)
class TrainingSetup:
    """Training step of a model. A factory returns it, a mapping of the same names, or `(model, batch, loss)`.

    Compilation, checkpoints, precision, optimizer, mode and strategy of the configuration apply to it.

    Attributes:
        model: the model to train.
        batch: one batch, used in every step: a tensor, mapping, tuple, list, dataclass, or any nesting of them. A
            mapping becomes keyword arguments of the model, a tuple or list positional ones, as far as its forward
            takes them; the rest is left for the loss.
        batches: batches to use in turn instead of `batch`: a DataLoader or another iterable. Fetching one and copying
            it to the device is the phase `input`; at the end the iteration begins again.
        loss: `loss(outputs)` or `loss(outputs, batch)`, a scalar. Without it, the loss is the output's `loss`, or for a
            model that returns a tensor, its mean square.
        optimizer: a class or function that takes the parameters, or an optimizer of the model's parameters. Without it,
            the configuration's.
        scheduler: a function that takes the optimizer and returns a learning-rate scheduler, or a scheduler; it steps
            after the optimizer.
        clip_norm: largest norm of all gradients together, in the phase `clip`.
        accumulate: batches per step; their gradients are averaged.
        forward: `forward(model, batch)` → outputs, where the model is not called as described above.
    """

    model: nn.Module
    batch: Any = None
    batches: Iterable[Any] | None = None
    loss: Callable[..., Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
    clip_norm: float | None = None
    accumulate: int = 1
    forward: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"model is {shown(self.model)}; {instance_or('give an nn.Module', self.model)}")
        if self.batch is not None and self.batches is not None:
            raise ConfigError("batch and batches are both given; give only one of them")
        if self.batch is None and self.batches is None:
            raise ConfigError(
                "no batch is given, or it is None; give batch, which every step uses, or batches, whose items the "
                "steps use in turn"
            )
        if self.batches is not None and not isinstance(self.batches, Iterable):
            raise ConfigError(
                f"batches is {shown(self.batches)}; give a list or DataLoader of batches, or a single batch as batch "
                "(in run() as inputs)"
            )
        if isinstance(self.batches, Tensor):
            raise ConfigError(
                "batches is a tensor, which is one batch; give it as batch (in run() as inputs), or give a list of "
                "batches"
            )
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate!r}; it must be a whole number of at least 1")
        of_type(self, int | float | None, "a number above 0", "clip_norm")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm is {self.clip_norm!r}; it must be above 0")
        for name, part, forms in (
            ("loss", self.loss, ("outputs", "outputs, batch")),
            ("forward", self.forward, ("model, batch",)),
        ):
            wanted = " or ".join(f"{name}({form})" for form in forms)
            if part is not None and not callable(part):
                targets = ", with the targets in the batch" if name == "loss" else ""
                raise ConfigError(f"{name} is {shown(part)}; give a function {wanted}{targets}")
            if part is not None and not any(plugins.takes(part, *form.split(", ")) for form in forms):
                raise ConfigError(f"{name}{plugins.signature(part)} has other arguments; write {wanted}")
        for name, part, is_made in (
            ("optimizer", self.optimizer, isinstance(self.optimizer, Optimizer)),
            ("scheduler", self.scheduler, callable(getattr(self.scheduler, "step", None))),
        ):
            if part is not None and not callable(part) and not is_made:
                raise ConfigError(f"{name} is {shown(part)}; give {_MAKES[name]}")
        check_scheduler(self.scheduler, self.optimizer)

    @classmethod
    def of(cls, made: Any) -> TrainingSetup | None:
        """Return a factory's result as a setup, or None if it has another form. Raises ConfigError."""
        if isinstance(made, cls):
            return made
        if isinstance(made, Mapping) and "model" in made:
            known = [field.name for field in fields(cls)]
            if unknown := [str(name) for name in made if name not in known]:
                remedy = choices(did_you_mean(unknown[0], known), known)
                raise ConfigError(f"a training setup has no field {unknown[0]!r}; {remedy}")
            return cls(**made)
        if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
            batch, loss = made[1], made[2] if len(made) == 3 else None
            return cls(made[0], batches=batch, loss=loss) if _is_loader(batch) else cls(made[0], batch, loss=loss)
        return None


def check_scheduler(scheduler: Any, optimizer: Any, by_option: str | None = None) -> None:
    """Raise ConfigError if a scheduler changes another optimizer than the one that steps.

    Args:
        scheduler: a scheduler, or a function that makes one.
        optimizer: the optimizer that steps, a function that makes it, or None if the step makes its own.
        by_option: the configuration's optimizer, if it has replaced the scheduler's.
    """
    scheduled = getattr(scheduler, "optimizer", None)
    groups = getattr(optimizer, "param_groups", None)  # a wrapper shares the groups with the optimizer inside it
    if isinstance(scheduler, type) or not isinstance(scheduled, Optimizer) or scheduled.param_groups is groups:
        return
    name = type(scheduled).__name__
    if by_option:
        raise ConfigError(
            f"optimizer {by_option} of the configuration replaces the {name} that the scheduler changes; leave out "
            f"optimizer {by_option}, or give scheduler=lambda optimizer: …"
        )
    never = "never steps, because the step makes an optimizer of its own"
    raise ConfigError(
        f"the scheduler changes an optimizer ({name}) that {never if groups is None else 'is not the one that steps'}; "
        f"give that {name} as optimizer=, or give scheduler=lambda optimizer: …"
    )


def _is_loader(batch: Any) -> bool:
    """Return whether `batch` is an iterable of batches, such as a DataLoader, a dataset or a generator."""
    from torch.utils.data import DataLoader, IterableDataset

    is_iterator = hasattr(batch, "__next__") and hasattr(batch, "__iter__")
    return isinstance(batch, (DataLoader, IterableDataset)) or is_iterator
