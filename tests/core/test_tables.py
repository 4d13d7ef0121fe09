"""Declared tables: each has what a person needs to read it, and holds the columns that its function gives."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import pytest

import cs_systems
from cs_systems.analysis.attribution.timeline import DECLARED
from cs_systems.core.tables import INDEX, Column, Table, heading, names_in, table

LONGEST_NOTE = 15  # words between two semicolons


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
def test_module_declares_the_tables_of_the_index(module: str) -> None:
    names = INDEX[module].split()
    declared = {one.name for one in declared_in(module)}
    assert {*names} <= declared
    assert len({*names}) == len(names)


@pytest.mark.parametrize("one", TABLES, ids=lambda one: f"{one.name}-{one.caption[:20]}")
def test_table_says_in_few_words_what_it_shows(one: Table[Any]) -> None:
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
    [("time_s", "time"), ("tokens_per_s", "tokens/s"), ("peak_allocated_bytes", "peak allocated"), ("share", "share")],
)
def test_heading_is_the_name_without_its_unit(column: str, title: str) -> None:
    assert heading(column) == title


def test_analyze_offers_the_tables_of_a_trace() -> None:
    from cs_systems.cli.analyze import OF_RANKS, OF_TRACE

    assert tuple(DECLARED) == OF_TRACE
    assert OF_RANKS == names_in("analysis.comparison.ranks") == ("ranks", "collectives", "beside")


def test_no_command_has_headings_of_its_own() -> None:
    package = Path(cs_systems.__file__).parent
    for file in (*package.glob("cli/*.py"), *package.glob("report/**/*.py")):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "render_rows":
                assert len(call.args) <= 4, file
                assert "titles" not in {keyword.arg for keyword in call.keywords}, file
