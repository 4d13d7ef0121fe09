"""Print the JSON Schema of what --format json writes, or of a line of records.jsonl.

With the name of a table, prints the columns of this table alone: type, unit and meaning.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from cs_systems.cli._output import deliver
from cs_systems.config import one_of
from cs_systems.core.tables import INDEX, Table

DOCUMENT, RECORD = "document", "record"
# The folders with files that declare tables; none of them imports torch.
WINGS = ("core", "record", "formulas", "readers", "analysis", "report", "cli")


@dataclass(frozen=True)
class SchemaArgs:
    name: Annotated[
        Positional[str], arg(help="document, record, or the name of a table", help_behavior_hint="(default: document)")
    ] = DOCUMENT


ARGS = SchemaArgs


def run(args: SchemaArgs) -> int:
    deliver(json.dumps(schema(args.name), indent=1, ensure_ascii=False) + "\n", "schema", None)
    return 0


def schema(name: str) -> dict[str, Any]:
    """Return the schema of this name. Raises ConfigError for an unknown one."""
    from cs_systems.report import schema as schemas

    if name == RECORD:
        return schemas.record(table for each in INDEX for table in _of_module(each))
    whole = schemas.document(tables())
    if name == DOCUMENT:
        return whole
    found: dict[str, Any] = whole["$defs"][one_of("schema", name, [DOCUMENT, RECORD, *whole["$defs"]])]
    return found


def tables() -> Iterator[Table[Any]]:
    """Yield every declared table of the package, each once."""
    seen = set[int]()
    for name in sorted(_modules()):
        for table in _of_module(name):
            if id(table) not in seen:
                seen.add(id(table))
                yield table


def _modules() -> Iterator[str]:
    for wing in WINGS:
        module = importlib.import_module(f"cs_systems.{wing}")
        yield module.__name__
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            yield found.name


def _of_module(name: str) -> Iterator[Table[Any]]:
    for value in vars(importlib.import_module(name)).values():
        for each in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(each, Table):
                yield each
