"""Rule for a request that failed: how much was asked for, what was free, and what would make room."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import ACTIVATIONS, OPTIMIZER_STATE
from cs_systems.core.tables import Row
from cs_systems.core.units import human

if TYPE_CHECKING:
    from cs_systems.analysis.memory.out_of_memory import Failure

OF_CATEGORY = {
    ACTIVATIONS: "checkpoint blocks, or use a smaller batch",
    OPTIMIZER_STATE: "shard it over ranks, or keep it in bf16",
}


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the last request that failed; the program needs what was allocated and what it asked for."""
    failure = evidence.failure
    if failure is None:
        return None
    row = failure.row
    needed = row["allocated_bytes"] + row["requested_bytes"]
    phase = f"in {row['phase']}" if row["phase"] else ""
    where = ", ".join(filter(None, [phase, f"at {row['where']}" if row["where"] else ""]))
    return Diagnosis(
        _cause(failure), _remedy(failure), needed, None, "bytes", (cast(Row, row),), where=where, takes=needed
    )


def _cause(failure: Failure) -> str:
    row = failure.row
    on_device = row["device_free_bytes"]
    free = [] if on_device is None else [f"{human(on_device, 'bytes')} free on the device"]
    if row["cached_bytes"] and row["largest_free_bytes"]:
        pieces = f"the largest piece {human(row['largest_free_bytes'], 'bytes')}"
        free.append(f"{human(row['cached_bytes'], 'bytes')} reserved but free ({pieces})")
    free.append(f"{human(row['allocated_bytes'], 'bytes')} allocated")
    which = f", the last of {failure.count} that failed" if failure.count > 1 else ""
    return f"a request for {human(row['requested_bytes'], 'bytes')} failed{which}, with {', '.join(free)}"


def _remedy(failure: Failure) -> str:
    """Return the change that would make room."""
    from cs_systems.analysis.memory.out_of_memory import EXPAND, FRAGMENTED, LIMIT, OTHER_POOL

    of_cause = {
        LIMIT: "the process's own limit was reached: raise it (torch.cuda.set_per_process_memory_fraction), or free "
        "memory",
        OTHER_POOL: "a free piece was large enough, in another stream's or graph's pool: allocate on one stream, or "
        "call torch.cuda.empty_cache() before",
    }
    if failure.cause in of_cause:
        return of_cause[failure.cause]
    row, lacks = failure.row, failure.lacks_bytes
    if failure.cause != FRAGMENTED or failure.is_expandable:
        return _held(failure, f"free {human(lacks, 'bytes')} more" if lacks else "free memory")
    lacks = row["requested_bytes"] - (row["device_free_bytes"] or 0)
    held = _held(failure, f"free {human(lacks, 'bytes')} more")
    return f"set {EXPAND}, which makes the free pieces usable, or {held}"


def _held(failure: Failure, lacks: str) -> str:
    """Return the category that holds most of the memory, and a way to reduce it."""
    from cs_systems.analysis.memory.categories import UNKNOWN

    if not failure.held:
        return lacks
    of_category = Counter[str]()
    for (category, _), size in failure.held.items():
        of_category[category] += size
    category, size = of_category.most_common(1)[0]
    own = {site: held for (name, site), held in failure.held.items() if name == category and site}
    site = max(own, key=lambda name: own[name], default="")
    known = category != UNKNOWN
    what = category if known else "allocated"
    at = f"{', most of them allocated' if known else ''} at {site}" if site else ""
    way = f"; {OF_CATEGORY[category]}" if category in OF_CATEGORY else ""
    return f"{lacks}: {human(size, 'bytes')} are {what}{at}{way}"


RULE = Rule(find)
