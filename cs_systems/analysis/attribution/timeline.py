"""Recorded steps of a profile as plain data for the page that draws them.

Times are whole nanoseconds from the beginning of the first step that is drawn. Events are stored as columns; each text
is stored once, in a table that the columns index. Threads of the host are numbered, the main thread first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

from cs_systems.analysis.attribution import module_tables, operator_table
from cs_systems.analysis.attribution.kernel_families import FAMILIES, family, short_name
from cs_systems.analysis.attribution.places import Place, main_thread
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.analysis.attribution.tables import NO_COSTS, TABLES, Costs, extent, notes
from cs_systems.core.printable import LONGEST_NAME, shortened
from cs_systems.core.range_names import UNATTRIBUTED, meaning
from cs_systems.core.tables import Row, Table, Tables, by_name
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.columns import Range, Ranges
from cs_systems.readers.forms.trace import Call, Copy, Function, Kernel, Step, Trace, steps_of

T = TypeVar("T")
K = TypeVar("K")
MOST_KERNELS = 1_000_000  # most kernels drawn; of more steps, those next to the step with the median wall time
MOST_OPERATORS = 200_000  # most operators drawn; of more, the longest


class OverheadRow(TypedDict):
    """Cost of profiling, in `overhead`: medians of the wall time of steps; None without enough warm-up."""

    recorded_s: float
    not_recorded_s: float | None  # the last steps of the warm-up
    recorded_to_not_recorded: float | None


class CoverageRow(TypedDict):
    """Extent of a trace, in `coverage`: shares are of the kernel time."""

    profiler: str
    steps: int
    kernels: int
    kernel_s: float
    phase_coverage: float
    layer_coverage: float
    fused_share: NotRequired[float]  # in kernels fused over several layers


class NoteRow(TypedDict):
    """Note under a table, in `notes`; about the whole profile if the table is None."""

    table: str | None
    note: str


class Times(TypedDict):
    """Columns of the starts and durations of a row's items."""

    start: list[int]
    duration: list[int]


class StepView(TypedDict):
    """Step that is drawn."""

    name: str
    number: int  # number of the step in the trace, from 0
    steps: int  # number of steps in the profile
    start_ns: int
    wall_ns: int
    end_ns: int  # end of the step or of its last kernel, whichever is later
    kernels: int
    kernel_ns: int
    no_phase_ns: int  # kernel time without a phase
    no_layer_ns: int
    graph_kernels: int  # kernels in CUDA graphs
    graph_launches: int


class Names(TypedDict):
    """Columns of every kernel of the profile."""

    name: list[str]
    short: list[str]
    family: list[int]  # index in `families`


class Functions(TypedDict):
    """Columns of a kernel's other properties; `name` is an index in `names`."""

    name: list[int]
    grid: list[str | None]
    block: list[str | None]
    registers: list[int | None]
    shared_bytes: list[int | None]


class RangeNames(TypedDict):
    """Columns of the ranges' names, with the phase and layer that each means."""

    name: list[str]
    phase: list[str | None]
    layer: list[str | None]


class StreamView(Times):
    """Stream of a device with columns of its kernels."""

    device: int
    stream: int | None
    function: list[int]  # index in `functions`
    place: list[int]  # index in `places`
    thread: list[int | None]  # thread that launched the kernel; None if not recorded, like the next two
    launch: list[int | None]  # when the host began to launch the kernel
    launching: list[int | None]  # duration of the launching call
    graph: list[int]  # 1 if the kernel ran in a CUDA graph


class CopiesView(Times):
    """Stream of a device with columns of its copies."""

    device: int
    stream: int | None
    kind: list[str]
    bytes: list[int | None]  # None if not recorded


class ThreadView(Times):
    """Thread of the host with columns of its ranges."""

    thread: int
    main: bool
    range: list[int]  # index in `ranges`


class CallsView(Times):
    """Thread of the host with columns of its CUDA calls."""

    thread: int
    name: list[str]


class OperatorsView(Times):
    """Thread of the host with columns of its operators."""

    thread: int
    name: list[int]  # index in `operator_names`


