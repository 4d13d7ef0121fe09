"""Reading and validation of records from files: a value of the wrong type is reported with its line."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.validation import field_types
from cs_systems.record import OR_AGAIN, RunRecord, read_records
from cs_systems.record import some_records as any_records

# columns are not checked, because users' own workloads do not declare theirs
_TABLES = dict[str, list[dict[str, Any]]]
_PLAIN = frozenset({str, int, float, bool})
STATUSES = ("ok", "oom", "unavailable", "timeout", "killed", "error")


def sound_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Return the records under the path and warnings about skipped lines. Raises ConfigError for a malformed record."""
    records, problems = read_records(path)
    return _checked(records, path), problems


def some_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Return the result of `sound_records` if it has at least one record. Raises ConfigError if there is none yet."""
    records, problems = any_records(path)
    return _checked(records, path), problems


def _checked(records: list[RunRecord], path: str | os.PathLike[str]) -> list[RunRecord]:
    for number, record in enumerate(records, 1):
        if problem := _malformed(record):
            raise ConfigError(
                f"record {number} of {path} (key {record.key}) is malformed: {problem}; delete the line with this key, "
                f"{OR_AGAIN}"
            )
    return records


def _malformed(record: RunRecord) -> str | None:
    """Describe the first problem of a record; None if there is none."""
    if problem := _type_problem(record, RunRecord, "record"):
        return problem
    if record.status not in STATUSES:
        return f"status is {record.status!r}"
    hints = field_types(RunConfig)
    if missing := {"workload", "model"} - record.config.keys():
        return f"config lacks {min(missing)}"
    cells = ((t, n, v) for t, rows in record.results.items() for row in rows for n, v in row.items())
    if nested := next(((t, n, v) for t, n, v in cells if isinstance(v, list | dict)), None):
        return f"{nested[1]} in table {nested[0]} is {repr(nested[2])[:80]}"
    problems = (_type_problem(v, hints[name], f"config.{name}") for name, v in record.config.items() if name in hints)
    return next(filter(None, problems), None)


def _type_problem(value: Any, kind: Any, name: str) -> str | None:
    """Describe the first part of the value that does not match the annotated type; None if all of it does."""
    if type(value) in _PLAIN and type(value) is kind:  # fast path for most values; a large run has millions
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return None if value is None or isinstance(value, str | int | float | list | dict) else _problem(value, name)
    if origin in (types.UnionType, typing.Union):
        problems = [_type_problem(value, each, name) for each in arguments if each is not types.NoneType]
        return None if None in problems or (value is None and types.NoneType in arguments) else problems[0]
    if dataclasses.is_dataclass(kind):
        hints = field_types(typing.cast(type, kind))
        if isinstance(value, typing.cast(type, kind)):
            pairs = {n: getattr(value, n) for n in hints}
        elif isinstance(value, Mapping) and name.startswith("config."):  # its model and shape are mappings too
            pairs = {n: value[n] for n in hints if n in value}
        else:
            return _problem(value, name)
        return next(filter(None, (_type_problem(v, hints[n], f"{name}.{n}") for n, v in pairs.items())), None)
    if origin is Mapping:
        return _type_problem(value, _TABLES, name)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return _problem(value, name)
        return next(filter(None, (_type_problem(v, arguments[0], f"{name}[{i}]") for i, v in enumerate(value))), None)
    if origin is dict:
        if not isinstance(value, dict):
            return _problem(value, name)
        return next(filter(None, (_type_problem(v, arguments[1], f"{name}.{k}") for k, v in value.items())), None)
    return None if _has_type(value, kind) else _problem(value, name)


def _problem(value: Any, name: str) -> str:
    return f"{name} is {repr(value)[:80]}"


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, str if issubclass(kind, str) else kind)  # an enumeration is a string in JSON
