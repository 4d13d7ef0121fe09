"""Modules of the traced model, as the recorder wrote them, so that reading a trace needs no model.

A Kineto trace holds them in its header, packed, because Kineto does not escape texts; for a file of nsys they are in
`<name>.modules.json` next to it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cs_systems.core import plugins
from cs_systems.core.range_names import meaning, refined
from cs_systems.record import Row

HEADER = "cs_systems.modules"
LARGEST_BYTES = 1 << 26  # limit of the unpacked table
_TEXTS, _MAYBE = ("path", "class", "range", "layer"), ("stack", "block", "part")


class Found(NamedTuple):
    """Meaning of the open ranges of a thread: layer, part and path; each is None if the ranges name none."""

    layer: str | None
    part: str | None
    module: str | None


class Modules:
    """Table `modules`: {path, class, range, stack, block, layer, part, parameters} in the order of the model.

    `how` names the source of the modules; empty if the recorder wrote them.
    """

    def __init__(self, rows: Sequence[Row], how: str | None = None) -> None:
        self.rows, self.how = list(rows), how
        self.by_path = {row["path"]: row for row in self.rows}
        self._by_range: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            if row["range"]:
                self._by_range[row["range"]].append(row)
        # ranges of the built-in model have names with meanings (`attention`); ranges of other models are paths
        named = [row for row in self.rows if row["path"] and row["range"]]
        self.are_paths = all(row["range"] in (row["path"], f"{row['path']} (module)") for row in named)

    def is_module(self, name: str) -> bool:
        return name in self._by_range

    def found(self, names: Sequence[str]) -> Found:
        """Return the meaning of the open ranges, given outermost first; module names may be repeated inside others."""
        row: Row | None = None
        layer = part = None
        for name in names:
            known = self._by_range.get(name, [])
            if len(known) > 1:
                known = [other for other in known if row and other["path"].startswith(f"{row['path']}.")]
            row = known[0] if len(known) == 1 else row
            if known and self.are_paths and row is not None:
                layer, part = row["layer"], row["part"]
                continue
            m = meaning(name)
            if m.layer and m.layer != layer and not self.are_paths:
                layer, part = m.layer, None
            part = refined(part, m.part)
        return Found(layer, part, None if row is None else row["path"])


def packed(rows: Sequence[Row]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpacked(text: Any) -> Modules | None:
    """Return the modules in a trace's header; None if there are none or they are damaged."""
    if not isinstance(text, str):
        return None
    try:
        return checked(json.loads(zlib.decompressobj().decompress(base64.b64decode(text), LARGEST_BYTES)))
    except (ValueError, zlib.error, RecursionError):
        return None


def modules_file(path: Path) -> Path:
    """Return the path of the file that holds the modules of an nsys trace."""
    name: str = path.name
    for suffix in plugins.get("readers", "nsys").suffixes:
        name = name.removesuffix(suffix)
    return path.with_name(f"{name}.modules.json")


def read_beside(path: Path) -> Modules | None:
    file = modules_file(path)
    try:
        if not file.is_file() or file.stat().st_size > LARGEST_BYTES:
            return None
        return checked(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def checked(value: Any) -> Modules | None:
    """Return the value as modules; None unless it has the form of the table."""
    if not isinstance(value, list) or not value:
        return None
    for row in value:
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _TEXTS):
            return None
        if not all(row.get(name) is None or isinstance(row[name], str) for name in _MAYBE):
            return None
        if type(row.get("parameters")) is not int or not 0 <= row["parameters"] < 1 << 63:
            return None
    return Modules([{name: row.get(name) for name in (*_TEXTS, *_MAYBE, "parameters")} for row in value])
