"""Evidence: which numbers of records and traces count, and what an unknown one leaves unknown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.diagnosis import Diagnosis, apply_rules, diagnose
from cs_systems.analysis.diagnosis._evidence import Evidence, of_records, of_snapshot
from cs_systems.analysis.diagnosis._memory_use import LOGITS
from cs_systems.analysis.memory.categories import attribute
from cs_systems.config import RunConfig, preset
from cs_systems.core.caveats import REMEDIES
from cs_systems.formulas.cost import COST
from cs_systems.formulas.memory.fit import needed_bytes
from cs_systems.record import Measurement, RunRecord
from tests.analysis.diagnosis.test_rules import LOOP, PLANTED, STEP_S, measured, timed, traced
from tests.analysis.diagnosis.whole_rows import whole
from tests.analysis.memory.test_limits import BACKWARD, FORWARD, UNNAMED, A, B, event, replayed
from tests.test_record import ENVIRONMENT

GIB = 1 << 30


def of(**tables: Any) -> Evidence:
    return Evidence(tables)  # type: ignore[arg-type]


def record(results: Any, measurement: Measurement | None = None, **config: Any) -> RunRecord:
    made = RunRecord("key", RunConfig(**config).to_dict(), "ok", environment=ENVIRONMENT, measurement=measurement)
    made.results.update(whole(results))
    return made


def test_diagnosis_without_duration_has_share_0() -> None:
    assert Diagnosis("", "", 0.0, 0.0).share == 0.0
    assert Diagnosis("", "", 4.0, 1.0).share == 0.75


def test_step_lasts_as_long_as_measured_else_as_before_the_profiler_else_as_traced() -> None:
    steps = [{"device": 0, "wall_s": 2.0}, {"device": 0, "wall_s": 4.0}, {"device": 1, "wall_s": 9.0}]
    streams = [{"step_s": 1.0}, {"step_s": 5.0}, {"step_s": None}, {}]
    assert timed(tables={"steps": steps}).step_s == pytest.approx(STEP_S)
    assert of(steps=steps, overlap=streams, overhead=[{"not_recorded_s": 1.5}]).step_s == 1.5
    assert of(steps=steps, overlap=streams, overhead=[{"not_recorded_s": 0.0}]).step_s is None
    assert of(steps=steps, overlap=streams).step_s == 3.0
    assert of(overlap=streams).step_s == 5.0
    assert of(steps=[{"device": 0, "wall_s": 0.0}]).step_s is None
    assert of().step_s is None


def test_evidence_without_times_or_memory_is_empty() -> None:
    assert of().is_empty
    assert of(overhead=[{"not_recorded_s": 1.5}]).is_empty, "no step was timed, and no kernel traced"
    assert of(steps=[{"device": 0, "wall_s": 0.0}]).is_empty
    assert not of(steps=[{"device": 0, "wall_s": 1.0}]).is_empty
    assert not of(overlap=[{"step_s": 5.0}]).is_empty


def test_wait_for_a_batch_is_limited_by_the_idle_time_of_the_gpu() -> None:
    ranges = [{"range": "input", "total_s": 3.0}, {"range": "enumerate(DataLoader)#x", "total_s": 8.0}]
    gaps = [{"device": 0, "cause": "launch-bound", "time_s": 1.0}, {"device": 0, "cause": "copy", "time_s": 1.0}]
    assert of(ranges=ranges).input_s == 3.0
    assert of(ranges=ranges[1:]).input_s == 8.0
    assert of(ranges=ranges, gaps=gaps).input_s == 2.0
    assert of().input_s == 0.0
    assert timed(tables={"ranges": ranges}).input_s == 0.0, "the measured step has no phase `input`"
    profiler = [{"device": 0, "cause": "profiler", "time_s": 9.0}, *gaps]
    assert of(gaps=profiler).idle_s == {"launch-bound": 1.0, "copy": 1.0}


def test_rows_of_phases_are_chosen_by_family_and_phase() -> None:
    rows = [{"phase": phase, "family": family} for phase in ("forward", "optimizer") for family in ("copy", "norm")]
    evidence = of(phases=rows)
    assert evidence.rows_of("copy") == [rows[0], rows[2]]
    assert evidence.rows_of("copy", "norm", phases=["forward"]) == rows[:2]
    assert evidence.rows_of("copy", without=["optimizer"]) == rows[:1]


def test_setting_is_known_from_the_results_or_if_the_workload_uses_it() -> None:
    own = RunConfig(workload="mine.py:step", batch_size=7)
    ran: Any = [{"uses": "precision batch_size", "strategy": "fsdp"}]
    assert Evidence(config=own).setting("batch_size") is None
    assert Evidence({"ran": ran}, config=own).setting("batch_size") == 7
    assert Evidence({"ran": ran}, config=own).setting("compile") is None
    assert Evidence({"ran": ran}, config=own).setting("strategy") == "fsdp"
    assert Evidence(config=RunConfig(batch_size=7)).setting("batch_size") == 7
    assert Evidence({"ran": ran}).setting("batch_size") is None


@pytest.mark.parametrize(
    ("kernel", "compile", "compiled"),
    [("triton_poi_fused_add", "none", True), ("gemm", "default", True), ("gemm", "none", False)],
)
def test_compiled_kernels_show_by_name_or_setting(kernel: str, compile: str, compiled: bool) -> None:
    evidence = replace(of(kernels=[{"kernel": kernel}]), config=RunConfig(compile=compile))  # type: ignore[arg-type]
    assert evidence.has_compiled_kernels is compiled
    assert of(kernels=[{"kernel": kernel}]).has_compiled_kernels is kernel.startswith("triton_")
    ran: Any = [{"compiled_graphs": int(compiled)}]
    assert Evidence({"ran": ran}).has_compiled_kernels is compiled, "only a trace tells it of the step itself"


@pytest.mark.parametrize(
    ("cost", "ceiling", "floor_s"),
    [
        ({"hardware_flops": 8.0, "bytes": 2.0}, {"peak_flops_per_s": 2.0, "peak_bytes_per_s": 1.0}, 4.0),
        ({"hardware_flops": 2.0, "bytes": 8.0}, {"peak_flops_per_s": 2.0, "peak_bytes_per_s": 4.0}, 2.0),
        ({"hardware_flops": 2.0, "bytes": 8.0}, {"peak_flops_per_s": 2.0}, 1.0),
        ({"hardware_flops": 2.0, "bytes": None}, {"peak_flops_per_s": 2.0, "peak_bytes_per_s": 4.0}, 1.0),
        ({"hardware_flops": 0.0, "bytes": 8.0}, {"peak_flops_per_s": 2.0, "peak_bytes_per_s": 4.0}, 2.0),
        ({"hardware_flops": None}, {"peak_flops_per_s": 2.0}, None),
        ({"hardware_flops": 2.0}, {"peak_flops_per_s": 0.0}, None),
    ],
)
def test_least_time_of_a_phase_follows_from_its_flops_or_bytes(cost: Any, ceiling: Any, floor_s: float | None) -> None:
    evidence = of(cost=[{"phase": "backward", "hardware_flops": 9e9}, {"phase": "forward", **cost}], ceiling=[ceiling])
    assert evidence.floor_s("forward") == floor_s
    assert evidence.floor_s("loss") is None
    assert replace(evidence, tables={**evidence.tables, "ceiling": []}).floor_s("forward") is None


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None, "1", [1]])
def test_row_with_an_unknown_number_is_left_out(bad: Any) -> None:
    (good,) = whole({"gaps": [{"device": 0, "cause": "copy", "time_s": 0.0}]})["gaps"]
    without = {name: value for name, value in good.items() if name != "time_s"}
    rows = [good, good | {"time_s": bad}, good | {"cause": None}, without]
    if bad is not None:
        rows.append(good | {"longest_s": bad})
    traces = record(traced(), profiler="kineto")
    traces.results.update({"gaps": rows, "ran": [{"precision": "bf16"}], "unknown": [{"a": 1}]})
    found = of_records([traces])
    assert found.tables["gaps"] == [good]
    assert found.tables["ran"] == [{"precision": "bf16"}]
    assert "unknown" not in found.tables


def test_timed_and_profiled_records_of_a_cell_are_judged_together() -> None:
    clean = record({"cost": [{"phase": "forward", "hardware_flops": 1.0}]}, measured(), device="cuda")
    kineto = record(
        traced() | {"cost": [{"phase": "forward", "hardware_flops": 2.0}]}, measured([9.0]), profiler="kineto"
    )
    memory = record({"kernels": [{"kernel": "of a step that it changes", "family": "copy", "time_s": 1.0}]},
                    profiler="memory")  # fmt: skip
    found = of_records([clean, kineto, memory])
    assert found.step_s == pytest.approx(STEP_S)
    assert found.floor_s("forward") is None
    assert [row["hardware_flops"] for row in COST.of(found.tables)] == [1.0]
    assert found.kernels() == whole(traced())["kernels"]
    untimed = of_records([record(traced(), measured(), workload="accumulation", profiler="kineto")])
    assert (untimed.tables, untimed.measurement) == ({}, None)


def test_usable_memory_is_the_memory_limit_or_the_device_memory() -> None:
    big = replace(record({}, measured()), environment=replace(ENVIRONMENT, device_memory_bytes=80 * GIB, device="cuda"))
    assert of_records([big]).device_bytes == 80 * GIB
    limited = replace(big, config=RunConfig(memory_limit_bytes=40 * GIB).to_dict())
    assert of_records([limited]).device_bytes == 40 * GIB
    assert of_records([replace(big, environment=None)]).device_bytes is None
    assert of_records([big]).device_name == ENVIRONMENT.device_name
    assert of_records([record({}, measured())]).device_name is None, "a CPU"


@pytest.mark.parametrize(("batches", "cells"), [((2, 4), "2 of 2 cells have this cause"), ((2,), None)])
def test_cells_with_the_same_cause_are_counted(batches: tuple[int, ...], cells: str | None) -> None:
    config = RunConfig(model=preset("tiny"), precision="bf16", device="cuda", profiler="kineto")  # type: ignore[arg-type]
    gaps = [{"device": 0, "cause": "launch-bound", "time_s": 0.04}]
    bound = [record(traced(gaps=gaps)) for _ in batches]
    bound = [replace(r, config=replace(config, batch_size=b).to_dict()) for r, b in zip(bound, batches, strict=True)]
    (found,) = [one for one in diagnose(bound).diagnoses if one.code == "launch-bound"]
    assert found.cells == (f"batch 2; {cells}" if cells else "")
    free = replace(record(traced()), config=replace(config, batch_size=8).to_dict())
    (found,) = [one for one in diagnose([*bound, free]).diagnoses if one.code == "launch-bound"]
    assert found.cells == (f"batch 2; {cells.replace('of 2', 'of 3')}" if cells else "batch 2")


def phase_row(phase: str, reserved: int, peak: int | None = None, peak_reserved: int | None = None) -> dict[str, Any]:
    sizes = {"reserved_bytes": reserved, "peak_allocated_bytes": peak, "peak_reserved_bytes": peak_reserved}
    return {"step": 1, "phase": phase} | {name: None if size is None else size * GIB for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("rows", "phase", "peak", "reserved"),
    [
        ([phase_row("forward", 20, 7, 20), phase_row("backward", 20, 8, 20)], "backward", 8, 20),
        ([phase_row("forward", 20, 8, 20), phase_row("backward", 9, 7, 20)], "forward", 8, 20),
        ([phase_row("forward", 20, 8, 20), phase_row("backward", 20, 8, 20)], "backward", 8, 20),
        ([phase_row("forward", 9, 7, 20), phase_row("backward", 20, 8, 20)], "backward", 8, None),
        ([phase_row("loss", 9), phase_row("forward", 20), phase_row("backward", 20, 8, 20)], "backward", 8, 20),
        ([phase_row("forward", 20, 8, 20), phase_row("loss", 9), phase_row("end", 9)], "forward", 8, 20),
    ],
)
def test_peak_of_a_record_is_its_highest_phase(
    rows: list[dict[str, Any]], phase: str, peak: int, reserved: int | None
) -> None:
    memory = of_records([record({"memory_phases": rows}, profiler="memory", workload="own.py:step")]).memory
    assert memory is not None
    assert (memory.phase, memory.peak_bytes) == (phase, peak * GIB)
    assert memory.reserved_bytes == (None if reserved is None else reserved * GIB)


def test_categories_of_a_forecast_are_taken_at_its_peak() -> None:
    sizes = [(1, "forward", "activations", 5), (1, "forward", "logits_and_loss", 3), (1, "backward", "gradients", 7)]
    forecast = [
        {"step": step, "phase": phase, "component": component, "peak_bytes": size}
        for step, phase, component, size in sizes
    ]
    results = {"memory_phases": [phase_row("forward", 20, 8, 20)], "memory_forecast": forecast}
    memory = of_records([record(results, profiler="memory", workload="own.py:step")]).memory
    assert memory is not None
    assert memory.categories == {"activations": 5, "logits": 3}
    assert memory.of("activations", "logits", "gradients") == 8


@pytest.mark.parametrize("caveat", ["nan-loss", "profiled", "unstable", "few-samples"])
def test_loop_has_a_remedy_for_each_caveat_except_few_samples(caveat: str) -> None:
    """That of few samples depends on the loop's length, and stands in the record."""
    loop, step = (Evidence(config=config) for config in (LOOP, RunConfig()))
    assert step.remedy(caveat) == REMEDIES[caveat]
    if caveat == "few-samples":
        with pytest.raises(KeyError):
            loop.remedy(caveat)
    else:
        assert (loop.remedy(caveat) == step.remedy(caveat)) is (caveat == "nan-loss")


