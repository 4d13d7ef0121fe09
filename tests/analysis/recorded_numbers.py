"""Numbers that the analysis finds in the recordings of tests/data, in a form that is short and can be compared.

Of long lists it keeps the length, the sum and the sum weighted by position. Of drawn
inputs and planted faults it keeps how often a number was found, with its sums over all of them. After a change that is
meant to change numbers, write the file again and read its differences:

    python -m tests.analysis.recorded_numbers
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cs_systems.analysis.attribution import overlap, timeline
from cs_systems.analysis.attribution.collectives import collectives
from cs_systems.analysis.attribution.distribution import distribution
from cs_systems.analysis.attribution.gaps import causes, idle_during, silences
from cs_systems.analysis.attribution.gathers import gathers
from cs_systems.analysis.attribution.kernel_trials import kernel_trials
from cs_systems.analysis.attribution.memory_ranges import memory_ranges
from cs_systems.analysis.attribution.offload import offload
from cs_systems.analysis.attribution.phase_gaps import launch_waits_s
from cs_systems.analysis.attribution.product_rates import product_rates
from cs_systems.analysis.attribution.profile import Profile, profile, restricted
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.analysis.attribution.recomputed import recomputed
from cs_systems.analysis.attribution.slow_steps import beyond
from cs_systems.analysis.attribution.step_growth import growing
from cs_systems.analysis.attribution.usual_steps import compiling, long_calls, paced, ranges_before, usual_steps
from cs_systems.analysis.comparison import loop_ranks, numerics, precision, profiles, strategies
from cs_systems.analysis.comparison.loop_growth import memory_growth, time_growth
from cs_systems.analysis.comparison.loop_start import slow_start
from cs_systems.analysis.comparison.loop_time import loop_time
from cs_systems.analysis.comparison.precision_causes import explained
from cs_systems.analysis.comparison.rank_work import works
from cs_systems.analysis.comparison.ranks import collective_rows, merged, rank_rows, straggler, summary
from cs_systems.analysis.comparison.verdict import verdict
from cs_systems.analysis.comparison.warmup import warmup_curve
from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence, of_profile, of_snapshot
from cs_systems.analysis.memory import tables
from cs_systems.analysis.memory import timeline as memory_timeline
from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.groups import groups
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.analysis.replay import (
    Clean,
    CopiesOverlapped,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    Refusal,
    Replay,
    SyncRemoved,
    replayed,
    run,
)
from cs_systems.analysis.replay.changes import Subject
from cs_systems.analysis.replay.clean import by_clean, by_usual
from cs_systems.analysis.replay.lanes import lanes
from cs_systems.analysis.replay.ranks import Together, together
from cs_systems.analysis.timing_caveats import launch_bound_phases, of_spread
from cs_systems.core import statistics
from cs_systems.core.step_kinds import step_kinds
from cs_systems.core.tracers import TRACERS
from cs_systems.readers import read as read_trace
from cs_systems.readers.forms.columns import UNKNOWN, Categorical
from cs_systems.readers.forms.operators import Operators, Signature
from cs_systems.readers.forms.trace import Step, Trace
from cs_systems.readers.snapshot import read as read_snapshot
from cs_systems.record import Measurement, Sample, read_records
from tests.analysis import drawn
from tests.analysis.diagnosis import test_loop_rules as loop_rules
from tests.analysis.diagnosis import test_rule_limits as rule_limits
from tests.analysis.diagnosis import test_rules as rules
from tests.analysis.diagnosis import test_thresholds as thresholds
from tests.analysis.diagnosis.whole_rows import whole
from tests.analysis.replay.simulated import (
    AUTOGRAD,
    MS,
    US,
    Close,
    Collective,
    Copied,
    Free,
    Host,
    Launch,
    Machine,
    Open,
    Record,
    Run,
    Sync,
    Wait,
    ranks,
    simulated,
)
from tests.analysis.replay.simulated import Graph as CudaGraph
from tests.analysis.replay.test_edges import BACKWARD, FORWARD, SHORT, on_two_streams

DATA = Path(__file__).parents[1] / "data"
PROFILES = Path(__file__).parents[2] / "profiles"
KEPT = DATA / "numbers.json"
SHOWN = 3  # rows of a table, and values of a list, that are kept as they are
CHANGES = (LaunchesFree(), HostScaled(0.5), FamilyScaled("matmul", 0.5), SyncRemoved(), CopiesOverlapped(),
           InputRemoved(), HostScaled(0.5, "forward"), HostScaled(2.0, "step"), SyncRemoved("step"),
           FamilyScaled("elementwise", 0.25), FamilyScaled("softmax", 3.0), HostScaled(0.5, "none"))  # fmt: skip


def short(value: Any) -> Any:
    """Return a value as plain data: numbers with six digits, and of long lists their sums."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): short(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _of_list(value)
    text = str(value)
    return Path(text).name if text.startswith("/") else text


