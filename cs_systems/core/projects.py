"""Folders of a user's project from which its files import, as after `uv sync` or `pip install -e`."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FILE = "pyproject.toml"
OURS = "cs_systems"  # a record has the version of its own code


def root_of(file: Path) -> Path | None:
    """Return the nearest folder above a file with a pyproject.toml; None if there is none."""
    return next((folder for folder in file.resolve().parents if (folder / FILE).is_file()), None)


def import_folders(file: Path) -> list[Path]:
    """Return the folders of the project around a file, which an installation of the project would make importable.

    These are its root, and the projects that its pyproject.toml names by their paths for uv, such as a package in a
    folder next to the code; of each also `src`.
    """
    root = root_of(file)
    if root is None:
        return []
    projects = [root, *_named(root, (root / FILE).stat().st_mtime_ns)]
    return [folder for project in projects for folder in (project, project / "src") if folder.is_dir()]


def imported_files(file: Path) -> list[Path]:
    """Return the files of its folder, its project and the current folder that a file imports, and these in turn.

    The current folder is last: it matters only for imports that the others lack. Imports are read from the code, also
    those inside functions; nothing is imported. Installed packages are left out.
    """
    folders = [file.absolute().parent, *import_folders(file), Path.cwd()]
    ours = {each.stem for folder in folders for each in folder.iterdir()} - {OURS}
    found, left = {file.resolve(): None}, [file]
    while left:
        current = left.pop()
        for name in (name for name in _imports_of(current) if name.partition(".")[0] in ("", *ours)):
            for each in _files_of(name, current, folders):
                if each not in found:
                    found[each] = None
                    left.append(each)
    return [*found][1:]


def _imports_of(file: Path) -> Sequence[str]:
    """Return the modules that a file may import; for a relative import, they begin with its dots."""
    try:
        return _imports(file, file.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError, RecursionError):  # reported when the file is imported
        return ()


@functools.lru_cache(maxsize=512)
def _imports(file: Path, modified_ns: int) -> tuple[str, ...]:
    names = dict[str, None]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        match node:
            case ast.Import(names=modules):
                names |= dict.fromkeys(each.name for each in modules)
            case ast.ImportFrom(module=module, names=objects, level=level):
                base = "." * level + (module or "")
                dot = "." if module else ""
                names |= dict.fromkeys([base, *(f"{base}{dot}{each.name}" for each in objects)])
    return tuple(names)


def _files_of(name: str, importer: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that run if a module is imported: the files of its packages, and its own."""
    parts = name.lstrip(".").split(".")
    if dots := len(name) - len(name.lstrip(".")):
        folders = [importer.resolve().parents[dots - 1]] if dots <= len(importer.resolve().parents) else []
    for folder in folders:
        tried = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        ends = ("/__init__.py", ".py") if parts[0] else ("/__init__.py",)  # `from . import x` names no file of its own
        files = [Path(f"{path}{end}") for path in tried for end in ends]
        if existing := [each for each in files if each.is_file()]:
            yield from (each.resolve() for each in existing)
            return


def root_with_name(file: Path, name: str) -> Path | None:
    """Return the folder around a file that holds the project of this name; None if there is none."""
    wanted = name.replace("_", "-").lower()
    for folder in import_folders(file):
        project = _read(folder / FILE).get("project", {})
        name = project.get("name", "") if isinstance(project, dict) else ""
        if str(name).replace("_", "-").lower() == wanted:
            return folder
    return None


@functools.lru_cache(maxsize=64)
def _named(root: Path, modified_ns: int) -> tuple[Path, ...]:
    """Return the folders that a project names in uv's sources and as members of its workspace."""
    try:
        uv = _read(root / FILE).get("tool", {}).get("uv", {})
        sources = [each for value in uv.get("sources", {}).values() for each in _as_list(value)]
        named = [root / each["path"] for each in sources if "path" in each]
        members = uv.get("workspace", {}).get("members", [])
        found = *named, *(folder for member in members for folder in sorted(root.glob(member)))
        return tuple(folder.resolve() for folder in found)
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # not the form that uv reads
        return ()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a pyproject.toml; empty if it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
