"""Tables of a profile.

Times and calls are per step: means over the steps. A share is of all kernel time unless stated otherwise.
`TABLES` holds each table by name; `notes` returns the notes under a table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypedDict, TypeVar

import numpy as np

from cs_systems.analysis.attribution.fusable import FusableRow, fusable_runs
from cs_systems.analysis.attribution.gaps import GapRow, gap_rows
from cs_systems.analysis.attribution.host import RangeRow, range_rows
from cs_systems.analysis.attribution.host_gaps import HostGapRow, WaitRow, host_gap_rows, wait_rows
from cs_systems.analysis.attribution.kernel_families import FAMILIES, family, is_collective, scores_of_attention
from cs_systems.analysis.attribution.offload import OffloadRow, offload
from cs_systems.analysis.attribution.overlap import of_kernels
from cs_systems.analysis.attribution.places import Place
from cs_systems.analysis.attribution.profile import Profile, Sum
from cs_systems.config import Phase
from cs_systems.core import units
from cs_systems.core.range_names import COMMUNICATION, LAYERS, LOOP_PHASES, PARTS, UNATTRIBUTED, meaning
from cs_systems.core.statistics import excess_s
from cs_systems.core.tables import Column, Row, by_name, first, table
from cs_systems.formulas.cost import PhaseCost
from cs_systems.readers.forms.trace import Function, steps_of

ALL = "all"
DISAGREES = 0.03  # share of the wall clock; above it, a step's times disagree
K = TypeVar("K")
# parts with matrix products of attention itself, not of projections
PRODUCTS = ("attention.scores", "attention.value")
PHASES = (*(phase.value for phase in Phase), COMMUNICATION, *LOOP_PHASES, UNATTRIBUTED)


class PerStep(TypedDict):
    """Kernels of one step as means over the steps; the share is of all kernel time unless the table says otherwise."""

    calls_per_step: Annotated[float, Column("calls", drop=8)]
    time_s: float
    share: Annotated[float, Column("share of time", drop=9)]


class StepRow(TypedDict):
    """Recorded step on one device, in `steps`.

    It compares the step's time on the host's clock (wall), between the device's events, and on the GPU.
    """

    step: int
    device: Annotated[int, Column("GPU")]
    kernels: int
    wall_s: Annotated[float, Column("wall clock")]
    event_s: Annotated[float | None, Column("events")]
    gpu_span_s: Annotated[float, Column("GPU span", drop=2)]  # from the first kernel's start to the last one's end
    kernel_s: Annotated[float, Column("sum of kernels")]  # summed over kernels
    # Of the wall time; overlapping kernels count once; None if kernels were not recorded.
    busy_share: Annotated[float | None, Column("GPU busy")]
    residual_s: Annotated[float, Column("wall − span", drop=1)]  # wall_s less gpu_span_s
    residual_share: float


class KernelRow(PerStep):
    """Kernel by its full name, in `kernels`, with the launch configuration that took the most time."""

    kernel: Annotated[str, Column(beside=52)]
    family: str
    mean_s: Annotated[float, Column(drop=3)]  # mean time of one call
    grid: str | None
    block: str | None
    registers: Annotated[int | None, Column("regs", drop=1)]  # per thread
    shared_bytes: Annotated[int | None, Column(drop=2)]  # per block
    shapes: int  # number of launch configurations


class ScoreRow(TypedDict):
    """Kernel that accesses the scores of attention, in `scores`."""

    kernel: Annotated[str, Column(beside=52)]
    family: str
    calls_per_step: Annotated[float, Column("calls", drop=8)]
    time_s: float


class FamilyRow(PerStep):
    """Family of kernels, in `families`."""

    family: str


class RatesRow(TypedDict):
    """Rates of a phase's kernels, None where no cost is known."""

    flops: Annotated[float | None, Column("work", drop=1)]
    achieved_flops_per_s: Annotated[float | None, Column("rate", drop=6)]
    bytes: float | None
    achieved_bytes_per_s: Annotated[float | None, Column("traffic", drop=2)]
    ceiling: Annotated[str | None, Column("bound by")]  # the ceiling that limits: "compute" or "memory"
    ceiling_share: Annotated[float | None, Column("of ceiling")]  # share of the limiting ceiling


