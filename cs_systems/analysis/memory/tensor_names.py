"""Readable names of tensors by size: 48.8 MiB is `token_embeddings or lm_head, 10,000 × 1280 × 4`.

Names come from the model's shapes, where the model is known or guessed; tensors in the sidecar keep their own names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

from cs_systems.analysis.memory.categories import (
    ACTIVATIONS,
    BEFORE_RECORDING,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    Attributed,
    Attribution,
)
from cs_systems.config import CONFIGURED, PRESETS, ConfigError, ModelConfig, RunConfig, one_of
from cs_systems.core.fields import Subject

ELEMENT_BYTES = (4, 2)
_OF_PARAMETERS = {
    PARAMETERS: "",
    BEFORE_RECORDING: "as ",
    GRADIENTS: "gradient of ",
    OPTIMIZER_STATE: "moment of ",
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorNames:
    """Names by size; `note` gives their source, and the dictionaries are empty where no model is known."""

    parameters: dict[int, str]  # bytes → name
    activations: dict[int, str]
    note: str

    def name(self, a: Attributed) -> str | None:
        """Return the name of an allocation's tensor; None where none fits."""
        size = a.allocation.requested_bytes
        if a.tensor is not None:
            return f"{a.tensor.name}, {' × '.join(map(_number, a.tensor.shape))} {a.tensor.dtype}"
        if a.category in _OF_PARAMETERS:
            known = self.parameters.get(size)
            return known and _OF_PARAMETERS[a.category] + known
        return self.activations.get(size) if a.category in (ACTIVATIONS, TEMPORARIES) else None


def tensor_names(attribution: Attribution, size: str | None = None) -> TensorNames:
    """Return the names for a snapshot: by the sidecar's configuration, else by the preset `size`, else by a guess.

    Raises:
        ConfigError: The preset is unknown, or is not the snapshot's.
    """
    sidecar = attribution.replay.snapshot.sidecar
    config = sidecar.config if sidecar else None
    sizes = {a.allocation.requested_bytes for a in attribution.allocations if a.category in _OF_PARAMETERS}
    if size is not None:
        model = PRESETS[one_of("size", size, PRESETS)]
        elements = [e for e in ELEMENT_BYTES if _fits(model, e, sizes)]
        if not elements:
            snapshot = attribution.replay.snapshot
            other = ", or choose another device" if len(snapshot.devices) > 1 else ""
            raise ConfigError(
                f"size {size} does not match device {snapshot.device} of the snapshot, which lacks tensors of that "
                f"preset; leave out size{other}",
                "size",
            )
        return _names(model, elements, None, f"tensors are named by their size, from the preset {size}")
    if config is not None and config.subject is Subject.STEP:
        elements = [e for e in ELEMENT_BYTES if _fits(config.model, e, sizes)]
        return _names(config.model, elements, config, f"tensors are named by their size, from {config.model.label}")
    if config is not None and config.workload not in CONFIGURED:
        return TensorNames({}, {}, "")  # a user's own model may have the sizes of a preset, but not its names
    for name, model in PRESETS.items():
        elements = [e for e in ELEMENT_BYTES if _fits(model, e, sizes)]
        if elements and _explains_most(model, elements, attribution):
            note = f"names are guessed: the tensors have the sizes of the preset {name}; give --size to choose another"
            return _names(model, elements, None, note)
    return TensorNames({}, {}, "")


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a BasicTransformerLM's parameters, by their name within a layer."""
    d, d_ff = model.d_model, model.d_ff
    return {
        **dict.fromkeys(("token_embeddings", "lm_head"), (model.vocab_size, d)),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "output_proj"), (d, d)),
        **dict.fromkeys(("w1", "w3"), (d_ff, d)),
        "w2": (d, d_ff),
        "norm": (d,),
    }


def activation_shapes(config: RunConfig) -> dict[str, Shape]:
    """Return the shapes of the tensors that forward and backward allocate for a batch."""
    batch, seq, model = config.batch_size, config.tokens_per_sequence, config.model
    return {
        "residual stream or a projection": (batch, seq, model.d_model),
        "feed-forward": (batch, seq, model.d_ff),
        "logits": (batch, seq, model.vocab_size),
        "attention scores": (batch, model.num_heads, seq, seq),
        "one factor per token": (batch, seq),
        "one factor per token and head": (batch, model.num_heads, seq),
    }


def _fits(model: ModelConfig, element: int, sizes: Collection[int]) -> bool:
    return all(prod(shape) * element in sizes for name, shape in parameter_shapes(model).items() if name != "norm")


def _explains_most(model: ModelConfig, elements: Iterable[int], attribution: Attribution) -> bool:
    """Return whether most bytes of the parameters are in tensors of the model's sizes: other models share some."""
    known = _by_size(parameter_shapes(model), elements)
    sizes = Counter[bool]()
    for a in attribution.allocations:
        if a.category == PARAMETERS:
            sizes[a.allocation.requested_bytes in known] += a.allocation.requested_bytes
    return sizes[True] >= sizes[False]


def _names(model: ModelConfig, elements: Iterable[int], config: RunConfig | None, note: str) -> TensorNames:
    activations = _by_size(activation_shapes(config), ELEMENT_BYTES) if config else {}
    if config and config.precision.is_autocast:
        copies = _by_size(parameter_shapes(model), [2])
        activations = {size: f"autocast's copy of {name}" for size, name in copies.items()} | activations
    return TensorNames(_by_size(parameter_shapes(model), elements), activations, note)


def _by_size(shapes: dict[str, Shape], elements: Iterable[int]) -> dict[int, str]:
    """Return a name by size; tensors of one size share it, and the first of their shapes is written out."""
    names: dict[int, str] = {}
    for element in elements:
        of_size: dict[int, dict[str, Shape]] = {}
        for name, shape in shapes.items():
            of_size.setdefault(prod(shape) * element, {})[name] = shape
        for size, found in of_size.items():
            *most, last = found
            dims = " × ".join(map(_number, (*next(iter(found.values())), element)))
            names.setdefault(size, f"{', '.join(most)} or {last}, {dims}" if most else f"{last}, {dims}")
    return names


def _number(n: int) -> str:
    return f"{n:,}" if n >= 10_000 else str(n)
