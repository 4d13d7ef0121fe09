"""Rule for small buckets: gradients travel in many small all-reduces, and their latency adds up."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.distribution import DDP, FSDP, Distribution
from cs_systems.analysis.comparison.loop_ranks import EXCHANGE, SMALL_BYTES, ExchangeRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

MANY = 4  # all-reduces per pass; a small model has few of any size
OWN = "send several gradients in one all-reduce: wrap the model in DistributedDataParallel, or flatten them"
TOGETHER = "send several values in one all-reduce: stack or flatten them"
REMEDY = "send larger buckets (bucket_cap_mb of DistributedDataParallel, 25 by default)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find small all-reduces of gradients; in one bucket, at best none of their exposed time is left."""
    found, step_s = evidence.distribution, evidence.step_s
    if step_s and (rows := EXCHANGE.of(evidence.tables)):
        return _of_loop(rows[0], step_s)
    if found is None or step_s is None or found.wrapper == FSDP or not found.has_backward:
        return None
    reduces = [call for call in found.calls if call.name == "all_reduce" and call.size_bytes]
    small = [call for call in reduces if (call.size_bytes or 0) < SMALL_BYTES]
    if found.wrapper != DDP and not _in_a_row(found, small):
        return None
    of_pass = len(small) / max(found.steps, found.passes)
    if of_pass < MANY or 2 * len(small) < len(reduces):
        return None
    cause = _cause("backward", of_pass, median(call.size_bytes or 0 for call in small))
    remedy = REMEDY if found.wrapper == DDP else OWN
    return Diagnosis(cause, remedy, step_s, step_s - found.exposed_s(small), subject=evidence.subject)


def _of_loop(row: ExchangeRow, step_s: float) -> Diagnosis | None:
    """Find small all-reduces in a loop; in one call, at best none of their transfer time is left."""
    if row["small"] < MANY:
        return None
    cause = _cause("backward" if row["are_gradients"] else "step", row["small"], row["small_bytes"])
    remedy = REMEDY if row["wrapper"] == DDP else OWN if row["are_gradients"] else TOGETHER
    return Diagnosis(cause, remedy, step_s, step_s * (1 - row["small_share"]))


def _cause(of: str, count: float, size_bytes: float) -> str:
    size = human(size_bytes, "bytes")
    return f"each {of} sends {count:.0f} all-reduces of {size} (median), too small to use the bandwidth"


def _in_a_row(found: Distribution, calls: Sequence[Collective]) -> bool:
    """Return whether most calls follow another one without computation in between, unlike calls that divide a layer."""
    begun = np.searchsorted(found.computing.start_s, sorted(call.start_s for call in calls))
    return 2 * int((np.diff(begun) == 0).sum()) > len(calls)


RULE = Rule(find, refines=("exposed-communication",))
