"""Reading and validation of records from files: a value of the wrong type is reported with its line."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cs_systems.config import ConfigError, RunConfig
from cs_systems.record import RunRecord, read_records
from cs_systems.record import some_records as any_records

STATUSES = ("ok", "oom", "unavailable", "timeout", "killed", "error")


def sound_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Return the records under the path and warnings about skipped lines. Raises ConfigError for a malformed record."""
    records, complaints = read_records(path)
    return _checked(records, path), complaints


def some_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Return what `sound_records` does, at least one record. Raises ConfigError if there is none yet."""
    records, complaints = any_records(path)
    return _checked(records, path), complaints


def _checked(records: list[RunRecord], path: str | os.PathLike[str]) -> list[RunRecord]:
    for number, record in enumerate(records, 1):
        if said := _malformed(record):
            raise ConfigError(f"record {number} of {path} is malformed: {said}; take its line out, or measure again")
    return records


def _malformed(record: RunRecord) -> str | None:
    """Return what is wrong with a record, or None if nothing is."""
    if said := _unlike(record, RunRecord, "record"):
        return said
    if record.status not in STATUSES:
        return f"status is {record.status!r}"
    hints = _hints(RunConfig)
    if missing := {"workload", "model"} - record.config.keys():
        return f"config has no {min(missing)}"
    cells = ((t, n, v) for t, rows in record.results.items() for row in rows for n, v in row.items())
    if nested := next(((t, n, v) for t, n, v in cells if isinstance(v, list | dict)), None):
        return f"{nested[1]} in table {nested[0]} is {repr(nested[2])[:80]}"
    told = (_unlike(v, hints[name], f"config.{name}") for name, v in record.config.items() if name in hints)
    return next(filter(None, told), None)


def _unlike(value: Any, kind: Any, name: str) -> str | None:
    """Return which part of the value does not match the annotated type, or None if all of it does."""
    said = f"{name} is {repr(value)[:80]}"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return None if value is None or isinstance(value, str | int | float | list | dict) else said
    if origin in (types.UnionType, typing.Union):
        told = [_unlike(value, each, name) for each in arguments if each is not types.NoneType]
        return None if None in told or (value is None and types.NoneType in arguments) else told[0]
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        if isinstance(value, typing.cast(type, kind)):
            pairs = {n: getattr(value, n) for n in hints}
        elif isinstance(value, Mapping) and name.startswith("config."):  # data, as are its model and shape
            pairs = {n: value[n] for n in hints if n in value}
        else:
            return said
        return next(filter(None, (_unlike(v, hints[n], f"{name}.{n}") for n, v in pairs.items())), None)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return said
        return next(filter(None, (_unlike(v, arguments[0], f"{name}[{i}]") for i, v in enumerate(value))), None)
    if origin is dict:
        if not isinstance(value, dict):
            return said
        return next(filter(None, (_unlike(v, arguments[1], f"{name}.{k}") for k, v in value.items())), None)
    return None if _is_of(value, kind) else said


def _is_of(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, str if issubclass(kind, str) else kind)  # an enumeration is a string in JSON


@lru_cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)
