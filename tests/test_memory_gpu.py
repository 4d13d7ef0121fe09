"""On a GPU: memory by phase beside the closed form, whose the device's memory is, snapshots, also of an OOM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cs_systems
from cs_systems.analysis.snapshot import read
from cs_systems.config import Precision, RunConfig, preset

pytestmark = pytest.mark.gpu
SMALL = RunConfig(model=preset("small", context_length=256), device="cuda", warmup=0, steps=2)


@pytest.mark.parametrize("checkpoint", ["none", "every:4", "selective:attention"])
def test_every_phase_is_near_its_closed_form(checkpoint: str) -> None:
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


def test_the_parts_of_the_devices_memory_add_up() -> None:
    record = cs_systems.run(replace(SMALL, profiler="memory"))
    so_far = 0
    for row in record.results["memory_parts"]:
        if row["total"] and row["part"] != "in use by nvidia-smi":
            assert row["bytes"] == so_far, row["part"]
        elif not row["total"]:
            so_far += row["bytes"] or 0


def test_a_snapshot_is_dumped_and_names_the_tensors(tmp_path: Path) -> None:
    (record,) = cs_systems.sweep([replace(SMALL, profiler="memory_snapshot", warmup=1, steps=1)], out=tmp_path)
    assert record.status == "ok"
    snapshot = read(tmp_path / record.artifacts["snapshot"])
    assert snapshot.sidecar is not None
    assert snapshot.sidecar.config == record.run_config
    kinds = {tensor.kind for tensor in snapshot.sidecar.tensors}
    assert kinds >= {"parameter", "gradient", "optimizer_state"}
    assert {"forward", "backward", "block 0"} <= {annotation.name for annotation in snapshot.annotations}
    assert len(snapshot.events) > 1000


def test_running_out_of_memory_leaves_a_snapshot_and_the_phases_until_then(tmp_path: Path) -> None:
    tight = replace(SMALL, memory_limit_bytes=2**30)  # parameters fit, activations do not
    cells = [replace(tight, profiler=name) for name in ("memory", "memory_snapshot")]
    memory, snapshot = cs_systems.sweep(cells, out=tmp_path)
    assert (memory.status, snapshot.status) == ("oom", "oom")
    assert memory.results["memory_phases"][0]["phase"] == "built"
    assert memory.results["memory_phases"][-1]["phase"] in ("forward", "backward")
    found = read(tmp_path / snapshot.artifacts["snapshot"])
    assert found.events.device_free_bytes


def test_what_a_blocks_backward_emits_and_frees() -> None:
    record = cs_systems.run(replace(SMALL, profiler="residuals", steps=1))
    for row in record.results["backward_blocks"]:
        assert row["change_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1), row["block"]
    for row in record.results["residual_blocks"]:
        if row["predicted_bytes"] is not None:
            assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01)
