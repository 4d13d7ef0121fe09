"""Tables of a profile by module, for traces with a table of modules (see `readers.forms.modules`).

Times are of one step. A module's time includes every kernel launched in it or in a nested module; its own time
excludes nested modules. FLOPs and kept memory come from the record: see `instrument.module_costs`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypedDict

from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.tables import NO_COSTS, Costs
from cs_systems.config import Phase
from cs_systems.core import statistics
from cs_systems.core.range_names import COMMUNICATION, UNATTRIBUTED, with_ancestors
from cs_systems.core.tables import Column, by_name, table
from cs_systems.record import Row

PHASES = (Phase.FORWARD.value, Phase.BACKWARD.value)

_OfClass = TypedDict("_OfClass", {"class": str})


class Rates(TypedDict):
    """Achieved rate of FLOPs, and its share of the device's peak."""

    achieved_flops_per_s: Annotated[float | None, Column("rate", drop=6)]
    ceiling_share: Annotated[float | None, Column("of ceiling")]


class WorkRow(_OfClass, Rates):
    """Time of modules in a step, and their FLOPs.

    None if a phase has no kernel in a module, or without a known cost.
    """

    forward_s: float | None
    backward_s: float | None
    time_s: float
    share: Annotated[float | None, Column("share of time", drop=9)]
    flops: Annotated[int | None, Column("work", drop=1)]


class ClassRow(WorkRow):
    """Class of modules with the time spent outside of nested modules, in `classes`."""

    modules: Annotated[int, Column("number")]


class BlockRow(WorkRow):
    """Block of the model, in `blocks`."""

    block: str | None
    path: str
    parameters: int
    calls_per_step: float
    kept_bytes: Annotated[int | None, Column("kept")]


class OwnTimes(TypedDict):
    """Time outside of nested modules, and its FLOPs."""

    own_s: float
    own_flops: int | None


class TreeRow(ClassRow, OwnTimes):
    """Modules with paths that differ only in block numbers, in `tree`; values are sums over them."""

    module: Annotated[str, Column(beside=50)]
    part: str | None
    parameters: int | None
    calls_per_step: float | None
    kept_bytes: Annotated[int | None, Column("kept")]


class ModuleRow(BlockRow, OwnTimes):
    """Module of the model, in `modules`, in the order of the model."""

    stack: str | None  # path of the list of blocks that contains it
    layer: str
    part: str | None
    forward_flops: int | None
    backward_flops: int | None


_TIMES = "forward_s backward_s time_s share flops achieved_flops_per_s ceiling_share"


@table(
    "modules, per step",
    f"path class part parameters {_TIMES} kept_bytes",
    most=10,
    headings={"path": "module"},
)
def modules(profile: Profile, costs: Costs = NO_COSTS) -> list[ModuleRow]:
    """Return one row for each module, in the order of the model; none without kernels, as they divide their time."""
    known = profile.trace.modules
    if known is None or not profile.trace.kernels:
        return []
    count = len(profile.steps)
    own: dict[Any, float] = defaultdict(float)
    inside: dict[Any, float] = defaultdict(float)
    calls = Counter[str]()
    for (_, place), total in profile.groups.items():
        if place.module is None:
            continue
        own[place.module] += total.time_s / count
        for path in with_ancestors(place.module):
            inside[path] += total.time_s / count
            inside[path, place.phase] += total.time_s / count
            calls[path] += total.calls
    own_flops = _own_flops(known.by_path, costs.modules)
    phases = _phases(profile)
    rows: list[ModuleRow] = []
    for row in known.rows:
        path, cost = row["path"], costs.modules.get(row["path"], {})
        rows.append(
            {
                "path": path,
                "class": row["class"],
                "block": row["block"],
                "stack": row["stack"],
                "layer": row["layer"],
                "part": row["part"],
                "parameters": row["parameters"],
                "forward_s": inside[path, PHASES[0]] if PHASES[0] in phases else None,
                "backward_s": inside[path, PHASES[1]] if PHASES[1] in phases else None,
                "calls_per_step": calls[path] / count,
                "time_s": inside[path],
                "own_s": own[path],
                "share": inside[path] / profile.time_s * count if profile.time_s else None,
                "forward_flops": cost.get("forward_flops"),
                "backward_flops": cost.get("backward_flops"),
                "flops": _flops(cost),
                "own_flops": own_flops.get(path),
                "kept_bytes": cost.get("kept_bytes"),
                **_rates(_flops(cost), inside[path], costs),
            }
        )
    return rows


def _phases(profile: Profile) -> set[str]:
    """Return the phases of kernels in modules; the time of a module in another phase is unknown, not 0."""
    return {place.phase for _, place in profile.groups if place.module is not None}


@table(
    "module tree, the blocks of a list summed, per step",
    f"module class modules part parameters {_TIMES} kept_bytes",
)
def tree(profile: Profile, costs: Costs = NO_COSTS) -> list[TreeRow]:
    """Return the modules with the blocks of each list summed, as `layers.*.attn`; modules without time are left out."""
    groups: dict[str, list[ModuleRow]] = defaultdict(list)
    for row in modules(profile, costs):
        groups[_general(row)].append(row)
    rows: list[TreeRow] = []
    for name, mine in groups.items():
        time_s, flops = sum(one["time_s"] for one in mine), statistics.total(one["flops"] for one in mine)
        rows.append(
            {
                "module": name,
                "class": mine[0]["class"] if len({one["class"] for one in mine}) == 1 else "several",
                "modules": len(mine),
                "part": mine[0]["part"],
                "parameters": statistics.total(one["parameters"] for one in mine),
                "kept_bytes": statistics.total(one["kept_bytes"] for one in mine),
                "flops": flops,
                "own_flops": statistics.total(one["own_flops"] for one in mine),
                "calls_per_step": statistics.total(one["calls_per_step"] for one in mine),
                "own_s": sum(one["own_s"] for one in mine),
                "time_s": time_s,
                "forward_s": statistics.total(one["forward_s"] for one in mine),
                "backward_s": statistics.total(one["backward_s"] for one in mine),
                "share": time_s / profile.time_s * len(profile.steps) if profile.time_s else None,
                **_rates(flops, time_s, costs),
            }
        )
    return [row for row in rows if row["time_s"] or row["parameters"]]


