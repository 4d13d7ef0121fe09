"""Plan of the fault campaign: which faults, in which sweeps, among which innocent cells; the same for a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from _fault_workload import CATALOGUE, PLACES, Fault

# Share of the faults. Those of a cell come six to a sweep; the others are done to the sweep as a whole.
CELL_FAMILIES = {
    "forks": 15, "channel": 15, "streams": 10, "state": 18, "threads": 6, "results": 12, "raising": 8, "memory": 4,
    "hangs": 3,
}  # fmt: skip
SWEEP_FAMILIES = {"parent": 5, "disk": 2, "journal": 5, "ranks": 4}
FAMILIES = {**CELL_FAMILIES, **SWEEP_FAMILIES}
MIXED = "mixed"
FAULTS_A_SWEEP = 6
MIXED_EVERY = 4  # of so many sweeps of cells the first has faults of several families, the others those of one
TIMEOUT_S = 8.0
FORMATS = ("terminal", "markdown", "csv", "latex")
RANKS = 2

SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")
LINGERING = ("child_lingers", "detached_child_lingers", "program_lingers", "many_children_linger")
KILLS = ("parent", "parent", "parent", "group", "twice", "worker", "cell")
DISKS = ("full while it runs", "full at the start", "file size", "no more files")
DAMAGES = (
    "first line torn", "last line torn", "last line torn", "middle line torn", "line replaced by garbage",
    "line replaced by null bytes", "null bytes at the end", "all null bytes", "empty", "all garbage", "scalar lines",
    "not UTF-8", "deep line", "long line", "line ends missing", "Windows line ends", "blank lines", "no end of line",
    "file of mine: .probe", "link of mine: .lock", "pipe of mine: .probe", "pipe of mine: .lock",
    "link of mine: .probe", "oversized cell",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """One sweep of the campaign.

    cells: what each does; the workload's plan. events: what is done to the sweep as a whole, one run each.
    face: `time`, `profile`, or `ranks`. mend: run it again without faults, which must complete it.
    """

    number: int
    family: str
    cells: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...] = ()
    face: str = "time"
    options: dict[str, Any] = field(default_factory=dict)
    mend: bool = False
    format: str = "terminal"

    @property
    def faults(self) -> int:
        by_cell = sum(cell.get("fault") is not None and not cell.get("extra") for cell in self.cells)
        return by_cell + len(self.events)


class Decks:
    """Shuffled faults of each family, each as often as it has variants."""

    def __init__(self, rng: Random, only: Sequence[str]) -> None:
        self._rng, self._only = rng, only
        self._decks: dict[str, list[Fault]] = {}

    def draw(self, family: str) -> dict[str, Any]:
        """Return a cell that commits the next fault of that family, without its number."""
        if not self._decks.get(family):
            known = [f for f in CATALOGUE.values() if f.family == family and self._asked(f)]
            self._decks[family] = [f for f in known for _ in range(min(8, 1 + len(f.variants) // 4))]
            self._rng.shuffle(self._decks[family])
        drawn = self._decks[family].pop()
        return self.cell(drawn)

    def cell(self, fault: Fault) -> dict[str, Any]:
        rng = self._rng
        places = sorted(fault.places, key=lambda place: place not in PLACES)
        weights = [4 if place in ("step", "build") else 1 for place in places]
        return {
            "fault": fault.name,
            "variant": rng.choice(list(fault.variants)),
            "place": rng.choices(places, weights)[0],
            "seed": rng.randrange(10**9),
        }

    def _asked(self, fault: Fault) -> bool:
        return not self._only or fault.family in self._only or f"{fault.family}.{fault.name}" in self._only


def plan(count: int, seed: int, only: Sequence[str] = ()) -> list[Sweep]:
    """Return `count` faults, divided into sweeps."""
    rng = Random(f"faults {seed}")
    decks = Decks(rng, only)
    asked = {name.partition(".")[0] for name in only} or set(FAMILIES)
    weights = {family: weight for family, weight in FAMILIES.items() if family in asked}
    planned = dict.fromkeys(weights, 0.0)
    sweeps: list[Sweep] = []
    of_cells = 0
    while (left := count - sum(sweep.faults for sweep in sweeps)) > 0:
        family = min(weights, key=lambda name: (planned[name] + rng.random()) / weights[name])
        label = family
        if family in CELL_FAMILIES:
            mixed = of_cells % MIXED_EVERY == 0 and len(asked & set(CELL_FAMILIES)) > 1
            of_cells += 1
            if mixed:
                label = MIXED
            families = [name for name in weights if name in CELL_FAMILIES] if mixed else [family]
            drawn = [rng.choices(families, [weights[f] for f in families])[0] for _ in range(min(left, FAULTS_A_SWEEP))]
            sweep = _of_cells(rng, len(sweeps), label, [decks.draw(name) for name in drawn])
        else:
            drawn = [family]
            sweep = _OF_SWEEPS[family](rng, decks, len(sweeps), left)
        for name in drawn:
            planned[name] += sweep.faults / len(drawn)
        sweeps.append(sweep)
    return sweeps


def _numbered(cells: Sequence[dict[str, Any]], samples: int, **rest: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"fault": None, **rest, **cell, "cell": n, "samples": samples} for n, cell in enumerate(cells, 1))


def _with_innocents(rng: Random, faulty: Sequence[dict[str, Any]], share: float = 0.85) -> list[dict[str, Any]]:
    """Return faulty cells, most of them followed by an innocent one, the last one always."""
    cells: list[dict[str, Any]] = [{}] if rng.random() < 0.4 else []
    for cell in faulty:
        cells.append(cell)
        if rng.random() < share or cell is faulty[-1]:
            cells.append({})
    return cells


def _of_cells(rng: Random, number: int, label: str, faulty: Sequence[dict[str, Any]]) -> Sweep:
    needs_timeout = any(CATALOGUE[cell["fault"]].needs_timeout for cell in faulty)
    profiled = label == "threads" and rng.random() < 0.3
    options: dict[str, Any] = {"warmup": rng.choice([0, 0, 1]), "steps": rng.choice([1, 2, 3])}
    if needs_timeout or rng.random() < 0.5:
        options["timeout_s"] = TIMEOUT_S
    if profiled:
        faulty = faulty[:3]  # each has a worker of its own
    elif rng.random() < 0.12:
        options |= {"interleave": True, "rounds": 2, "warmup": 0, "steps": rng.choice([2, 3])}
    elif rng.random() < 0.08 and not needs_timeout:
        options |= {"repeats": 2, "shuffle": True}
    samples = options["warmup"] + options["steps"]
    for cell in faulty:
        cell["call"] = rng.randrange(samples)
        if options.get("rounds"):  # each visit builds the cell anew, and counts from 0
            cell["call"] = 0
    cells = _numbered(_with_innocents(rng, faulty), samples)
    face = "profile" if profiled else "time"
    return Sweep(number, label, cells, (), face, options, rng.random() < 0.4, rng.choice(FORMATS))


def _parent(rng: Random, decks: Decks, number: int, left: int) -> Sweep:
    """Return a sweep that is killed repeatedly, in half of the cases with processes that a cell left behind."""
    ranks = rng.random() < 0.15
    events = []
    for _ in range(min(left, rng.randrange(2, 5))):
        how = rng.choice(KILLS)
        name = rng.choice(SIGNALS)
        # Python itself prints a traceback when it is interrupted while it starts.
        after = "folder" if name == "SIGINT" else rng.choice(["start", "folder", "record"])
        if how == "worker":
            name, after = "SIGKILL", "record"
        if how == "cell" and (ranks or any(event["how"] == "cell" for event in events)):
            how = "parent"
        delay_s = round(rng.uniform(0.0, 2.5), 2)
        events.append({"kind": "kill", "how": how, "signal": name, "after": after, "delay_s": delay_s})
    faulty = []
    if rng.random() < 0.5 and not ranks:
        lingering = decks.cell(CATALOGUE[rng.choice(LINGERING)]) | {"place": "step", "extra": True}
        faulty.append(lingering)
    for event in events:
        if event["how"] == "cell":
            faulty.append({"fault": "kills_the_parent", "variant": event["signal"], "place": "step", "seed": 0,
                           "once": f"killed-{number}", "extra": True})  # fmt: skip
    cells = _numbered(_with_innocents(rng, faulty, 1.0) + [{}] * 4 if faulty else [{}] * 5, 2, nap_s=0.2)
    face, options = ("ranks", {}) if ranks else ("time", {"warmup": 0, "steps": 2})
    return Sweep(number, "parent", cells, tuple(events), face, options, False, "terminal")


def _disk(rng: Random, decks: Decks, number: int, left: int) -> Sweep:
    event = {"kind": "disk", "how": rng.choice(DISKS), "size_kib": rng.randrange(1200, 2200)}
    options = {"warmup": 0, "steps": 1}
    cells = _numbered([{}] * 6, 1, fat_kb=rng.randrange(250, 500))
    return Sweep(number, "disk", cells, (event,), "time", options, False, "terminal")


def _journal(rng: Random, decks: Decks, number: int, left: int) -> Sweep:
    """Return a sweep whose files are damaged after each run."""
    names = rng.sample(DAMAGES, min(left, 4))
    events = [{"kind": "damage", "how": name, "seed": rng.randrange(10**9)} for name in names]
    options = {"warmup": 0, "steps": 1}
    return Sweep(number, "journal", _numbered([{}] * 5, 1), tuple(events), "time", options, False, rng.choice(FORMATS))


def _ranks(rng: Random, decks: Decks, number: int, left: int) -> Sweep:
    faulty = [
        decks.draw("ranks") | {"rank": rng.randrange(RANKS), "call": rng.randrange(2)} for _ in range(min(left, 3))
    ]
    cells = _numbered(_with_innocents(rng, faulty, 0.7), 2)
    return Sweep(number, "ranks", cells, (), "ranks", {"timeout_s": 12.0}, rng.random() < 0.4, "terminal")


_OF_SWEEPS = {"parent": _parent, "disk": _disk, "journal": _journal, "ranks": _ranks}
