"""Rule for cached memory: whole segments stay reserved that nothing uses at the peak, left from an earlier need."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.fragmentation import SMALL_BYTES
from cs_systems.config import Phase
from cs_systems.core.units import human

NOTABLE = 0.3  # share of the reserved memory; requests of changing sizes leave some segments unused
REMEDY = (
    "call torch.cuda.empty_cache() once after the work that needed it, such as an evaluation with larger batches: the "
    "allocator returns it only when its own request fails, and no other process can use it until then"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find reserved memory in segments without any block in use; memory between blocks in use is fragmentation."""
    memory = evidence.memory
    if memory is None or memory.reserved_bytes is None or memory.unusable_bytes is None or memory.is_expandable:
        return None
    cached = memory.reserved_bytes - memory.peak_bytes - memory.unusable_bytes
    if cached < SMALL_BYTES or cached < NOTABLE * memory.reserved_bytes:
        return None
    size, reserved = human(cached, "bytes"), human(memory.reserved_bytes, "bytes")
    cause = f"{size} of {reserved} reserved stay cached without any use, even at the peak"
    # forward and backward of the same step, which the history lacks, may need this memory
    lacks_pass = bool(memory.phases) and not memory.phases & {Phase.FORWARD, Phase.BACKWARD}
    return Diagnosis(
        cause,
        REMEDY,
        memory.reserved_bytes,
        memory.reserved_bytes - cached,
        "bytes",
        memory.rows,
        comes_last=lacks_pass,
        is_outside=lacks_pass,
    )


RULE = Rule(find)
