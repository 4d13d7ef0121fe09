"""Rule for small buckets: gradients travel in many small all-reduces, whose latency adds up."""

from __future__ import annotations

from statistics import median

from cs_systems.analysis.attribution.distribution import DDP
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

SMALL_BYTES = 1 << 20  # an all-reduce of less takes its latency, not its bandwidth; PyTorch's first bucket has 1 MiB
MANY = 4  # all-reduces of a pass; a small model has few of any size
REMEDY = "send larger buckets (bucket_cap_mb of DistributedDataParallel, 25 by default)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find small all-reduces of gradients; in one bucket, at best none of their exposed time is left."""
    found, step_s = evidence.distribution, evidence.step_s
    if found is None or step_s is None or found.wrapper != DDP or not found.passes:
        return None
    reduces = [call for call in found.calls if call.name == "all_reduce" and call.size_bytes]
    small = [call for call in reduces if (call.size_bytes or 0) < SMALL_BYTES]
    of_pass = len(small) / max(found.steps, found.passes)
    if of_pass < MANY or 2 * len(small) < len(reduces):
        return None
    size = human(median(call.size_bytes or 0 for call in small), "bytes")
    cause = f"each backward sends {of_pass:.0f} all-reduces of {size} (median), too small to use the bandwidth"
    return Diagnosis(cause, REMEDY, step_s, step_s - found.exposed_s(small), subject=evidence.subject)


RULE = Rule(find)