def _of_list(values: Sequence[Any]) -> Any:
    if len(values) <= SHOWN:
        return [short(each) for each in values]
    if all(isinstance(each, Mapping) for each in values):
        columns: dict[str, list[float]] = {}
        for at, row in enumerate(values, 1):
            for name, number in row.items():
                if isinstance(number, int | float) and math.isfinite(number):
                    sums = columns.setdefault(name, [0.0, 0.0])
                    sums[0], sums[1] = sums[0] + number, sums[1] + at * number
        return {"rows": len(values), "first": [short(each) for each in values[:SHOWN]], "sums": short(columns)}
    numbers = [float(each) if isinstance(each, int | float) else float(len(str(short(each)))) for each in values]
    weighted = sum(at * each for at, each in enumerate(numbers, 1))
    return [len(values), short(sum(numbers)), short(weighted), *(short(each) for each in values[:SHOWN])]


@cache
def _profile(name: str) -> Profile:
    path = DATA / name
    if not name.endswith(".sqlite.gz"):
        return profile(read_trace(path))
    with tempfile.TemporaryDirectory() as folder:
        (made := Path(folder, path.stem)).write_bytes(gzip.decompress(path.read_bytes()))
        return profile(read_trace(made))


def of_tables(name: str) -> Any:
    return timeline.results(_profile(name))


def of_page(name: str) -> Any:
    return timeline.view(_profile(name))


def of_usual(name: str) -> Any:
    found = usual_steps(_profile(name))
    return {field.name: getattr(found, field.name) for field in fields(found) if field.name != "profile"}


def of_replay(name: str) -> Any:
    return _of_replay(replayed(_profile(name)))


def _of_replay(made: Replay, clean: Clean | None = None) -> Any:
    graph = made.parts[0].graph
    answers = {repr(change): made.what_if(change) for change in CHANGES}
    if clean:
        answers |= {f"{change!r}, of a clean step": made.what_if(change, clean=clean) for change in CHANGES}
    return {
        "why not": made.why_not, "recorded": made.recorded_s, "replayed": made.replayed_step_s, "error": made.error,
        "unexplained": made.unexplained, "spread": made.spread, "constants": graph.constants, "queue": graph.queue,
        "guessed": graph.waits.guessed, "answers": answers, "lanes": _lanes(made),
    }  # fmt: skip


def of_program(name: str) -> Any:
    """Return the replay of a simulated program, as if a profiler that slows the host down had recorded it."""
    program = PROGRAMS[name]
    trace, steps, step_s = simulated(program.step, machine=program.machine, beside=program.beside)
    trace = replace(trace, profiler=program.profiler, overheads=[(steps[0].start_s, steps[0].start_s + 20 * US)])
    clean = Clean(0.9 * step_s, {"step": 0.6 * step_s, "forward": 0.2 * step_s}, {"forward": 0.3 * step_s})
    return _of_replay(replayed(trace, steps), clean)


def of_steps(program: Simulated) -> Any:
    """Return all columns of a simulated program's graph, of the graph repeated and changed, and the times of both."""
    trace, steps, step_s = simulated(program.step, 4, program.machine, program.beside)
    trace, steps = program.change(trace, steps)
    trace = replace(trace, overheads=[(steps[0].start_s, steps[0].start_s + 20 * US)])
    (part,) = (made := replayed(trace, steps)).parts
    graph, to = part.graph, Subject(trace, part.graph, part.graph.costs, steps[0].start_s)
    clean = Clean(0.9 * step_s, {"step": 0.6 * step_s, "forward": 0.2 * step_s}, {"forward": 0.3 * step_s})
    changes = (*CHANGES, HostScaled(0.25, "part"), SyncRemoved("part"), HostScaled(0.5, "log"), SyncRemoved("log"))
    applied = {str(change): change.apply(to) for change in changes}
    changed = {name: one for name, one in applied.items() if isinstance(one, Subject)}
    costs = {name: one.costs for name, one in changed.items()} | {"clean": by_clean(to, clean)}
    costs |= {name: by_usual(to, one.inflation) for name, one in TRACERS.items() if one.inflation}
    versions = found.versions if (found := lanes(made)) else []
    boxes = [(box.start_s, box.end_s) for version in versions for lane in version.lanes for box in lane.boxes]
    return {
        "refused": {name: one.reason for name, one in applied.items() if isinstance(one, Refusal)},
        "recorded": _columns(graph.recorded), "graph": _columns(graph), "costs": _columns(graph.costs),
        "changed": {name: _columns(one, graph.costs) for name, one in costs.items()},
        "moved": {name: _columns(one.graph, graph) for name, one in changed.items() if one.graph is not graph},
        "quartiles": [_columns(one, graph.costs) for one in part.quartiles],
        "once": _columns(run.replay(graph)), "twice": _columns(run.replay(part.twice)), "boxes": _sums(boxes),
        "repeated": _columns(part.twice) | _columns(part.twice.recorded),
    }  # fmt: skip


