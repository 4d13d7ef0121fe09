"""Tests of a recorder on a GPU: events at the boundaries, kernels by phase, a snapshot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from cs_systems import Recorder
from cs_systems.analysis.comparison.loop_findings import WHOLE_LOOP
from cs_systems.machine.device import resolve

pytestmark = pytest.mark.gpu


def test_loop_on_a_gpu_has_a_timing_a_profile_and_a_snapshot(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Recorder(model, optimizer, out=tmp_path, warmup=3, steps=5, snapshot=True) as recorder:
        for _ in range(20):
            inputs = torch.randn(64, 512)
            with recorder.step():
                optimizer.zero_grad()
                loss = model(inputs.cuda(non_blocking=True)).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                loss.item()
    clean, profiled, snapshot = recorder.records
    assert [r.status for r in recorder.records] == ["ok", "ok", "ok"]
    assert clean.measurement is not None
    assert clean.measurement.clock == "cuda_event"
    assert clean.measurement.peak_allocated_bytes
    for sample in clean.measurement.timed:
        assert {"input", "copy", "forward", "backward", "clip", "optimizer", "host_sync"} <= {*sample.phases_s}
        assert sum(sample.phases_s.values()) == pytest.approx(sample.wall_s, rel=0.2, abs=1e-3)
    (coverage,) = profiled.results["coverage"]
    assert coverage["steps"] == 3
    assert coverage["phase_coverage"] > 0.95
    assert {"forward", "backward", "clip", "optimizer"} <= {row["phase"] for row in profiled.results["phases"]}
    assert (tmp_path / snapshot.artifacts["snapshot"]).is_file()


def test_input_hidden_behind_the_gpu_adds_no_time_to_the_step(tmp_path: Path) -> None:
    """The loop never waits for the device, so the recorder must not make it wait."""
    model = nn.Linear(64, 64).cuda()
    with Recorder(model, out=tmp_path, warmup=3, steps=8, profile="none") as recorder:
        for _ in range(11):
            time.sleep(0.01)
            with recorder.step():
                model(torch.ones(1, 64, device="cuda")).sum().backward()
                resolve("cuda").occupy(0.03)
    (record,) = recorder.records
    assert record.measurement is not None
    for sample in record.measurement.timed:
        assert sample.phases_s["input"] < 0.005
        assert sample.wall_s == pytest.approx(sum(sample.phases_s.values()))
    lag_s = record.measurement.timed[-1].lag_s
    assert lag_s is not None
    assert lag_s["other"] > 0.05, "the device is steps behind the host"


def test_steps_of_a_loop_ahead_of_the_gpu_are_timed_by_the_device(tmp_path: Path) -> None:
    """The host is many steps ahead, sleeps in one of them, which the queue hides, and waits at the end."""
    model = nn.Linear(64, 64).cuda()
    with Recorder(model, out=tmp_path, warmup=3, steps=70, profile="none", stacks=False) as recorder:
        for step in range(73):
            with recorder.step():
                model(torch.ones(1, 64, device="cuda")).sum().backward()
                resolve("cuda").occupy(0.01)
            if step == 60:
                time.sleep(0.06)
    (row,) = WHOLE_LOOP.of(recorder.records[-1].results)
    assert (row["kind"], row["steps"]) == ("usual", 72)  # the first one begins with the recording
    assert row["total_s"] == pytest.approx(72 * row["median_s"], rel=0.1)
