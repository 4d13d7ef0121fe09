"""The predicted peak of a rank, against what H200s held: every committed cell whose memory was read stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems import plugins
from cs_systems.attention import AttentionBackend
from cs_systems.config import RunConfig
from cs_systems.device import resolve
from cs_systems.formulas.memory_model import step_memory
from cs_systems.formulas.parallel_memory import step_memory_of_a_rank
from cs_systems.record import RunRecord, read_records
from cs_systems.workloads._training import strategy_of
from cs_systems.workloads.train_step import _attention_call

PROFILES = Path(__file__).parents[2] / "profiles"
STUDIES = ("a4_fully_sharded", "c15_sharded_optimizer", "c16_zero_stage1")


def read(study: str) -> list[RunRecord]:
    records = [record for record in read_records(PROFILES / study)[0] if record.run_config.profiler == "rank_memory"]
    assert len({record.run_config.strategy for record in records}) > 3
    return records


def predicted_bytes(config: RunConfig) -> int:
    backend: AttentionBackend = plugins.get("attention", config.attention)
    whole = step_memory(config, backend.algorithm(_attention_call(config, resolve("cpu"))))
    strategy = strategy_of(config)
    return step_memory_of_a_rank(whole, strategy.splits, config.world_size, strategy.buckets).peak_bytes


@pytest.mark.parametrize("study", STUDIES)
def test_it_is_within_five_percent(study: str) -> None:
    for record in read(study):
        assert record.measurement is not None
        held = record.measurement.peak_allocated_bytes
        assert held is not None
        config = record.run_config
        off = predicted_bytes(config) / held - 1
        assert abs(off) < 0.05, f"{config.strategy} on {config.world_size} of {config.model.label}: {off:+.1%}"