def _columns(value: Any, other: Any = None) -> dict[str, Any]:
    """Return the sums of each field, of those that differ from another's."""
    found = {field.name: _sums(own) for field in fields(value) if not is_dataclass(own := getattr(value, field.name))}
    return {name: sums for name, sums in found.items() if other is None or sums != _sums(getattr(other, name))}


def _sums(value: Any) -> list[float]:
    """Return how many finite numbers there are, their sum and their sum weighted by position; times in µs."""
    value = value.codes if isinstance(value, Categorical) else value
    values = value.ravel() if isinstance(value, np.ndarray) else np.array([number for _, number in _numbers(value)])
    found = np.nan_to_num(values / US if values.dtype.kind == "f" else values, posinf=0, neginf=0)
    return [len(found), round(float(found.sum()), 3), round(float(found @ np.arange(1, len(found) + 1)), 3)]


def of_program_s_ranks() -> Any:
    """Return the joint replay of three ranks, of which one computes longer."""
    steps = [(Open("forward"), Host(40 * US), *(Launch(lasts_s) for _ in range(9)), Close(), Record("made", 7),
              Wait(30, "made"), Collective(200 * US), Record("reduced", 30), Wait(7, "reduced"), *SHORT, Sync())
             for lasts_s in (30 * US, 45 * US, 30 * US)]  # fmt: skip
    recorded, _ = ranks(steps)
    joint = together([replayed(trace, own) for trace, own in recorded])
    assert isinstance(joint, Together)
    return {
        "step": joint.step_s, "replayed": joint.replayed_s, "straggler": joint.straggler, "transfer": joint.transfer_s,
        "as the median": joint.straggler_like_the_median(), "offset": joint.offset_s, "calls": _sums(joint.calls),
    }  # fmt: skip


class Simulated(NamedTuple):
    """Step of a simulated program; `change` changes its trace, and chooses other steps."""

    step: tuple[object, ...]
    profiler: str = "simulation"
    machine: Machine = Machine()
    beside: tuple[object, ...] = ()
    change: Callable[[Trace, list[Step]], tuple[Trace, list[Step]]] = lambda trace, steps: (trace, steps)


MARKED = (Open("forward"), *FORWARD, Close(), Open("input"), Host(0.5 * MS), Close())
BESIDE = tuple(one for _ in range(400) for one in (Host(3 * US), Launch(2 * US, 20, "softmax", 6 * US)))
IN_BACKWARD = (Host(15 * US), *SHORT[:3], Open("forward"), Host(5 * US), Launch(9 * US), Close(), Launch(9 * US))
ALL_KINDS = (
    *(Open("forward"), Host(50 * US), Launch(20 * US), Launch(10 * US), Record("a", 7), Wait(20, "a"), Close()),
    *(Launch(30 * US, 20, "softmax"), Open("log"), Host(40 * US), Launch(8 * US), Copied(12 * US, 7, "DtoH pageable")),
    *(Close(), Run(AUTOGRAD, IN_BACKWARD), Host(10 * US), CudaGraph((6 * US, 7 * US)), Launch(5 * US)),
    *(Record("b", 20), Sync(event="b"), Open("input"), Host(30 * US), Copied(3 * US, 21, "HtoD pinned"), Close()),
    *(Copied(4 * US, 7, "HtoD pageable"), Free(25 * US), Launch(3 * US), Sync(stream=7), Host(20 * US), Launch(4 * US)),
)


def in_parts(trace: Trace, steps: list[Step]) -> tuple[Trace, list[Step]]:
    """Return the parts of the steps, between which the host works."""
    return trace, [Step(*one[:3]) for one in trace.ranges.named("part".__eq__) if one.start_s >= steps[0].start_s]


def until_idle(trace: Trace, steps: list[Step]) -> tuple[Trace, list[Step]]:
    """Return steps that end with the last of their kernels."""
    launched_s, end_s = trace.kernels.launch_start_s, trace.kernels.end_s
    return trace, [one._replace(end_s=float(end_s[launched_s < one.end_s].max())) for one in steps]


