"""Rule for fragmentation: the allocator reserves more than is allocated at the peak, in pieces too small to use."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

NOTABLE = 0.1  # share of the reserved memory; the allocator's blocks of 2 and 20 MiB always leave some free
SMALL_BYTES = 1 << 30  # less than this does not decide whether a step fits
REMEDY = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and keep shapes constant"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find memory that is reserved at the peak and not allocated; at best nothing else is reserved.

    If the segments are known, those without a block in use do not count, because the allocator returns them on demand.
    Segments that hold only logits or attention scores do not count either, because the remedies for these free them.
    """
    memory = evidence.memory
    if memory is None or memory.reserved_bytes is None:
        return None
    free = memory.unusable_bytes if memory.lasting_bytes is None else memory.lasting_bytes
    if free is None:
        free = memory.reserved_bytes - memory.peak_bytes
    if free < SMALL_BYTES or free < NOTABLE * memory.reserved_bytes:
        return None
    cause = f"{free / memory.reserved_bytes:.0%} of the reserved memory is in no allocation even at the peak"
    return Diagnosis(cause, REMEDY, memory.reserved_bytes, memory.reserved_bytes - free, "bytes", memory.rows)


RULE = Rule(find)