class PhaseRow(PerStep, RatesRow):
    """Phase and family of kernels, in `phases`; each phase's family `all` comes first."""

    phase: str
    family: str


class PassesRow(PerStep):
    """Kernel time by pass; None if no kernel of the pass is attributed to any name."""

    forward_s: float | None
    backward_s: float | None


class LayerRow(PassesRow):
    """Layer or named module, in `layers`, in the order of the model."""

    layer: str


class PartRow(PassesRow):
    """Part of the blocks, summed over blocks, in `parts`."""

    part: Annotated[str, Column("part of a block")]


class AttentionRow(PerStep):
    """Phase, part and family inside attention, in `attention`; the share is of the phase's attention."""

    phase: str
    part: str
    family: str


class RatioRow(TypedDict):
    """Ratio of backward to forward in a step, in `ratio`, by one measure of time."""

    measure: Annotated[str, Column("measured by")]
    forward_s: float
    backward_s: float
    backward_to_forward: Annotated[float, Column("backward : forward")]


class DeviceOverlapRow(TypedDict):
    """Row of the table `overlap` of a profiler of kernels: communication of one device in a step."""

    device: Annotated[int, Column("GPU")]
    collectives_per_step: Annotated[float, Column("collectives")]
    communication_s: float
    hidden_s: float
    exposed_s: float
    hidden_share: Annotated[float | None, Column("share hidden")]  # share of the communication; None if there is none
    share: Annotated[float, Column("exposed of wall time", drop=9)]  # time of exposed communication / time of the step


class Ceilings(NamedTuple):
    """Peak rates of the device, in the precision that ran."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Costs:
    """Known costs and times from outside the trace.

    `by_phase` maps (phase, family or `all`) to the cost of one step. `event_s` is the step's time by the device's
    events, measured in the same run.
    """

    by_phase: Mapping[tuple[str, str], PhaseCost] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    event_s: float | None = None
    modules: Mapping[str, Row] = field(default_factory=dict)


NO_COSTS = Costs()


def _summed(profile: Profile, key: Callable[[Function, Place], K | None]) -> dict[K, Sum]:
    """Return calls and time of all steps by key, the longest time first."""
    sums: dict[K, Sum] = defaultdict(lambda: Sum(0, 0.0))
    for (function, place), one in profile.groups.items():
        if (k := key(function, place)) is not None:
            sums[k] = Sum(sums[k].calls + one.calls, sums[k].time_s + one.time_s)
    return dict(sorted(sums.items(), key=lambda item: -item[1].time_s))


@table(
    "steps: wall clock, GPU span and kernel time",
    "step device kernels wall_s event_s gpu_span_s kernel_s busy_share residual_s",
    most=10,
)
def steps(profile: Profile, costs: Costs = NO_COSTS) -> list[StepRow]:
    """Return one row for each step and device, which compares the step's times."""
    idle = {device: gaps.idle_s(len(profile.steps)) for device, gaps in profile.gaps.items()}
    rows: list[StepRow] = []
    for (number, device), kernels in profile.by_step.items():
        step = profile.steps[number]
        wall_s, span_s = step.end_s - step.start_s, kernels.last_end_s - kernels.first_start_s
        rows.append(
            {
                "step": step.number,
                "device": device,
                "kernels": kernels.calls,
                "wall_s": wall_s,
                "event_s": costs.event_s,
                "gpu_span_s": span_s,
                "kernel_s": kernels.time_s,
                "busy_share": None if profile.trace.lacks_kernels else excess_s(wall_s, idle[device][number]) / wall_s,
                "residual_s": excess_s(wall_s, span_s),
                "residual_share": excess_s(wall_s, span_s) / wall_s,
            }
        )
    return rows


