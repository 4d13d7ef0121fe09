"""JSON Schemas (draft 2020-12) of a command's document and of a record, from the declarations of tables and fields."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cs_systems.analysis.diagnosis import DIAGNOSES
from cs_systems.config import RunConfig
from cs_systems.core import units
from cs_systems.core.fields import declared
from cs_systems.core.tables import Table, heading
from cs_systems.record import SCHEMA_VERSION as RECORD_VERSION
from cs_systems.record import Measurement, RunRecord, Sample
from cs_systems.report.series import FLAG, INTEGER, REAL, TEXT
from cs_systems.report.tables.columns import COLUMNS, title
from cs_systems.report.tables.document import CELLS, SCHEMA_VERSION

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
MAY_CHANGE = (
    "Tables, columns, rules and notes may be added under the same version; one is renamed, removed or changes its unit "
    "only with a new version."
)
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_OF_FRAME = {TEXT: "string", INTEGER: "integer", REAL: "number", FLAG: "boolean"}
_DECLARED = {RunConfig, *(each.kind for each in declared(RunConfig).values() if dataclasses.is_dataclass(each.kind))}
_SHARE, _RATE, _PER_J = "fraction", "1/s", "1/J"


def document(tables: Iterable[Table[Any]]) -> Schema:
    """Return the schema of the document that a command writes with --format json."""
    defs: dict[str, list[Schema]] = {}
    for table in tables:
        defs.setdefault(table.name, []).append(rows(table))
    defs[CELLS] = [cells()]
    rules = [
        {
            "if": {"properties": {"name": {"const": name}}},
            "then": {"properties": {"rows": {"items": {"$ref": f"#/$defs/{name}"}}}},
        }
        for name in sorted(defs)
    ]
    table_schema = {
        "type": "object",
        "required": ["name", "caption", "rows", "notes"],
        "properties": {
            "name": {"type": "string", "description": "name of the table, for --table"},
            "caption": {"type": "string"},
            "rows": {"type": "array", "items": {"type": "object"}},
            "notes": {"type": "array", "items": {"type": "string"}, "description": "doubts and explanations"},
        },
        "allOf": rules,
    }
    sentences = {"type": "array", "items": {"type": "string"}}
    answer = {
        "type": ["object", "null"],
        "description": "what takes the time or the memory, and what would help",
        "properties": {
            "verdict": {"type": ["string", "null"], "description": "why there are no diagnoses"},
            "judged": {"type": ["string", "null"], "description": "the steps that were judged"},
            "diagnoses": {"type": "array", "description": DIAGNOSES.caption, "items": rows(DIAGNOSES)},
            "refuted": {**sentences, "description": "remedies that the same run measured, without a gain"},
            "unknown": {**sentences, "description": "questions that the data cannot answer"},
        },
    }
    error = {
        "type": "object",
        "description": "why the command refused or failed; there is nothing else then",
        "required": ["message", "status"],
        "properties": {
            "message": {"type": "string", "description": "what is wrong, and what to do"},
            "status": {"type": "integer", "description": "exit status"},
        },
    }
    return {
        "$schema": DRAFT,
        "title": "document of cs-systems",
        "description": f"What a command of cs-systems writes with --format json. {MAY_CHANGE}",
        "type": "object",
        "required": ["schema_version"],
        "properties": {
            "schema_version": {"const": SCHEMA_VERSION, "description": MAY_CHANGE},
            "error": error,
            "answer": answer,
            "notes": {**sentences, "description": "what was read, when it was recorded, and doubts about all numbers"},
            "tables": {"type": "array", "items": table_schema},
            "more": {
                "type": "object",
                "description": "tables with more rows or columns than shown, with their number of rows; --table NAME",
                "additionalProperties": {"type": "integer"},
            },
        },
        "$defs": {name: found[0] if len(found) == 1 else {"anyOf": found} for name, found in sorted(defs.items())},
    }


def record(tables: Iterable[Table[Any]]) -> Schema:
    """Return the schema of a line of records.jsonl."""
    of_record = _of_class(RunRecord)
    of_sample = _of_class(Sample)["properties"]
    columns = {name: {**each, "type": ["array", "object"]} for name, each in of_sample.items()}
    measurement = _of_class(Measurement)
    measurement["properties"]["samples"] = {
        "type": "object",
        "description": "a column for each field of a sample, with a value for each step, warm-up included",
        "properties": columns,
    }
    results: dict[str, list[Schema]] = {}
    for table in tables:
        results.setdefault(table.name, []).append({**rows(table), "required": []})  # an earlier version may lack some
    of_record["properties"] |= {
        "config": _of_class(RunConfig),
        "measurement": {**measurement, "type": ["object", "null"]},
        "schema_version": {"const": RECORD_VERSION},
        "results": {
            "type": "object",
            "description": "tables of the record by name",
            "properties": {
                name: {"type": "array", "items": found[0] if len(found) == 1 else {"anyOf": found}}
                for name, found in sorted(results.items())
            },
        },
    }
    return {
        "$schema": DRAFT,
        "title": "record of cs-systems",
        "description": f"A line of records.jsonl: the result of one cell. {MAY_CHANGE}",
        **of_record,
        "required": ["key", "config", "status", "schema_version"],
    }


def rows(table: Table[Any]) -> Schema:
    """Return the schema of a row of a declared table, with the heading and the unit of each column."""
    kinds = table.kinds
    return {
        "title": table.name,
        "description": table.caption,
        "type": "object",
        "required": [name for name in table.required if name in kinds],
        "properties": {name: _column(table, name, kinds[name]) for name in kinds},
    }


def cells() -> Schema:
    """Return the schema of a row of a table of records; a column of another phase is named `backward.median_s`."""
    properties = {
        name: _property([_OF_FRAME[one.kind], "null"], title(name), one.note or one.meaning, name)
        for name, one in COLUMNS.items()
        if name != "range_s"  # a document has both of its ends
    }
    of_phase = {
        "type": ["number", "null"],
        "title": "median time of the phase",
        "description": "median time of the phase that the name begins with, such as forward, backward or optimizer",
        "unit": "s",
    }
    return {
        "title": CELLS,
        "description": "cells of a run, one per row, with the step's time, rates and memory",
        "type": "object",
        "properties": properties,
        "patternProperties": {r"^\w+\.median_s$": of_phase},
    }


def unit(column: str) -> str | None:
    """Return the unit of a column by its name; None for a count or a text."""
    suffix = units.base_suffix(column)
    if suffix is None:
        return None
    special = {"_per_s": _RATE, "_per_j": _PER_J, "_j": "J", "_w": "W", "_hz": "Hz"}
    return special.get(suffix) or (suffix.strip("_").replace("_per_", "/") if suffix.startswith("_") else _SHARE)


def _column(table: Table[Any], name: str, kinds: tuple[Any, ...]) -> Schema:
    column = table.columns[name]
    shown = table.headings.get(name) or column.heading or heading(name)
    types = _type(kinds)
    if "number" in types and "null" not in types:
        types.append("null")  # JSON has no NaN or infinity
    return _property(types, shown, column.note or column.meaning, name)


def _property(kind: list[str], title: str, description: str, name: str) -> Schema:
    found: Schema = {"type": kind[0] if len(kind) == 1 else kind, "title": title}
    if description:
        found["description"] = description
    is_number = {"number", "integer", "object"} & {*kind}
    return {**found, "unit": unit(name)} if is_number and unit(name) else found


def _type(kinds: Iterable[Any]) -> list[str]:
    found = dict.fromkeys(_NAMES.get(kind) or _of_other(kind) for kind in kinds)
    if "number" in found:
        found.pop("integer", None)
    return [*found]


def _of_other(kind: Any) -> str:
    """Return the type of a value that is neither a text nor a number."""
    origin = get_origin(kind) or kind
    if isinstance(origin, str) or origin is Literal or (isinstance(origin, type) and issubclass(origin, StrEnum)):
        return "string"
    if isinstance(origin, type) and issubclass(origin, list | tuple):
        return "array"
    return "object" if isinstance(origin, type) and issubclass(origin, Mapping) else "string"


def _of_class(kind: type) -> Schema:
    """Return the schema of a dataclass as JSON, with what a field's declaration says of it."""
    hints = get_type_hints(kind)
    said = declared(kind) if kind in _DECLARED else {}
    properties = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        part = next((each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)), None)
        name = field.name
        meaning = said[name].field.meaning if name in said else ""
        if part is not None:
            properties[name] = {**_of_class(part), "description": meaning} if meaning else _of_class(part)
            properties[name]["type"] = ["object", "null"]
            continue
        properties[name] = _property(_type(options), heading(name), meaning, name)
    return {"type": "object", "properties": properties}
