"""Observation of the configuration fields that a workload from outside the package reads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cs_systems.config import RunConfig
from cs_systems.core.validation import did_you_mean

_READ = "_read"
_LENGTHS = (
    "context_length",
    "seq_len",
    "seq_length",
    "sequence_length",
    "max_length",
    "block_size",
)  # names that other programs use


class _Observed:
    """Mixin of a frozen dataclass that adds each field that is read to a set, which nested configs share."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dataclass_fields__"):
            own = object.__getattribute__(self, "__dict__")
            if _READ in own:  # absent while a copy is being made
                own[_READ].add(f"{own['_prefix']}{name}")
        return value

    def __getattr__(self, name: str) -> Any:
        known = object.__getattribute__(self, "__dataclass_fields__")
        own = object.__getattribute__(self, "__dict__")
        inside = [field for field in own if name in getattr(own[field], "__dataclass_fields__", ())]
        if name in _LENGTHS:
            remedy = "the length of a sequence is config.tokens_per_sequence"
        elif inside:
            remedy = f"use config.{inside[0]}.{name}"
        elif own.get("_prefix") and name in RunConfig.__dataclass_fields__:
            remedy = f"use config.{name}"
        else:
            remedy = did_you_mean(name, known) or f"its fields are {', '.join(known)}"
        what = f"config.{own.get('_prefix', '')}".rstrip(".")
        raise AttributeError(f"{what} has no field {name!r}; {remedy}", name=name, obj=self)


@functools.cache
def _observed_kind(kind: type) -> type:
    return type(f"_Observed{kind.__name__}", (_Observed, kind), {})


def observed(config: RunConfig) -> tuple[RunConfig, set[str]]:
    """Return an equal config that records reads, and the set of field names that it fills.

    A field of the model, the shape or the collective is noted as `model.d_model`, `shape.seq`, ….
    """
    read: set[str] = set()
    watched: RunConfig = _copy(config, read, "")
    return watched, read


def _copy(config: Any, read: set[str], prefix: str) -> Any:
    kind: type = type(config)
    made: Any = object.__new__(_observed_kind(kind))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _copy(value, read, f"{field.name}.")
        made.__dict__[field.name] = value
    made.__dict__.update({_READ: read, "_prefix": prefix})
    return made
