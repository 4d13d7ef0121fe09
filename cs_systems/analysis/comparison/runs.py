"""Comparison of two runs, cell by cell.

The compared fields are detected: those config fields that have one value on each side, and not the same one (naive
against flash, fp32 against bf16). Cells are matched on all other fields.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from statistics import median
from typing import Annotated, Any, TypedDict

from cs_systems.analysis.comparison import SIDES
from cs_systems.config import FIELDS, ConfigError, describe
from cs_systems.core import statistics
from cs_systems.core.caveats import REMEDIES
from cs_systems.core.fields import Subject
from cs_systems.core.plugins import is_foreign
from cs_systems.core.printable import command_line
from cs_systems.core.tables import Column, Table, first_row
from cs_systems.core.units import counted
from cs_systems.formulas.energy import ENERGY, step_j
from cs_systems.record import Environment, RunRecord, are_of_one_version

_SOURCES = tuple(
    name for name, each in FIELDS.items() if each.kind is str and each.field.plugin and each.field.identity
)
_MACHINE = (
    *("device_name", "torch", "triton", "cuda", "driver", "python"),
    *("code_version", "git_commit", "float32_matmul"),
)


class ComparisonRow(TypedDict):
    """Phase of a cell in both runs: `a` is the baseline, `b` the candidate.

    The interval and the verdict come from `statistics.Comparison`; `ratio` is the ratio of the two medians.
    """

    cell: str
    phase: str
    a_median_s: Annotated[float, Column("baseline", "median time of the baseline over all rounds")]
    b_median_s: Annotated[float, Column("candidate", "median time of the candidate over all rounds")]
    ratio: Annotated[float, Column(note="the candidate's time over the baseline's")]
    ratio_low: Annotated[float | None, Column("ratio, low end", "low end of the 95% confidence interval")]
    ratio_high: Annotated[float | None, Column("ratio, high end", "high end of the 95% confidence interval")]
    verdict: Annotated[str, Column(note="slower, faster, no difference or unknown")]
    resolution: Annotated[float | None, Column("finds", "smallest slowdown that this comparison can detect")]
    unseen: Annotated[str | None, Column("not measured", "what the interval leaves out")]
    noise: Annotated[str, Column(note="what the interval is computed from")]
    apart: Annotated[bool, Column(note="whether nine in ten samples of both sides are over a factor of 2 apart")]
    a_peak_bytes: Annotated[int | None, Column("baseline peak")]
    b_peak_bytes: Annotated[int | None, Column("candidate peak")]
    a_step_j: Annotated[float | None, Column("baseline energy")]
    b_step_j: Annotated[float | None, Column("candidate energy")]


TOO_NOISY = "too noisy"
LIKELY = ("likely slower", "likely faster")  # far apart in one process a side, which proves nothing about others
VERDICTS = ("slower", "faster", *LIKELY, "no difference", TOO_NOISY, "unknown")
WITHOUT_INTERVAL = (*LIKELY, TOO_NOISY)
HOPELESS = 1.0  # above this, a comparison could not even detect a doubling, so "no difference" would mislead
APART = 2.0  # least ratio of the slower side's quickest tenth to the quicker side's slowest

COMPARED = Table("compared", ComparisonRow, "times, candidate compared with baseline")


@dataclass(frozen=True)
class Comparison:
    """Comparison of a candidate with a baseline.

    `compared` maps a field to (value in the baseline, value in the candidate). `rows` has one row per matched cell and
    phase. `doubts` are the reasons to be careful with the rows.
    """

    compared: dict[str, tuple[Any, Any]]
    rows: list[ComparisonRow]
    doubts: list[str]


def compare(
    a: Sequence[RunRecord],
    b: Sequence[RunRecord],
    phases: Sequence[str] = ("step",),
    paths: Sequence[Path | None] = (None, None),
) -> Comparison:
    """Compare the candidate `b` with the baseline `a`, with one row per matched cell and phase.

    Cells timed under a profiler, or with a loss that is NaN or infinite, are left out.

    paths: where the records of both sides come from, for the messages.

    Raises:
        ConfigError: no cell of the baseline matches one of the candidate, or a side has no valid timing.
    """
    if isinstance(phases, str) or not phases:
        raise ConfigError(f"phases is {phases!r}; give a list of at least one phase, such as ['step', 'forward']")
    for side, records, path in zip(SIDES, (a, b), paths, strict=True):
        _refuse_untimed(side, records, path)
    left_out = list(_left_out(a, b))
    a, b = (_of_latest_version(_clean(side)) for side in (a, b))
    compared = _compared(a, b)
    left_out += _of_two_workloads(compared)
    cells_a, cells_b = _cells(a, compared), _cells(b, compared)
    both = [identity for identity in cells_a if identity in cells_b]
    found = [
        (identity, row)
        for identity in both
        for phase in phases
        if (row := _row(cells_a[identity], cells_b[identity], phase, compared))
    ]
    rows = [row for _, row in found]
    for phase in phases:
        if count := len(both) - sum(row["phase"] == phase for row in rows):
            left_out.append(f"left out: phase {phase} of {counted(count, 'cell')}, absent or 0 s in one of the runs")
    if not rows:
        if both:
            raise ConfigError(
                f"no cell of both runs has the phase {' or '.join(phases)} with times above 0; choose a phase of both, "
                "such as step"
            )
        first_a, first_b = (describe(next(iter(cells.values()))[0].run_config) for cells in (cells_a, cells_b))
        raise ConfigError(
            f"no cell of the baseline, such as {first_a!r}, matches a cell of the candidate, such as {first_b!r}; "
            "compare runs of the same cells"
        )
    undecided = [pair for pair in found if said(pair[1]) in WITHOUT_INTERVAL]
    largest = sorted(undecided, key=lambda pair: -abs(math.log(pair[1]["ratio"])))[:1]
    proof = [text for identity, _ in largest for cells in (cells_a, cells_b) if (text := _proof(cells[identity]))]
    return Comparison(compared, rows, [*proof, *left_out, *_unmatched(cells_a, cells_b), *_differences(a, b)])


def _refuse_untimed(side: str, records: Sequence[RunRecord], path: Path | None) -> None:
    """Raise ConfigError if no record of this side has a valid timing."""
    where = f"the {side} {path}" if path else f"the {side}"
    if not records:
        raise ConfigError(f"{where} has no records; give those of a run, such as read_records('runs/x')[0]")
    if not any(record.measurement for record in records):
        see = command_line("cs-systems", "report", path) if path else "the reasons in its records"
        raise ConfigError(f"{where} has no measured cell; see {see}")
    if not any(record.measurement for record in undisturbed(records)):
        raise ConfigError(f"{where} has no cell timed without a profiler; measure it with cs-systems time")
    if not any(record.measurement for record in _clean(records)):
        raise ConfigError(f"{where} has no valid timing, because its loss is NaN or infinite; {REMEDIES['nan-loss']}")


def different(name: str, baseline: str, candidate: str) -> str:
    """Return a sentence that a property differs between the two sides."""
    return f"{name} differs: {baseline or 'unknown'} in the baseline, {candidate or 'unknown'} in the candidate"


def speedups(records: Sequence[RunRecord], field: str, baselines: Sequence[bool]) -> list[statistics.Comparison | None]:
    """Compare the step of each record with its baseline: the record that differs only in `field`.

    Args:
        records: records of one workload.
        field: the field of a configuration in which a cell and its baseline differ; `size` stands for all fields of the
            model.
        baselines: which of the records are baselines.

    Returns:
        For each record the comparison, with the ratio of its time over its baseline's; None without a timing or a
        baseline.
    """
    keys = [_without(identity, field) for identity in _identities(records)]
    timed = [record.is_timing and bool(record.measurement and record.measurement.timed) for record in records]
    of_key: dict[str, list[RunRecord]] = defaultdict(list)
    for record, key, is_baseline, is_timed in zip(records, keys, baselines, timed, strict=True):
        if is_baseline and is_timed:
            of_key[key].append(record)
    return [
        statistics.ratio_interval(processes(of_key[key], "step"), processes([record], "step"))
        if is_timed and of_key[key]
        else None
        for record, key, is_timed in zip(records, keys, timed, strict=True)
    ]


def _without(identity: Mapping[str, Any], field: str) -> str:
    """Return the identity without the field, as a key."""
    model = {name for name in identity if name.startswith("model.") and name != "model.context_length"}
    dropped = model if field == "size" else {name for name in identity if name.rpartition(".")[2] == field}
    if not dropped:
        raise ConfigError(
            f"{field!r} is not a setting by which cells are compared; use a setting such as attention, precision, size "
            "or compile"
        )
    return json.dumps({name: value for name, value in identity.items() if name not in dropped}, sort_keys=True)


def profiled_pairs(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> list[tuple[str, RunRecord, RunRecord]]:
    """Return the cells that both runs hold with tables of a trace: (description, baseline's record, candidate's)."""
    a, b = ([r for r in side if "families" in r.results] for side in (a, b))
    compared = _compared(a, b)
    _of_two_workloads(compared)
    cells_a, cells_b = _cells(a, compared), _cells(b, compared)
    return [
        (describe(replace(records[0].run_config, profiler="none"), compared), records[-1], cells_b[identity][-1])
        for identity, records in cells_a.items()
        if identity in cells_b
    ]


def _clean(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records without a profiler and, of those with times, only those with a finite loss."""
    return [record for record in undisturbed(records) if record.is_timing or record.measurement is None]