class View(TypedDict):
    """Data of the page of a profile: one row for each stream or thread; `places` has the columns of `Place`.

    step: the step with the median wall time. hidden_operators: the number of operators that are not drawn.
    """

    source: str
    profiler: str
    incomplete: str | None  # description of missing kernels after a fault
    devices: dict[str, str]
    step: StepView
    steps: list[StepView]
    end_ns: int
    families: Sequence[str]
    names: Names
    functions: Functions
    places: dict[str, list[str | None]]
    ranges: RangeNames
    streams: list[StreamView]
    copies: list[CopiesView]
    threads: list[ThreadView]
    calls: list[CallsView]
    operators: list[OperatorsView]
    operator_names: list[str]
    hidden_operators: int


class Numbered(dict[T, int]):
    """Map from a value to its index in a table, assigned on first use."""

    def __missing__(self, value: T) -> int:
        self[value] = number = len(self)
        return number


class Within(NamedTuple):
    """Contents of a trace from the first to the last of some steps."""

    kernels: list[tuple[Kernel, Place]]
    copies: list[Copy]
    ranges: list[Range]
    calls: list[Call]
    operators: list[Range]


def view(profile: Profile) -> View:
    """Return the recorded steps as the page's data."""
    median = median_step(profile)
    numbers = drawn_steps(profile, median)
    trace, first = profile.trace, profile.steps[numbers[0]]
    own = within(profile, first.start_s, profile.steps[numbers[-1]].end_s)
    names, ranges, operators = Numbered[str](), Numbered[str](), Numbered[str]()
    functions, places = Numbered[Function](), Numbered[Place]()
    for function, _ in profile.groups:  # also groups of steps that are not drawn, because the tables name them
        _ = names[function.name]
    main = main_thread(trace.ranges)
    threads = Numbered[int]() if main is None else Numbered({main: 0})
    ns = _since(first)
    # filled before the tables of names, which are numbered on first use
    streams = _streams(own.kernels, functions, places, threads, ns)
    lanes: list[ThreadView] = [
        {
            "thread": threads[thread],
            "main": thread == main,
            "range": [ranges[r.name] for r in found],
            **_times(found, ns),
        }
        for thread, found in sorted(_by(own.ranges, lambda r: r.thread).items(), key=lambda t: t[0] != main)
    ]
    drawn = _longest(own.operators, MOST_OPERATORS)
    of_operators: list[OperatorsView] = [
        {"thread": threads[thread], "name": [operators[op.name] for op in found], **_times(found, ns)}
        for thread, found in _by(drawn, lambda op: op.thread).items()
    ]
    of_functions = [names[function.name] for function in functions]
    steps = _steps(profile, numbers, own, ns)
    return {
        "source": trace.source,
        "profiler": trace.profiler,
        "incomplete": profile.incomplete,
        "devices": {str(device): trace.devices.get(device, f"GPU {device}") for device in profile.devices},
        "step": steps[numbers.index(median)],
        "steps": steps,
        "end_ns": max([step["end_ns"] for step in steps]),
        "families": FAMILIES,
        "names": {
            "name": list(names),
            "short": shortened([short_name(name) for name in names], LONGEST_NAME),
            "family": [FAMILIES.index(family(name)) for name in names],
        },
        "functions": {
            "name": of_functions,
            "grid": [extent(function.grid) for function in functions],
            "block": [extent(function.block) for function in functions],
            "registers": [function.registers for function in functions],
            "shared_bytes": [function.shared_bytes for function in functions],
        },
        "places": {
            field: [getattr(place, field) for place in places]
            for field in Place._fields
            if field != "module" or trace.modules is not None
        },
        "ranges": {
            "name": list(ranges),
            "phase": [None if _is_module(trace, name) else meaning(name).phase for name in ranges],
            "layer": [_layer(trace, name) for name in ranges],
        },
        "streams": streams,
        "copies": _copies(own.copies, ns),
        "threads": lanes,
        "calls": [
            {"thread": threads[thread], "name": [call.name for call in found], **_times(found, ns)}
            for thread, found in _by(own.calls, lambda call: call.thread).items()
        ],
        "operators": of_operators,
        "operator_names": list(operators),
        "hidden_operators": len(own.operators) - len(drawn),
    }


def _is_module(trace: Trace, name: str) -> bool:
    return trace.modules is not None and trace.modules.are_paths and trace.modules.is_module(name)


