"""Names of copies: their direction, and the kind of the host's memory."""

from __future__ import annotations

import re

_SIDES = "host|device|array|peer|[hdap]"
_DIRECTION = re.compile(rf"({_SIDES})[ _-]?to[ _-]?({_SIDES})(?![a-z])", re.IGNORECASE)
_MEMORY = re.compile(r"pageable|pinned", re.IGNORECASE)


def copy_name(text: str) -> str:
    """Return a copy's name from a profiler's: "HtoD pageable" from `Memcpy HtoD (Pageable -> Device)`, else ""."""
    direction, memory = _DIRECTION.search(text), _MEMORY.search(text)
    sides = "to".join(side[0].upper() for side in direction.groups()) if direction else ""
    return " ".join(filter(None, (sides, memory[0].lower() if memory else "")))
