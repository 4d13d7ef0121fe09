"""Tests of the explanations of the memory studies and of the memory prediction benchmark."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cs_systems.config import RunConfig
from cs_systems.formulas.cost import FULL_MATRIX_CUDA
from cs_systems.formulas.memory.model import step_memory
from cs_systems.record import RunRecord

NAMES = {
    "memory_peaks": "memory_peaks",
    "nvidia_smi_memory": "nvidia_smi_memory",
    "saved_for_backward": "saved_for_backward",
    "activation_checkpointing": "activation_checkpointing",
}


def study(name: str) -> Any:
    return importlib.import_module(NAMES[name]).STUDY


def explained(skeleton: Any, name: str, records: list[RunRecord]) -> str:
    return "\n".join(study(name).explain(skeleton.cells(records)))


def invented(builders: Any, config: RunConfig) -> Any:
    record = builders.ok(config, 0.1, 1e12, 2**34)
    return record if config.profiler == "none" else builders.recorded(record)


def test_nvidia_smi_memory_explains_memory_in_use(skeleton: Any, builders: Any) -> None:
    explanation = explained(skeleton, "nvidia_smi_memory", [invented(builders, study("nvidia_smi_memory").full()[0])])
    assert "2.00 GiB in use beyond memory_allocated" in explanation
    assert "cache, whole blocks 1.00 GiB, context and modules 1.00 GiB" in explanation


def test_saved_for_backward_compares_closed_form_with_hooks(skeleton: Any, builders: Any) -> None:
    explanation = explained(skeleton, "saved_for_backward", [invented(builders, study("saved_for_backward").full()[0])])
    assert "the closed form of a block is within 0.10% of what the hooks count, in 1 cells" in explanation
    assert "a block keeps 16 times the residual stream's 128 KiB" in explanation


def test_activation_checkpointing_names_best_group(skeleton: Any, builders: Any) -> None:
    peaks = {"none": 64, "every:1": 40, "every:2": 36, "every:4": 44, "selective:matmul": 50}
    records = []
    for config in study("activation_checkpointing").full():
        if config.model.name == "xl" and config.checkpoint in peaks:
            record = builders.ok(
                config, 1.0 if config.checkpoint == "none" else 1.3, 1e12, 2**30 * peaks[config.checkpoint]
            )
            records.append(record)
    explanation = explained(skeleton, "activation_checkpointing", records)
    assert "xl: among equal groups, every:2 needs the least memory, measured: 36.0 GiB" in explanation
    assert "every:2 saves the most, 44% of 64.0 GiB (measured): 36.0 GiB remain, for +30.0% of the time" in explanation


def test_memory_peaks_names_largest_allocation(skeleton: Any, builders: Any) -> None:
    explanation = explained(skeleton, "memory_peaks", [invented(builders, c) for c in study("memory_peaks").full()])
    assert "token_embeddings.weight, 48.8 MiB (vocabulary 10000 × d_model 1280 × 4 bytes)" in explanation
    assert "four times the parameters are" in explanation


def test_memory_prediction_names_worst_error_and_unpredicted_oom(builders: Any, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
    benchmark = importlib.import_module("memory_prediction")
    sys.modules.pop("memory_prediction")
    records, device = [], 139 * 2**30
    for config in [c for c in benchmark.cells() if c.attention == "naive" and c.model.name in ("xl", "small")]:
        predicted = step_memory(config, FULL_MATRIX_CUDA).peak_bytes
        fits = predicted <= device and config.tokens_per_sequence != 512
        record = builders.ok(config, 0.1, 1e12, predicted * 100 // (104 if config.model.name == "xl" else 101))
        if not fits:
            record = builders.failed(config, "oom", "out of memory", predicted=predicted)
        records.append(replace(record, environment=replace(record.environment, device_memory_bytes=device)))
    explanation = "\n".join(benchmark.explain(records))
    assert "cells within 5%" in explanation
    assert "the worst is xl" in explanation.split("seen while")[0]
    assert "+4.00%" in explanation
    assert "not predicted: xl ctx 512" in explanation or "not predicted: small ctx 512" in explanation
    assert "0 cells that were predicted not to fit did fit" in explanation
    done = {record.run_config for record in records}
    assert benchmark.missing(records) == [config for config in benchmark.cells() if config not in done]
    rows = benchmark.rows(records)
    assert {row["held out"] for row in rows} == {"yes", "no"}
    assert all(row["error"] is None for row in rows if row["result"] == "oom")
