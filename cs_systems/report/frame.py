"""Records as one long pandas DataFrame: `frame(records)`, or `load(path)` for a run's folder.

One row is one (record, phase). Phase `step` is the whole step by the wall clock, or by the device's clock where the
device was held until the step was submitted (`held`). A record without a timing (oom, unavailable, timeout, killed,
error, a loss that is NaN or infinite) is one row with phase None, so that it appears in every table with its status and
reason. Columns hold base units, given by their names; unknown is null (NaN, NA or None), never 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from cs_systems.config import CONFIGURED, ConfigError, ModelConfig
from cs_systems.core.statistics import interval, summary
from cs_systems.formulas.rank_layout import data_ranks
from cs_systems.record import DONE, Measurement, Row, RunRecord
from cs_systems.report import collectives
from cs_systems.report.series import typed

if TYPE_CHECKING:
    import pandas as pd

STEP = "step"
CLEAN = "none"  # profiler of clean records, whose times are timings
TEXT, INTEGER, REAL, FLAG = "object", "Int64", "float64", "boolean"
_FITTING: dict[str, type | tuple[type, ...]] = {TEXT: str, INTEGER: int, REAL: (int, float), FLAG: bool}

_RUN_FIELDS = {
    "attention": TEXT,
    "precision": TEXT,
    "mode": TEXT,
    "compile": TEXT,
    "checkpoint": TEXT,
    "keep_graph": FLAG,
    "device": TEXT,
    "warmup": INTEGER,
    "warmup_s": REAL,
    "steps": INTEGER,
    "rounds": INTEGER,
    "l2": TEXT,
    "memory_limit_bytes": INTEGER,
    "seed": INTEGER,
    "strategy": TEXT,
    "bucket_size_mb": REAL,
    "tp_degree": INTEGER,
    "world_size": INTEGER,
    "profiler": TEXT,
}
_MODEL_FIELDS = {
    "size": TEXT,
    "d_model": INTEGER,
    "d_ff": INTEGER,
    "num_layers": INTEGER,
    "num_heads": INTEGER,
    "vocab_size": INTEGER,
    "rope_theta": REAL,
    "context_length": INTEGER,
    "seq_len": INTEGER,
    "batch_size": INTEGER,
    "optimizer": TEXT,
}
_SHAPE_FIELDS = {
    "batch": INTEGER,
    "heads": INTEGER,
    "heads_kv": INTEGER,
    "seq": INTEGER,
    "seq_k": INTEGER,
    "d_head": INTEGER,
    "causal": FLAG,
    "align": TEXT,
}
# Fields of a configuration that describe a step, not its measurement; foreign workloads may ignore them.
_STEP_FIELDS = {
    **_MODEL_FIELDS,
    **_SHAPE_FIELDS,
    **{
        name: _RUN_FIELDS[name]
        for name in ("attention", "precision", "mode", "compile", "checkpoint", "keep_graph", "l2")
    },
}
_RAN = ("attention_version", "tokens", "executed_d_head", "block_q", "block_k", "resident")
# Columns of a record, equal in each of its rows; `record` is its position among the given records.
CELL_COLUMNS: dict[str, str] = {
    "record": INTEGER,
    "key": TEXT,
    "repeat": INTEGER,
    "workload": TEXT,
    **_MODEL_FIELDS,
    **_SHAPE_FIELDS,
    **_RUN_FIELDS,
    "status": TEXT,
    "reason": TEXT,
    "warnings": TEXT,
    "device_name": TEXT,
    "torch": TEXT,
    "code_version": TEXT,
    "attention_version": TEXT,
    "ran_optimizer": TEXT,
    "executed_d_head": INTEGER,
    "block_q": INTEGER,
    "block_k": INTEGER,
    "resident": FLAG,
    "tokens": INTEGER,
    "held": FLAG,
    "setup_s": REAL,
    "compile_s": REAL,
    "peak_allocated_bytes": INTEGER,
    "peak_reserved_bytes": INTEGER,
    "predicted_peak_bytes": INTEGER,
    "ceiling_flops_per_s": REAL,
    "ceiling_source": TEXT,
    **collectives.CELL_COLUMNS,
}
# Columns of one phase of a record.
PHASE_COLUMNS: dict[str, str] = {
    "phase": TEXT,
    "n": INTEGER,
    "median_s": REAL,
    "mean_s": REAL,
    "std_s": REAL,
    "p10_s": REAL,
    "p90_s": REAL,
    "spread": REAL,
    "ci_low_s": REAL,
    "ci_high_s": REAL,
    "submit_median_s": REAL,
    "lag_median_s": REAL,
    "wall_minus_phases_s": REAL,
    "tokens_per_s": REAL,
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


def load(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Load the frame of the records under `path`, without failed attempts that a resumed sweep has since replaced."""
    from cs_systems.report.reading import sound_records

    return frame(without_retried(sound_records(path)[0]))