def _layer(trace: Trace, name: str) -> str | None:
    if trace.modules is not None and _is_module(trace, name):
        return trace.modules.found((name,)).layer
    return meaning(name).layer


# Every table of a trace, in the order in which they are shown.
DECLARED = {
    **TABLES,
    **by_name(range_tree, operator_table.operators),
    **module_tables.TABLES,
}


def results(profile: Profile, costs: Costs = NO_COSTS) -> Tables:
    """Return every table by name, and `notes`; `operators` only where the trace holds some."""
    rows: dict[str, Sequence[Row]] = {name: table(profile, costs) for name, table in TABLES.items()}
    of_operators: list[str] = []
    if operator_table.operators_of(profile.trace) is not None:
        rows["operators"], of_operators = operator_table.largest(profile, costs)
    if profile.trace.modules is not None:
        rows |= {name: table(profile, costs) for name, table in module_tables.TABLES.items()}
    all_notes: list[NoteRow] = [{"table": None, "note": note} for note in profile.notes]
    all_notes += [{"table": name, "note": note} for name in TABLES for note in notes(name, profile, rows[name])]
    if reason := module_tables.why_nothing(profile):
        all_notes.append({"table": "layers", "note": reason})
    all_notes += [{"table": "operators", "note": note} for note in of_operators]
    all_notes += [
        {"table": name, "note": note}
        for name in module_tables.TABLES.keys() & rows.keys()
        for note in module_tables.notes(name, profile, rows[name])
    ]
    return rows | {"notes": all_notes}


