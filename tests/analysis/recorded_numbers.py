"""Numbers that the analysis finds in the recordings of tests/data, in a form that is short and can be compared.

Of long lists it keeps the length, the sum and the sum weighted by position. After a change that is meant to change
numbers, write the file again and read its differences:

    python -m tests.analysis.recorded_numbers
"""

from __future__ import annotations

import gzip
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cs_systems.analysis.attribution import timeline
from cs_systems.analysis.attribution.distribution import distribution
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.usual_steps import usual_steps
from cs_systems.analysis.comparison import numerics, precision, profiles, strategies
from cs_systems.analysis.comparison.loop_time import loop_time
from cs_systems.analysis.comparison.precision_causes import explained
from cs_systems.analysis.comparison.ranks import collective_rows, merged, rank_rows, straggler, summary
from cs_systems.analysis.comparison.verdict import verdict
from cs_systems.analysis.comparison.warmup import warmup_curve
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
    Replay,
    SyncRemoved,
    replayed,
)
from cs_systems.analysis.replay.lanes import lanes
from cs_systems.analysis.replay.ranks import Together, together
from cs_systems.analysis.timing_caveats import launch_bound_phases, of_spread
from cs_systems.core import statistics
from cs_systems.core.step_kinds import step_kinds
from cs_systems.readers import read as read_trace
from cs_systems.readers.snapshot import read as read_snapshot
from cs_systems.record import Measurement, Sample, read_records
from tests.analysis.replay.simulated import (
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
    answers = {str(change): made.what_if(change) for change in CHANGES}
    if clean:
        answers |= {f"{change}, of a clean step": made.what_if(change, clean=clean) for change in CHANGES}
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


def of_program_s_ranks() -> Any:
    """Return the joint replay of three ranks, of which one computes longer."""
    steps = [(Open("forward"), Host(40 * US), *(Launch(lasts_s) for _ in range(9)), Close(), Record("made", 7),
              Wait(30, "made"), Collective(200 * US), Record("reduced", 30), Wait(7, "reduced"), *SHORT, Sync())
             for lasts_s in (30 * US, 45 * US, 30 * US)]  # fmt: skip
    recorded, _ = ranks(steps)
    joint = together([replayed(trace, own) for trace, own in recorded])
    assert isinstance(joint, Together)
    return joint.step_s, joint.replayed_s, joint.straggler, joint.straggler_like_the_median(), joint.transfer_s


class Simulated(NamedTuple):
    """Step of a simulated program."""

    step: tuple[object, ...]
    profiler: str = "simulation"
    machine: Machine = Machine()
    beside: tuple[object, ...] = ()


MARKED = (Open("forward"), *FORWARD, Close(), Open("input"), Host(0.5 * MS), Close())
BESIDE = tuple(one for _ in range(400) for one in (Host(3 * US), Launch(2 * US, 20, "softmax", 6 * US)))
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
    "program of ranks": of_program_s_ranks,
    **{f"ranks of {name}": partial(of_job, name) for name in JOBS},
    **{f"memory of {name}": partial(of_memory, f"{name}.pickle.gz") for name in SNAPSHOTS},
    **{f"durations from {first} on": partial(of_draws, first) for first in range(0, 40, 10)},
    "differences of snapshots": of_snapshots,
    "differences of traces": of_pair,
    **{f"run {name}": partial(of_run, name) for name in RUNS},
}  # fmt: skip


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
