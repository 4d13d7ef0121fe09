"""Architecture that import-linter's contracts cannot check.

These are the modules that are really loaded, the constant of each plug-in, and import cycles inside functions.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems.core import plugins

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = (
    *("config", "record", "core", "formulas", "readers", "analysis", "report", "measure.profilers", "cli"),
    # The parent of the workers.
    *(
        f"measure.runtime.{name}"
        for name in (
            *(
                "allowance",
                "channel",
                "fork_client",
                "guardian",
                "journal",
                "lifetime",
                "plain_rows",
                "processes",
                "profiled",
            ),
            *("ranks", "scheduler", "stragglers", "supervisor", "sweep", "warming"),
        )
    ),
)


def modules(folder: Path) -> dict[str, Path]:
    """Return the modules below a folder by their dotted names."""
    parts = {file: file.relative_to(folder.parent).with_suffix("").parts for file in sorted(folder.rglob("*.py"))}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the known modules that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            longest = next((n for n in (name, name.rpartition(".")[0]) if n in known), None)
            if longest is not None and known[longest] != file:
                yield longest


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, in order, or an empty list."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        found = next(filter(None, (follow(n, [*path, name]) for n in sorted(graph.get(name, ())))), [])
        done.add(name)
        return found

    return next(filter(None, (follow(name, []) for name in sorted(graph))), [])


@pytest.mark.parametrize("folder", ["cs_systems", "scripts/studies"])
def test_there_are_no_import_cycles(folder: str) -> None:
    known = modules(ROOT / folder)
    if folder.startswith("scripts"):  # these import each other by their stems
        known = {name.rpartition(".")[2]: file for name, file in known.items()}
    assert cycle({name: set(imported(file, known)) for name, file in known.items()}) == []


def test_indirect_import_cycles_are_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_rooms_without_torch_do_not_import_it() -> None:
    """Load the modules, because imports of torch inside functions are allowed."""
    known = modules(ROOT / "cs_systems")
    rooms = tuple(f"cs_systems.{room}" for room in WITHOUT_TORCH)
    names = [name for name in known if name.startswith(tuple(f"{room}." for room in rooms)) or name in rooms]
    assert {name for room in rooms for name in names if name == room} == set(rooms)
    program = "\n".join(["import sys", *(f"import {name}" for name in names), "print('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@pytest.mark.parametrize("package", plugins.KINDS)
def test_every_plug_in_exports_one_constant(package: str) -> None:
    kind, constants = plugins.KINDS[package], {kind.constant for kind in plugins.KINDS.values()}
    for name in plugins.names(package):
        file = kind.file(name)
        assigned = [
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id in constants
        ]
        assert assigned == [kind.constant], file
