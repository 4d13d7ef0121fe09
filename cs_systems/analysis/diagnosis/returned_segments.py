"""Rule for returned segments: the allocator gives memory back to the driver and asks for it again, which takes time."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

OFTEN = 2  # times the peak; less may be the end of a warm-up
MANY = 20  # segments
BY_PROGRAM = "call torch.cuda.empty_cache() outside of the loop, if at all"
BY_PRESSURE = (
    "find what returns it: torch.cuda.empty_cache() in a loop, or requests that do not fit what is cached, for which a "
    "smaller batch leaves room"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find memory that was returned and requested again.

    Each cudaFree and cudaMalloc makes the host wait for the device.
    """
    memory = evidence.memory
    if memory is None or (returned := memory.returned) is None:
        return None
    if returned.segments < MANY or returned.bytes < OFTEN * memory.peak_bytes:
        return None
    size, times = human(returned.bytes, "bytes"), returned.bytes / memory.peak_bytes
    cause = (
        f"{size} in {returned.segments} segments go back to the driver and are asked for again, {times:.2g} times the "
        "peak"
    )
    remedy = BY_PROGRAM if returned.by_program else BY_PRESSURE
    return Diagnosis(cause, remedy, memory.peak_bytes, None, "bytes", memory.rows, takes=memory.peak_bytes)


RULE = Rule(find)