def without_retried(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Drop each failed record (error, timeout, killed) that a later record of the same cell replaces."""
    last = {(r.key, r.repeat): i for i, r in enumerate(records)}
    return [r for i, r in enumerate(records) if r.status in DONE or last[r.key, r.repeat] == i]


def by_kind(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group records that may share a table: one workload, and all clean or all under one profiler, those last.

    The keys are names: `train_step`, `train_step under nsys`.
    """
    clean: dict[str, list[RunRecord]] = {}
    profiled: dict[str, list[RunRecord]] = {}
    for record in records:
        workload, profiler = record.config["workload"], record.config.get("profiler", CLEAN)
        kinds, name = (clean, workload) if profiler == CLEAN else (profiled, f"{workload} under {profiler}")
        kinds.setdefault(name, []).append(record)
    return {**clean, **profiled}


def frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return the long DataFrame of `records`: CELL_COLUMNS, then PHASE_COLUMNS.

    Raises ConfigError for a malformed record.
    """
    import pandas as pd

    cells: list[Row] = []
    rows: list[tuple[Any, ...]] = []
    owners: list[int] = []
    records = list(records)
    for index, record in enumerate(records):
        with _naming(index, record):
            cells.append(_cell(index, record))
    _forget_unused(cells)
    for index, (record, cell) in enumerate(zip(records, cells, strict=True)):
        with _naming(index, record):
            peak = cell["ceiling_flops_per_s"]
            measured = [tuple(map(row.get, PHASE_COLUMNS)) for row in _phase_rows(record, peak)]
        rows += measured
        owners += [index] * len(measured)
    identity = typed({name: [c.get(name) for c in cells] for name in CELL_COLUMNS}, CELL_COLUMNS)
    columns = zip(*rows, strict=True) if rows else ([] for _ in PHASE_COLUMNS)
    phases = typed(dict(zip(PHASE_COLUMNS, map(list, columns), strict=True)), PHASE_COLUMNS)
    return pd.concat([identity.take(owners).reset_index(drop=True), phases], axis=1)


@contextmanager
def _naming(index: int, record: RunRecord) -> Iterator[None]:
    """Convert errors caused by a record's missing fields into one that names the record."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"record {index + 1} (key {record.key}): {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"record {index + 1} (key {record.key}) is malformed: {error!r}") from error


def _forget_unused(cells: Sequence[Row]) -> None:
    """Set to null the fields that a workload outside CONFIGURED is not known to use.

    Known are the fields that it reports itself, and those that its records vary, unless no configuration reached it.
    """
    foreign = [cell for cell in cells if cell["workload"] not in CONFIGURED]
    varied: dict[tuple[str, str], set[Any]] = {}
    for cell in foreign:
        for name in _STEP_FIELDS:
            varied.setdefault((cell["workload"], name), set()).add(cell.get(name))
    for cell in foreign:
        for name in _STEP_FIELDS.keys() - cell["said"].keys():
            if len(varied[cell["workload"], name]) == 1 or not cell["takes_config"]:
                cell[name] = None
        if cell["precision"] != cell["ceiling_precision"]:
            cell["ceiling_flops_per_s"] = cell["ceiling_source"] = None


def _cell(index: int, record: RunRecord) -> Row:
    """Return the CELL_COLUMNS of one record; fields that its workload does not use stay null."""
    config, results, environment, measurement = record.config, record.results, record.environment, record.measurement
    ran, memory, ceiling = (_only_row(results, table) for table in ("ran", "memory", "ceiling"))
    cell: Row = {
        "record": index,
        "key": record.key,
        "repeat": record.repeat,
        "workload": config["workload"],
        **{name: config.get(name) for name in _RUN_FIELDS},
        "checkpoint": config.get("checkpoint", "none"),  # older records have none, as they have no strategy
        "strategy": ":".join([config.get("strategy", "single"), *config.get("strategy_args", ())]),
        "world_size": config.get("world_size", 1),
        **(_shape(config["shape"]) if config.get("shape") else {}),
        **(_model(config) if config["workload"] != "attention" else {}),
        "status": record.status,
        "reason": record.reason,
        "warnings": "; ".join(dict.fromkeys(w.code for w in record.warnings)) or None,
        "device_name": environment and environment.device_name,
        "torch": environment and environment.torch,
        "code_version": environment and environment.code_version,
        **{name: ran.get(name) for name in _RAN},
        "ran_optimizer": ran.get("optimizer"),
        "predicted_peak_bytes": memory.get("predicted_peak_bytes"),
        "peak_allocated_bytes": memory.get("peak_allocated_bytes"),
        "peak_reserved_bytes": memory.get("peak_reserved_bytes"),
        "ceiling_flops_per_s": ceiling.get("peak_flops_per_s"),
        "ceiling_source": ceiling.get("source"),
        "ceiling_precision": ceiling.get("precision"),
        **collectives.cell(record),
    }
    if config["workload"] not in CONFIGURED:  # its own report takes precedence over the configuration
        fitting = {name: _FITTING[kind] for name, kind in _STEP_FIELDS.items()}
        cell["said"] = {n: v for n, v in ran.items() if n in fitting and isinstance(v, fitting[n])}
        cell |= {**cell["said"], "takes_config": ran.get("takes_config", True)}
    if measurement:
        cell["held"] = all(s.held_s is not None for s in measurement.timed)
        cell["setup_s"] = measurement.setup_s
        cell["compile_s"] = _total(s.compile_s for s in measurement.samples)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            cell[name] = _first_known(getattr(measurement, name), cell[name])
    return cell


def _model(config: Mapping[str, Any]) -> Row:
    model = config["model"]
    return {
        **model,
        "size": _label(tuple(model.items())),
        "seq_len": _first_known(config.get("seq_len"), model["context_length"]),
        "batch_size": config.get("batch_size"),
        "optimizer": config.get("optimizer"),
        "d_head": model["d_model"] // model["num_heads"],
    }


def _shape(shape: Mapping[str, Any]) -> Row:
    """Return the call's shape with heads_kv and seq_k, also where the configuration leaves them to heads and seq."""
    return {
        **shape,
        "heads_kv": _first_known(shape.get("heads_kv"), shape["heads"]),
        "seq_k": _first_known(shape.get("seq_k"), shape["seq"]),
    }


@lru_cache(maxsize=1024)
def _label(model: tuple[tuple[str, Any], ...]) -> str:
    return ModelConfig(**dict(model)).label


def _phase_rows(record: RunRecord, peak: float | None) -> Iterator[Row]:
    measurement = record.measurement
    if measurement is None or not measurement.timed or not record.is_timing:
        yield {}
        return
    costs = {row["phase"]: row for row in record.results.get("cost", ())}
    tokens = _tokens(record)
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
            "spread": _ratio(durations.p90 - durations.p10, durations.median),
            "n": durations.n,
            "median_s": durations.median,
            "mean_s": durations.mean,
            "std_s": durations.std,
            "p10_s": durations.p10,
            "p90_s": durations.p90,
            "ci_low_s": low,
            "ci_high_s": high,
            **_host(measurement, phase),
            **_rates(costs.get(phase, {}), durations.median, peak),
        }
        if phase == STEP:
            row |= {"tokens_per_s": _ratio(tokens, durations.median), **collectives.step(record)}
        yield row


def _tokens(record: RunRecord) -> int | None:
    """Return the tokens of a step, of all ranks together."""
    of_a_rank = _only_row(record.results, "ran").get("tokens")
    return of_a_rank and of_a_rank * data_ranks(record.config)


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
    model_rate, hardware_rate = _ratio(model, seconds), _ratio(hardware, seconds)
    return {
        "model_flops": model,
        "hardware_flops": hardware,
        "bytes": moved,
        "model_flops_per_s": model_rate,
        "hardware_flops_per_s": hardware_rate,
        "bytes_per_s": _ratio(moved, seconds),
        "mfu": _ratio(model_rate, peak),
        "hfu": _ratio(hardware_rate, peak),
    }


def _only_row(results: Mapping[str, list[Row]], table: str) -> Row:
    rows = results.get(table)
    return rows[0] if rows else {}


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _total(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _first_known(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)
