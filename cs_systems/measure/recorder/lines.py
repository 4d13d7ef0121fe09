"""Findings from samples of the stack: the program's own functions in usual steps, and the extra work of slow steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import CodeType
from typing import NamedTuple

from cs_systems.analysis.comparison import loop_findings as found
from cs_systems.analysis.comparison.loop_findings import BETWEEN, OTHER, WITHOUT_GRADIENTS
from cs_systems.core.step_kinds import StepKind
from cs_systems.measure.recorder.element_sums import ElementSum
from cs_systems.measure.recorder.lengths import Longer
from cs_systems.measure.recorder.phases import BACKWARD, FORWARD, INPUT, LOSS, OPTIMIZER
from cs_systems.measure.recorder.stacks import (
    Line,
    Sample,
    callee_of,
    function_of,
    line_of,
    method_of,
    place_of,
    source_of,
)

MOST_ROWS = 10
MOST_INNER = 40
# Methods that write a log, in a function that itself calls no phase.
WRITES = {"write", "writelines", "writerow", "add_scalar", "add_scalars", "add_histogram", "dump", "log_metrics"}
_WAITS = re.compile(r"\bnext\(|\b(?:in|from|iter)\b.*(?:load|batch)", re.IGNORECASE)
INNER = (FORWARD, LOSS, BACKWARD)  # phases of the model, in which own lines are found too
UPDATING = (BACKWARD, OPTIMIZER)
_At = tuple[CodeType, int]  # a function and the number of one of its lines
LONGER = 3.0  # most times as long as when sampled that calls of phases take when timed; the rest is something else
AROUND = (OTHER, BETWEEN, INPUT)  # phases in which the program's own code may run


def own_python(
    samples: Sequence[Sample],
    phases_s: dict[str, float],
    feeds_model: Callable[[tuple[Line, ...]], bool],
    goes_into_loss: Callable[[tuple[Line, ...]], bool] = lambda _: False,
    polled: Callable[[Line], str | None] = lambda _: None,
    calls_phase: Callable[[Line], bool] = lambda _: False,
    read_all: Callable[[Line, float], Longer | None] = lambda *_: None,
) -> list[found.OwnPythonRow]:
    """Return a row per own function and phase of these samples, in seconds of a timed step.

    feeds_model: returns whether the lines compute an input of the model. goes_into_loss: the same of the loss, for
    forward passes without gradients and for lines outside of the phases. polled: returns what a loop around a sleep
    looks at. calls_phase: returns whether a line is known to call a model or a backward pass, also where no sample was
    taken inside of it. read_all: returns what a line reads in this time, if that gets longer in each step.
    """
    by_phase: Counter[str] = Counter()
    times: dict[tuple[str, CodeType, bool], Counter[Line]] = {}
    counts: Counter[tuple[str, CodeType, bool]] = Counter()
    chains: dict[Line, tuple[Line, ...]] = {}
    collected: Counter[str] = Counter()
    around = {line[0] for s in samples for line in _chain(s) if s.phase is not None and s.phase.phase() not in AROUND}
    of_phases = (s for s in samples if s.phase is not None and s.phase.phase() not in (*AROUND, LOSS))
    calls = {chain[-1] for s in of_phases if (chain := _chain(s))}
    around_s = 0.0
    for sample in samples:
        phase = sample.phase.phase() if sample.phase is not None else None
        if phase is None:
            continue
        by_phase[_timed(phase)] += sample.time_s + sample.lost_s  # type: ignore[assignment]
        collected[phase] += sample.lost_s  # type: ignore[assignment]
        line = next(reversed(_chain(sample)), None)
        if phase == OTHER and line is not None and (line in calls or calls_phase(line)):
            around_s += sample.time_s
        elif line is not None:
            flows = feeds_model if phase == OTHER else goes_into_loss if phase == WITHOUT_GRADIENTS else None
            kind = phase, line[0], flows is not None and flows(_chain(sample))
            chains.setdefault(line, _chain(sample))
            times.setdefault(kind, Counter())[line] += sample.time_s  # type: ignore[assignment]
            counts[kind] += 1
    rows: list[found.OwnPythonRow] = []
    for (phase, code, feeds), lines in times.items():
        lasted_s, all_s = sum(lines.values()), by_phase[_timed(phase)]
        if not all_s or _timed(phase) not in phases_s:
            continue
        most = most_of(lines)
        rows.append(
            {
                "phase": phase,
                "function": function_of(most),
                "place": place_of(most),
                "calls": callee_of(most),
                "writes": code not in around and not WRITES.isdisjoint(code.co_names),
                "time_s": lasted_s / all_s * phases_s[_timed(phase)],
                "share": lasted_s / all_s,
                "samples": counts[phase, code, feeds],
                "feeds_model": feeds,
                "place_share": lines[most] / lasted_s if lasted_s else 0.0,
            }
        )
        if (looked_at := polled(most)) is not None:
            rows[-1]["polls"] = looked_at
        if (read := read_all(most, rows[-1]["time_s"] * rows[-1]["place_share"])) is not None:
            rows[-1] |= {"reads": read.name, "reads_more": read.per_step}
        if phase == OTHER and any(goes_into_loss(chains[line]) for line in lines):
            rows[-1]["feeds_loss"] = True
    rows += [
        {
            "phase": phase,
            "function": found.COLLECTOR,
            "place": "",
            "calls": None,
            "writes": False,
            "time_s": lasted_s / by_phase[_timed(phase)] * phases_s[_timed(phase)],
            "share": lasted_s / by_phase[_timed(phase)],
            "samples": len(samples),
            "feeds_model": False,
        }
        for phase, lasted_s in collected.items()
        if lasted_s and _timed(phase) in phases_s
    ]
    if around_s and OTHER in phases_s:
        share, steps = around_s / by_phase[OTHER], len({sample.step for sample in samples})
        time_s = min(share * phases_s[OTHER], LONGER * around_s / steps)
        rows.append({"phase": OTHER, "function": found.CALLS, "place": "", "calls": None, "writes": False,
                     "time_s": time_s, "share": share, "samples": len(samples), "feeds_model": False})  # fmt: skip
    return sorted(rows, key=lambda row: -row["time_s"])[:MOST_ROWS]


def inner_lines(
    samples: Sequence[Sample], phases_s: dict[str, float], *, is_cpu: bool = True
) -> list[found.InnerLineRow]:
    """Return a row per own line inside the model's phases, with its time by samples, in seconds of a timed step."""
    by_phase: Counter[str] = Counter()
    times: Counter[tuple[str, Line, bool]] = Counter()
    counts: Counter[tuple[str, Line, bool]] = Counter()
    late_s: dict[CodeType, list[float]] = {}
    for sample in samples:
        phase = sample.phase.phase() if sample.phase is not None else None
        if phase is None or _timed(phase) not in INNER:
            continue
        by_phase[_timed(phase)] += sample.time_s + sample.lost_s  # type: ignore[assignment]
        if sample.leaf is not None and phase in INNER:
            late_s.setdefault(sample.leaf[0], []).append(sample.late_s)
            times[phase, sample.leaf, sample.is_plain] += sample.time_s  # type: ignore[assignment]
            counts[phase, sample.leaf, sample.is_plain] += 1
    rows: dict[tuple[str, str, str | None, bool], found.InnerLineRow] = {}
    for (phase, line, is_plain), lasted_s in times.items():
        if phase not in phases_s or not by_phase[phase]:
            continue
        key = phase, place_of(line), method_of(line), is_plain
        row = rows.setdefault(
            key,
            {
                "phase": phase,
                "function": function_of(line),
                "place": place_of(line),
                "method": key[2],
                "source": source_of(line),
                "is_plain": is_plain,
                "time_s": 0.0,
                "samples": 0,
                "late_s": median(late_s[line[0]]) if is_cpu else None,
            },
        )
        row["time_s"] += lasted_s / by_phase[phase] * phases_s[phase]
        row["samples"] += counts[phase, line, is_plain]
    return sorted(rows.values(), key=lambda row: -row["time_s"])[:MOST_INNER]


