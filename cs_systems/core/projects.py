"""Folders of a user's project from which its files import, as after `uv sync` or `pip install -e`."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

FILE = "pyproject.toml"


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


def root_with_name(file: Path, name: str) -> Path | None:
    """Return the folder, of those around a file, whose project has this name; None if there is none."""
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