@table(
    "kernels by time, per step",
    "kernel calls_per_step time_s mean_s share grid registers shared_bytes",
    most=10,
    brief=first(3),
    headings={"share": "share"},
)
def kernels(profile: Profile, costs: Costs = NO_COSTS) -> list[KernelRow]:
    """Return one row for each kernel (full name)."""
    shapes: dict[str, list[tuple[float, Function]]] = defaultdict(list)
    for function, total in _summed(profile, lambda function, place: function).items():
        shapes[function.name].append((total.time_s, function))
    rows: list[KernelRow] = []
    for name, total in _summed(profile, lambda function, place: function.name).items():
        main = max(shapes[name])[1]
        rows.append(
            {
                "kernel": name,
                "family": family(name),
                **_per_step(profile, total),
                "mean_s": total.time_s / total.calls,
                "grid": extent(main.grid),
                "block": extent(main.block),
                "registers": main.registers,
                "shared_bytes": main.shared_bytes,
                "shapes": len(shapes[name]),
            }
        )
    return rows


@table("kernel families, per step", "family calls_per_step time_s share")
def families(profile: Profile, costs: Costs = NO_COSTS) -> list[FamilyRow]:
    """Return one row for each family."""
    sums = _summed(profile, lambda function, place: family(function.name))
    return [{"family": name, **_per_step(profile, total)} for name, total in sums.items()]


def _whole_phases(rows: Sequence[PhaseRow]) -> Sequence[PhaseRow]:
    """Return the rows of whole phases; empty if there is only one phase."""
    whole = [row for row in rows if row["family"] == ALL]
    return whole if len(whole) > 1 else []


@table(
    "phases by kernel family, per step",
    "phase family calls_per_step time_s share flops achieved_flops_per_s achieved_bytes_per_s ceiling ceiling_share",
    brief=_whole_phases,
)
def phases(profile: Profile, costs: Costs = NO_COSTS) -> list[PhaseRow]:
    """Return phase × family, each phase's `all` first; rates and ceilings are None where no cost is known."""
    by_phase = _summed(profile, lambda function, place: place.phase)
    both = _summed(profile, lambda function, place: (place.phase, family(function.name)))
    rows: list[PhaseRow] = []
    for phase in (p for p in PHASES if p in by_phase):
        parts = {name: total for name in FAMILIES if (total := both.get((phase, name)))}
        for name, total in [(ALL, by_phase[phase]), *sorted(parts.items(), key=lambda item: -item[1].time_s)]:
            per_step = _per_step(profile, total)
            rates = _rates(per_step["time_s"], costs.by_phase.get((phase, name)), costs.ceilings)
            # above the ceiling, other families must have computed some of these FLOPs
            if name != ALL and rates["ceiling"] == "compute" and (rates["ceiling_share"] or 0) > 1:
                rates = _rates(per_step["time_s"], None, costs.ceilings)
            rows.append({"phase": phase, "family": name, **per_step, **rates})
    return rows


def _rates(time_s: float, cost: PhaseCost | None, ceilings: Ceilings | None) -> RatesRow:
    flops, moved = (cost.hardware_flops, cost.bytes) if cost else (None, None)
    binds = share = None
    if ceilings and flops is not None and moved is not None:
        least = {"compute": flops / ceilings.flops_per_s, "memory": moved / ceilings.bytes_per_s}
        binds = max(least, key=lambda name: least[name])
        share = least[binds] / time_s
    return {
        "flops": flops,
        "achieved_flops_per_s": None if flops is None else flops / time_s,
        "bytes": moved,
        "achieved_bytes_per_s": None if moved is None else moved / time_s,
        "ceiling": binds,
        "ceiling_share": share,
    }


