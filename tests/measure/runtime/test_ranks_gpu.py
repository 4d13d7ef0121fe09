"""Ranks on two GPUs with NCCL: a failing rank is named and fails only its cell, as with gloo on CPUs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs_systems import sweep
from cs_systems.analysis.comparison.own_code import OWN_CODE
from cs_systems.analysis.comparison.strategies import stages
from cs_systems.config import PRESETS, RunConfig, preset
from tests.measure.runtime.test_ranks_that_die import no_leftover_process, on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_leftover_process")]
__all__ = ["no_leftover_process"]
LIMIT_S = 30.0
TINY = RunConfig(model=PRESETS["tiny"], device="cuda", warmup=1, steps=3)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 CUDA devices, there is {count}")


def test_each_rank_has_a_gpu_and_a_peak() -> None:
    strategies = ("ddp_flat", "ddp_bucketed", "ddp_bucketed+zero1", "zero1_flat")
    for record in sweep([replace(TINY, strategy=name, world_size=2, precision="bf16") for name in strategies]):
        assert (record.status, record.reason) == ("ok", None)
        steps = [row for row in record.results["ranks"] if row["phase"] == "step"]
        assert len(steps) == 2
        assert all(row["peak_allocated_bytes"] > 0 for row in steps)
        assert record.measurement is not None
        assert record.measurement.peak_allocated_bytes == max(row["peak_allocated_bytes"] for row in steps)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("rank_1_is_killed", "killed", "rank 1 on cuda:1 killed by SIGKILL"),
        ("rank_1_raises", "error", "rank 1 on cuda:1: ZeroDivisionError"),
        ("rank_1_runs_out_of_gpu_memory", "oom", "rank 1 on cuda:1: CUDA out of memory"),
        ("rank_1_hangs", "timeout", "rank 1 on cuda:1 kept the others waiting for 10 s: rank 1 on cuda:1 is in hangs"),
    ],
)
def test_failing_rank_is_named(
    name: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cs_systems.measure.runtime.ranks.PATIENCE_S", 10.0)
    began: list[float] = []
    (record,) = sweep(
        [on_ranks(name, device="cuda")], out=tmp_path, on_progress=lambda p: p.config and began.append(time.monotonic())
    )
    assert record.status == status, record.reason
    assert re.match(reason, record.reason or ""), record.reason
    assert time.monotonic() - began[0] < LIMIT_S


def test_ranks_on_one_machine_listen_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = f"{Path(__file__).with_name('disturbing_workloads.py')}:listens"
    (record,) = sweep([RunConfig(workload=workload, device="cuda", warmup=1, steps=3, world_size=2)])
    assert record.status == "ok", record.reason
    addresses = {address for rank in ("0", "1") for address in (tmp_path / rank).read_text().split()}
    assert addresses <= {"0100007F"}, "only 127.0.0.1"


def test_more_ranks_than_gpus_are_unavailable() -> None:
    count = torch.cuda.device_count()
    (record,) = sweep([replace(TINY, strategy="ddp_flat", world_size=count + 1)])
    assert record.status == "unavailable"
    assert (record.reason or "").startswith(f"{count + 1} ranks need one GPU each, but torch sees {count}")


def test_memory_of_each_strategy_is_known_after_building_and_before_and_after_the_update() -> None:
    base = RunConfig(model=preset("small", num_layers=2), device="cuda", warmup=0, steps=2, profiler="rank_memory")
    strategies = ("ddp_naive", "ddp_naive+zero1", "fsdp", "torch_fsdp2")
    found = {}
    for record in sweep([replace(base, strategy=name, world_size=2) for name in strategies]):
        assert record.status == "ok", record.reason
        rows = {row["component"]: row for row in stages([record])}
        if record.run_config.strategy != "torch_fsdp2":  # which keeps units gathered that the formula divides
            assert all(row["off"] < 0.02 for name, row in rows.items() if name != "allocated"), rows
        found[record.run_config.strategy] = rows["allocated"]
    for row in found.values():
        assert 0 < row["built_bytes"] < row["backward_bytes"], "gradients join the parameters"
        assert row["optimizer_bytes"] > row["built_bytes"]
    whole = found["ddp_naive"]
    assert found["ddp_naive+zero1"]["optimizer_bytes"] < whole["optimizer_bytes"]
    for name in ("fsdp", "torch_fsdp2"):
        assert found[name]["built_bytes"] < 0.7 * whole["built_bytes"], name


def test_own_strategies_train_with_own_optimizer_and_loss_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "data" / "own_code")
    own = {"optimizer": "adapters.py:get_adamw_cls", "loss_function": "adapters.py:run_cross_entropy"}
    strategies = ("adapters.py:get_ddp", "adapters.py:get_fsdp", "ddp_naive+adapters.py:get_sharded_optimizer")
    config = replace(TINY, steps=1, steps_s=0.5, **own)  # type: ignore[arg-type]
    for record in sweep([replace(config, strategy=name, world_size=2) for name in strategies]):
        assert record.status == "ok", record.reason
        assert [row["same"] for row in OWN_CODE.of(record.results)] == ["yes", "yes"]
        assert record.measurement is not None
        assert sum(sample.wall_s for sample in record.measurement.timed) > 0.1
        assert len(record.measurement.timed) > 1
