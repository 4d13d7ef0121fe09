"""Columns of a phase in the frame: its samples, the CPU's and the device's times, and the rates from its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import fsum, isfinite
from statistics import median

from cs_systems.config import Phase
from cs_systems.core.statistics import interval, quantile, quotient, summary
from cs_systems.core.tables import first_row
from cs_systems.formulas import energy
from cs_systems.formulas.cost import COST
from cs_systems.formulas.energy import ENERGY
from cs_systems.formulas.rank_layout import data_ranks
from cs_systems.record import Measurement, Row, RunRecord, measured_by
from cs_systems.report import collectives
from cs_systems.report.series import INTEGER, REAL, TEXT

STEP = "step"
# Columns of one phase of a record.
PHASE_COLUMNS: dict[str, str] = {
    "phase": TEXT,
    "n": INTEGER,
    "median_s": REAL,
    "mean_s": REAL,
    "total_s": REAL,
    "std_s": REAL,
    "p10_s": REAL,
    "p90_s": REAL,
    "p99_s": REAL,
    "spread": REAL,
    "ci_low_s": REAL,
    "ci_high_s": REAL,
    "submit_median_s": REAL,
    "lag_median_s": REAL,
    "wall_minus_phases_s": REAL,
    "tokens_per_s": REAL,
    "samples_per_s": REAL,
    "step_j": REAL,
    "above_idle_j": REAL,
    "tokens_per_j": REAL,
    "mean_w": REAL,
    "model_flops": REAL,
    "hardware_flops": REAL,
    "bytes": REAL,
    "model_flops_per_s": REAL,
    "hardware_flops_per_s": REAL,
    "bytes_per_s": REAL,
    "mfu": REAL,
    "hfu": REAL,
    **collectives.STEP_COLUMNS,
}


def known_phases(records: Iterable[RunRecord]) -> list[str]:
    """Return the phases of timed records, `step` first; without timed records, those that a step may have."""
    timed = {name: None for r in records if r.measurement for name in r.measurement.phase_names()}
    return [*dict.fromkeys((STEP, *(timed or Phase)))]


def phase_rows(record: RunRecord, peak: float | None) -> Iterator[Row]:
    measurement = record.measurement
    if measurement is None or not measurement.timed or not record.is_timing:
        yield {}
        return
    if measured_by(record.config.get("profiler", "none")) != "time":  # such a profiler changes what the step does
        yield {"phase": STEP}
        return
    costs = {row["phase"]: row for row in COST.of(record.results)}
    for phase in (*(p for p in measurement.phase_names() if p != STEP), STEP):
        rounds = _rounds(measurement, phase)
        if not rounds:
            yield {"phase": phase, "n": 0}
            continue
        known = [duration for one in rounds for duration in one]
        durations = summary(known)
        low, high, _ = interval(rounds) if min(known) > 0 else (None, None, None)
        row = {
            "phase": phase,
            "spread": quotient(durations.p90 - durations.p10, durations.median),
            "n": durations.n,
            "median_s": durations.median,
            "mean_s": durations.mean,
            "total_s": fsum(known),
            "std_s": durations.std,
            "p10_s": durations.p10,
            "p90_s": durations.p90,
            "p99_s": quantile(known, 0.99),
            "ci_low_s": low,
            "ci_high_s": high,
            **_host(measurement, phase),
            **_rates(costs.get(phase, {}), durations.median, peak),
        }
        if phase == STEP:
            row |= {
                "tokens_per_s": _counted_per_s(record, measurement, "tokens", durations.median),
                "samples_per_s": _counted_per_s(record, measurement, "samples", durations.median),
                **_energy(record),
                **collectives.step(record),
            }
        yield row


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


def _energy(record: RunRecord) -> Row:
    """Return a step's energy on all ranks, the part above idle, the tokens per joule and the mean power."""
    rows = ENERGY.of(record.results)
    if not rows:
        return {}
    joules, idle = energy.step_j(rows[0]), energy.idle_step_j(rows[0])
    ran = first_row(record.results, "ran")
    tokens, together = ran.get("tokens"), ran.get("timed_tokens")
    all_tokens = tokens * data_ranks(record.config) if tokens is not None else None
    if together is not None:
        all_tokens = together / rows[0]["steps"]
    return {
        "step_j": joules,
        "above_idle_j": None if joules is None or idle is None else joules - idle,
        "tokens_per_j": quotient(all_tokens, joules),
        "mean_w": energy.mean_w(rows[0]),
    }


def _rounds(measurement: Measurement, phase: str) -> list[list[float]]:
    """Return the durations of a phase by round, without NaN and infinite ones."""
    rounds: dict[int, list[float]] = {}
    for sample, duration in zip(measurement.timed, measurement.durations_s(phase), strict=True):
        if isfinite(duration):
            rounds.setdefault(sample.round, []).append(duration)
    return list(rounds.values())


def _host(measurement: Measurement, phase: str) -> Row:
    """Return medians of a phase's submission time and of the device's lag at its end.

    For a step, also return the median of its wall time minus its phases.
    """
    timed = measurement.timed
    if phase != STEP:
        lags = [s.lag_s[phase] for s in timed if s.lag_s and phase in s.lag_s]
        return {
            "submit_median_s": _median([s.submit_s[phase] for s in timed if phase in s.submit_s]),
            "lag_median_s": _median(lags),
        }
    return {
        "submit_median_s": _median([sum(s.submit_s.values()) for s in timed if s.submit_s]),
        "lag_median_s": _median([list(s.lag_s.values())[-1] for s in timed if s.lag_s]),
        "wall_minus_phases_s": _median([s.wall_s - sum(s.phases_s.values()) for s in timed]),
    }


def _rates(cost: Row, seconds: float | None, peak: float | None) -> Row:
    """Return the rates from the formula's cost per second, and their shares of the device's peak."""
    model, hardware, moved = (cost.get(name) for name in ("model_flops", "hardware_flops", "bytes"))
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
