"""Kinds of CUDA and HIP calls by name, and the kinds that can leave the device without work."""

from __future__ import annotations

import functools
import re
from enum import StrEnum


class Kind(StrEnum):
    """Effect of a call on the host and the device.

    `OTHER` includes calls that enqueue a copy or a memset without a wait: `Copies.call` names them.
    """

    LAUNCH = "launch"  # launch of one kernel
    GRAPH_LAUNCH = "graph launch"
    EVENT_RECORD = "event record"
    STREAM_WAIT = "stream wait"  # a stream waits for an event
    STREAM_SYNC = "stream synchronise"  # the host waits for a stream
    EVENT_SYNC = "event synchronise"
    DEVICE_SYNC = "device synchronise"
    BLOCKING_COPY = "blocking copy"
    ALLOCATION = "allocation"  # allocation or release of memory
    OTHER = "other"


# The first pattern that matches a name without its version suffix gives the kind. nsys adds the version of the
# interface (`cudaMalloc_v3020`), and the driver's own names may have one (`cuMemAlloc_v2_ptsz`).
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds|_spt)+$")
_KINDS = {
    Kind.ALLOCATION: r"(cuda|hip)(Malloc|Free|Host(Alloc|Malloc|Register|Unregister))"
    r"|cuMem(Alloc|Free|Create|Release|Map|Unmap|SetAccess|Host(Alloc|Register|Unregister))",
    Kind.EVENT_SYNC: r"Event\w*Synchronize",
    Kind.STREAM_SYNC: r"(Stream|Queue)\w*Synchronize",
    Kind.DEVICE_SYNC: r"Synchronize",
    Kind.BLOCKING_COPY: r"(cuda|cu|hip)Memcpy(?!.*Async)",
    Kind.GRAPH_LAUNCH: r"GraphLaunch",
    Kind.LAUNCH: r"^(cuda|cu|hip)\w*Launch\w*Kernel|^cudaLaunch$",
    Kind.EVENT_RECORD: r"^(cuda|cu|hip)EventRecord",
    Kind.STREAM_WAIT: r"StreamWaitEvent",
}
SYNCHRONISATION = "synchronisation"
# kind → cause to which a call's time is attributed if the device has no work
STALLS = {
    Kind.ALLOCATION: "cudaMalloc",
    **dict.fromkeys((Kind.EVENT_SYNC, Kind.STREAM_SYNC, Kind.DEVICE_SYNC, Kind.BLOCKING_COPY), SYNCHRONISATION),
}


def unversioned(name: str) -> str:
    """Return a call's name without the version of the interface: `cudaFree_v3020` → `cudaFree`."""
    return _VERSION.sub("", name)


@functools.lru_cache(maxsize=4096)
def kind(name: str) -> Kind:
    """Return the kind of a call, by its name."""
    plain = unversioned(name)
    return next((one for one, pattern in _KINDS.items() if re.search(pattern, plain)), Kind.OTHER)


def stalls(name: str) -> str | None:
    """Return the cause for idle time during a call of this name; None if such a call does not wait."""
    return STALLS.get(kind(name))