PURE = 0.5  # least share of a line's time, in steps that were looked at, in which it computes totals


def lines_of_sums(
    samples: Sequence[Sample],
    usual: Sequence[Sample],
    phases_s: dict[str, float],
    sums: Mapping[int, Sequence[ElementSum]],
) -> found.ElementSumsRow | None:
    """Return the running totals of a step, and the time of the own function that computes most of them.

    A sample has the time since the one before it, and thus the operators since then: Python's sum() is one call.
    samples: those of all steps; which lines compute totals is seen in the few steps with `sums`, usual or not.
    usual: those of the usual steps, which tell the time. sums: the totals in some steps, by the number of the step.
    """
    inside: dict[_At, float] = {}
    all_s: dict[_At, float] = {}
    for before, sample in pairwise(samples):
        totals = sums.get(sample.step)
        if totals and before.step == sample.step and sample.leaf is not None and not _is_in(sample, BACKWARD):
            at, since = _at(sample.leaf), range(before.sequence, sample.sequence)
            summed = sum(max(0, min(one.last + 1, since.stop) - max(one.first, since.start)) for one in totals)
            all_s[at] = all_s.get(at, 0.0) + sample.time_s
            inside[at] = inside.get(at, 0.0) + (sample.time_s * summed / len(since) if since else 0.0)
    shares = {at: time_s / all_s[at] for at, time_s in inside.items() if time_s and time_s >= PURE * all_s[at]}
    functions: dict[CodeType, float] = {}
    for at in shares:
        functions[at[0]] = functions.get(at[0], 0.0) + inside[at]
    function = max(functions, key=functions.__getitem__, default=None)
    by_phase: dict[str, float] = {}
    of_lines: dict[str, float] = {}
    lines, count = Counter[Line](), 0
    for sample in usual:
        if function is None or sample.phase is None or _is_in(sample, BACKWARD):
            continue
        phase, leaf = _timed(sample.phase.phase()), sample.leaf
        by_phase[phase] = by_phase.get(phase, 0.0) + sample.time_s + sample.lost_s
        if leaf is not None and leaf[0] is function and _at(leaf) in shares:
            of_lines[phase] = of_lines.get(phase, 0.0) + sample.time_s * shares[_at(leaf)]
            lines[leaf] += sample.time_s  # type: ignore[assignment]
            count += 1
    if not count:
        return None
    most = most_of(lines)
    return {
        "operators": round(sum(each.operators for of_step in sums.values() for each in of_step) / len(sums)),
        "time_s": sum(phases_s.get(name, 0.0) * time_s / by_phase[name] for name, time_s in of_lines.items() if time_s),
        "samples": count,
        "function": function_of(most),
        "place": place_of(most),
        "calls": callee_of(most),
    }


