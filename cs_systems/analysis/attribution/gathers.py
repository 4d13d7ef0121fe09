"""All-gathers of sharded parameters in one step of a rank, and which of them came too late for the computation.

A gather is late where the device computes nothing just before its end: computation waited for it. If kernels run when
it ends, it came in time. Without kernels in the trace this is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.overlap import Intervals, Streams
from cs_systems.config import Phase
from cs_systems.core.range_names import meaning
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.core.tables import Column, Table
from cs_systems.readers.forms.jobs import kind
from cs_systems.readers.forms.trace import Trace

IN_TIME = 0.05  # a gather is late if computation waited for more than this share of it: kernels leave small gaps
_PHASES = (Phase.FORWARD, Phase.BACKWARD)


class GatherRow(TypedDict):
    """All-gather of one step, in order of its start.

    layer: "block 3", if the phase has as many gathers of one size as the model has blocks; otherwise None.
    """

    rank: int
    phase: str | None
    layer: str | None
    gathered_bytes: Annotated[int | None, Column("size")]
    start_s: float
    duration_s: float
    late_s: Annotated[float, Column("late", "late: time that no kernel ran just before the gather ended")]
    in_time: Annotated[bool, Column("in time")]


GATHERS = Table("gathers", GatherRow, "all-gathers of one step: which came in time for the computation")


def gathers(trace: Trace, step: Streams, layers: int | None, rank: int = 0) -> list[GatherRow]:
    """Return a row for each all-gather of the step; none without kernels.

    layers: the number of blocks of the model, None if it is unknown.
    """
    rows: list[GatherRow] = []
    starts, ends = step.collectives.start_s.tolist(), step.collectives.end_s.tolist()
    for index, name, start, end in zip(step.sent.tolist(), step.names, starts, ends, strict=True):
        if kind(name) != "all_gather":
            continue
        message, late_s = trace.messages.get(index), _late_s(step.computing, start, end)
        rows.append(
            {
                "rank": rank,
                "phase": _phase(trace, float(trace.kernels.launched_s[index])),
                "layer": None,
                "gathered_bytes": message.size_bytes if message else None,
                "start_s": start,
                "duration_s": end - start,
                "late_s": late_s,
                "in_time": late_s <= IN_TIME * (end - start),
            }
        )
    return _with_layers(rows, layers)


def _late_s(computing: Intervals, start: float, end: float) -> float:
    """Return the time before the end of a gather, at most its duration, in which nothing was computed."""
    before = int(np.searchsorted(computing.start_s, end - ROUNDING_S)) - 1
    computed_until = float(computing.end_s[before]) if before >= 0 else start
    return min(max(end - computed_until, 0.0), end - start)


def _phase(trace: Trace, launched_s: float) -> str | None:
    """Return the phase in which the host launched a kernel. Backward in another thread counts as the host's phase."""
    ranges = trace.ranges
    around = ranges.take(np.flatnonzero((ranges.start_s <= launched_s) & (launched_s < ranges.end_s)))
    found = {meaning(name).phase for name in around.name}
    return next((str(phase) for phase in _PHASES if phase in found), None)


def _with_layers(rows: Sequence[GatherRow], layers: int | None) -> list[GatherRow]:
    """Return the rows with the layers of gathers of equal size; backward gathers the last block first."""
    found = list(rows)
    for phase in _PHASES:
        sizes = Counter(row["gathered_bytes"] for row in rows if row["phase"] == phase and row["gathered_bytes"])
        usual, count = sizes.most_common(1)[0] if sizes else (None, 0)
        if count != layers:
            continue
        number = iter(range(count) if phase is Phase.FORWARD else reversed(range(count)))
        for place, row in enumerate(found):
            if (row["phase"], row["gathered_bytes"]) == (phase, usual):
                found[place] = {**row, "layer": f"block {next(number)}"}
    return found
