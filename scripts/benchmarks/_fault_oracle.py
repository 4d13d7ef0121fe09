"""Judge of the fault campaign: what is wrong with the records of a sweep, read from its files alone. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _fault_workload import CATALOGUE, FORGED, FORGED_S, KILLED, OK

DONE = frozenset({"ok", "oom", "unavailable"})  # a resumed sweep does not measure these again
CATEGORIES = (
    "lost", "doubled", "wrong", "contaminated", "left", "hung", "refused", "traceback", "changed",
)  # fmt: skip
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|Exception ignored in|\[rank\d\]:")
Row = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Failure of a sweep: its category, the cell or the event, and the observation."""

    category: str
    where: str
    what: str


@dataclass(frozen=True)
class Line:
    """Record of one of the campaign's cells, as the journal has it."""

    text: bytes
    record: Row

    @property
    def cell(self) -> int:
        return int(self.record["config"]["batch_size"])

    @property
    def slot(self) -> tuple[int, int]:
        """Cell and repeat; the sweep must hold one valid record of each."""
        return self.cell, int(self.record.get("repeat", 0))


def lines(journal: bytes) -> list[Line]:
    """Return the lines that are whole records of the campaign's workload, in order."""
    found = []
    for text in journal.split(b"\n"):
        try:
            record = json.loads(text)
            if str(record["config"]["workload"]).endswith("_fault_workload.py:factory") and record["status"]:
                found.append(Line(text, record))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def changed(before: bytes, after: bytes, damaged: bool) -> Iterator[Failure]:
    """Check that the journal only grew; a damaged one may be repaired, but keeps its whole records in order."""
    if not damaged:
        if not after.startswith(before):
            yield Failure("changed", "records.jsonl", f"the first {len(before)} bytes are not what they were")
        return
    texts, place = [line.text for line in lines(after)], 0
    for line in lines(before):
        try:
            place = texts.index(line.text, place) + 1
        except ValueError:
            yield Failure("changed", f"cell {line.cell}", "its whole record is gone or has changed")


def doubled(before: Sequence[Line], new: Sequence[Line]) -> Iterator[Failure]:
    """Check that a run added at most one record per cell, and none of a completed cell."""
    status = {line.slot: line.record["status"] for line in before}
    seen: dict[tuple[int, int], str] = {}
    for line in new:
        if line.slot in seen:
            yield Failure("doubled", f"cell {line.cell}", f"recorded twice in one run: {seen[line.slot]}, then "
                          f"{line.record['status']}")  # fmt: skip
        elif status.get(line.slot) in DONE:
            yield Failure("doubled", f"cell {line.cell}", f"was {status[line.slot]} and is measured again")
        seen[line.slot] = line.record["status"]


def lost(held: Iterable[Line], cells: Iterable[int], repeats: int) -> Iterator[Failure]:
    """Check that every cell has a record for each repeat."""
    there = {line.slot for line in held}
    for cell in cells:
        for repeat in range(repeats):
            if (cell, repeat) not in there:
                yield Failure("lost", f"cell {cell}", f"no record of repeat {repeat}")


def strangers(new: Iterable[Line], cells: Iterable[int], repeats: int) -> Iterator[Failure]:
    known = {(cell, repeat) for cell in cells for repeat in range(repeats)}
    for line in new:
        if line.slot not in known:
            yield Failure("wrong", f"cell {line.cell}", f"nobody asked for repeat {line.slot[1]} of it")