def test_logits_of_a_snapshot_include_tensors_of_the_loss_and_the_last_layer(tmp_path: Path) -> None:
    """Loss makes 4,096 bytes that backward frees, and 1,024 that it frees itself at the peak."""
    loss = [{"filename": "model.py", "line": 2, "name": "loss_fn"}]
    events = [
        event("alloc", A, 1536, 1, frames=FORWARD), event("alloc", B, 4096, 2, frames=loss),
        event("alloc", B + 8192, 1024, 3, frames=loss), event("free_requested", B + 8192, 1024, 4, frames=loss),
        event("alloc", B + 8192, 512, 5, frames=BACKWARD),
    ]  # fmt: skip
    memory = of_snapshot(attribute(replayed(tmp_path, events)), UNNAMED).memory
    assert memory is not None
    assert (memory.peak_bytes, memory.of(LOGITS), memory.of("activations"), memory.phase) == (6656, 5120, 1536, "loss")


def test_snapshot_without_a_peak_gives_no_evidence(tmp_path: Path) -> None:
    one = [event("alloc", A, 2048, 1)]
    assert of_snapshot(attribute(replayed(tmp_path, one)), UNNAMED).is_empty
    assert not of_snapshot(attribute(replayed(tmp_path, [*one, event("alloc", B, 512, 2)])), UNNAMED).is_empty


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_recomputation_is_a_cause_if_the_step_fits_without_it(spare: int) -> None:
    evidence = PLANTED["recomputation"][0]
    assert evidence.config is not None
    needed = needed_bytes(replace(evidence.config, device="cuda", checkpoint="none"))
    found = apply_rules(replace(evidence, device_bytes=needed + spare)).diagnoses
    assert ("recomputation" in {one.code for one in found}) is (spare >= 0)
