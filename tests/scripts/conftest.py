"""Helpers shared by the tests of studies: the scripts as modules, and records like those of a real sweep."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import Precision
from cs_systems.measure.profilers.rank_memory import expected_of
from cs_systems.record import Row, RunRecord, read_records

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def scripts_path() -> Iterator[None]:
    """Let a script import its neighbours, as when it runs."""
    folders = [str(ROOT / "scripts" / "studies"), str(ROOT / "scripts")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def skeleton() -> Any:
    return importlib.import_module("_study")


@pytest.fixture(scope="module")
def builders() -> Any:
    """Return the module of the report tests that builds records."""
    spec = importlib.util.spec_from_file_location("report_builders", ROOT / "tests" / "report" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for precision in (Precision.FP16, Precision.BF16_PURE):
        module.CEILINGS[precision] = module.CEILINGS[Precision.BF16]
    module.recorded = recorded
    return module


@cache
def _profiles() -> dict[str, RunRecord]:
    """Return profiler → a real profile of small, naive, fp32, eager, on an H200."""
    records, _ = read_records(ROOT / "profiles" / "profile_coverage" / "small.records.jsonl")
    wanted = {"attention": "naive", "compile": "none"}
    return {record.config["profiler"]: record for record in records if wanted.items() <= record.config.items()}


_READ = {"allocated_bytes": 4 * 2**30, "reserved_bytes": 5 * 2**30, "device_used_bytes": 6 * 2**30}
_KEPT = {"operation": "MmBackward0", "shape": "512×64", "dtype": "float32", "total_bytes": 2**20, "share": 0.5}
# Tables that the memory profilers write on a GPU.
MEMORY_TABLES: dict[str, dict[str, list[Row]]] = {
    "memory": {
        "memory_phases": [{"step": 1, "phase": "forward", **_READ}],
        "memory_parts": [
            {"part": "memory_allocated", "bytes": 4 * 2**30, "total": True},
            {"part": "cache, whole blocks", "bytes": 2**30, "total": False},
            {"part": "other processes", "bytes": None, "total": False},
            {"part": "context and modules", "bytes": 2**30, "total": False},
            {"part": "in use by cudaMemGetInfo", "bytes": 6 * 2**30, "total": True},
        ],
    },
    "residuals": {
        "residuals": [{"module": "layers.*.ln1", **_KEPT}, {"module": "layers.*.ffn", **_KEPT}],
        "residual_blocks": [{"block": "block 0", "bytes": 2**21, "predicted_bytes": 2**21 + 2**11}],
        "residual_stream": [{"bytes": 2**17}],
    },
}


@cache
def _numerics() -> dict[tuple[str, str], RunRecord]:
    """Return (workload, precision) → the record of a CPU in the studies of low precision."""
    folders = [ROOT / "profiles" / name / "cpu" for name in ("low_precision_sums", "autocast_dtypes")]
    records = [record for folder in folders for record in read_records(folder)[0]]
    return {(record.config["workload"], record.config["precision"]): record for record in records}


def with_calls(record: RunRecord) -> RunRecord:
    """Return a collective's record with a call time that depends on its size, and a setup time that does not."""
    shape = record.run_config.collective
    assert shape is not None
    assert record.measurement is not None
    phases = {"skew": 1e-3, "queue": 2e-3, "transfer": shape.calls * (20e-6 + shape.size_bytes / 200e9)}
    samples = tuple(replace(s, phases_s=phases, submit_s=phases, lag_s=phases) for s in record.measurement.samples)
    set_up = {"start_s": 3.0, "init_process_group_s": 0.5, "new_group_s": 0.2, "first_call_s": 0.05}
    link = {"peak_bytes_per_s": 450e9, "source": "NVIDIA H200 data sheet, SXM: NVLink, one direction"}
    return replace(
        record,
        measurement=replace(record.measurement, samples=samples),
        results={"ran": [{"backend": "nccl"}], "setup": [set_up], "link": [link]},
    )


def rank_tables(record: RunRecord) -> dict[str, list[Row]]:
    """Return the tables of a training cell on ranks, with values as in the formulas.

    Half of the communication is hidden, and rank 0 does not wait.
    """
    config, trained = record.run_config, 10**6
    step = {"step_s": 0.1, "compute_s": 0.06, "idle_s": 0.01, "collectives": 3}
    communicates_s = 0.06 if config.world_size > 1 else 0.0
    moved = {"communication_s": communicates_s, "hidden_s": communicates_s / 2, "exposed_s": communicates_s / 2}
    stages = ((0, "built"), (1, "forward"), (1, "backward"), (1, "optimizer"))
    expected = [(*of, expected_of(trained, config.strategy, config.world_size, *of)) for of in stages]
    tables: dict[str, list[Row]] = {
        "overlap": [
            {"rank": rank, **step, **moved, "transfer_s": communicates_s, "waiting_s": 0.02 * rank}
            for rank in range(config.world_size)
        ],
        "streams": [{"rank": 0, "stream": "compute", "phase": "forward", "start_s": 0.0, "end_s": 0.06}],
        "rank_memory": [
            {"rank": rank, "step": step, "stage": stage, "component": name, "bytes": size, "expected_bytes": size}
            for rank in range(config.world_size)
            for step, stage, sizes in expected
            for name, size in sizes.items()
        ],
        "sent": [{"collectives": 3, "sent_bytes": 1e6 + 9, "formula_sent_bytes": 1e6}],
    }
    names = {"overlap": ("overlap", "streams"), "rank_memory": ("rank_memory",)}.get(config.profiler, ())
    return {name: tables[name] for name in (*names, *(("sent",) if config.is_distributed else ()))}


def recorded(record: RunRecord) -> RunRecord:
    """Return the record with tables of its profiler and workload.

    Tables of kernels and of low precision come from real records; tables of memory and ranks are made up.
    """
    if record.config.get("collective"):
        return with_calls(record)
    real = _numerics().get((record.config["workload"], record.config["precision"]))
    if real and (record.config["profiler"] == "dtypes" or real.config["profiler"] == "none"):
        return replace(record, status=real.status, reason=real.reason, results=record.results | real.results)
    if record.config["profiler"] in ("none", "overlap", "rank_memory"):
        return replace(record, results=record.results | rank_tables(record))
    if memory_tables := MEMORY_TABLES.get(record.config["profiler"]):
        return replace(record, results=record.results | memory_tables)
    tables_of = _profiles()[record.config["profiler"]].results
    assert record.measurement is not None
    tables = {
        name: tables_of[name] for name in ("steps", "ratio", "phases", "families", "kernels", "attention", "gaps")
    }
    for name in ("phases", "attention"):
        tables[name] = [row for row in tables_of[name] if row["phase"] in record.measurement.phase_names()]
    times: dict[str, float] = defaultdict(float)
    for row in tables["phases"]:
        if row["family"] != "all":
            times[row["family"]] += row["time_s"]
    tables["families"] = [{"family": name, "time_s": time} for name, time in times.items()]
    tables["kernels"] = [row for row in tables_of["kernels"] if row["family"] in times]
    return replace(record, results=record.results | tables)