def undisturbed(records: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in records if not record.is_profiled]


def _left_out(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> Iterable[str]:
    for side, records in zip(SIDES, (a, b), strict=True):
        if count := len(records) - len(undisturbed(records)):
            yield f"left out: {counted(count, 'record')} of the {side} timed under a profiler"
        if count := len(undisturbed(records)) - len(_clean(records)):
            yield f"left out: {counted(count, 'record')} of the {side} with a loss that is NaN or infinite"
        if count := len(_clean(records)) - len(_of_latest_version(_clean(records))):
            yield f"left out: {counted(count, 'record')} of the {side} of earlier versions of its code"


def _of_latest_version(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records without those of a cell whose code differs from the code of its latest record."""
    cells = [record.run_config.key() for record in records]  # a record's own key holds the number of its repetition
    latest = dict(zip(cells, records, strict=True))
    return [record for cell, record in zip(cells, records, strict=True) if are_of_one_version(record, latest[cell])]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return {name: value for name, value in flat.items() if name not in FIELDS or FIELDS[name].field.identity}


def _identities(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the fields that identify each record; code in a file is named by the file, without its folder.

    If two files of the records have the same name, the folders are kept.
    """
    flat = [_flat(record.run_config.to_dict()) for record in records]
    paths: dict[str, set[str]] = defaultdict(set)
    for values in flat:
        for name in _SOURCES:
            paths[_in_any_folder(values[name])].add(values[name])
    return [
        values | {name: short for name in _SOURCES if len(paths[short := _in_any_folder(values[name])]) == 1}
        for values in flat
    ]


def _in_any_folder(source: str | None) -> str:
    """Return `mine.py:factory` for `folder/mine.py:factory`, and any other name as it is."""
    return PurePath(source).name if source and ".py:" in source else source or ""


def _compared(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> dict[str, tuple[Any, Any]]:
    values_a, values_b = _values(a), _values(b)
    return {
        name: (json.loads(*values_a[name]), json.loads(*values_b[name]))
        for name in values_a.keys() & values_b.keys()
        if len(values_a[name]) == len(values_b[name]) == 1 and values_a[name] != values_b[name]
    }


def _of_two_workloads(compared: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a doubt if two different workloads of one kind are compared: two of the user's own, or two loops.

    Raises:
        ConfigError: the workloads are of two kinds, so their configurations describe different steps.
    """
    if "workload" not in compared:
        return []
    a, b = compared["workload"]
    if Subject.of(a) is not Subject.of(b) or not (is_foreign(a) or Subject.of(a) is Subject.LOOP):
        raise ConfigError(
            f"the baseline measures {a} and the candidate {b}, which are different steps; compare runs of one workload"
        )
    return [
        f"the workload differs: {a} in the baseline, {b} in the candidate; times compare only if both do the same work"
    ]


def _values(records: Iterable[RunRecord]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for identity in _identities([*records]):
        for name, value in identity.items():
            found[name].add(json.dumps(value))
    return found


def _cells(records: Iterable[RunRecord], compared: Mapping[str, Any]) -> dict[str, list[RunRecord]]:
    """Return the measured records by cell; a cell's records are its repeats."""
    cells: dict[str, list[RunRecord]] = defaultdict(list)
    records = [record for record in records if record.measurement is not None]
    for record, values in zip(records, _identities(records), strict=True):
        identity = {name: value for name, value in values.items() if name not in compared}
        cells[json.dumps(identity, sort_keys=True)].append(record)
    return cells


def processes(records: Iterable[RunRecord], phase: str) -> list[list[list[float]]]:
    """Return the timed samples by process and round."""
    found = []
    for record in records:
        measurement = record.measurement
        assert measurement is not None
        rounds: dict[int, list[float]] = defaultdict(list)
        for sample, duration in zip(measurement.timed, measurement.durations_s(phase), strict=True):
            rounds[sample.round].append(duration)
        found.append(list(rounds.values()))
    return found


def _row(a: Sequence[RunRecord], b: Sequence[RunRecord], phase: str, without: Collection[str]) -> ComparisonRow | None:
    if any(phase != "step" and phase not in (r.measurement.phase_names() if r.measurement else ()) for r in (*a, *b)):
        return None
    processes_a, processes_b = processes(a, phase), processes(b, phase)
    try:
        found = statistics.ratio_interval(processes_a, processes_b)
    except ConfigError:  # most steps of a process lack the phase, so its median is 0 s
        return None
    return {
        "cell": describe(a[0].run_config, without) or _plainly(a[0], without) or "all of it",
        "phase": phase,
        "a_median_s": found.a,
        "b_median_s": found.b,
        "ratio": found.ratio,
        "ratio_low": found.low,
        "ratio_high": found.high,
        "verdict": found.verdict,
        "resolution": found.resolution,
        "unseen": found.unseen,
        "noise": found.noise,
        "apart": _apart(processes_a, processes_b),
        "a_peak_bytes": _peak(a),
        "b_peak_bytes": _peak(b),
        "a_step_j": _energy(a),
        "b_step_j": _energy(b),
    }


def _apart(a: Sequence[statistics.Rounds], b: Sequence[statistics.Rounds]) -> bool:
    """Return whether nine in ten samples of a side are over `APART` times as long as nine in ten of the other."""
    quick, slow = sorted(
        ([sample for rounds in side for samples in rounds for sample in samples] for side in (a, b)), key=median
    )
    return statistics.quantile(slow, 0.1) > APART * statistics.quantile(quick, 0.9)


def said(row: ComparisonRow) -> str:
    """Return the verdict of a row, or that its noise could hide even a doubling.

    A change that several processes prove stays proved, and steps far apart in one process a side are likely a change.
    """
    if row["resolution"] is None or row["resolution"] <= HOPELESS:
        return row["verdict"]
    if row["unseen"] is None:
        return TOO_NOISY if row["verdict"] == "no difference" else row["verdict"]
    return LIKELY[row["ratio"] < 1] if row["apart"] else TOO_NOISY


def _proof(side: Sequence[RunRecord]) -> str | None:
    """Return the command that measures a cell of one process in two more; None if its command is not known."""
    record, *others = side
    if others or record.origin is None or record.origin.command is None:
        return None
    command = record.origin.command
    if record.subject is Subject.LOOP:
        return f"to decide, run this twice more into the same folder: {command}"
    return f"to decide: {command} --repeats 3"


def verdict_counts(rows: Sequence[ComparisonRow], *, with_peaks: bool = False) -> str:
    """Return the number of rows with each verdict as text, on request also of rows with a larger peak memory."""
    verdicts = Counter(map(said, rows))
    larger = {"larger": sum(map(is_larger, rows))} if with_peaks else {}
    counts = {VERDICTS[0]: verdicts[VERDICTS[0]], **larger, **{name: verdicts[name] for name in VERDICTS[1:]}}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def opening(rows: Sequence[ComparisonRow]) -> str:
    """Return the comparison in a sentence: how many times changed, and the largest sure change; "" without rows."""
    counts = verdict_counts(rows)
    sure = [row for row in rows if said(row) in ("slower", "faster")]
    count = sum(map(is_larger, rows))
    larger = f"; the peak memory is larger in {count} of {len(rows)}" if count else ""
    if not sure:
        return f"no change of a time is sure: {counts}{larger}{_likely(rows)}" if rows else ""
    most = max(sure, key=lambda row: abs(math.log(row["ratio"])))
    place = f"{most['cell']}, {most['phase']}"
    low, high = most["ratio_low"], most["ratio_high"]
    spread = "" if low is None or high is None else f" ({low:.3f} … {high:.3f})"
    ratio = f"{most['ratio']:.3f}{spread} times the baseline's time"
    if len(rows) == 1:
        return f"the candidate is {said(most)}: {ratio} ({place}){larger}"
    return f"of {len(rows)} times of the candidate: {counts}; most changed: {place}: {ratio}{larger}"


def _likely(rows: Sequence[ComparisonRow]) -> str:
    """Return what is known of the largest likely change, which one process a side cannot prove; "" without one."""
    likely = [row for row in rows if said(row) in LIKELY]
    if not likely:
        return ""
    most = max(likely, key=lambda row: abs(math.log(row["ratio"])))
    less, more = ("baseline", "candidate") if most["ratio"] > 1 else ("candidate", "baseline")
    place = "" if len(rows) == 1 else f" ({most['cell']}, {most['phase']})"
    return (
        f". The candidate took {most['ratio']:.3g} times the baseline's time{place}, and nine in ten samples of the "
        f"{more} are over twice as long as nine in ten of the {less}; but one process a side cannot show how much "
        "processes vary"
    )


def is_larger(row: ComparisonRow) -> bool:
    """Return whether the candidate's peak exceeds the baseline's by more than the variation of equal runs."""
    a, b = row["a_peak_bytes"], row["b_peak_bytes"]
    return a is not None and b is not None and b > a * (1 + statistics.MINIMUM_EFFECT)


def _peak(records: Iterable[RunRecord]) -> int | None:
    """Return the median peak memory over the repeats of a cell; None if a device does not report it."""
    peaks = [r.measurement.peak_allocated_bytes for r in records if r.measurement]
    known = [peak for peak in peaks if peak is not None]
    return round(median(known)) if known else None


def _energy(records: Iterable[RunRecord]) -> float | None:
    """Return the median energy of a step over the repeats of a cell, None where it is unknown."""
    known = [joules for r in records for row in ENERGY.of(r.results) if (joules := step_j(row)) is not None]
    return median(known) if known else None


def _plainly(record: RunRecord, without: Collection[str]) -> str:
    """Return precision and mode, to describe a cell of the user's own workload that has only default values."""
    names = [name for name in ("precision", "mode") if record.subject is Subject.OWN and name not in without]
    return " · ".join(str(record.config[name]) for name in names)


def _unmatched(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[str]:
    for side, here, there in zip(SIDES, (a, b), (b, a), strict=True):
        if alone := len(here.keys() - there.keys()):
            yield f"{counted(alone, 'cell')} only in the {side}"


def _differences(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> Iterable[str]:
    for name in _MACHINE:
        left, right = _machine(a, name), _machine(b, name)
        if left != right:
            yield different(name, ", ".join(left), ", ".join(right))
    code_a, code_b = _code(a), _code(b)
    for name in code_a.keys() & code_b.keys():
        if code_a[name] != code_b[name]:
            yield f"the code of {name} differs between baseline and candidate"
    for side, records in zip(SIDES, (a, b), strict=True):
        codes = sorted({w.code for r in records for w in r.warnings})
        if codes:
            yield f"caveats of the {side}: {', '.join(codes)}"


def _code(records: Iterable[RunRecord]) -> dict[str, set[str]]:
    """Return the hashes of each source file of a user's own code, by its name without the folder."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        ran = first_row(record.results, "ran")
        if record.subject is Subject.LOOP and (digest := ran.get("workload_sha256")):
            found[str(record.config["workload"])].add(str(digest))
        for role, names in record.run_config.own_code.items():
            for name, digest in zip(names, str(ran.get(f"{role}_sha256", "")).split(" "), strict=False):
                if digest:
                    found[_in_any_folder(name)].add(digest)
    return found


def _machine(records: Iterable[RunRecord], name: str) -> list[str]:
    assert name in {f.name for f in fields(Environment)}
    return sorted({str(getattr(r.environment, name)) for r in records if r.environment is not None})
