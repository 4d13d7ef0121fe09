"""Memory on a GPU: by phase and owner, compared with the prediction; snapshots, nsys and checkpoint plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cs_systems
from cs_systems.cli import main
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.formulas.memory.fit import CONTEXT_BYTES
from cs_systems.measure.profilers.nsys_memory import UNCACHED
from cs_systems.readers.snapshot import read
from cs_systems.record import read_records

pytestmark = pytest.mark.gpu
SMALL = RunConfig(model=preset("small", context_length=256), device="cuda", warmup=0, steps=2)


@pytest.mark.parametrize("checkpoint", ["none", "every:4", "selective:attention"])
def test_each_phase_is_near_its_prediction(checkpoint: str) -> None:
    config = replace(SMALL, attention="sdpa_flash", precision=Precision.BF16, checkpoint=checkpoint, profiler="memory")
    record = cs_systems.run(config)
    assert record.status == "ok"
    for row in record.results["memory_phases"][1:]:
        where = (row["step"], row["phase"])
        assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.06), where
        assert row["allocated_bytes"] == pytest.approx(row["predicted_allocated_bytes"], rel=0.06), where
        assert row["allocated_bytes"] <= row["reserved_bytes"] <= row["device_used_bytes"]
    peaks = [row["peak_allocated_bytes"] for row in record.results["memory_phases"][1:]]
    assert record.measurement is not None
    assert record.measurement.peak_allocated_bytes == max(peaks)


def test_parts_of_device_memory_add_up() -> None:
    record = cs_systems.run(replace(SMALL, profiler="memory"))
    so_far = 0
    for row in record.results["memory_parts"]:
        if row["total"] and row["part"] != "in use by nvidia-smi":
            assert row["bytes"] == so_far, row["part"]
        elif not row["total"]:
            so_far += row["bytes"] or 0


def test_snapshot_is_dumped_with_tensor_names(tmp_path: Path) -> None:
    (record,) = cs_systems.sweep([replace(SMALL, profiler="memory_snapshot", warmup=1, steps=1)], out=tmp_path)
    assert record.status == "ok"
    snapshot = read(tmp_path / record.artifacts["snapshot"])
    assert snapshot.sidecar is not None
    assert snapshot.sidecar.config == record.run_config
    kinds = {tensor.kind for tensor in snapshot.sidecar.tensors}
    assert kinds >= {"parameter", "gradient", "optimizer_state"}
    assert {"forward", "backward", "block 0"} <= {annotation.name for annotation in snapshot.annotations}
    assert len(snapshot.events) > 1000


def test_oom_leaves_snapshot_and_completed_phases(tmp_path: Path) -> None:
    tight = replace(SMALL, memory_limit_bytes=2**30)  # parameters fit, activations do not
    cells = [replace(tight, profiler=name) for name in ("memory", "memory_snapshot")]
    memory, snapshot = cs_systems.sweep(cells, out=tmp_path)
    assert (memory.status, snapshot.status) == ("oom", "oom")
    assert memory.results["memory_phases"][0]["phase"] == "built"
    assert memory.results["memory_phases"][-1]["phase"] in ("forward", "backward")
    found = read(tmp_path / snapshot.artifacts["snapshot"])
    assert found.events.device_free_bytes


def test_change_by_a_blocks_backward_matches_prediction() -> None:
    record = cs_systems.run(replace(SMALL, profiler="residuals", steps=1))
    for row in record.results["backward_blocks"]:
        assert row["change_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1), row["block"]
    for row in record.results["residual_blocks"]:
        if row["predicted_bytes"] is not None:
            assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01)


@pytest.mark.nsys
def test_nsys_records_bytes_that_a_block_keeps_and_frees(tmp_path: Path) -> None:
    """Without the caching allocator each tensor is a cudaMalloc, in the range of the thread that called it."""
    config = replace(SMALL, profiler="nsys_memory", profiler_args=(UNCACHED,), warmup=1, steps=1)
    (record,) = cs_systems.sweep([config], out=tmp_path)
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.measurement.peak_allocated_bytes is None, "torch counts nothing then"
    rows = {(row["phase"], row["layer"]): row for row in record.results["memory_ranges"]}
    for block in range(12):
        for phase in ("forward", "backward"):
            row = rows[phase, f"block {block}"]
            assert row["change_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1), (phase, block)


@pytest.mark.nsys
def test_nsys_records_growth_of_the_allocator_cache(tmp_path: Path) -> None:
    config = replace(SMALL, profiler="nsys_memory", warmup=0, steps=1)
    (record,) = cs_systems.sweep([config], out=tmp_path)
    assert record.status == "ok", record.reason
    rows = record.results["memory_ranges"]
    assert sum(row["allocated_bytes"] for row in rows) > 2**30
    assert sum(row["freed_bytes"] for row in rows) == 0
    assert {row["predicted_bytes"] for row in rows} == {None}


def test_cheapest_checkpoint_is_proven_under_memory_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`small` at context 512 needs 4.9 GiB with its CUDA context; in 4 GiB it runs with the checkpoint found."""
    words = ["memory", "--size", "small", "--best-checkpoint", "--budget", "4GiB", "--out", str(tmp_path)]
    assert main(words) == 0
    (record,) = read_records(tmp_path)[0]
    assert record.run_config.checkpoint != "none"
    assert record.run_config.memory_limit_bytes == 4 * 2**30 - CONTEXT_BYTES
    output = capsys.readouterr().out
    assert "ok in a budget of 4.00 GiB: measured peak" in output
    assert "the prediction was" in output


def test_oom_names_the_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "--size", "small", "--context-length", "256", "--snapshot", "--memory-limit", "1GiB"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    record = next(r for r in read_records(tmp_path)[0] if r.run_config.profiler == "memory_snapshot")
    assert record.status == "oom"
    file = tmp_path / record.artifacts["snapshot"]
    assert f"read it: cs-systems snapshot {file}" in capsys.readouterr().out
    assert main(["snapshot", str(file)]) == 0
    output = capsys.readouterr().out
    assert "out of memory at event" in output
    assert "memory at the peak, by category" in output
