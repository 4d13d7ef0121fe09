"""Sentences of every committed run, held against its own rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.comparison.precision_causes import computation
from cs_systems.analysis.diagnosis import Diagnosis, apply_rules, diagnose
from cs_systems.analysis.diagnosis._evidence import of_records
from cs_systems.config import FIELDS, RunConfig
from cs_systems.record import RunRecord, median_s, read_records

PROFILES = Path(__file__).parents[3] / "profiles"
RUNS = sorted(file.parent for file in PROFILES.rglob("records.jsonl"))
BROKEN = 0.97  # of a bound: a measured time below it breaks the bound


@functools.cache
def records_of(run: Path) -> list[RunRecord]:
    return read_records(run)[0]


@functools.cache
def followed(run: Path) -> list[tuple[RunConfig, Diagnosis, float, float]]:
    """Return (cell, its diagnosis, its time, time of a cell that follows the remedy and differs in nothing else)."""
    return [*_followed(records_of(run))]


def _followed(records: list[RunRecord]) -> Iterator[tuple[RunConfig, Diagnosis, float, float]]:
    cells: dict[object, list[RunRecord]] = {}
    timed: dict[RunConfig, list[RunRecord]] = {}
    for record in records:
        if record.status == "ok":
            cells.setdefault(computation(record), []).append(record)
            if record.is_timing and record.config.get("profiler", "none") == "none":
                timed.setdefault(record.run_config.of_any_measurement, []).append(record)
    for of_cell in cells.values():
        config = of_cell[-1].run_config.of_any_measurement
        if config not in timed:
            continue
        near = [(other, found) for other in timed if (found := _only_change(config, other))]
        for diagnosis in apply_rules(of_records(of_cell)).diagnoses:
            for other, (name, value) in near:
                if value in diagnosis.options.get(name, ()):
                    now, then = median_s(timed[config]), median_s(timed[other])
                    assert now is not None
                    assert then is not None
                    yield config, diagnosis, now, then


def _only_change(config: RunConfig, other: RunConfig) -> tuple[str, Any] | None:
    """Return the name and the other value of the one field in which two cells of the same work differ."""
    if _shared(other) != _shared(config):
        return None
    changed = {
        name: value
        for name, each in FIELDS.items()
        if each.field.identity and (value := getattr(other, name)) != getattr(config, name)
    }
    return next(iter(changed.items())) if len(changed) == 1 else None


def _shared(config: RunConfig) -> object:
    return config.model, config.shape, config.tokens_per_sequence, config.batch_size, config.mode


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(PROFILES)))
def test_no_bound_is_above_a_measured_remedy(run: Path) -> None:
    for config, diagnosis, _, then in followed(run):
        assert diagnosis.at_best is None or then >= BROKEN * diagnosis.at_best, (config, diagnosis.sentence, then)


def test_many_pairs_check_the_bounds() -> None:
    assert sum(1 for run in RUNS for _ in followed(run)) > 100


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(PROFILES)))
def test_no_headline_is_contradicted_by_a_row(run: Path) -> None:
    """A remedy that no cell with it was faster than is not named for that cell; a faster one is quoted as measured."""
    answer = diagnose(records_of(run))
    best: dict[tuple[str, RunConfig], tuple[float, float]] = {}
    for config, diagnosis, now, then in followed(run):
        before = best.get((diagnosis.code, config))
        best[diagnosis.code, config] = now, min(then, before[1] if before else then)
    for (code, _), (now, then) in best.items():
        for diagnosis in answer.diagnoses:
            if diagnosis.code == code and diagnosis.now == pytest.approx(now):
                assert diagnosis.expected is not None, diagnosis.sentence
                assert diagnosis.expected.how == "measured"
                assert diagnosis.expected.value == pytest.approx(then)
                assert then < now
