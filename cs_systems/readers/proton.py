"""Format of the profiles that Triton's Proton writes."""

from __future__ import annotations

from cs_systems.core.formats import Format, imported

SUFFIXES = (".hatchet", ".hatchet_msgpack")
FORMAT = Format(
    title="a profile of Triton's Proton",
    matches=imported("cs_systems.readers._proton", "matches"),
    suffixes=SUFFIXES,
    holds="scopes",
    read=imported("cs_systems.readers._proton"),
    record="`triton.profiler.start(NAME)` before and `triton.profiler.finalize()` after the kernels",
    lacks="times of single launches",
)