def without_launches(trace: Trace, steps: list[Step]) -> tuple[Trace, list[Step]]:
    """Return a trace that lost the launch of every fifth kernel."""
    kernels = trace.kernels
    lost = np.arange(len(kernels)) % 5 == 3
    call, launch_s = np.where(lost, UNKNOWN, kernels.call), np.where(lost, np.nan, kernels.launch_start_s)
    return replace(trace, kernels=replace(kernels, call=call, launch_start_s=launch_s)), steps


def on_two_devices(trace: Trace, steps: list[Step]) -> tuple[Trace, list[Step]]:
    """Return a trace with stream 20 on another device, and with an operator that names autograd's thread."""
    kernels, autograd = trace.kernels, np.array([AUTOGRAD])
    name = Signature("autograd::engine::evaluate_function: AddBackward0", None)
    named = Operators(Categorical.of([name]), autograd, autograd, autograd)
    return replace(trace, kernels=replace(kernels, device=np.where(kernels.stream == 20, 1, 0)), operators=named), steps


def delayed(by_us: Sequence[float], trace: Trace, steps: list[Step], first: int = 0) -> tuple[Trace, list[Step]]:
    """Return a trace of a device that falls behind by so many µs more at each fourth kernel of the steps."""
    at_s = np.sort(trace.kernels.start_s[trace.kernels.start_s >= steps[0].start_s])[first::4][: len(by_us)]
    by_s = np.append(0.0, np.cumsum(by_us) * US)

    def later(columns: Any) -> Any:
        times = {name: getattr(columns, name) for name in ("start_s", "end_s")}
        return replace(columns, **{name: s + by_s[np.searchsorted(at_s, s, "right")] for name, s in times.items()})

    return replace(trace, kernels=later(trace.kernels), copies=later(trace.copies)), steps


def of_delays(first: int) -> Any:
    """Return what is found if delays are a bit longer than each limit, at some kernels and everywhere."""
    found = []
    for us in (1.5, 2.5, 3.5, 5.5, 10.5, 15.5, 20.5, 24.5, 25.5, 50.5, 200.5):
        change = partial(delayed, [us, -us, -us, us] * 2, first=first)
        machine = Machine(says_waits=first % 2 == 0)
        everywhere = Machine(**{("launch_s", "gap_s", "return_s", "routine_s")[first]: us * US})
        found += [Simulated(ALL_KINDS, machine=machine, change=change), Simulated(ALL_KINDS, machine=everywhere)]
    return of_many(of_steps, found)


GRAPHS = (Launch(30 * US), CudaGraph((2 * US, 9 * US, 4 * US, 3 * US, 5 * US, 6 * US, 8 * US)), Launch(2 * US, 20))


def nodes_apart(trace: Trace, steps: list[Step]) -> tuple[Trace, list[Step]]:
    """Return a trace in which nodes of a graph ran on three streams, some at the same time."""
    kernels = trace.kernels
    number = np.array([int(one.name[5:]) if one.name.startswith("node") else 0 for one in kernels.function])
    stream = np.array([7, 20, 21, 7, 21, 20, 7])[number]
    earlier_s = np.where((number == 2) | (number == 5), 7 * US, 0.0)
    start_s, end_s = kernels.start_s - earlier_s, kernels.end_s - earlier_s
    stream = np.where(number > 0, stream, kernels.stream)
    return replace(trace, kernels=replace(kernels, stream=stream, start_s=start_s, end_s=end_s)), steps