def _is_in(sample: Sample, phase: str) -> bool:
    return sample.phase is not None and sample.phase.phase() == phase


def _at(line: Line) -> _At:
    return line[0], line_of(line)


def _timed(phase: str) -> str:
    """Return the phase under which the time of this phase was measured."""
    return FORWARD if phase == WITHOUT_GRADIENTS else phase


def most_of(lines: Counter[Line]) -> Line:
    """Return the most frequent instruction in the line with the most time."""
    of_line: Counter[str] = Counter()
    for line, time_s in lines.items():
        of_line[place_of(line)] += time_s
    place = max(of_line, key=of_line.__getitem__)
    return max((line for line in lines if place_of(line) == place), key=lines.__getitem__)


class Usual(NamedTuple):
    """Times of a usual step: of the whole step, of its phases, and of its own lines if its stack was sampled.

    lines_s: time in each line itself. places_s: time in each line with all that it calls.
    """

    median_s: float
    phases_s: Mapping[str, float]
    lines_s: Mapping[str, float]
    places_s: Mapping[str, float]


def _chain(sample: Sample) -> tuple[Line, ...]:
    return sample.chain or ((sample.leaf,) if sample.leaf else ())


def lines_of(samples: Sequence[Sample], steps: int) -> dict[str, float]:
    """Return the time of each own line per step."""
    return _times_of(samples, steps, lambda chain: chain[-1:])


def places_of(samples: Sequence[Sample], steps: int) -> dict[str, float]:
    """Return the time of each own line per step, with all that it calls."""
    return _times_of(samples, steps, lambda chain: chain)


def _times_of(
    samples: Sequence[Sample], steps: int, lines: Callable[[tuple[Line, ...]], tuple[Line, ...]]
) -> dict[str, float]:
    """Return the time per step of each place among the chosen lines of a sample."""
    found: Counter[str] = Counter()
    for sample in samples:
        for place in {place_of(line) for line in lines(_chain(sample))}:
            found[place] += sample.time_s / steps  # type: ignore[assignment]
    return {**found}


def without_usual(samples: Sequence[Sample], steps: int, usual: Usual) -> list[Sample]:
    """Return the samples with only the time beyond what `steps` usual steps spend in the same place."""
    by_line = bool(usual.lines_s)

    def place(sample: Sample) -> str | None:
        if by_line:
            return place_of(_chain(sample)[-1])
        return sample.phase.phase() if sample.phase is not None else None

    places = [place(sample) for sample in samples]
    total: Counter[str | None] = Counter()
    for name, sample in zip(places, samples, strict=True):
        total[name] += sample.time_s  # type: ignore[assignment]
    expected = usual.lines_s if by_line else usual.phases_s
    left = {
        name: max(0.0, 1 - steps * expected.get(name, 0.0) / time_s) if name is not None and time_s else 1.0
        for name, time_s in total.items()
    }
    return [s._replace(time_s=s.time_s * left[name]) for name, s in zip(places, samples, strict=True)]


AS_USUAL = 0.5  # share of a line's share in slow steps that it has in usual ones, if these do the same
COVERED = 0.6  # least share of a step that must have been sampled
MOSTLY = 0.3  # share of a slow step's samples in forward passes without gradients that makes it an evaluation


