"""Columns of a phase in the frame: its samples, the CPU's and the device's times, and the rates from its cost."""

from collections.abc import Iterable, Iterator
from math import fsum, isfinite
from statistics import median
from typing import Annotated, TypedDict

from cs_systems.config import Phase
from cs_systems.core.statistics import interval, quantile, quotient, summary
from cs_systems.core.tables import Column, first_row
from cs_systems.formulas import energy
from cs_systems.formulas.cost import COST, CostRow
from cs_systems.formulas.energy import ENERGY
from cs_systems.formulas.rank_layout import data_ranks
from cs_systems.record import RAN, Measurement, Row, RunRecord, measured_by
from cs_systems.report import collectives
from cs_systems.report.series import CellColumn, cell_columns

STEP = "step"
PEAK = ("ceiling_flops_per_s", "ceiling_source")  # columns of the device's peak


class Key(TypedDict):
    """Phase of a row; a record without times has a row without a phase."""

    phase: Annotated[str | None, Column(meaning="phase of the step that the row is about")]
    n: Annotated[int | None, Column(meaning="number of timed steps")]


class Times(TypedDict):
    """Columns of a phase's timed samples."""

    median_s: Annotated[float, Column("median", meaning="median time of a step")]
    mean_s: Annotated[float, Column(meaning="mean time of a step")]
    total_s: float
    std_s: float | None
    p10_s: float
    p90_s: float
    p99_s: float
    spread: Annotated[float | None, Column(note="spread: (p90 − p10) / median")]
    ci_low_s: Annotated[
        float | None,
        Column(
            "CI low",
            "CI: 95% confidence interval of the median; it is computed from the medians of the rounds, or from the "
            "samples, assumed independent, if there are fewer than 3 rounds",
        ),
    ]
    ci_high_s: Annotated[float | None, Column("CI high")]


class Host(TypedDict):
    """Columns of the CPU, which submits the work of a phase."""

    submit_median_s: Annotated[float | None, Column("submit", "submit: time the CPU took to submit the work")]
    lag_median_s: Annotated[
        float | None,
        Column("lag", "lag: delay of the device behind the CPU at the end of the phase; near 0, the device waited"),
    ]
    wall_minus_phases_s: Annotated[
        float | None, Column("outside phases", "outside phases: time of the step minus the time of its phases")
    ]


class Throughput(TypedDict):
    """Columns of a step: what it processes."""

    tokens_per_s: Annotated[
        float | None, CellColumn(meaning="tokens per second", of_ranks="tokens/s: sum over all ranks")
    ]
    samples_per_s: Annotated[
        float | None, CellColumn(meaning="samples per second", of_ranks="samples/s: sum over all ranks")
    ]


class StepEnergy(TypedDict):
    """Columns of a step: its energy on all ranks."""

    step_j: Annotated[
        float | None,
        Column(
            "energy",
            "energy: of a step, from the counter of the whole board (CPU: its packages) over all timed steps",
        ),
    ]
    above_idle_j: Annotated[
        float | None,
        Column("above idle", "above idle: energy of a step minus the energy of an idle device in the same time"),
    ]
    tokens_per_j: float | None
    mean_w: Annotated[float | None, Column("power", "power: mean over all timed steps")]


class Rates(TypedDict):
    """Columns of a phase's cost by formula."""

    model_flops: Annotated[float | None, Column(meaning="FLOPs of the model in a step by formula")]
    hardware_flops: Annotated[float | None, Column(meaning="FLOPs in a step as executed, by formula")]
    bytes: float | None
    model_flops_per_s: Annotated[
        float | None,
        CellColumn(
            "model",
            "model FLOP/s: FLOPs by formula / time; causal attention counts half",
            counted="model FLOP/s: FLOPs as counted or declared / time; causal attention counts half",
            of_ranks="; for one rank",
        ),
    ]
    hardware_flops_per_s: Annotated[
        float | None,
        CellColumn(
            "executed",
            "executed FLOP/s: computed FLOPs / time, with padding, masked tiles and recomputation",
            counted="executed FLOP/s: all FLOPs, with recomputation, / time",
            of_ranks="; for one rank",
        ),
    ]
    bytes_per_s: float | None
    mfu: Annotated[
        float | None,
        CellColumn("MFU", "MFU: model FLOP/s as a share of the device's peak at that precision", peak=PEAK),
    ]
    hfu: Annotated[
        float | None,
        CellColumn("HFU", "HFU: executed FLOP/s as a share of the device's peak at that precision", peak=PEAK),
    ]


# Columns of one phase of a record.
PHASE_COLUMNS = cell_columns(Key, Times, Host, Throughput, StepEnergy, Rates, collectives.StepColumns)


def known_phases(records: Iterable[RunRecord]) -> list[str]:
    """Return the phases of timed records, `step` first; without timed records, those that a step may have."""
    timed = {name: None for r in records if r.measurement for name in r.measurement.phase_names()}
    return [*dict.fromkeys((STEP, *(timed or Phase)))]


