"""What a `region` read inside the worker, on its way to `collect` in the parent: one file of JSON, gone once taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cs_systems.profilers import ProfileLost


def _path(out: Path) -> Path:
    return Path(f"{out}.readings.json")


def leave(out: Path, found: dict[str, Any]) -> None:
    _path(out).write_text(json.dumps(found))


def take(out: Path, lost: str) -> dict[str, Any]:
    """What was left. Raises ProfileLost where nothing was: `lost` says what is missing."""
    try:
        found: dict[str, Any] = json.loads(_path(out).read_text())
    except FileNotFoundError:
        raise ProfileLost(f"{lost}: is there room on the disk?") from None
    _path(out).unlink()
    return found
