"""Device memory by range: the bytes that cudaMalloc and cudaFree allocate and free in each phase and layer."""

from __future__ import annotations

from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.places import places_at
from cs_systems.analysis.attribution.profile import find_steps
from cs_systems.config import ConfigError
from cs_systems.core.tables import Column, Table
from cs_systems.readers.forms.columns import Categorical
from cs_systems.readers.forms.trace import Trace, steps_of

MEMORY_USAGE = "--cuda-memory-usage=true"


class MemoryRange(TypedDict):
    """Device memory that a phase and layer allocate and free in a step: means over the steps."""

    phase: str
    layer: str
    allocations: Annotated[float, Column("calls")]
    allocated_bytes: float
    freed_bytes: float
    change_bytes: float
    # highest memory in use in the range, minus the memory in use when the step began; largest of all steps
    most_bytes: int


class MemoryRangeRow(MemoryRange):
    """Memory of a range, and for blocks the predicted memory, in `memory_ranges`.

    Predicted: the bytes that a block's forward keeps, and the change of the bytes in use by its backward. None in other
    rows, and for compiled code or checkpoints, which the formula does not cover.
    """

    predicted_bytes: int | None


class MemoryRangesOf(TypedDict):
    """Requests that `memory_ranges` counts, in `memory_ranges_of`: of single tensors, or of the caching allocator."""

    sees: str


def memory_ranges(trace: Trace) -> list[MemoryRange]:
    """Return the memory that each phase and layer of a step allocates and frees.

    Rows are in the order in which a step first reaches each phase and layer; the list is empty where no step allocated.
    A call belongs to the ranges open on the thread that made it, like a kernel's launch.

    Raises:
        ConfigError: The trace has no memory events, or no step.
    """
    found = trace.allocations
    if found is None:
        raise ConfigError(f"{trace.source} has no memory events; record with nsys and {MEMORY_USAGE}")
    steps, _ = find_steps(trace, None)
    number, inside = steps_of(found.time_s, steps)
    in_use = np.cumsum(found.change_bytes)
    began = np.searchsorted(found.time_s, [step.start_s for step in steps])
    above = in_use - np.append(0, in_use)[began][number]
    places = places_at(trace.ranges, found.thread, found.time_s, trace.modules)
    pairs = Categorical.of((place.phase, place.layer) for place in places)
    rows: list[MemoryRange] = []
    for code in dict.fromkeys(pairs.codes[inside].tolist()):
        phase, layer = pairs.values[code]
        mine = inside & (pairs.codes == code)
        change = found.change_bytes[mine]
        rows.append(
            {
                "phase": phase,
                "layer": layer,
                "allocations": int((change > 0).sum()) / len(steps),
                "allocated_bytes": int(change[change > 0].sum()) / len(steps),
                "freed_bytes": -int(change[change < 0].sum()) / len(steps),
                "change_bytes": int(change.sum()) / len(steps),
                "most_bytes": int(above[mine].max()),
            }
        )
    return rows


MEMORY_RANGES = Table(
    "memory_ranges",
    MemoryRangeRow,
    "device memory of one step, by range",
    "phase layer allocations allocated_bytes freed_bytes change_bytes predicted_bytes most_bytes",
)
MEMORY_RANGES_OF = Table("memory_ranges_of", MemoryRangesOf, "what the table of memory by range counts")