def _general(row: ModuleRow) -> str:
    """Return the module's path with a star in place of the block number."""
    stack, path = row["stack"], row["path"]
    return (path or row["class"]) if stack is None else stack + re.sub(r"^(\.?)\d+", r"\1*", path[len(stack) :])


@table("blocks, per step", f"block class parameters {_TIMES} kept_bytes")
def blocks(profile: Profile, costs: Costs = NO_COSTS) -> list[BlockRow]:
    """Return one row for each block."""
    return [
        {
            "block": row["block"],
            "path": row["path"],
            "class": row["class"],
            "parameters": row["parameters"],
            "forward_s": row["forward_s"],
            "backward_s": row["backward_s"],
            "time_s": row["time_s"],
            "share": row["share"],
            "flops": row["flops"],
            "achieved_flops_per_s": row["achieved_flops_per_s"],
            "ceiling_share": row["ceiling_share"],
            "kept_bytes": row["kept_bytes"],
            "calls_per_step": row["calls_per_step"],
        }
        for row in modules(profile, costs)
        # only the block itself, not the modules inside it
        if row["stack"] is not None and re.fullmatch(r"\.?\d+", row["path"][len(row["stack"]) :])
    ]


@table("classes of modules by their own time, per step", f"class modules {_TIMES}")
def classes(profile: Profile, costs: Costs = NO_COSTS) -> list[ClassRow]:
    """Return one row for each class of modules, by own time, so that the times of all classes add up."""
    of_modules = modules(profile, costs)
    times: dict[tuple[str, str], float] = defaultdict(float)
    by_path, phases = {row["path"]: row for row in of_modules}, _phases(profile)
    for (_, place), total in profile.groups.items():
        if place.module is not None and place.phase in PHASES:
            times[by_path[place.module]["class"], place.phase] += total.time_s / len(profile.steps)
    rows: list[ClassRow] = []
    for name in dict.fromkeys(row["class"] for row in of_modules):
        mine = [row for row in of_modules if row["class"] == name]
        own_s, flops = sum(row["own_s"] for row in mine), statistics.total(row["own_flops"] for row in mine)
        rows.append(
            {
                "class": name,
                "modules": len(mine),
                "forward_s": times[name, PHASES[0]] if PHASES[0] in phases else None,
                "backward_s": times[name, PHASES[1]] if PHASES[1] in phases else None,
                "time_s": own_s,
                "share": own_s / profile.time_s * len(profile.steps) if profile.time_s else None,
                "flops": flops,
                **_rates(flops, own_s, costs),
            }
        )
    return sorted((row for row in rows if row["time_s"] or row["flops"]), key=lambda row: -row["time_s"])


TABLES = by_name(tree, blocks, classes, modules)


def notes(name: str, profile: Profile, rows: Sequence[Row]) -> list[str]:
    """Return the notes under a table: the share of the time that belongs to modules, and how to read the times."""
    if not rows:
        return [why_nothing(profile) or "the trace has no table of modules"]
    in_module = sum(total.time_s for (_, place), total in profile.groups.items() if place.module is not None)
    share = in_module / profile.time_s if profile.time_s else 0.0
    said = [*profile.how_layered, f"{share:.1%} of the kernel time belongs to a module"]
    if name == "classes":
        said.append("the time of a class is that of its modules without the modules inside them")
    elif name in ("tree", "modules"):
        said.append("the time of a module includes the modules inside it; its own time does not")
    if any(row.get("flops") is not None for row in rows):
        said.append("FLOPs are those that were executed; a fused attention leaves hidden tiles out")
    return said


def why_nothing(profile: Profile) -> str | None:
    """Return one sentence on why no kernel of forward or backward belongs to a layer; None if one does."""
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


def _flops(row: Mapping[str, Any] | None) -> int | None:
    """Return the FLOPs of forward and backward together; only forward's if there was no backward."""
    known = [row[f"{phase}_flops"] for phase in PHASES if row.get(f"{phase}_flops") is not None] if row else []
    return sum(known) if known else None


def _own_flops(paths: Iterable[str], costs: Mapping[str, Row]) -> dict[str, int]:
    own = {path: flops for path in paths if (flops := _flops(costs.get(path))) is not None}
    whole = dict(own)
    for path, flops in whole.items():
        parent = next((above for above in reversed(with_ancestors(path)[:-1]) if above in own), None)
        if parent is not None:
            own[parent] -= flops
    return own


def _rates(flops: int | None, time_s: float, costs: Costs) -> Rates:
    rate = flops / time_s if flops is not None and time_s else None
    peak = costs.ceilings.flops_per_s if costs.ceilings else None
    return {"achieved_flops_per_s": rate, "ceiling_share": rate / peak if rate is not None and peak else None}