def median_step(profile: Profile) -> int:
    """Return the number of the step with the median wall time (the shorter of two), of those with a kernel if any."""
    numbers = {number for number, _ in profile.by_step} or range(len(profile.steps))
    walls = sorted((profile.steps[n].end_s - profile.steps[n].start_s, n) for n in numbers)
    return walls[(len(walls) - 1) // 2][1]


def drawn_steps(profile: Profile, median: int) -> list[int]:
    """Return the numbers of the steps to draw: all, or those next to the median step that have MOST_KERNELS at most."""
    kernels = [0] * len(profile.steps)
    for (number, _), sums in profile.by_step.items():
        kernels[number] += sums.calls
    low = high = median
    count = kernels[median]
    while low > 0 or high < len(kernels) - 1:
        number = low - 1 if low > 0 and (median - low <= high - median or high == len(kernels) - 1) else high + 1
        count += kernels[number]
        if count > MOST_KERNELS:
            break
        low, high = min(low, number), max(high, number)
    return list(range(low, high + 1))


def within(profile: Profile, start_s: float, end_s: float) -> Within:
    """Return the events between two times of the host.

    Kernels belong to the time in which they were launched; ranges, operators and calls to the time in which they begin.
    Only calls that can leave the device without work count: launches are drawn with their kernels. Copies belong to the
    time if they begin before its last kernel ends.
    """
    trace, whole = profile.trace, [Step("whole", start_s, end_s)]
    _, launched = steps_of(trace.kernels.launched_s, whole)
    kernels = list(zip(trace.kernels.rows(launched), profile.places.take(launched), strict=True))
    last_s = max([end_s, *(kernel.end_s for kernel, _ in kernels)])
    copies, calls = trace.copies, trace.calls.where(stalls)

    def begun(ranges: Ranges) -> list[Range]:
        return ranges.take(steps_of(ranges.start_s, whole)[1]).named(lambda name: True)

    return Within(
        kernels,
        list(copies.take((start_s <= copies.start_s) & (copies.start_s <= last_s))),
        begun(trace.ranges),
        list(calls.take((start_s <= calls.start_s) & (calls.start_s <= end_s))),
        begun(trace.operators.ranges()) if trace.operators is not None else [],
    )


def _longest(ranges: Sequence[Range], most: int) -> Sequence[Range]:
    if len(ranges) <= most:
        return ranges
    least_s = sorted((r.end_s - r.start_s for r in ranges), reverse=True)[most]
    return [r for r in ranges if r.end_s - r.start_s > least_s]


def _steps(profile: Profile, numbers: Sequence[int], own: Within, ns: Callable[[float], int]) -> list[StepView]:
    """Return the steps with the sums of the kernels launched in each, as in every table."""
    steps = [profile.steps[number] for number in numbers]
    launched = [k.start_s if k.launch_start_s is None else k.launch_start_s for k, _ in own.kernels]
    found, inside = steps_of(np.array(launched), steps)
    of_step: list[list[tuple[Kernel, Place]]] = [[] for _ in steps]
    for one, index, counts in zip(own.kernels, found.tolist(), inside.tolist(), strict=True):
        if counts:
            of_step[index].append(one)
    return [_step(step, len(profile.steps), mine, ns) for step, mine in zip(steps, of_step, strict=True)]


def _step(step: Step, count: int, kernels: Sequence[tuple[Kernel, Place]], ns: Callable[[float], int]) -> StepView:
    in_graph = [kernel for kernel, _ in kernels if kernel.in_graph]

    def time_ns(counts: Callable[[Place], bool] = lambda place: True) -> int:
        return round(sum(kernel.end_s - kernel.start_s for kernel, place in kernels if counts(place)) * 1e9)

    return {
        "name": step.name,
        "number": step.number,
        "steps": count,
        "start_ns": ns(step.start_s),
        "wall_ns": ns(step.end_s) - ns(step.start_s),
        "end_ns": max([ns(step.end_s), *(ns(kernel.end_s) for kernel, _ in kernels)]),
        "kernels": len(kernels),
        "kernel_ns": time_ns(),
        "no_phase_ns": time_ns(lambda place: place.phase == UNATTRIBUTED),
        "no_layer_ns": time_ns(lambda place: place.layer == UNATTRIBUTED),
        "graph_kernels": len(in_graph),
        "graph_launches": len({(kernel.thread, kernel.launch_start_s) for kernel in in_graph}),
    }


def _streams(
    kernels: Iterable[tuple[Kernel, Place]],
    functions: Numbered[Function],
    places: Numbered[Place],
    threads: Numbered[int],
    ns: Callable[[float], int],
) -> list[StreamView]:
    streams = _by(kernels, lambda one: (one[0].device, -1 if one[0].stream is None else one[0].stream))
    return [
        {
            "device": device,
            "stream": None if stream < 0 else stream,
            **_times([kernel for kernel, _ in found], ns),
            "function": [functions[kernel.function] for kernel, _ in found],
            "place": [places[place] for _, place in found],
            "thread": [None if kernel.thread is None else threads[kernel.thread] for kernel, _ in found],
            **_launches([kernel for kernel, _ in found], ns),
            "graph": [int(kernel.in_graph) for kernel, _ in found],
        }
        for (device, stream), found in sorted(streams.items())
    ]


class _Launches(TypedDict):
    launch: list[int | None]
    launching: list[int | None]


def _launches(kernels: Sequence[Kernel], ns: Callable[[float], int]) -> _Launches:
    begins = [None if k.launch_start_s is None else ns(k.launch_start_s) for k in kernels]
    ends = [None if k.launch_end_s is None else ns(k.launch_end_s) for k in kernels]
    both = zip(begins, ends, strict=True)
    lasting = [None if begin is None or end is None else max(end - begin, 0) for begin, end in both]
    return {"launch": begins, "launching": lasting}


def _copies(copies: Iterable[Copy], ns: Callable[[float], int]) -> list[CopiesView]:
    return [
        {
            "device": device,
            "stream": stream,
            **_times(found, ns),
            "kind": [copy.kind for copy in found],
            "bytes": [copy.bytes for copy in found],
        }
        for (device, stream), found in sorted(_by(copies, lambda copy: (copy.device, copy.stream)).items())
    ]


def _times(items: Sequence[Kernel | Copy | Range | Call], ns: Callable[[float], int]) -> Times:
    starts = [ns(item.start_s) for item in items]
    return {"start": starts, "duration": [ns(i.end_s) - start for i, start in zip(items, starts, strict=True)]}


def _since(step: Step) -> Callable[[float], int]:
    return lambda time_s: round((time_s - step.start_s) * 1e9)


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


OVERHEAD = Table("overhead", OverheadRow, "time of a step under the profiler, and before it")
COVERAGE = Table("coverage", CoverageRow, "extent of the trace")
NOTES = Table("notes", NoteRow, "remarks on the tables")
