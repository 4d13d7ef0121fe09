"""Peak that a snapshot's events would have without some of its allocations.

The events are replayed as they were recorded, without these allocations: the peak may move to another event. A remedy
that removes exactly them leaves this peak; one that allocates something in their place leaves at least this peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from cs_systems.analysis.memory.allocations import Allocation
from cs_systems.analysis.memory.categories import Attributed, Attribution


def peak_without(found: Attribution, gone: Iterable[Attributed], phases: Iterable[str] | None = None) -> int:
    """Return the highest number of bytes allocated at any event, without `gone`.

    phases: the phases in which these allocations are gone; None: always.
    """
    events = len(found.places)
    removed = allocated((one.allocation for one in gone), events)
    if phases is not None:
        names = {*phases}
        after = zip(removed[1:], found.places, strict=True)
        removed = [0, *(size if place.phase in names else 0 for size, place in after)]
    of_all = allocated((one.allocation for one in found.allocations), events)
    return max(before - less for before, less in zip(of_all, removed, strict=True))


def allocated(allocations: Iterable[Allocation], events: int) -> list[int]:
    """Return the bytes of these allocations that are alive before the first event, and after each."""
    changes = [0] * (events + 2)
    for one in allocations:
        changes[one.start + 1] += one.bytes
        changes[one.end + 1] -= one.bytes
    return list(accumulate(changes[:-1]))