IN_ONE_STREAM = tuple(one for _ in range(60) for one in (Host(11 * US), Launch(2 * US, 7, "softmax", 6 * US)))
PROGRAMS = {
    "forward": Simulated((*MARKED, Sync(), Host(0.3 * MS)), "kineto"),
    "launches": Simulated((*MARKED, *SHORT, Host(6 * MS), *SHORT, Sync()), "nsys"),
    "streams": Simulated(on_two_streams(20 * US, 60 * US)),
    "guessed waits": Simulated(on_two_streams(50 * US, 20 * US), machine=Machine(says_waits=False)),
    "backward": Simulated((*FORWARD, BACKWARD, Host(20 * US), *SHORT, Sync(stream=7)), "kineto"),
    "queue": Simulated((*(Launch(20 * US) for _ in range(700)), Host(5 * MS)), machine=Machine(queue=600)),
    "graph": Simulated((Host(10 * US), CudaGraph((20 * US,) * 30), Launch(5 * US), Sync(), Host(40 * US)), "nsys"),
    "copies": Simulated((Copied(0.3 * MS, 7, "HtoD pageable"), *FORWARD, Copied(0.2 * MS, 7, "DtoH pageable"), Sync())),
    "free": Simulated((*FORWARD, Free(40 * US), Host(0.3 * MS)), "kineto"),
    "two threads": Simulated((*SHORT, Host(0.3 * MS), Sync(stream=7)), beside=BESIDE),
}
ALL_PROGRAMS = PROGRAMS | {
    "all kinds": Simulated(ALL_KINDS),
    "all kinds, in parts": Simulated((Host(7 * US), Open("part"), *ALL_KINDS, Close(), Host(3 * US)), change=in_parts),
    "all kinds, until idle": Simulated((*ALL_KINDS, Host(40 * US)), change=until_idle),
    "all kinds, without launches": Simulated(ALL_KINDS, change=without_launches),
    "all kinds, on two devices": Simulated(ALL_KINDS, change=on_two_devices),
    "all kinds, clock ahead": Simulated(ALL_KINDS, change=partial(delayed, [6])),
    "all kinds, clock behind": Simulated(ALL_KINDS, machine=Machine(says_waits=False), change=partial(delayed, [-6])),
    "all kinds, delayed": Simulated(ALL_KINDS, change=partial(delayed, [2, 3, 7, 11, 40, -20, 60, -70])),
    "many graphs": Simulated((CudaGraph((1 * US,) * 50), Launch(2 * US)) * 25),
    "graphs on three streams": Simulated((*GRAPHS, Host(9 * US), *GRAPHS[1:], Sync()), change=nodes_apart),
    "backward first": Simulated((Run(AUTOGRAD, IN_BACKWARD), Host(5 * US), *ALL_KINDS)),
    "one stream of two threads": Simulated((*ALL_KINDS, *SHORT, Host(20 * US)), beside=IN_ONE_STREAM),
    "all kinds, guessed": Simulated(ALL_KINDS, "kineto", Machine(says_waits=False)),
}


def _lanes(made: Replay) -> Any:
    found = lanes(made)
    return found and [
        (version.name, version.step_s, [(lane.name, [box._asdict() for box in lane.boxes]) for lane in version.lanes])
        for version in found.versions
    ]


def of_job(name: str) -> Any:
    profiles = [_profile(f"ranks_h200/{name}_rank{rank}.json.gz") for rank in (0, 1)]
    job = merged([summary(one, rank) for rank, one in enumerate(profiles)])
    joint = together([replayed(one) for one in profiles])
    parts = [distribution(one) for one in profiles]
    return {
        "ranks": rank_rows(job), "collectives": collective_rows(job), "straggler": straggler(job), "notes": job.notes,
        "joint": (joint.step_s, joint.replayed_s, joint.straggler, joint.straggler_like_the_median())
        if isinstance(joint, Together) else joint,
        "exposed": [one and (one.exposed_s(one.calls), one.passes, one.updates, len(one.early)) for one in parts],
    }  # fmt: skip


def of_memory(name: str) -> Any:
    found = attribute(replay(read_snapshot(DATA / name)))
    names = tensor_names(found)
    made = {table: make(found, names) for table, make in tables.TABLES.items()}
    of_groups = {group: [one.allocation.bytes for one in own] for group, own in groups(found, ()).items()}
    return {
        **made,
        "file": tables.file_row(found, "x"),
        "groups": of_groups,
        "page": memory_timeline.view(found, names),
    }


def of_snapshots() -> Any:
    a, b = (
        attribute(replay(read_snapshot(DATA / f"memory_h200/{name}.pickle.gz"))) for name in ("foreach", "evaluation")
    )
    return {
        "category": tables.differences(a, b, lambda _, one: one.category),
        "where": tables.differences(a, b, tables.where),
        "devices": tables.devices([a, b]),
    }


def of_pair() -> Any:
    a, b = _profile(SMALL), _profile(STEP)
    return {**{by: profiles.difference(a, b, by) for by in profiles.DIFFERENCES}, "doubts": profiles.doubts(a, b)}


OF_STRATEGIES = ("steps", "communication", "differences", "volumes", "stages", "disturbance")


