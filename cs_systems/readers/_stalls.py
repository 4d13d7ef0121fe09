"""CUDA calls of the host that can leave the device without work, by cause."""

from __future__ import annotations

import functools
import re

SYNCHRONISATION = "synchronisation"
# cause → names of runtime and driver calls; nsys adds the version of the interface (`cudaMalloc_v3020`).
STALLS = {
    "cudaMalloc": r"(cuda|hip)(Malloc|Free|Host(Alloc|Malloc|Register))"
    r"|cuMem(Alloc|Free|Create|Release|Map|Unmap|SetAccess)",
    SYNCHRONISATION: r"Synchronize|(cuda|cu|hip)Memcpy(?!.*Async)",
}


@functools.lru_cache(maxsize=4096)
def stalls(name: str) -> str | None:
    """Return the cause to which a call's waiting time is attributed; None for a call that does not wait."""
    return next((cause for cause, pattern in STALLS.items() if re.search(pattern, name)), None)