def phase_rows(record: RunRecord, peak: float | None) -> Iterator[Row]:
    """Yield the PHASE_COLUMNS of each phase of a record; what is unknown may be absent."""
    measurement = record.measurement
    if measurement is None or not measurement.timed or not record.is_timing:
        yield Key(phase=None, n=None)
        return
    if measured_by(record.config.get("profiler", "none")) != "time":  # such a profiler changes what the step does
        yield Key(phase=STEP, n=None)
        return
    costs = {row["phase"]: row for row in COST.of(record.results)}
    for phase in (*(p for p in measurement.phase_names() if p != STEP), STEP):
        rounds = _rounds(measurement, phase)
        if not rounds:
            yield Key(phase=phase, n=0)
            continue
        times = _times(rounds)
        row: dict[str, object] = {
            **Key(phase=phase, n=sum(map(len, rounds))),
            **times,
            **_host(measurement, phase),
            **_rates(costs.get(phase), times["median_s"], peak),
        }
        if phase == STEP:
            row |= _throughput(record, measurement, times["median_s"])
            row |= _energy(record) or {}
            row |= collectives.step(record) or {}
        yield row


def _times(rounds: list[list[float]]) -> Times:
    known = [duration for one in rounds for duration in one]
    durations = summary(known)
    low, high, _ = interval(rounds) if min(known) > 0 else (None, None, None)
    return {
        "median_s": durations.median,
        "mean_s": durations.mean,
        "total_s": fsum(known),
        "std_s": durations.std,
        "p10_s": durations.p10,
        "p90_s": durations.p90,
        "p99_s": quantile(known, 0.99),
        "spread": quotient(durations.p90 - durations.p10, durations.median),
        "ci_low_s": low,
        "ci_high_s": high,
    }


def _throughput(record: RunRecord, measurement: Measurement, median_s: float) -> Throughput:
    return {
        "tokens_per_s": _counted_per_s(record, measurement, "tokens", median_s),
        "samples_per_s": _counted_per_s(record, measurement, "samples", median_s),
    }


def _counted_per_s(record: RunRecord, measurement: Measurement, what: str, median_s: float) -> float | None:
    """Return the tokens or samples of all ranks per second, of the median step.

    If the batches differ in size, it is the rate of all timed steps together, because no step represents the others.
    """
    ran = first_row(record.results, "ran")
    if (together := ran.get(f"timed_{what}")) is not None:
        seconds = sum(measurement.durations_s(STEP))
        return quotient(together, seconds) if isfinite(seconds) else None
    of_a_rank = ran.get(what)
    return quotient(of_a_rank and of_a_rank * data_ranks(record.config), median_s)


def _energy(record: RunRecord) -> StepEnergy | None:
    """Return a step's energy on all ranks, the part above idle, the tokens per joule and the mean power."""
    measured = ENERGY.first(record.results)
    if not measured:
        return None
    joules, idle = energy.step_j(measured), energy.idle_step_j(measured)
    ran = RAN.first_or_empty(record.results)
    tokens, together = ran.get("tokens"), ran.get("timed_tokens")
    all_tokens: float | None = tokens * data_ranks(record.config) if tokens is not None else None
    if together is not None:
        all_tokens = together / measured["steps"]
    return {
        "step_j": joules,
        "above_idle_j": None if joules is None or idle is None else joules - idle,
        "tokens_per_j": quotient(all_tokens, joules),
        "mean_w": energy.mean_w(measured),
    }


def _rounds(measurement: Measurement, phase: str) -> list[list[float]]:
    """Return the durations of a phase by round, without NaN and infinite ones."""
    rounds: dict[int, list[float]] = {}
    for sample, duration in zip(measurement.timed, measurement.durations_s(phase), strict=True):
        if isfinite(duration):
            rounds.setdefault(sample.round, []).append(duration)
    return list(rounds.values())


def _host(measurement: Measurement, phase: str) -> Host:
    """Return medians of a phase's submission time and of the device's lag at its end.

    For a step, also return the median of its wall time minus its phases.
    """
    timed = measurement.timed
    if phase != STEP:
        lags = [s.lag_s[phase] for s in timed if s.lag_s and phase in s.lag_s]
        return {
            "submit_median_s": _median([s.submit_s[phase] for s in timed if phase in s.submit_s]),
            "lag_median_s": _median(lags),
            "wall_minus_phases_s": None,
        }
    return {
        "submit_median_s": _median([sum(s.submit_s.values()) for s in timed if s.submit_s]),
        "lag_median_s": _median([list(s.lag_s.values())[-1] for s in timed if s.lag_s]),
        "wall_minus_phases_s": _median([s.wall_s - sum(s.phases_s.values()) for s in timed]),
    }


def _rates(cost: CostRow | None, seconds: float | None, peak: float | None) -> Rates:
    """Return the rates from the formula's cost per second, and their shares of the device's peak."""
    model = cost.get("model_flops") if cost else None
    hardware = cost.get("hardware_flops") if cost else None
    moved = cost.get("bytes") if cost else None
    model_rate, hardware_rate = quotient(model, seconds), quotient(hardware, seconds)
    return {
        "model_flops": model,
        "hardware_flops": hardware,
        "bytes": moved,
        "model_flops_per_s": model_rate,
        "hardware_flops_per_s": hardware_rate,
        "bytes_per_s": quotient(moved, seconds),
        "mfu": quotient(model_rate, peak),
        "hfu": quotient(hardware_rate, peak),
    }


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