def of_run(name: str) -> Any:
    """Return the comparisons of a committed run, as far as they are about its records."""
    records = read_records(PROFILES / name)[0]
    found: dict[str, Any] = {"verdict": verdict(records)}
    for table in ("accumulated", "ulps", "summed", "normalized", "ranges"):
        found[table] = getattr(numerics, table)(records)
    found["verdicts"] = [numerics.verdicts(record) for record in records]
    found["causes"] = explained(records)
    for workload in ("language_model", "training_curve", "precision_error"):
        for cell, of_cell in precision.by_cell(records, workload).items():
            found[f"{workload} {precision.name_of(cell)}"] = [
                of(of_cell) for of in (precision.gains, precision.errors, precision.learning)
            ]
    for cell, group in strategies.groups(records).items():
        found[f"ranks {strategies.name(cell)} {cell.batch_size}"] = {
            table: getattr(strategies, table)(group) for table in OF_STRATEGIES
        }
    found["warm-up"] = [warmup_curve(record.measurement) for record in records[:4] if record.measurement]
    return found


def of_durations(seed: int) -> Any:
    """Return the statistics of drawn durations: with noise, slow steps, a drift or few samples."""
    drawn = random.Random(seed)
    count, noise = drawn.choice([3, 5, 6, 7, 8, 9, 12, 20, 31, 40, 64]), drawn.choice([0.001, 0.01, 0.03, 0.1, 0.3])
    every, times = drawn.choice([3, 4, 7, 10, count, count + 1]), drawn.choice([1.0, 1.5, 1.9, 2.1, 2.9, 3.1, 9.0])
    slope = drawn.choice([0.0, 0.0, 0.001, 0.01])
    walls = [
        drawn.lognormvariate(-3, noise) * (times if step % every == every - 1 else 1.0) * (1 + slope * step)
        for step in range(count)
    ]
    rounds = [walls[number :: drawn.choice([1, 2, 3, 5])] for number in range(drawn.choice([1, 2, 3]))]
    other = [[wall_s * drawn.lognormvariate(0.02, noise) for wall_s in own] for own in rounds]
    samples = tuple(
        Sample(step % 3, step < 2, wall_s, {"forward": wall_s / 2}, {"forward": wall_s / 2}, {"forward": wall_s / 40})
        for step, wall_s in enumerate(walls)
    )
    measurement = Measurement("cuda_event", samples, 0.0)
    return {
        "summary": statistics.summary(walls), "interval": statistics.interval(rounds),
        "of median": statistics.median_interval(walls), "of half": statistics.median_interval(walls, 0.5),
        "ratio": statistics.ratio_interval([rounds], [other]),
        "of repeats": statistics.ratio_interval([rounds, other, rounds], [other, rounds]),
        "outliers": statistics.outliers(walls), "drift": statistics.drift(walls),
        "unstable": [statistics.unstable(walls, of_loop=of_loop) for of_loop in (False, True)],
        "kinds": [vars(kind) for kind in step_kinds(walls)], "warm-up": warmup_curve(measurement),
        "caveats": [caveat.message for caveat in of_spread(measurement, "step")],
        "loop": loop_time(measurement), "bound": launch_bound_phases(measurement),
    }  # fmt: skip


def of_draws(first: int) -> Any:
    return {str(seed): of_durations(seed) for seed in range(first, first + 10)}


def _usual(found: Profile) -> Any:
    usual = usual_steps(found)
    return {field.name: getattr(usual, field.name) for field in fields(usual) if field.name != "profile"}


def _idle(found: Profile) -> Any:
    """Return the stretches that causes of idle time and of a start-up rest on, within and around the recording."""
    trace, (begin_s, end_s) = found.trace, (found.steps[0].start_s, found.steps[-1].end_s)
    inside, outside = (begin_s + drawn.TICK_S, end_s - drawn.TICK_S), (begin_s - 1.0, end_s + 1.0)
    return {
        "silences": [silences(trace, *between) for between in (inside, outside)],
        "idle": idle_during(trace.kernels, trace.calls.start_s, trace.calls.end_s),
        "causes": [causes(trace, device, gaps) for device, gaps in found.gaps.items()],
        "compiling": compiling(trace, *outside),
        "calls": [long_calls(trace, *inside, drawn.TICK_S * n) for n in (1, 8)],
        "ranges": [ranges_before(trace, end_s, drawn.TICK_S * n) for n in (1, 16)],
    }  # fmt: skip


def _slow(found: Profile) -> Any:
    usual = usual_steps(found)
    return [beyond(usual, one) for one in usual.apart if one.windows and usual.windows]


def _of_streams(found: Profile) -> Any:
    of_all = overlap.of_kernels(found.trace, found.steps)
    return {
        "rows": [one.row() for one in of_all], "pictures": [overlap.picture(found.trace, one) for one in of_all],
        "gathers": [gathers(found.trace, one, layers, 1) for one in of_all for layers in (1, 2)],
    }  # fmt: skip


