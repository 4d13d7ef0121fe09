"""The architecture, read from the imports: who may know whom, and what never imports torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cs_systems"
FILES = sorted(PACKAGE.rglob("*.py"))

# The first pattern that fits a file says on which floor it is. A new file that fits none belongs into one of them.
FLOORS = {
    "0": [
        "__init__", "version", "checks", "shapes", "config", "record", "formulas/*", "stats", "plugins", "validity",
        "finding", "slowest", "filekind",
        "runtime/__init__", "runtime/channel", "runtime/guardian", "runtime/lifetime", "runtime/plain_rows",
        "attention/__init__", "workloads/__init__", "parallel/__init__", "profilers/__init__",
    ],
    "report": ["report/*"],
    "analysis": ["analysis/*"],
    "profilers": ["profilers/*"],
    "3": ["workloads/*", "runtime/worker", "runtime/execute", "runtime/process_state", "runtime/torchrun", "doctor"],
    "parent": ["runtime/*"],
    "top": ["__main__", "cli/*"],
    "1": ["device", "watch/*", "annotate", "timing", "environment", "world"],
    "2": ["model", "optim", "losses", "fp8", "checkpointing", "attention/*", "kernels/*", "parallel/*"],
}  # fmt: skip
MAY_IMPORT = {
    "0": {"0"},
    "report": {"0", "report"},
    "analysis": {"0", "analysis"},
    "profilers": {"0", "analysis", "report", "profilers"},
    "parent": {"0", "parent"},
    "top": {"0", "report", "analysis", "profilers", "parent", "top"},
    "1": {"0", "1"},
    "2": {"0", "1", "2"},
    "3": {"0", "1", "2", "3"},
}
WITHOUT_TORCH = {"0", "report", "analysis", "profilers", "parent", "top"}


def module_name(file: Path) -> str:
    """`…/cs_systems/report/table.py` → `report/table`."""
    return file.relative_to(PACKAGE).with_suffix("").as_posix()


def floor_of(module: str) -> str | None:
    return next((floor for floor, patterns in FLOORS.items() if any(fnmatch(module, p) for p in patterns)), None)


def imports_on_loading(source: str) -> Iterator[str]:
    """Dotted names that a module imports as it is loaded: not inside functions, not for type checkers alone."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def own_module(dotted: str) -> str | None:
    """The module of this package that a dotted name means: `cs_systems.report.table.render` → `report/table`."""
    parts = dotted.split(".")
    if parts[0] != "cs_systems":
        return None
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[1:length])
        if path.with_suffix(".py").is_file() and length > 1:
            return module_name(path.with_suffix(".py"))
        if (path / "__init__.py").is_file():
            return module_name(path / "__init__.py")
    raise AssertionError(f"{dotted} is not in the package")


def violations(module: str, source: str) -> list[str]:
    """What a module's imports break, one sentence each."""
    floor = floor_of(module)
    if floor is None:
        return [f"{module} is on no floor: add it to FLOORS in tests/test_layers.py"]
    found = []
    for dotted in imports_on_loading(source):
        if dotted.split(".")[0] in ("torch", "triton") and floor in WITHOUT_TORCH:
            found.append(f"{module} (floor {floor}) imports {dotted} as it is loaded: import it inside the function")
        target = own_module(dotted)
        if target is not None and floor_of(target) not in MAY_IMPORT[floor]:
            found.append(f"{module} (floor {floor}) imports {target} (floor {floor_of(target)})")
        if dotted.split(".")[0] in ("json", "time") and floor == "2":
            found.append(f"{module} (floor 2) imports {dotted}: what is measured neither times nor writes")
    return found


def test_every_file_knows_only_the_floors_below_it() -> None:
    assert [v for file in FILES for v in violations(module_name(file), file.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("stats", "import torch", "imports torch"),
        ("report/page", "try:\n    from torch import nn\nexcept ImportError: pass", "imports torch.nn"),
        ("formulas/cost", "from cs_systems.report.table import render", "floor report"),
        ("device", "from cs_systems.runtime import execute", "floor 3"),
        ("runtime/sweep", "from cs_systems.runtime.worker import serve", "floor 3"),
        ("model", "class A:\n    import time", "neither times nor writes"),
        ("attention/fast", "from cs_systems.workloads.train_step import TrainStep", "floor 3"),
        ("brand_new", "", "add it to FLOORS"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    found = violations(module, source)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "from cs_systems.config import RunConfig",
    ],
)
def test_what_is_not_imported_on_loading_is_no_violation(source: str) -> None:
    assert violations("stats", source) == []


def test_contributing_tells_the_same_floors() -> None:
    _, _, below = (ROOT / "CONTRIBUTING.md").read_text().partition("| floor | what | may import |")
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", below.partition("\n\n")[0], re.MULTILINE)
    told = {floor: ({*re.findall(r"`([^`]+)`", what)}, {*may.split(", ")}) for floor, what, may in rows}
    kept = {floor: {p.removesuffix("*") for p in FLOORS[floor] if "__" not in p and p != "version"} for floor in FLOORS}
    assert told == {floor: (kept[floor], MAY_IMPORT[floor]) for floor in FLOORS}


@pytest.mark.parametrize("room", ["analysis", "formulas", "watch"])
def test_the_map_of_a_room_names_every_file_once(room: str) -> None:
    named = re.findall(r"`(\w+)`", ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or "")
    assert sorted(named) == [file.stem for file in FILES if file.parent.name == room and file.stem != "__init__"]


def test_the_package_is_two_deep() -> None:
    assert [m for m in map(module_name, FILES) if m.count("/") > 1] == []


def test_what_needs_no_torch_does_not_load_it() -> None:
    """The floors hold when the modules really are imported, through whatever others import."""
    without = [m for m in map(module_name, FILES) if floor_of(m) in WITHOUT_TORCH and m != "__main__"]
    names = sorted("cs_systems." + m.removesuffix("/__init__").replace("/", ".") for m in without if m != "__init__")
    program = "\n".join(["import sys", *(f"import {name}" for name in names), "print('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