@table(
    "layers and named modules, per step",
    "layer forward_s backward_s calls_per_step time_s share",
    most=100,
)
def layers(profile: Profile, costs: Costs = NO_COSTS) -> list[LayerRow]:
    """Return one row for each layer or named module, in the order of the model."""
    order = [form.split(" {}")[0] for form in (*_EMBEDDING_FIRST, COMMUNICATION, UNATTRIBUTED)]

    known = [row["layer"] for row in profile.trace.modules.rows] if profile.trace.modules else []
    in_model = {name: number for number, name in enumerate(dict.fromkeys(known))}

    def position(name: str) -> tuple[int, int]:
        layer, _, number = name.rpartition(" ")
        if profile.trace.modules is not None and profile.trace.modules.are_paths:
            return (-1, in_model[name]) if name in in_model else (order.index(name), 0)
        return (order.index(layer), int(number)) if number.isdigit() else (order.index(name), 0)

    found = _by_phase(profile, lambda place: place.layer, position)
    return [{"layer": name, **passes} for name, passes in found]


_EMBEDDING_FIRST = sorted(LAYERS, key=lambda form: (form != "embedding", list(LAYERS).index(form)))


@table(
    "parts of a transformer block, sum over all blocks, per step",
    "part forward_s backward_s calls_per_step time_s share",
)
def parts(profile: Profile, costs: Costs = NO_COSTS) -> list[PartRow]:
    """Return one row for each part of the blocks, summed over blocks.

    `attention` and `block` hold the time outside every named part.
    """
    modules = profile.trace.modules
    blocks = {row["block"] for row in modules.rows} if modules else set()

    def part(place: Place) -> str | None:
        if modules is not None and modules.are_paths:
            return (place.part or "block") if place.layer in blocks else None
        return place.part or ("block" if place.layer.startswith("block") else None)

    others = sorted({p.part for p in profile.places.values if p.part} - {*PARTS})
    order = [*PARTS, *others, "block"]
    found = _by_phase(profile, part, lambda name: (order.index(name), 0))
    if [name for name, _ in found] == ["block"]:  # nothing distinguishes the parts
        return []
    return [{"part": name, **passes} for name, passes in found]


def _by_phase(
    profile: Profile, key: Callable[[Place], str | None], order: Callable[[str], tuple[int, int]]
) -> list[tuple[str, PassesRow]]:
    """Return the kernel time of each name by pass, in the given order."""

    def where(place: Place) -> tuple[str, str] | None:
        return None if (name := key(place)) is None else (name, place.phase)

    both = _summed(profile, lambda function, place: where(place))
    # if no kernel of a phase is attributed to any name, each name's time in the phase is unknown, not 0
    split = {phase for name, phase in both if name != UNATTRIBUTED}

    def time_s(name: str, phase: Phase) -> float | None:
        taken = both.get((name, phase.value), Sum(0, 0.0)).time_s / len(profile.steps)
        return taken if taken or phase.value in split else None

    rows: list[tuple[str, PassesRow]] = []
    for name, total in _summed(profile, lambda function, place: key(place)).items():
        passes: PassesRow = {
            "forward_s": time_s(name, Phase.FORWARD),
            "backward_s": time_s(name, Phase.BACKWARD),
            **_per_step(profile, total),
        }
        rows.append((name, passes))
    return sorted(rows, key=lambda row: order(row[0]))


@table(
    "inside attention, per step",
    "phase part family calls_per_step time_s share",
    headings={"share": "of attention"},
)
def attention(profile: Profile, costs: Costs = NO_COSTS) -> list[AttentionRow]:
    """Return phase × part × family inside attention; the share is of the phase's attention."""

    def where(function: Function, place: Place) -> tuple[str, str, str] | None:
        inside = place.part is not None and place.part.startswith("attention")
        return (place.phase, place.part or "", family(function.name)) if inside else None

    sums = _summed(profile, where)
    whole: dict[str, float] = defaultdict(float)
    for (phase, *_), total in sums.items():
        whole[phase] += total.time_s
    rows: list[AttentionRow] = [
        {
            "phase": phase,
            "part": part,
            "family": name,
            **_per_step(profile, total),
            "share": total.time_s / whole[phase],
        }
        for (phase, part, name), total in sums.items()
    ]
    return sorted(rows, key=lambda row: (PHASES.index(row["phase"]), _part_order(row["part"]), -row["time_s"]))


def _part_order(name: str) -> int:
    return list(PARTS).index(name) if name in PARTS else len(PARTS)


