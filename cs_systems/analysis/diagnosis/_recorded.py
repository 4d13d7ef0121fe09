"""What-ifs that a profiled record keeps: the replay of its steps after the remedies of its diagnoses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cs_systems.analysis.diagnosis import WORTH, find_all
from cs_systems.analysis.diagnosis._evidence import of_records
from cs_systems.analysis.replay.clean import Clean
from cs_systems.analysis.replay.what_ifs import Cleanly, WhatIfRow, together

if TYPE_CHECKING:
    from cs_systems.analysis.replay import Replay
    from cs_systems.record import RunRecord


def what_ifs(record: RunRecord, replayed: Callable[[], Replay]) -> list[WhatIfRow]:
    """Return the durations of a step without a profiler after each remedy that a replay can carry, and combinations.

    record: with the tables of the trace. replayed: returns the replay of its steps. Empty if the record has no step
    without the profiler, or its steps cannot be replayed.
    """
    clean = Clean.of(record.clean) if record.clean is not None else None
    if clean is None:
        return []
    replay = replayed()
    if replay.why_not is not None:
        return []
    known = Cleanly(replay, clean)
    found, _ = find_all(replace(of_records([record]), known_replay=known))
    rows = together(known, dict.fromkeys(one.change for one in found if one.change is not None), WORTH)
    return [row for row in rows if row["saved_share"] is not None]
