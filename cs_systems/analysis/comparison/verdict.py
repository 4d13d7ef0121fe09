"""Verdict of a run with cells that differ in one field: how much faster the fastest is than the first cell."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.analysis.comparison.precision import HOPELESS
from cs_systems.analysis.comparison.runs import speedups
from cs_systems.config import FIELDS, RunConfig
from cs_systems.record import RunRecord

MOST_CELLS = 12  # with more cells, the table is the answer


def verdict(records: Sequence[RunRecord]) -> str:
    """Return the verdict as a sentence.

    "" unless there are at least two cells, all timed, that differ in one field only.

    Example: `sdpa_flash is 1.09 (1.04 … 1.14) times as fast as naive`.
    """
    timed = [record for record in records if record.is_timing and not record.is_profiled]
    cells: dict[RunConfig, list[RunRecord]] = {}
    for record in timed:
        cells.setdefault(record.run_config, []).append(record)
    field = _only_field([*cells])
    if field is None or len(cells) > MOST_CELLS:
        return ""
    baseline, *others = cells
    newest = [cells[cell][-1] for cell in cells]
    compared = speedups(newest, field, [record.run_config == baseline for record in newest])[1:]
    known = {cell: one for cell, one in zip(others, compared, strict=True) if one is not None}
    if not known:
        return ""
    best = min(known, key=lambda cell: known[cell].ratio)
    found, (fast, slow) = known[best], (_value(best, field), _value(baseline, field))
    if found.verdict == "unknown" or found.low is None or found.high is None:
        return ""
    if found.verdict == "no difference":
        if found.resolution is not None and found.resolution > HOPELESS:
            return f"too noisy: not even a doubling between {slow} and {fast} would have been noticed"
        least, most = 1 / found.high, 1 / found.low
        return f"no difference is shown between {slow} and {fast}: {1 / found.ratio:.2f} ({least:.2f} … {most:.2f})"
    if found.ratio > 1:
        fast, slow, ratio, low, high = slow, fast, found.ratio, found.low, found.high
    else:
        ratio, low, high = 1 / found.ratio, 1 / found.high, 1 / found.low
    return f"{fast} is {ratio:.2f} ({low:.2f} … {high:.2f}) times as fast as {slow}"


def _only_field(cells: Sequence[RunConfig]) -> str | None:
    """Return the field in which all cells differ from each other, if it is the only one."""
    identities = [name for name, each in FIELDS.items() if each.field.identity]
    different = [name for name in identities if len({repr(getattr(cell, name)) for cell in cells}) > 1]
    return different[0] if len(different) == 1 and different[0] not in ("model", "shape") else None


def _value(cell: RunConfig, field: str) -> str:
    value = getattr(cell, field)
    text = FIELDS[field].words(value)
    return text if isinstance(value, str) else f"{field} {text}"
