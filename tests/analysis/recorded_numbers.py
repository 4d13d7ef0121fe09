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
from cs_systems.analysis.attribution.distribution import distribution
from cs_systems.analysis.attribution.gathers import gathers
from cs_systems.analysis.attribution.kernel_trials import kernel_trials
from cs_systems.analysis.attribution.memory_ranges import memory_ranges
from cs_systems.analysis.attribution.offload import offload
from cs_systems.analysis.attribution.phase_gaps import launch_waits_s
from cs_systems.analysis.attribution.product_rates import product_rates
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.analysis.attribution.recomputed import recomputed
from cs_systems.analysis.attribution.slow_steps import beyond
from cs_systems.analysis.attribution.step_growth import growing
from cs_systems.analysis.attribution.usual_steps import usual_steps
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
from tests.analysis import drawn
from tests.analysis.diagnosis import test_loop_rules as loop_rules
from tests.analysis.diagnosis import test_rule_limits as rule_limits
from tests.analysis.diagnosis import test_rules as rules
from tests.analysis.diagnosis import test_thresholds as thresholds
from tests.analysis.diagnosis.whole_rows import whole
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


def of_drawn_trace(seed: int) -> Any:
    found = drawn.profile_of(seed)
    trace, usual, alone = found.trace, usual_steps(found), overlap.of_kernels(found.trace, found.steps)
    return {
        "tables": timeline.results(found), "page": timeline.view(found), "answer": _of_answer(of_profile(found)),
        "usual": {field.name: getattr(usual, field.name) for field in fields(usual) if field.name != "profile"},
        "beyond": [beyond(usual, one) for one in usual.apart if one.windows and usual.windows],
        "growing": growing(trace.kernels, found.steps), "ranges": range_tree(found), "work": works(found),
        "streams": [one.row() for one in alone], "picture": overlap.picture(trace, alone[0]),
        "gathers": gathers(trace, alone[-1], 2), "offload": offload(found), "recomputed": recomputed(found),
        "trials": kernel_trials(found), "products": product_rates(found), "memory": memory_ranges(trace),
        "distribution": distribution(found), "waits": [launch_waits_s(found, phase) for phase in drawn.PHASES],
    }  # fmt: skip


def of_drawn_program(seed: int) -> Any:
    trace, steps, _ = simulated(drawn.program_of(seed), machine=Machine(says_waits=seed % 3 != 0))
    return _of_replay(replayed(trace, steps))


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
    """Return the answer to two planted faults together, some of whose numbers are changed."""
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
    return found


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield (place, number) of an answer; of a text, the sum of its numbers."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
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
    "program of ranks": of_program_s_ranks,
    **{f"ranks of {name}": partial(of_job, name) for name in JOBS},
    **{f"memory of {name}": partial(of_memory, f"{name}.pickle.gz") for name in SNAPSHOTS},
    **{f"durations from {first} on": partial(of_draws, first) for first in range(0, 40, 10)},
    **{f"{make.__name__[3:].replace('_', ' ')} from {first} on": partial(of_many, make, range(first, first + count))
       for make, count, times in ((of_drawn_trace, 20, 3), (of_drawn_program, 10, 2), (of_drawn_memory, 20, 2),
                                  (of_drawn_loop, 100, 1), (of_drawn_evidence, 400, 1))
       for first in range(0, count * times, count)},
    "planted faults": partial(of_many, of_planted_fault, FAULTS),
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
