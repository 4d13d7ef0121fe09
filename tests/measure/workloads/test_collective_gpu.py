"""Collectives between two GPUs: every one runs on NCCL, and small calls are not launch-bound."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.config import RunConfig
from cs_systems.core.collectives import COLLECTIVES, CollectiveShape
from cs_systems.measure.runtime.sweep import sweep
from cs_systems.record import RunRecord
from cs_systems.report import collectives

SIZES, DTYPES = (1024, 16 * 2**20), ("fp32", "bf16")


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    import torch

    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 CUDA devices, there is {count}")
    shapes = [CollectiveShape(c, n, d, calls=20) for c in COLLECTIVES for d in DTYPES for n in SIZES]
    base: dict[str, Any] = {"workload": "collective", "device": "cuda", "world_size": 2, "warmup": 3, "steps": 5}
    return list(sweep([RunConfig(collective=shape, **base) for shape in shapes]))


@pytest.mark.gpu
def test_every_collective_runs_on_nccl(records: list[RunRecord]) -> None:
    assert [(r.status, r.reason) for r in records] == [("ok", None)] * len(COLLECTIVES) * len(SIZES) * len(DTYPES)
    for record in records:
        (call,) = record.results["ran"]
        shape = record.run_config.collective
        assert shape is not None
        assert call["backend"].startswith("nccl ")
        assert max(call["sent_bytes"], call["received_bytes"]) == shape.size_bytes
        assert all(value > 0 for value in record.results["setup"][0].values())


@pytest.mark.gpu
def test_launches_are_queued_before_the_calls(records: list[RunRecord]) -> None:
    for record in records:
        assert record.measurement is not None
        assert record.measurement.phase_names() == ("skew", "queue", "transfer")
        assert "launch-bound" not in {caveat.code for caveat in record.warnings}


@pytest.mark.gpu
def test_bandwidth_does_not_exceed_the_link(records: list[RunRecord]) -> None:
    """Check rates where the link is known; only a switch that reduces data itself could exceed it."""
    shares = [collectives.step(record)["link_share"] for record in records]
    assert all(share is None or 0 < share < 1 for share in shares)
