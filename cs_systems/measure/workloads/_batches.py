"""Batches of any nesting: copying them to a device, and passing them to a model and a loss."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.core.statistics import total
from cs_systems.record import Ran

_ID_DTYPES = (torch.int64, torch.int32, torch.int16)  # integers; bool and uint8 are masks
_ATOMS = (bool, int, float, str, bytes, nn.Module, type(None))  # hold no tensor of a batch


def placed(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the batch with all tensors on the device; floating-point tensors in `dtype`, if given.

    Mappings (also the BatchEncoding of tokenizers) become dicts; tuples, lists, named tuples and dataclasses keep their
    types. For other objects with a method `to`, `to(device)` is called; the rest is unchanged.
    """
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: placed(part, device, dtype) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [placed(part, device, dtype) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: placed(getattr(value, name), device, dtype) for name in names})
    if callable(move := getattr(value, "to", None)):
        return move(device)
    return value


def call_with(model: nn.Module, signature: inspect.Signature, run: Callable[..., Any], batch: Any) -> Any:
    """Call `run` with the parts of the batch that the model's forward accepts. Raises ConfigError if it accepts none.

    Args:
        model: the model, for messages.
        signature: the signature of its forward.
        run: the model, wrapped or compiled.
        batch: a mapping gives keyword arguments, a tuple or list positional ones, anything else is one argument.
    """
    if isinstance(batch, Mapping):
        kinds = {p.kind for p in signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        named = {name: value for name, value in batch.items() if takes_any or name in signature.parameters}
        if not named:
            takes, has = ", ".join(signature.parameters) or "nothing", ", ".join(map(str, batch))
            name = type(model).__name__
            if not batch:
                raise ConfigError(
                    f"the batch is an empty dict, and {name}.forward takes {takes}; give a batch with these keys"
                )
            rename = "rename the keys of the batch, or " if signature.parameters else ""
            raise ConfigError(
                f"{name}.forward takes {takes}, but the batch has {has}; {rename}give a function "
                "forward=lambda model, batch: … to run() or TrainingSetup"
            )
        return run(**named)
    if isinstance(batch, (tuple, list)):
        return run(*batch[: _most_positional(signature)])
    return run(batch)


def _most_positional(signature: inspect.Signature) -> int | None:
    """Return how many positional arguments fit, or None for any number."""
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)


def loss_in(outputs: Any) -> Tensor | None:
    """Return the scalar loss that a model put into its outputs (`outputs.loss`, `outputs["loss"]`), or None."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return found if isinstance(found, Tensor) else None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch of any nesting, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    if isinstance(batch, (tuple, list)):
        parts: Any = batch
    elif isinstance(batch, _ATOMS):
        return
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    else:
        parts = batch.values() if isinstance(batch, Mapping) else ()
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif not isinstance(part, _ATOMS):
            yield from tensors_in(part)


def samples_in(batch: Any, model: nn.Module) -> int | None:
    """Return the samples of a batch: the first dimension if all tensors share it, else None.

    Scalars do not count. If the model has a module with `batch_first=False`, such as nn.LSTM by default, the first
    dimension may be time. It is then used only if the batch also has a tensor of one dimension, such as labels.
    """
    shapes = [_shape(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    if len({shape[0] for shape in shapes}) != 1:
        return None
    may_be_time = any(getattr(module, "batch_first", True) is False for module in model.modules())
    return None if may_be_time and all(len(shape) > 1 for shape in shapes) else shapes[0][0]


def tokens_in(batch: Any) -> int | None:
    """Return the tokens of a batch, or None if unknown: the size of `input_ids`, or of a first integer matrix."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else None
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    is_ids = isinstance(first, Tensor) and first.dim() == 2 and first.dtype in _ID_DTYPES
    return first.numel() if is_ids else None


class StepSize(NamedTuple):
    """Size of the batches of one step; None if a batch does not show it."""

    tokens: int | None
    samples: int | None
    shapes: tuple[tuple[int, ...], ...]  # shapes of all tensors

    def __add__(self, other: Any) -> StepSize:
        """Return the size of both batches together."""
        tokens, samples, shapes = other
        return StepSize(total([self.tokens, tokens]), total([self.samples, samples]), (*self.shapes, *shapes))


NO_BATCH = StepSize(0, 0, ())


def size_of(batch: Any, model: nn.Module) -> StepSize:
    """Return the size of one batch of the model; it reads only shapes, and never waits for the device."""
    return StepSize(tokens_in(batch), samples_in(batch, model), tuple(_shape(tensor) for tensor in tensors_in(batch)))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)


def differ(sizes: Sequence[StepSize]) -> bool:
    """Return True if the steps had batches of different shapes."""
    return len({size.shapes for size in sizes}) > 1


def sizes_row(sizes: Sequence[StepSize]) -> Ran:
    """Return the tokens and samples of each timed step, and, if batches differ in size, their totals."""
    tokens, samples = [size.tokens for size in sizes], [size.samples for size in sizes]
    row: Ran = {"tokens": _of_each(tokens), "samples": _of_each(samples)}
    if differ(sizes):
        row |= {"timed_tokens": total(tokens), "timed_samples": total(samples)}
    return row


def _of_each(counts: Sequence[int | None]) -> int | None:
    return counts[0] if len({*counts}) == 1 else None
