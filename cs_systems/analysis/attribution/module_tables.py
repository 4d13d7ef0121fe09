"""Tables of a profile by module, for a trace with a table of modules: see `traces.modules`.

Times are those of one step. A module's time is that of every kernel launched in it or in a module inside it; its own
time excludes the modules inside. FLOPs and kept memory are the record's: see `instrument.module_costs`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.tables import NO_COSTS, Costs
from cs_systems.config import Phase
from cs_systems.core import statistics
from cs_systems.core.range_names import COMMUNICATION, UNATTRIBUTED
from cs_systems.record import Row

PHASES = (Phase.FORWARD.value, Phase.BACKWARD.value)
SUMMED = (
    "parameters",
    "kept_bytes",
    "flops",
    "own_flops",
    "calls_per_step",
    "own_s",
    "time_s",
    "forward_s",
    "backward_s",
)


def modules(profile: Profile, costs: Costs = NO_COSTS) -> list[Row]:
    """Return one row for each module, in the order of the model."""
    known = profile.trace.modules
    if known is None:
        return []
    count = len(profile.steps)
    own: dict[Any, float] = defaultdict(float)
    inside: dict[Any, float] = defaultdict(float)
    calls = Counter[str]()
    for (_, place), total in profile.groups.items():
        if place.module is None:
            continue
        own[place.module] += total.time_s / count
        for path in _with_ancestors(place.module):
            inside[path] += total.time_s / count
            inside[path, place.phase] += total.time_s / count
            calls[path] += total.calls
    own_flops = _own_flops(known.by_path, costs.modules)
    phases = _phases(profile)
    rows = []
    for row in known.rows:
        path = row["path"]
        rows.append(
            {
                **{name: row[name] for name in ("path", "class", "block", "stack", "layer", "part", "parameters")},
                **{f"{phase}_s": inside[path, phase] if phase in phases else None for phase in PHASES},
                "calls_per_step": calls[path] / count,
                "time_s": inside[path],
                "own_s": own[path],
                "share": inside[path] / profile.time_s * count if profile.time_s else None,
                **{f"{phase}_flops": costs.modules.get(path, {}).get(f"{phase}_flops") for phase in PHASES},
                "flops": _flops(costs.modules.get(path)),
                "own_flops": own_flops.get(path),
                "kept_bytes": costs.modules.get(path, {}).get("kept_bytes"),
            }
        )
    return [{**row, **_rates(row, costs)} for row in rows]


def _phases(profile: Profile) -> set[str]:
    """Return the phases of kernels in modules; the time of a module in another phase is unknown, not 0."""
    return {place.phase for _, place in profile.groups if place.module is not None}


def tree(profile: Profile, costs: Costs = NO_COSTS) -> list[Row]:
    """Return the modules with the blocks of each list summed: `layers.*.attn`; those that take no time are left out."""
    rows = modules(profile, costs)

    def general(row: Row) -> str:
        stack, path = row["stack"], str(row["path"])
        if stack is None:
            return path or str(row["class"])
        return str(stack) + re.sub(r"^(\.?)\d+", r"\1*", path[len(stack) :])

    return [row for row in _grouped(rows, general, "module", profile, costs) if row["time_s"] or row["parameters"]]


def blocks(profile: Profile, costs: Costs = NO_COSTS) -> list[Row]:
    """Return one row for each block."""
    rows = modules(profile, costs)
    is_block = [row for row in rows if row["stack"] is not None and _is_block(row)]
    kept = ("block", "path", "class", "parameters", *(f"{phase}_s" for phase in PHASES), "time_s", "share", "flops")
    rates = ("achieved_flops_per_s", "ceiling_share", "kept_bytes", "calls_per_step")
    return [{name: row[name] for name in (*kept, *rates)} for row in is_block]


def classes(profile: Profile, costs: Costs = NO_COSTS) -> list[Row]:
    """Return one row for each class of modules, by own time: the times of all classes add up."""
    rows = modules(profile, costs)
    times: dict[tuple[str, str], float] = defaultdict(float)
    by_path, phases = {row["path"]: row for row in rows}, _phases(profile)
    for (_, place), total in profile.groups.items():
        if place.module is not None and place.phase in PHASES:
            times[by_path[place.module]["class"], place.phase] += total.time_s / len(profile.steps)
    made = []
    for name in dict.fromkeys(row["class"] for row in rows):
        mine = [row for row in rows if row["class"] == name]
        own_s, flops = sum(row["own_s"] for row in mine), statistics.total(row["own_flops"] for row in mine)
        row = {
            "class": name,
            "modules": len(mine),
            **{f"{phase}_s": times[name, phase] if phase in phases else None for phase in PHASES},
            "time_s": own_s,
            "share": own_s / profile.time_s * len(profile.steps) if profile.time_s else None,
            "flops": flops,
        }
        made.append({**row, **_rates(row, costs)})
    return sorted((row for row in made if row["time_s"] or row["flops"]), key=lambda row: -row["time_s"])


TABLES: dict[str, Callable[[Profile, Costs], list[Row]]] = {
    "tree": tree,
    "blocks": blocks,
    "classes": classes,
    "modules": modules,
}


def notes(name: str, profile: Profile, rows: Sequence[Row]) -> list[str]:
    """Return the notes under a table: the share of the time that belongs to a module, and how to read the times."""
    if not rows:
        return [why_nothing(profile) or "the trace has no table of modules"]
    in_module = sum(total.time_s for (_, place), total in profile.groups.items() if place.module is not None)
    share = in_module / profile.time_s if profile.time_s else 0.0
    said = [f"{share:.1%} of the kernel time belongs to a module"]
    if name == "classes":
        said.append("the time of a class is that of its modules without the modules inside them")
    elif name in ("tree", "modules"):
        said.append("the time of a module includes the modules inside it; its own time does not")
    if any(row.get("flops") is not None for row in rows):
        said.append("FLOPs are those that were executed; a fused attention leaves hidden tiles out")
    return said


def why_nothing(profile: Profile) -> str | None:
    """Return in one sentence why no kernel of forward or backward belongs to a layer; None if one does."""
    time: dict[bool, float] = defaultdict(float)
    for (_, place), total in profile.groups.items():
        if place.phase in PHASES or place.phase == UNATTRIBUTED:
            time[place.layer not in (UNATTRIBUTED, COMMUNICATION)] += total.time_s
    if time[True] or not time[False]:
        return None
    kernels, modules = profile.trace.kernels, profile.trace.modules
    begins = "no kernel of forward or backward belongs to a module: "
    if kernels.in_graph.all():
        return f"{begins}all ran in CUDA graphs, whose replay opens no range; profile without CUDA graphs"
    opened = set(profile.trace.ranges.name.values)
    if modules is not None and not any(map(modules.is_module, opened)):
        return (
            f"{begins}none of the model's {len(modules.rows)} modules was called while the trace was recorded: the "
            "step runs another model, or a compiled one; use the compile mode default, or none"
        )
    if modules is None:
        tried = f"; {profile.why_no_blocks}" if profile.why_no_blocks else ""
        return (
            f"{begins}no range in the trace is named like a module, and the trace has no table of modules{tried}; "
            "record with cs-systems profile, with torch.profiler and with_stack=True, or with a range around each "
            "module's forward"
        )
    return f"{begins}kernels are launched outside of the ranges of modules"


def _with_ancestors(path: str) -> list[str]:
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(len(words) + 1)]


def _flops(row: Mapping[str, Any] | None) -> int | None:
    """Return the FLOPs of forward and backward together; of forward alone where there was no backward."""
    known = [row[f"{phase}_flops"] for phase in PHASES if row.get(f"{phase}_flops") is not None] if row else []
    return sum(known) if known else None


def _own_flops(paths: Iterable[str], costs: Mapping[str, Row]) -> dict[str, int]:
    own = {path: flops for path in paths if (flops := _flops(costs.get(path))) is not None}
    whole = dict(own)
    for path, flops in whole.items():
        parent = next((above for above in reversed(_with_ancestors(path)[:-1]) if above in own), None)
        if parent is not None:
            own[parent] -= flops
    return own


def _rates(row: Row, costs: Costs) -> Row:
    flops, time_s = row["flops"], row["time_s"]
    rate = flops / time_s if flops is not None and time_s else None
    peak = costs.ceilings.flops_per_s if costs.ceilings else None
    return {"achieved_flops_per_s": rate, "ceiling_share": rate / peak if rate is not None and peak else None}


def _grouped(rows: Iterable[Row], key: Callable[[Row], str], title: str, profile: Profile, costs: Costs) -> list[Row]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    made: list[Row] = []
    for name, mine in groups.items():
        row = {
            title: name,
            "class": mine[0]["class"] if len({one["class"] for one in mine}) == 1 else "several",
            "modules": len(mine),
            "part": mine[0]["part"],
            **{column: statistics.total(one[column] for one in mine) for column in SUMMED},
        }
        share = row["time_s"] / profile.time_s * len(profile.steps) if profile.time_s else None
        made.append({**row, "share": share, **_rates(row, costs)})
    return made


def _is_block(row: Row) -> bool:
    """Return whether the row is the block itself, not a module inside it: what follows its list's path is a number."""
    return re.fullmatch(r"\.?\d+", str(row["path"])[len(row["stack"]) :]) is not None