def _steps_and_places(found: Profile) -> Any:
    (start_s, *_), (*_, end_s) = found.steps[0][1:3], found.steps[-1][1:3]
    one = restricted(found, found.steps[:1], device=found.devices[0])
    return {
        "steps": found.steps, "places": found.places.codes, "notes": found.notes, "groups": [*found.groups.values()],
        "by step": [*found.by_step.values()], "gaps": [*found.gaps.values()], "paced": paced(found),
        "shares": (found.phase_coverage, found.layer_coverage, found.fused_share, found.time_s, one.time_s),
        "calls": [*collectives(found)], "within": timeline.within(found, start_s, (start_s + end_s) / 2),
    }  # fmt: skip


# What is found in drawn traces, by the modules that find it.
OF_TRACES: dict[str, Callable[[Profile], Any]] = {
    "profile, places, inferred_phases, inferred_layers, collectives": _steps_and_places,
    "tables, host, host_gaps, module_tables and operator_table": timeline.results,
    "timeline": timeline.view,
    "gaps and usual_steps": _idle,
    "usual_steps": _usual,
    "slow_steps": _slow,
    "step_growth": lambda found: growing(found.trace.kernels, found.steps),
    "range_tree": range_tree,
    "rank_work": works,
    "overlap and gathers": _of_streams,
    "offload, recomputed, kernel_trials and product_rates": lambda found: (
        offload(found), recomputed(found), kernel_trials(found), product_rates(found)
    ),
    "memory_ranges": lambda found: memory_ranges(found.trace),
    "distribution and phase_gaps": lambda found: (
        (ranks := distribution(found)), ranks and [ranks.exposed_s(calls) for calls in (ranks.calls, ranks.calls[::2])],
        [launch_waits_s(found, phase) for phase in drawn.PHASES]
    ),
    "evidence and diagnoses": lambda found: _of_answer(of_profile(found)),
}  # fmt: skip


def of_drawn_traces(find: Callable[[Profile], Any]) -> Any:
    return of_many(lambda seed: find(_drawn(seed)), range(60))


@cache
def _drawn(seed: int) -> Profile:
    return drawn.profile_of(seed)


def of_drawn_program(seed: int) -> Any:
    return of_steps(Simulated(drawn.program_of(seed), machine=Machine(says_waits=seed % 3 != 0)))


def of_drawn_memory(seed: int) -> Any:
    found = drawn.memory_of(seed)
    names = tensor_names(found)
    made = {table: make(found, names) for table, make in tables.TABLES.items()}
    return made | {"page": memory_timeline.view(found, names), "answer": _of_answer(of_snapshot(found, names))}


