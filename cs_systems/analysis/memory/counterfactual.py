"""Peak that a snapshot's events would have without some of its allocations.

The events are replayed as they were recorded, without these allocations: the peak may move to another event. A remedy
that removes exactly them leaves this peak; one that allocates something in their place leaves at least this peak.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cs_systems.analysis.memory.allocations import Allocation
from cs_systems.analysis.memory.categories import Attributed, Attribution
from cs_systems.readers.forms.columns import Ints


def peak_without(found: Attribution, gone: Iterable[Attributed], phases: Iterable[str] | None = None) -> int:
    """Return the highest number of bytes allocated at any event, without `gone`.

    phases: the phases in which these allocations are gone; None: always.
    """
    events = len(found.places)
    removed = allocated((one.allocation for one in gone), events)
    if phases is not None:
        names = {*phases}
        removed[1:] *= np.array([place.phase in names for place in found.places], bool)
        removed[0] = 0
    return int((allocated((one.allocation for one in found.allocations), events) - removed).max())


def allocated(allocations: Iterable[Allocation], events: int) -> Ints:
    """Return the bytes of these allocations that are alive before the first event, and after each."""
    changes = np.zeros(events + 2, np.int64)
    for one in allocations:
        changes[one.start + 1] += one.bytes
        changes[one.end + 1] -= one.bytes
    return np.cumsum(changes)[: events + 1]
