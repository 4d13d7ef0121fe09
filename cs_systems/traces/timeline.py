"""One step of a profile as plain data for the page that draws it.

Times are whole nanoseconds from the beginning of the step. Frequent items are stored as columns, and each text once, in
a table that the columns index: 10,000 kernels take some 300 kB of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypedDict, TypeVar, cast

from cs_systems.core.rows import NoteRow, Results, Row
from cs_systems.traces import module_tables, operator_table
from cs_systems.traces.attribution import Place, main_thread
from cs_systems.traces.kernel_families import FAMILIES, family, short_name
from cs_systems.traces.profile import Profile
from cs_systems.traces.range_names import UNATTRIBUTED, meaning
from cs_systems.traces.tables import NO_COSTS, TABLES, Costs, extent, notes
from cs_systems.traces.trace import Call, Copy, Function, Kernel, Range, Step, Trace, steps_of

T = TypeVar("T")
K = TypeVar("K")


class Times(TypedDict):
    """Columns of the starts and durations of a row's items."""

    start: list[int]
    duration: list[int]


class StepView(TypedDict):
    """Step that is drawn."""

    name: str
    number: int  # from 0
    steps: int  # of the profile
    wall_ns: int
    end_ns: int  # of the step or its last kernel, whichever is later
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
    launch: list[int | None]  # when the host began to launch the kernel; None if not recorded
    graph: list[int]  # 1 in a CUDA graph


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


class View(TypedDict):
    """Data of the page of a profile: one row for each stream or thread; `places` has the columns of `Place`."""

    source: str
    profiler: str
    devices: dict[str, str]
    step: StepView
    families: Sequence[str]
    names: Names
    functions: Functions
    places: dict[str, list[str | None]]
    ranges: RangeNames
    streams: list[StreamView]
    copies: list[CopiesView]
    threads: list[ThreadView]
    calls: list[CallsView]


class Numbered(dict[T, int]):
    """Map from a value to its index in a table, assigned on first use."""

    def __missing__(self, value: T) -> int:
        self[value] = number = len(self)
        return number


class Within(NamedTuple):
    """Contents of a trace that belong to one step; its kernels are those launched in it, as in every table."""

    kernels: list[tuple[Kernel, Place]]
    copies: list[Copy]
    ranges: list[Range]
    calls: list[Call]


def view(profile: Profile) -> View:
    """Return the step with the median wall time, among those that have a kernel if any has (a CPU's have none)."""
    number = median_step(profile)
    step = profile.steps[number]
    own = within(profile, step)
    names, ranges = Numbered[str](), Numbered[str]()
    functions, places = Numbered[Function](), Numbered[Place]()
    for function, _ in profile.groups:  # those of other steps too: the tables name them
        _ = names[function.name]
    main = main_thread(profile.trace.ranges)
    ns = _since(step)
    # Before the tables of names: they are numbered as they are used.
    streams = _streams(own.kernels, functions, places, ns)
    threads: list[ThreadView] = [
        {"thread": thread, "main": thread == main, "range": [ranges[r.name] for r in found], **_times(found, ns)}
        for thread, found in sorted(_by(own.ranges, lambda r: r.thread).items(), key=lambda t: t[0] != main)
    ]
    of_functions = [names[function.name] for function in functions]
    trace = profile.trace
    return {
        "source": trace.source,
        "profiler": trace.profiler,
        "devices": {str(device): trace.devices.get(device, f"GPU {device}") for device in profile.devices},
        "step": _step(profile, number, own),
        "families": FAMILIES,
        "names": {
            "name": list(names),
            "short": [short_name(name) for name in names],
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
        "threads": threads,
        "calls": [
            {"thread": thread, "name": [call.name for call in found], **_times(found, ns)}
            for thread, found in _by(own.calls, lambda call: call.thread).items()
        ],
    }


def _is_module(trace: Trace, name: str) -> bool:
    return trace.modules is not None and trace.modules.are_paths and trace.modules.is_module(name)


def _layer(trace: Trace, name: str) -> str | None:
    if trace.modules is not None and _is_module(trace, name):
        return trace.modules.found((name,)).layer
    return meaning(name).layer


def results(profile: Profile, costs: Costs = NO_COSTS) -> Results:
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
    return cast(Results, rows | {"notes": all_notes})


def median_step(profile: Profile) -> int:
    """Return the number of the step with the median wall time (the shorter of two), of those with a kernel if any."""
    numbers = {number for number, _ in profile.by_step} or range(len(profile.steps))
    walls = sorted((profile.steps[n].end_s - profile.steps[n].start_s, n) for n in numbers)
    return walls[(len(walls) - 1) // 2][1]


def within(profile: Profile, step: Step) -> Within:
    """Return the events that belong to a step.

    Ranges and calls belong to the step in which they begin. Copies, whose launch is not known, belong to it if they
    begin between its beginning and its end or that of its last kernel.
    """
    trace = profile.trace
    _, of_step = steps_of(trace.kernels.launched_s, [step])
    places = profile.places.take(of_step)
    kernels = list(zip(trace.kernels.rows(of_step), places, strict=True))
    end_s = max([step.end_s, *(kernel.end_s for kernel, _ in kernels)])
    return Within(
        kernels,
        sorted((c for c in trace.copies if step.start_s <= c.start_s <= end_s), key=lambda c: c.start_s),
        trace.ranges.take(steps_of(trace.ranges.start_s, [step])[1]).named(lambda name: True),
        sorted((c for c in trace.calls if step.start_s <= c.start_s <= step.end_s), key=lambda c: c.start_s),
    )


def _step(profile: Profile, number: int, own: Within) -> StepView:
    step = profile.steps[number]
    ns = _since(step)
    in_graph = [kernel for kernel, _ in own.kernels if kernel.in_graph]

    def time_ns(counts: Callable[[Place], bool] = lambda place: True) -> int:
        return round(sum(kernel.end_s - kernel.start_s for kernel, place in own.kernels if counts(place)) * 1e9)

    return {
        "name": step.name,
        "number": number,
        "steps": len(profile.steps),
        "wall_ns": ns(step.end_s),
        "end_ns": max([ns(step.end_s), *(ns(kernel.end_s) for kernel, _ in own.kernels)]),
        "kernels": len(own.kernels),
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
            "launch": [None if k.launch_start_s is None else ns(k.launch_start_s) for k, _ in found],
            "graph": [int(kernel.in_graph) for kernel, _ in found],
        }
        for (device, stream), found in sorted(streams.items())
    ]


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