@table("GPU idle time by cause, per step", brief=first(3))
def gaps(profile: Profile, costs: Costs = NO_COSTS) -> list[GapRow]:
    """Return the time without a kernel by cause; shares are of the steps' wall time."""
    return gap_rows(profile.trace, profile.gaps, profile.steps)


@table("the host while the GPU was idle without a CUDA call, per step", most=10)
def host_gaps(profile: Profile, costs: Costs = NO_COSTS) -> list[HostGapRow]:
    """Return what the host did while the first device was idle and no CUDA call was made for over 1 ms."""
    gaps = profile.gaps[profile.devices[0]] if profile.devices else None
    return host_gap_rows(profile.trace, gaps, profile.steps)


@table("calls of the host that wait for the GPU, per step", most=10)
def waits(profile: Profile, costs: Costs = NO_COSTS) -> list[WaitRow]:
    """Return the calls that wait for the device, by calling place."""
    return wait_rows(profile.trace, profile.steps)


@table("updates of the weights by the CPU while the GPU is idle, per step")
def cpu_updates(profile: Profile, costs: Costs = NO_COSTS) -> list[OffloadRow]:
    """Return the updates by the CPU, with the copies of gradients and weights; no row if there are none."""
    found = offload(profile) if profile.gaps else None
    return [] if found is None else [found]


@table("kernels bound by memory, in runs that a compiler could fuse, per step")
def fusable(profile: Profile, costs: Costs = NO_COSTS) -> list[FusableRow]:
    """Return the runs of elementwise kernels, copies and norms; no row without any."""
    found = fusable_runs(profile)
    return [found] if found["fusable_per_step"] else []


@table("kernels that read or write attention's scores in memory, per step")
def scores(profile: Profile, costs: Costs = NO_COSTS) -> list[ScoreRow]:
    """Return the kernels between two matrix products that access the scores of attention."""
    trace, steps = profile.trace, len(profile.steps)
    found = scores_of_attention(trace.kernels) & steps_of(trace.kernels.launched_s, profile.steps)[1]
    sums: dict[str, tuple[int, float]] = {}
    for kernel in trace.kernels.rows(found):
        calls, time_s = sums.get(kernel.function.name, (0, 0.0))
        sums[kernel.function.name] = calls + 1, time_s + kernel.end_s - kernel.start_s
    return [
        {"kernel": name, "family": family(name), "calls_per_step": calls / steps, "time_s": time_s / steps}
        for name, (calls, time_s) in sums.items()
    ]


@table("ranges by CPU time, per step", most=10)
def ranges(profile: Profile, costs: Costs = NO_COSTS) -> list[RangeRow]:
    """Return the host's wall time in each range, not the device's time; shares are of the steps' wall time."""
    return range_rows(profile.trace.ranges, profile.steps)


@table(
    "backward time : forward time, per step (wall time: of the CPU's ranges)",
    "measure forward_s backward_s backward_to_forward",
)
def ratio(profile: Profile, costs: Costs = NO_COSTS) -> list[RatioRow]:
    """Return the ratio of backward to forward, by kernel time and by wall time (the host's ranges).

    The two differ where the host limits the speed. Only steps with both phases count; without any, the row is missing.
    Collectives also last while a rank waits for others, so if a phase has some, an additional row excludes them.
    """
    rows: list[RatioRow] = []
    both = Phase.FORWARD, Phase.BACKWARD
    measures = {"kernel time": profile.step_phases, "wall time": _phase_walls(profile)}
    collectives = is_collective(profile.trace.kernels)
    if any({*both} & {*step} for step in profile.phase_times(collectives)):
        measures["computation"] = profile.phase_times(~collectives)
    for measure, steps in measures.items():
        times = [[step[phase] for phase in both] for step in steps if {*both} <= {*step}]
        if times:
            forward, backward = (sum(phase) for phase in zip(*times, strict=True))
            rows.append(
                {
                    "measure": measure,
                    "forward_s": forward / len(times),
                    "backward_s": backward / len(times),
                    "backward_to_forward": backward / forward,
                }
            )
    return rows


