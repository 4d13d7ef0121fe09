"""Output of a command as one JSON document: `document(pieces)`.

While a command runs, each of its tables, answers and sentences becomes a piece, a line of JSON, where other formats
have text. `document` puts the pieces together. A short answer ends with a piece that names the tables with more rows,
and is cut until it fits MOST_BYTES. A program reads the rows, so words go first: long captions, notes and evidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.core.printable import plain, within
from cs_systems.core.tables import Row, Table

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import Answer
    from cs_systems.report.tables.table import Table as Shown

SCHEMA_VERSION = 1
CELLS = "cells"  # name of a table of records, with the columns of the frame
MOST_BYTES = 8_000  # of a short answer: about 2,000 tokens
MOST_EVIDENCE = 2  # rows of evidence per diagnosis in a short answer
# What a short answer that is too long keeps of its words, and of each table before whole tables are left out.
LONGEST_CAPTION, LONGEST_NOTE, MOST_NOTES, FEWEST_ROWS = 140, 160, 2, 4
DIAGNOSES, FEWEST_DIAGNOSES = "diagnoses", 3


def table(declared: Table[Any], rows: Sequence[Row], notes: Iterable[str] = ()) -> str:
    """Return the piece of a declared table: every column of its rows, in base units."""
    return _piece(table=_table(declared.name, declared.caption, rows, [*declared.notes, *notes]))


def cells(tables: Sequence[Shown], width: int | None = None, color: bool = False) -> str:
    """Return the pieces of tables of records, one row per cell; a range p10 … p90 is two columns."""
    return "".join(_piece(table=_table(CELLS, one.caption, _rows(one), one.notes_of(one.columns))) for one in tables)


def answer(found: Answer) -> str:
    """Return the piece of an answer; no piece if there was nothing to judge."""
    said = {
        "verdict": found.nothing or None,
        "judged": found.judged or None,
        "diagnoses": [one.row() for one in found.diagnoses],
        "refuted": list(found.refuted),
        "unknown": list(found.unknowns),
    }
    return _piece(answer=said) if any(said.values()) else ""


def note(text: str) -> str:
    """Return the piece of a sentence."""
    return _piece(note=plain(text))


def more(rows: Mapping[str, int]) -> str:
    """Return the piece that ends a short answer: the tables with more rows than it shows, and their number."""
    return _piece(more=rows)


def failure(message: str, status: int) -> str:
    """Return the piece of a command that failed with this exit status: the document has nothing else."""
    return _piece(error={"message": plain(message), "status": status})


def document(pieces: str) -> str:
    """Return the pieces as one JSON object, with a line break at its end."""
    found: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "answer": None, "notes": [], "tables": [], "more": {}}
    is_short = False
    for line in filter(str.strip, pieces.split("\n")):
        ((kind, content),) = json.loads(line).items()
        if kind == "table":
            found["tables"].append(content)
        elif kind == "note":
            found["notes"].append(content)
        elif kind == "error":
            return error(**content)
        elif kind == "more":
            found["more"] |= content
            is_short = True
        else:
            found[kind] = content
    return written(_cut(found) if is_short else found)


def error(message: str, status: int) -> str:
    """Return the document of a command that failed with this exit status."""
    return written({"schema_version": SCHEMA_VERSION, "error": {"message": message, "status": status}})


def _cut(found: dict[str, Any]) -> dict[str, Any]:
    """Return the document within MOST_BYTES; `more` counts the rows of the tables that are cut, and the diagnoses."""
    totals = {DIAGNOSES: len(_diagnoses(found))}
    for one in found["tables"]:
        totals[one["name"]] = totals.get(one["name"], 0) + len(one["rows"])
    _cut_evidence(found, MOST_EVIDENCE)
    cuts = _cuts(found, totals)
    while len(written(found).encode()) > MOST_BYTES and next(cuts, None):
        pass
    return found


def _cuts(found: dict[str, Any], totals: Mapping[str, int]) -> Iterator[bool]:
    """Make the document shorter, a cut at a time: words before rows, and the first table last."""
    tables, diagnoses, more = found["tables"], _diagnoses(found), found["more"]
    for each in (found, *tables):
        each["notes"] = [within(note, LONGEST_NOTE) for note in each["notes"]]
    for one in tables:
        one["caption"] = within(one["caption"], LONGEST_CAPTION)
    yield True
    _cut_evidence(found, 1)
    yield True
    for each in (found, *tables):
        del each["notes"][MOST_NOTES:]
    yield True
    while tables and len((longest := max(tables, key=_size))["rows"]) > FEWEST_ROWS:
        more.setdefault(longest["name"], totals[longest["name"]])
        del longest["rows"][max(FEWEST_ROWS, len(longest["rows"]) * 7 // 8) :]
        yield True
    _cut_evidence(found, 0)
    yield True
    for one, fewest in ((diagnoses, FEWEST_DIAGNOSES), (tables, 1), (diagnoses, 1)):
        while len(one) > fewest:
            name = one.pop().get("name", DIAGNOSES)
            more.setdefault(name, totals[name])
            yield True
    while tables and tables[0]["rows"][1:]:
        more.setdefault(tables[0]["name"], totals[tables[0]["name"]])
        tables[0]["rows"].pop()
        yield True


def _diagnoses(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the diagnoses of a document, as the list that it holds."""
    return found["answer"]["diagnoses"] if found["answer"] else []


def _cut_evidence(found: Mapping[str, Any], most: int) -> None:
    for one in _diagnoses(found):
        del one["evidence"][most:]


def _size(one: Row) -> int:
    """Return the bytes of the rows that a table may lose before others lose all; 0 if it has only a few rows."""
    return len(written(one["rows"])) if len(one["rows"]) > FEWEST_ROWS else 0


def _table(name: str, caption: str, rows: Sequence[Row], notes: Iterable[str]) -> Row:
    return {"name": name, "caption": plain(caption), "rows": list(rows), "notes": [plain(each) for each in notes]}


def _rows(shown: Shown) -> Sequence[Row]:
    found: list[dict[str, Any]] = [{} for _ in shown.statuses]
    for column in shown.columns:
        phase, dot, name = column.name.rpartition(".")
        ends = [f"{phase}{dot}{name.replace('range', end, 1)}" for end in ("p10", "p90")]
        for row, value in zip(found, column.values, strict=True):
            if name.startswith("range_"):
                row.update(zip(ends, value or (None, None), strict=True))
            else:
                row[column.name] = value
    return found


def _piece(**content: Any) -> str:
    return written(content)


def written(value: Any) -> str:
    """Return a value as one line of JSON: equal values give equal bytes."""
    text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isprintable():  # what could move a terminal's cursor is escaped
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    return text + "\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers that are not finite are null, and other objects their text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)
