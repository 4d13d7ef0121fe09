"""Rule for unused parameters: DistributedDataParallel searches for them in each pass, and agrees on them."""

from __future__ import annotations

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.comparison.loop_ranks import EXCHANGE, ExchangeRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = (
    "leave out find_unused_parameters=True if each step uses every parameter; if the same ones are never used, freeze "
    "them"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of the search, and of the all-reduce of its result, the smallest of each pass."""
    found, step_s = evidence.distribution, evidence.step_s
    if step_s and (rows := EXCHANGE.of(evidence.tables)):
        return _of_loop(rows[0], step_s)
    if found is None or step_s is None or not found.searches:
        return None
    maps = sorted((call for call in found.calls if call.name == "all_reduce"), key=_size)[: found.searches]
    map_s = found.exposed_s(call for call in maps if call.size_bytes is not None)
    lost_s = found.search_s + map_s
    cause = (
        f"DistributedDataParallel searches for unused parameters in each pass ({human(found.search_s, 's')} per step) "
        f"and averages the result ({human(map_s, 's')})"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - lost_s, subject=evidence.subject)


def _of_loop(row: ExchangeRow, step_s: float) -> Diagnosis | None:
    """Find the time of the search in a loop, and whether any pass left a parameter unused."""
    if row["unused"] is None:
        return None
    search_s, marks_s = row["search_share"] * step_s, row["marks_share"] * step_s
    averages = f" and averages the result (about {human(marks_s, 's')})" if marks_s else ""
    found = f"at most {row['unused']}" if row["unused"] else "none"
    cause = (
        f"DistributedDataParallel searches for unused parameters in each pass (about {human(search_s, 's')} per step)"
        f"{averages}, and finds {found}"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - search_s - marks_s, is_free=not row["unused"])


def _size(call: Collective) -> float:
    return float("inf") if call.size_bytes is None else call.size_bytes


RULE = Rule(find, refines=("exposed-communication",))
