"""Declared tables: each has what a person needs to read it, and holds the columns that its function gives."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import pytest

import cs_systems
from cs_systems.analysis.attribution.timeline import DECLARED
from cs_systems.core.tables import INDEX, Column, Table, heading, names_in, table
from cs_systems.formulas.cost import COST
from cs_systems.report.tables.rows import render_table

LONGEST_NOTE = 15  # words between two semicolons
PRINTERS = ("tabulate", "rich.table")


def declared_in(module: str) -> list[Table[Any]]:
    """Return the tables that a module holds, its own and those that it imports."""
    return [value for value in vars(importlib.import_module(module)).values() if isinstance(value, Table)]


def modules() -> list[str]:
    """Return the modules that may declare a table, all of them without torch."""
    packages = [f"cs_systems.{name}" for name in ("core", "formulas", "readers", "analysis", "report", "cli")]
    found = pkgutil.walk_packages(cs_systems.__path__, "cs_systems.")
    return ["cs_systems.record", *(one.name for one in found if one.name.startswith(tuple(packages)))]


TABLES = {id(one): one for module in modules() for one in declared_in(module)}.values()


@pytest.mark.parametrize("module", INDEX)
def test_every_table_of_the_index_is_declared_by_its_module(module: str) -> None:
    names = INDEX[module].split()
    declared = {one.name for one in declared_in(module)}
    assert {*names} <= declared
    assert len({*names}) == len(names)


@pytest.mark.parametrize("one", TABLES, ids=lambda one: f"{one.name}-{one.caption[:20]}")
def test_table_has_a_short_caption(one: Table[Any]) -> None:
    assert one.caption
    assert one.columns
    assert all(one.titles.values())
    assert {*one.titles} | {*one.headings} <= {*one.columns}
    assert {*one.optional} < {*one.titles}
    notes = (*one.notes, *(column.note for column in one.columns.values()))
    for sentence in (one.caption, *(part for note in notes for part in note.split("; "))):
        assert len(sentence.split()) <= LONGEST_NOTE, sentence


class Plain(TypedDict):
    time_s: float
    share: Annotated[float, Column("of wall time", note="of wall time: the step's")]
    tokens_per_s: NotRequired[Annotated[float, Column()]]


@table("times by kind", "time_s share", name="times")
def plain(seconds: float) -> list[Plain]:
    return [{"time_s": seconds, "share": 1.0}]


class Mapped(TypedDict):
    part: str
    bytes: dict[str, int]
    error: Annotated[dict[int, float | None], Column(form=".1e")]


MAPPED = Table("sizes", Mapped, "sizes")


def test_decorated_function_is_a_table_of_its_rows() -> None:
    assert plain(2.0) == [{"time_s": 2.0, "share": 1.0}]
    assert (plain.name, plain.titles) == ("times", {"time_s": "time", "share": "of wall time"})
    assert [*plain.columns] == ["time_s", "share", "tokens_per_s"]
    held = plain.filled(plain(2.0))
    assert held == {"times": plain(2.0)}
    assert plain.of(held) == plain(2.0)
    assert plain.of({}) == ()


@pytest.mark.parametrize(
    ("column", "title"),
    [
        ("time_s", "time"),
        ("tokens_per_s", "tokens/s"),
        ("peak_allocated_bytes", "peak allocated"),
        ("share", "share"),
        ("busy_share", "busy"),
    ],
)
def test_heading_is_the_name_without_its_unit(column: str, title: str) -> None:
    assert heading(column) == title


def test_analyze_offers_the_tables_of_a_trace() -> None:
    from cs_systems.cli.analyze import OF_RANKS, OF_TRACE

    assert tuple(DECLARED) == OF_TRACE
    assert OF_RANKS == names_in("analysis.comparison.ranks") == ("ranks", "collectives", "beside")


def test_every_table_that_is_printed_is_declared() -> None:
    """Rows become text in report/tables alone, by their declaration.

    The table of cells in a notebook has the headings of the fields, which are declared too. Texts are aligned by hand
    in the overview of the commands and before a path.
    """
    package = Path(cs_systems.__file__).parent
    makers, aligned = {}, set()
    for file in package.rglob("*.py"):
        name, nodes = file.relative_to(package).as_posix(), [*ast.walk(ast.parse(file.read_text()))]
        used = {alias.name for node in nodes if isinstance(node, ast.ImportFrom | ast.Import) for alias in node.names}
        used |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        if not name.startswith("report/tables/") and (found := used & {"render_rows", "plain_table", *PRINTERS}):
            makers[name] = found
        specs = [node.format_spec for node in nodes if isinstance(node, ast.FormattedValue) and node.format_spec]
        aligned |= {name for spec in specs if re.match(r"f'[ ]?[<>^]", ast.unparse(spec))}
    assert makers == {"report/display.py": {"plain_table"}}
    assert aligned == {"cli/__init__.py", "core/printable.py"}


def test_row_without_an_optional_column_fits_its_table() -> None:
    """The rows of `cost` are declared where annotations are texts."""
    row = {"phase": "forward", "model_flops": 1.5, "hardware_flops": 2, "bytes": None}
    assert COST.fits(row)
    assert COST.fits(row | {"score_flops": 1})
    assert not COST.fits(row | {"score_flops": -1})
    assert not COST.fits({name: row[name] for name in row if name != "bytes"})


def test_mappings_in_rows_are_columns() -> None:
    rows: list[Any] = [
        {"part": "a", "bytes": {"forward": 2048, "backward": 1024}, "error": {16: 0.5}},
        {"part": "b", "bytes": {"forward": 4096}, "error": {16: 0.25, 65536: None}},
    ]
    csv = "part,forward_bytes,backward_bytes,16_error,65536_error\na,2048,1024,0.5,\nb,4096,,0.25,\n"
    assert render_table(MAPPED, rows, "csv") == csv
    shown = [*map(str.split, render_table(MAPPED, rows).splitlines())]
    assert shown[1:3] == [["fwd", "bwd"], ["part", "KiB", "KiB", "16"]]  # a column without a value is left out
    assert shown[4:6] == [["a", "2.00", "1.00", "5.0e-01"], ["b", "4.00", "–", "2.5e-01"]]


def test_table_without_rows_has_a_sentence() -> None:
    assert render_table(MAPPED, [], notes=["why"]) == "sizes\nno data\nwhy\n"
    assert "| no data |" in render_table(MAPPED, [], "markdown")