def _phase_walls(profile: Profile) -> list[dict[str, float]]:
    """Return the wall time of each phase's outermost ranges, for each step."""
    walls: list[dict[str, float]] = [defaultdict(float) for _ in profile.steps]
    last: dict[str, float] = {}
    ranges = profile.trace.ranges.named(lambda name: meaning(name).phase)
    number, begins_in = steps_of(np.array([r.start_s for r in ranges]), profile.steps)
    for r, n, begins in zip(ranges, number.tolist(), begins_in.tolist(), strict=True):
        phase, lasted = str(meaning(r.name).phase), r.end_s - r.start_s
        if begins and lasted and r.end_s <= profile.steps[n].end_s and r.start_s >= last.get(phase, float("-inf")):
            walls[n][phase] += lasted
            last[phase] = r.end_s
    return walls


@table("communication during computation (hidden) and alone (exposed), per step", brief=first(2))
def overlap(profile: Profile, costs: Costs) -> list[DeviceOverlapRow]:
    """Return one row for each device, per step: its communication, hidden behind computation and exposed."""
    kernels, count = profile.trace.kernels, len(profile.steps)
    communicating = set(kernels.device[is_collective(kernels)].tolist())
    rows: list[DeviceOverlapRow] = []
    for device in profile.devices:
        total = Counter[str]()
        if device in communicating:  # without communication every sum is 0
            for streams in of_kernels(profile.trace, profile.steps, device):
                total.update(streams.row())
        rows.append(
            {
                "device": device,
                "collectives_per_step": total["collectives"] / count,
                "communication_s": total["communication_s"] / count,
                "hidden_s": total["hidden_s"] / count,
                "exposed_s": total["exposed_s"] / count,
                "hidden_share": total["hidden_s"] / total["communication_s"] if total["communication_s"] else None,
                "share": total["exposed_s"] / total["step_s"] if total["step_s"] else 0.0,
            }
        )
    return rows


TABLES = by_name(
    steps,
    ratio,
    phases,
    families,
    kernels,
    layers,
    parts,
    attention,
    gaps,
    host_gaps,
    waits,
    cpu_updates,
    fusable,
    scores,
    overlap,
    ranges,
)


def has_something(name: str, rows: Sequence[Row]) -> bool:
    """Return whether a table is worth showing: a single GPU, for example, has no communication."""
    return bool(rows) and (name != "overlap" or any(row["communication_s"] for row in rows))


def mean_step_s(rows: Sequence[Row]) -> float | None:
    """Return the mean wall time of the recorded steps, from the rows of `steps`; None without any."""
    walls = {row["step"]: row["wall_s"] for row in rows}  # one row for each device
    return sum(walls.values()) / len(walls) if walls else None