def slow_steps(
    kind: StepKind,
    usual: Usual,
    durations_s: Sequence[float],
    samples: Sequence[Sample],
    is_whole: Callable[[int], bool],
    worked_s: float | None = None,
) -> found.SlowStepsRow:
    """Return the row of a slow kind of steps, with the own function that takes most of the extra time.

    worked_s: CPU time of the process in these steps beyond as many usual ones'.
    Steps that were sampled from their start count; without any, steps that were sampled for most of their time.
    """
    mine = {*kind.positions}
    # samples taken while phases were observed
    in_phase = [s for s in samples if s.step in mine and s.phase is not None]
    known_s = sum(s.time_s for s in in_phase)
    forward_s = sum(s.time_s for s in in_phase if s.phase.phase() == WITHOUT_GRADIENTS)
    chosen = [s for s in samples if s.step in mine and _chain(s)]
    sampled_s: Counter[int] = Counter()
    for sample in chosen:
        sampled_s[sample.step] += sample.time_s  # type: ignore[assignment]
    whole = {n for n in sampled_s if is_whole(n)} or {n for n in sampled_s if sampled_s[n] > COVERED * durations_s[n]}
    chosen = [s for s in chosen if s.step in whole]
    places_s = places_of(chosen, max(1, len(whole)))
    chosen = without_usual(chosen, len(whole), usual)
    updating = [_chain(s) for s in samples if s.phase is not None and s.phase.phase() in UPDATING]
    line, share = common_line(chosen, updating)
    place = None if line is None else place_of(line)
    inside = [s for s in chosen if s.time_s and line is not None and any(each[0] is line[0] for each in _chain(s))]
    phased = [s for s in chosen if s.phase is not None]
    extra_s = kind.total_s - len(kind.positions) * usual.median_s
    times_s: Counter[str] = Counter()
    for sample in phased:
        times_s[sample.phase.phase()] += sample.time_s  # type: ignore[assignment]
    return {
        "every": kind.every,
        "steps": len(kind.positions),
        "median_s": kind.median_s,
        "usual_s": usual.median_s,
        "extra_s": extra_s,
        "total_s": sum(durations_s),
        "function": None if line is None else function_of(line),
        "place": place,
        "calls": None if line is None else callee_of(line),
        "place_share": share,
        "as_usual": place is not None
        and usual.places_s.get(place, 0.0) * kind.median_s >= AS_USUAL * places_s[place] * usual.median_s,
        "without_gradients": known_s > 0 and forward_s > MOSTLY * known_s,
        "waits_for_batch": 2 * times_s[INPUT] > times_s.total(),
        "phase": max(times_s, key=times_s.__getitem__, default=None),
        "sampled": len(whole),
        "looks": len(inside),
        "worked_share": None if worked_s is None or extra_s <= 0 else worked_s / extra_s,
        "makes_order": line is not None and makes_order(function_of(line), source_of(line)),
    }


def makes_order(function: str | None, source: str) -> bool:
    """Return whether a line of an iterator works itself, and does not wait for the batches of another one."""
    return (function or "").endswith("__iter__") and not _WAITS.search(source)


DEEPER = 0.5  # share of the samples in one function; above it, that function is named instead of its caller


def common_line(
    samples: Sequence[Sample], updating: Sequence[tuple[Line, ...]] = ()
) -> tuple[Line | None, float | None]:
    """Return the line with the most time in the deepest own function with most of the time, and its share.

    updating: the lines around backward passes and updates. A function around them is no answer, unless one of its
    lines has most of the time and does not call such a function.
    """
    loops = {line[0] for chain in updating for line in chain}
    callers = {place_of(line) for chain in updating for line in chain[:-1]}
    total_s = sum(s.time_s for s in samples)
    inside, depth = [(_chain(s), s.time_s) for s in samples], 0
    found: tuple[Line | None, float | None] = None, None
    while total_s:
        here = [(chain, time_s) for chain, time_s in inside if depth < len(chain)]
        functions: Counter[CodeType] = Counter()
        for chain, time_s in here:
            functions[chain[depth][0]] += time_s  # type: ignore[assignment]
        code = max(functions, key=functions.__getitem__, default=None)
        if code is None or functions[code] < DEEPER * total_s:
            break
        lines: Counter[Line] = Counter()
        for chain, time_s in here:
            if chain[depth][0] is code:
                lines[chain[depth]] += time_s  # type: ignore[assignment]
        most = most_of(lines)
        place = place_of(most)
        inside = [(chain, time_s) for chain, time_s in here if place_of(chain[depth]) == place]
        is_most = sum(time_s for _, time_s in inside) >= DEEPER * total_s
        is_clear = code not in loops or (is_most and place not in callers)
        found = (most, functions[code] / total_s) if is_clear else found
        depth += 1
    return found