def wrong(line: Line, plan: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield the failures in the record of a faulty cell."""
    fault, record = CATALOGUE[plan["fault"]], line.record
    where = label(plan)
    status, reason = record["status"], record.get("reason") or ""
    allowed = fault.allowed(plan["place"])
    if status == "error" and "; measure it without interleave" in reason:
        return  # it left what would disturb the cells that are visited in turn with it
    if status not in allowed:
        yield Failure("wrong", where, f"{status}, not {' or '.join(sorted(allowed))}: {shortened(reason)}")
        return
    if status == OK:
        yield from _forged(record, where)
        return
    if not reason:
        yield Failure("wrong", where, f"{status} without a reason")
    elif not _names_culprit(fault.variants[plan["variant"]], reason, plan):
        expected = fault.variants[plan["variant"]].replace("{rank}", str(plan.get("rank")))
        yield Failure("wrong", where, f"the reason does not name {expected!r}: {shortened(reason)}")
    elif status == KILLED and _FRAGMENT.search(reason):
        yield Failure("wrong", where, f"last words are not one line: {shortened(reason)}")


_FRAGMENT = re.compile(r'\n|Traceback \(|File "|\^\^\^|\x1b|\x00')


def _names_culprit(expected: str, reason: str, plan: Mapping[str, Any]) -> bool:
    return re.search(expected.replace("{rank}", str(plan.get("rank"))), reason, re.DOTALL) is not None


def _forged(record: Row, where: str) -> Iterator[Failure]:
    saw = record.get("results", {}).get("saw")
    times = ((record.get("measurement") or {}).get("samples") or {}).get("wall_s", [])
    if (isinstance(saw, list) and {"cell": FORGED} in saw) or FORGED_S in times:
        yield Failure("wrong", where, "a record that the cell has forged was taken")


def contaminated(
    line: Line, plan: Mapping[str, Any], expected: Mapping[str, Sequence[Mapping[str, Any]]], folder: str
) -> Iterator[Failure]:
    """Yield how an innocent cell's record differs from those of cells in untouched processes.

    expected: place → what was seen there, of several cells.
    """
    record, where = line.record, f"innocent cell {line.cell}"
    if record["status"] != OK:
        yield Failure("contaminated", where, f"{record['status']}: {shortened(record.get('reason') or '')}")
        return
    try:
        owners, seen = what_it_saw(record)
        steps = len(record["measurement"]["samples"]["wall_s"])
    except (KeyError, TypeError, ValueError):
        yield Failure("contaminated", where, "its record does not hold what it saw")
        return
    if owners != {line.cell}:
        yield Failure("contaminated", where, f"its record is that of cell {owners}")
    if steps != plan["samples"]:
        yield Failure("contaminated", where, f"{steps} samples, not {plan['samples']}")
    differences = sorted({text for place in expected for text in _differences(place, seen, expected[place], folder)})
    if differences:
        yield Failure("contaminated", where, shortened("; ".join(differences), 400))


def what_it_saw(record: Row) -> tuple[set[int], dict[str, dict[str, Any]]]:
    """Return the cells that reported, and their observations: place → name → value."""
    seen: dict[str, dict[str, Any]] = {}
    rows = record["results"]["saw"]
    for row in rows:
        seen.setdefault(row["place"], {})[row["name"]] = json.loads(row["value"])
    return {row["cell"] for row in rows}, seen


def _differences(
    place: str, seen: Mapping[str, Any], expected: Sequence[Mapping[str, Any]], folder: str
) -> Iterator[str]:
    if place not in seen:
        yield f"nothing seen at {place}"
        return
    found = neutral(seen[place], folder)
    for name in expected[0]:
        known = [of[name] for of in expected]
        if found.get(name) not in known:
            yield f"{name}: {_difference(found.get(name), known[0])}"


def _difference(found: Any, known: Any) -> str:
    """Return both values as text; of two mappings only the entries that differ."""
    if isinstance(found, dict) and isinstance(known, dict):
        names = [name for name in sorted({*found, *known}) if found.get(name) != known.get(name)]
        return ", ".join(f"{name} {found.get(name)!r} was {known.get(name)!r}" for name in names)
    return f"{found!r} was {known!r}"


def neutral(value: Any, folder: str) -> Any:
    """Return the value seen, without the name of the sweep's folder."""
    return json.loads(json.dumps(value).replace(folder, "SWEEP"))


def tracebacks(text: str, where: str) -> Iterator[Failure]:
    if match := _TRACEBACK.search(text):
        yield Failure("traceback", where, shortened(_last_line(text[match.start() :])))


def _last_line(text: str) -> str:
    """Return the line that names the error of the first traceback."""
    body = text.splitlines()
    return next((line for line in body[1:] if line and not line.startswith((" ", "\t"))), body[0])


def label(plan: Mapping[str, Any]) -> str:
    """Return fault, variant and place of a cell: `forks.child_lingers:SIGKILL@step`."""
    if plan.get("fault") is None:
        return f"cell {plan['cell']}"
    family, variant = CATALOGUE[plan["fault"]].family, plan["variant"]
    rank = "" if plan.get("rank") is None else f" on rank {plan['rank']}"
    return f"cell {plan['cell']} {family}.{plan['fault']}{':' * bool(variant)}{variant}@{plan['place']}{rank}"


def shortened(text: str, length: int = 240) -> str:
    """Return the text as one line of printable characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= length else f"{line[:length]}…"
