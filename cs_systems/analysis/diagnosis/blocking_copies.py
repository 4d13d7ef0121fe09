"""Rule for blocking copies: memory is copied while no kernel runs."""

from __future__ import annotations

import re

from cs_systems.analysis.attribution.gaps import COPY
from cs_systems.analysis.attribution.tables import gaps
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.replay import CopiesOverlapped
from cs_systems.core.tables import Row
from cs_systems.readers.forms.trace import steps_of

PLAIN = "copy from pinned memory, in a stream of its own, while kernels run"
AHEAD = "copy less, such as a smaller data type, or copy ahead in a stream of its own, while kernels run"
PINNED, PAGEABLE = re.compile("pinned"), re.compile("pageable")  # in the name of a copy
REMEDY = "pin the host's memory (pin_memory=True), copy with non_blocking=True, and copy the next batch ahead"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps between kernels in which a copy ran."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(COPY)
    if step_s is None or not idle_s:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU copies memory and computes nothing"
    rows: tuple[Row, ...] = tuple(row for row in gaps.of(evidence.tables) if row["cause"] == COPY)
    remedy = AHEAD if _are_pinned(evidence) else REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - idle_s, evidence=rows, change=CopiesOverlapped())


def _are_pinned(evidence: Evidence) -> bool:
    """Return whether most time of the copies between host and device is from or to pinned memory already."""
    if evidence.usual is None:
        return False
    copies = evidence.usual.profile.trace.copies
    copies = copies.take(steps_of(copies.start_s, evidence.usual.profile.steps)[1])
    pinned, pageable = (
        float((copies.end_s - copies.start_s)[copies.name.codes_where(memory.search)].sum())
        for memory in (PINNED, PAGEABLE)
    )
    return pinned > pageable


RULE = Rule(find)
