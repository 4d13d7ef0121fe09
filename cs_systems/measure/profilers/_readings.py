"""Readings passed from `region` in the worker to `collect` in the parent by a JSON file, which is then deleted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs_systems.measure.profilers import ProfileLost


def _path(out: Path) -> Path:
    return Path(f"{out}.readings.json")


def leave(out: Path, found: Mapping[str, object]) -> None:
    _path(out).write_text(json.dumps(found))


CHECK_DISK = "check the free disk space"
CHECK_SHARED = f"{CHECK_DISK}, and if the ranks run on several nodes, choose a folder that all nodes share"


def take(out: Path, lost: str, remedy: str = CHECK_DISK) -> Any:
    """Return the readings that `leave` wrote, in the profiler's type, and delete their file.

    Raises ProfileLost without a file; `lost` names the missing readings.
    """
    try:
        found = json.loads(_path(out).read_text())
    except FileNotFoundError:
        raise ProfileLost(f"{lost}; {remedy}") from None
    _path(out).unlink()
    return found