def drawn_step(rows: Sequence[Row]) -> str:
    """Return a line on which step the page's timeline opens with, and the mean of all; "" if there is only one step.

    It is the step with the median wall time (the shorter of two), as in `timeline.median_step`.
    """
    walls = sorted({(row["wall_s"], row["step"]) for row in rows if row["kernels"]})
    mean_s, steps = mean_step_s(rows), len({row["step"] for row in rows})
    if not walls or mean_s is None or steps == 1:
        return ""
    wall_s, number = walls[(len(walls) - 1) // 2]
    opening = f"opens at step {number}, which took {units.human(wall_s, 's')}"
    return f"{opening}; the tables are means over {steps} steps of {units.human(mean_s, 's')} on average"


def notes(name: str, profile: Profile, rows: Iterable[Row]) -> list[str]:
    """Return the notes under a table: its coverage, and warnings with remedies."""
    rows = list(rows)
    found = []
    if name in ("phases", "layers", "parts", "attention"):
        found.append(profile.coverage)
    if name in ("ratio", "phases") and len(profile.kinds) > 1:
        found.append(_kinds(profile))
    if name == "layers":
        found += [*profile.how_layered, *_unsplit_backward(profile)]
    if name == "attention":
        found += _split(rows)
    if name == "steps":
        found += _reconciled(rows)
    if name == "families" and (copies := profile.trace.copies):
        time_s = float((copies.end_s - copies.start_s).sum())
        total = units.human(time_s, "s")
        found.append(f"not included: {len(copies):,} memcpy and memset in the trace, {total} in total")
    return found


def _kinds(profile: Profile) -> str:
    kinds = "; ".join(f"{count} with {', '.join(kind)}" for kind, count in profile.kinds.items())
    return (
        f"steps of different kinds: {kinds}; the ratio of backward to forward is that of the steps with both, and "
        "other values are means over all steps"
    )


def _unsplit_backward(profile: Profile) -> list[str]:
    unsplit = _summed(profile, lambda function, place: place == Place(Phase.BACKWARD, UNATTRIBUTED, None) or None)
    backward = _summed(profile, lambda function, place: place.phase == Phase.BACKWARD or None)
    if not unsplit or unsplit[True].time_s < 0.5 * backward[True].time_s:
        return []
    return [
        "backward is not split by layer: no range was open in the thread that launched it; record with torch.profiler "
        "and a range around the forward of each layer"
    ]


def _split(rows: Sequence[Row]) -> list[str]:
    found = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        own = [row for row in rows if row["phase"] == phase]
        if any(row["family"] == "attention" for row in own):
            found.append(
                f"{phase}: a fused kernel computes scores, softmax and value together, so they have no separate times"
            )
        else:
            found += softmax_to_products(phase, own)
    if not rows:
        found.append(
            "no range named attention, scores, softmax or value holds a kernel; mark these ranges to split attention"
        )
    return found


def softmax_to_products(phase: str, rows: Sequence[Row]) -> list[str]:
    """Return a note that compares softmax with the products of scores and value, and with all products of the layer."""
    softmax = sum(row["time_s"] for row in rows if row["family"] == "softmax")
    products = [row for row in rows if row["family"] == "matmul"]
    within = sum(row["time_s"] for row in products if row["part"] in PRODUCTS)
    every = sum(row["time_s"] for row in products)
    if not softmax or not every:
        return []
    if not within:
        ratio = f"{softmax / every:.2f} times as long as all matrix products of the layer"
        return [f"{phase}: softmax takes {ratio}; mark ranges scores and value to leave out projections"]
    inside = f"within attention, softmax takes {softmax / within:.2f} times as long as the products of scores and value"
    whole = f"; with the projections, {softmax / every:.2f} times" if every > within else ""
    return [f"{phase}: {inside}{whole}"]


def _reconciled(rows: Sequence[Row]) -> list[str]:
    """Return warnings where wall clock, events and kernel span disagree; a step has a row for each device."""
    found, steps = [], {row["step"]: row for row in rows}
    apart = [row for row in rows if abs(row["residual_share"]) > DISAGREES]
    if apart:
        most = max(apart, key=lambda row: abs(row["residual_share"]))
        count = len({row["step"] for row in apart})
        found.append(
            f"warning: wall clock and GPU span differ by over {DISAGREES:.0%} in {count} of {len(steps)} "
            f"steps, most in step {most['step']} ({most['residual_share']:+.1%}): the host worked before the "
            "first or after the last kernel, or the step did not end with a synchronisation; see gaps"
        )
    for row in steps.values():
        if row["event_s"] is not None and abs(row["event_s"] / row["wall_s"] - 1) > DISAGREES:
            found.append(
                f"warning: step {row['step']} takes {row['event_s'] * 1e3:.3g} ms by events and "
                f"{row['wall_s'] * 1e3:.3g} ms by the wall clock: they measured different steps, "
                "or the profiler slowed the host"
            )
    return found


def _per_step(profile: Profile, total: Sum) -> PerStep:
    count = len(profile.steps)
    return {
        "calls_per_step": total.calls / count,
        "time_s": total.time_s / count,
        "share": total.time_s / profile.time_s,
    }


def extent(shape: tuple[int, int, int] | None) -> str | None:
    """Return a shape as `8×4×1`: a grid in blocks or a block in threads."""
    return None if shape is None else "×".join(map(str, shape))