def of_drawn_loop(seed: int) -> Any:
    lasted = drawn.durations_of(seed)
    return {
        "start": slow_start(lasted, len(lasted) // 2), "growth": time_growth([*enumerate(lasted)]),
        "memory": memory_growth(drawn.readings_of(seed)), "kinds": [vars(kind) for kind in step_kinds(lasted)],
        "summary": statistics.summary(lasted), "unstable": statistics.unstable(lasted, of_loop=seed % 2 == 0),
        "ranks": loop_ranks.tables_of(drawn.reports_of(seed)),
    }  # fmt: skip


def _of_answer(evidence: Evidence) -> Any:
    answer = apply_rules(evidence)
    return {one.code: one for one in answer.diagnoses} | {"unknowns": answer.unknowns}


def of_planted_fault(name: str) -> Any:
    return _of_answer(FAULTS[name])


def of_drawn_evidence(seed: int) -> Any:
    """Return the answer to two planted faults together, with some of their numbers changed."""
    choice = random.Random(seed).choice

    def changed(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or choice([True, True, False]):
            return value
        if isinstance(value, int):
            return max(0, value + choice([-2, -1, 1, 2]))
        return choice([value / 2, value * 2, 0.0, *SHARES])

    one, other = (FAULTS[choice([*FAULTS])] for _ in range(2))
    rows = {
        name: [{column: changed(value) for column, value in row.items()} for row in table]
        for name, table in {**other.tables, **one.tables}.items()
    }
    return _of_answer(replace(one, tables=whole(rows), measurement=one.measurement or other.measurement))


def of_many(make: Callable[[Any], Any], seeds: Iterable[Any]) -> dict[str, list[float]]:
    """Return for each place of a number in the answers: how often it is known, the sum, and the weighted sum."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for at, seed in enumerate(seeds, 1):
        for place, number in _numbers(make(seed)):
            sums = found[place]
            sums[:] = sums[0] + 1, sums[1] + number, sums[2] + (at + sums[0]) * number
    return dict(sorted(found.items()))


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield (place, number) of an answer; of a text, the sum of its numbers."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, place)
    elif isinstance(value, int | float):
        yield place, value if math.isfinite(value) else 0.0
    elif value is not None:
        yield place, sum(map(float, re.findall(r"\d+(?:\.\d+)?", str(value))))


FAULTS: dict[str, Evidence] = {
    f"{number} {name}": evidence
    for number, faults in enumerate((rules.PLANTED, loop_rules.PLANTED, rule_limits.LIMITS, rule_limits.NUMBERS,
                                     thresholds.LIMITS, thresholds.BOUNDS))
    for name, known in faults.items() for evidence in known if isinstance(evidence, Evidence)
}  # fmt: skip
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0)  # at which rules begin to speak
SMALL, STEP, NSYS = "kineto_h200_small2.json.gz", "kineto_h200_step.json.gz", "nsys_h200_step.sqlite.gz"
JOBS = ("experts", "late_data", "late_host", "pipeline", "tensor_parallel")
SNAPSHOTS = ("memory_h200/evaluation", "memory_h200/foreach", "memory_h200/no_grad", "memory_h200/process_limit",
             "memory_h200/device_full", "memory_h200/kept_graphs", "memory_h200/kept_outputs",
             "memory_h200/kept_gradients", "snapshot_h200_step")  # fmt: skip
RUNS = ("precision", "precision_speed", "low_precision_sums", "fully_sharded", "zero_stage_1", "data_parallel_variants",
        "warmup_steps")  # fmt: skip
CASES: dict[str, Callable[[], Any]] = {
    **{f"{make.__name__[3:]} of {name}": partial(make, name) for name in (SMALL, STEP, NSYS)
       for make in (of_tables, of_page, of_usual, of_replay)},
    **{f"program of {name}": partial(of_program, name) for name in PROGRAMS},
    **{f"recorded graph, waits, run, changes and lanes of {name}": partial(of_steps, program)
       for name, program in ALL_PROGRAMS.items()},
    **{f"graph, waits and run with delays from kernel {first} on": partial(of_delays, first) for first in range(4)},
    "program of ranks": of_program_s_ranks,
    **{f"ranks of {name}": partial(of_job, name) for name in JOBS},
    **{f"memory of {name}": partial(of_memory, f"{name}.pickle.gz") for name in SNAPSHOTS},
    **{f"durations from {first} on": partial(of_draws, first) for first in range(0, 40, 10)},
    **{f"{make.__name__[3:].replace('_', ' ')} from {first} on": partial(of_many, make, range(first, first + count))
       for make, count, times in ((of_drawn_program, 20, 3), (of_drawn_memory, 20, 2), (of_drawn_loop, 100, 1),
                                  (of_drawn_evidence, 400, 1))
       for first in range(0, count * times, count)},
    **{f"{modules} of drawn traces": partial(of_drawn_traces, find) for modules, find in OF_TRACES.items()},
    "planted faults": partial(of_many, of_planted_fault, FAULTS),
    "differences of snapshots": of_snapshots,
    "differences of traces": of_pair,
    **{f"run {name}": partial(of_run, name) for name in RUNS},
}  # fmt: skip


@cache
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def differences(told: Any, known: Any, at: str = "") -> list[str]:
    """Return where a short form differs from the kept one by more than the last digit; it may have more columns."""
    if isinstance(told, dict) and isinstance(known, dict) and told.keys() >= known.keys():
        return [each for key in known for each in differences(told[key], known[key], f"{at}/{key}")]
    if isinstance(told, list) and isinstance(known, list) and len(told) == len(known):
        return [
            each for n, pair in enumerate(zip(told, known, strict=True)) for each in differences(*pair, f"{at}/{n}")
        ]
    if isinstance(told, float) and isinstance(known, float):
        return [] if math.isclose(told, known, rel_tol=1e-5, abs_tol=1e-12) else [f"{at}: {told} is not {known}"]
    return [] if told == known else [f"{at}: {told!r} is not {known!r}"]


def written(made: Mapping[str, Any]) -> str:
    """Return the numbers as JSON with a line for each table of a case, so that a difference names what changed."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def lines(value: Any) -> str:
        if not isinstance(value, dict | list):
            return line(value)
        begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
        each = [f"{line(k)}: {line(v)}" for k, v in value.items()] if begin == "{" else [line(one) for one in value]
        return f"{begin}\n" + ",\n".join(each) + f"\n{end}"

    return "{\n" + ",\n".join(f"{line(case)}: {lines(value)}" for case, value in made.items()) + "\n}\n"


def main() -> None:
    made = {name: short(make()) for name, make in CASES.items()}
    KEPT.write_text(written(made))


if __name__ == "__main__":
    main()
