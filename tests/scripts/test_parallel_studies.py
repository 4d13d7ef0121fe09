"""Tests of the explanations of the studies of parallel strategies."""

from __future__ import annotations

import importlib
import re
from typing import Any

from cs_systems.config import RunConfig
from cs_systems.record import RunRecord

NAMES = {
    "data_parallel_variants": "data_parallel_variants",
    "sharded_optimizer": "sharded_optimizer",
    "zero_stage_1": "zero_stage_1",
    "fully_sharded": "fully_sharded",
}


def study(name: str) -> Any:
    return importlib.import_module(NAMES[name]).STUDY


def explained(skeleton: Any, name: str, records: list[RunRecord]) -> str:
    return "\n".join(study(name).explain(skeleton.cells(records)))


def invented(builders: Any, config: RunConfig) -> Any:
    return builders.recorded(builders.ok(config, 0.1, 1e12, 10**9))


def test_data_parallel_variants_compares_predicted_and_measured_best_bucket(skeleton: Any, builders: Any) -> None:
    records = []
    for config in study("data_parallel_variants").full():
        seconds = {"single": 0.04, "ddp_naive": 0.06}.get(config.strategy, 0.05)
        if config.strategy == "ddp_bucketed":
            seconds = {1.0: 0.052, 10.0: 0.046, 100.0: 0.045, 1000.0: 0.049}[config.bucket_size_mb or 0.0]
        records.append(builders.recorded(builders.ok(config, seconds, 1e12, 10**9)))
    explanation = explained(skeleton, "data_parallel_variants", records)
    assert re.search(
        r"on 2 ranks the smallest increase over one rank: ddp_bucketed 100 MB by [45]\.\d+ ms \(1[01]\.\d%", explanation
    )
    assert re.search(r"torch_ddp\S* .*by [ 19.0]+\d* ms \(.* of its step\); ours [45]\.\d+ ms less", explanation)
    assert "over α 20.0 µs, β 200 GB/s against" in explanation
    assert "1 MB is the best as predicted, 100 MB as measured" in explanation
    assert "ddp_naive: a rank is in its collectives for 80.0 ms of a step, 25% of that waiting" in explanation


def test_sharded_optimizer_and_zero_stage_1_compare_memory_and_sent_bytes_with_formulas(
    skeleton: Any, builders: Any
) -> None:
    explanation = explained(
        skeleton, "sharded_optimizer", [invented(builders, config) for config in study("sharded_optimizer").full()]
    )
    assert "medium, zero1_flat: 977 KiB less state on a rank than ddp_bucketed, for " in explanation
    assert "are within 0.00% of the formula in 15 components" in explanation
    explanation = explained(
        skeleton, "zero_stage_1", [invented(builders, config) for config in study("zero_stage_1").full()]
    )
    assert (
        "on 4 ranks a sharded optimizer (ddp_bucketed+zero1) sends 1.000 times the bytes of ZeRO stage 1" in explanation
    )


def test_fully_sharded_compares_fsdp_with_fsdp2(skeleton: Any, builders: Any) -> None:
    explanation = explained(
        skeleton, "fully_sharded", [invented(builders, config) for config in study("fully_sharded").full()]
    )
    assert re.search(r"fsdp takes (1\.0|0\.9)\d\d of FSDP2's step and 1.000 of its peak", explanation)
    assert re.search(r"fsdp: .* in the traces: exposed \+30.0 ms, slower computing \+0 s", explanation)
