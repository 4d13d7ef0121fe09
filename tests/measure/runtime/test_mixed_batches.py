"""Tests of batches of different sizes: rates of all timed steps together, and no numbers of a single batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cs_systems
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.record import RunRecord

MESSAGE = "the batches of the timed steps differ in size; rates are for all of them, and FLOPs were not counted"


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(input_ids))
        return out


def measured(sizes: Sequence[tuple[int, int]], steps: int, **options: Any) -> RunRecord:
    """Measure steps on batches of these sizes, after a warm-up on the first one."""
    batches = [{"input_ids": torch.zeros(size, dtype=torch.long)} for size in sizes]
    record = cs_systems.run(
        model=LanguageModel(), batches=batches, warmup=1, steps=steps, device="cpu", precision="fp32", **options
    )
    assert record.status == "ok", record.reason
    return record


def step_row(record: RunRecord) -> Any:
    frame = record.frame()
    return frame[frame["phase"] == "step"].iloc[0]


def seconds(record: RunRecord) -> float:
    assert record.measurement is not None
    return sum(record.measurement.durations_s("step"))


def codes(record: RunRecord) -> list[str]:
    return [caveat.code for caveat in record.warnings]


def test_rates_of_padded_batches_are_of_all_timed_steps_together() -> None:
    record = measured([(4, 100), (4, 8), (4, 16), (2, 32)], 3)
    (ran,) = record.results["ran"]
    assert (ran["tokens"], ran["samples"], ran["timed_tokens"], ran["timed_samples"]) == (None, None, 160, 10)
    row = step_row(record)
    assert row["tokens_per_s"] == pytest.approx(160 / seconds(record))
    assert row["samples_per_s"] == pytest.approx(10 / seconds(record))
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "mixed-batches")
    assert caveat.message == MESSAGE
    assert (
        caveat.remedy == "compare tokens/s or samples/s, not times; or pad to one length, and drop the last short batch"
    )
    assert "unstable-times" not in [found.code for found in diagnose([record]).diagnoses]


def test_flops_of_a_single_batch_are_not_used_for_unequal_steps() -> None:
    record = measured([(4, 8), (4, 8), (4, 16)], 2)
    assert "cost" not in record.results
    assert "modules" not in record.results
    assert step_row(record)[["model_flops", "model_flops_per_s", "mfu"]].isna().all()


def test_flops_are_counted_on_a_batch_of_the_timed_size() -> None:
    usual, mixed = measured([(4, 8)] * 3, 2), measured([(4, 8), (4, 8), (4, 8), (1, 8)], 2)
    assert mixed.results["cost"] == usual.results["cost"]
    assert "mixed-batches" not in codes(mixed)


def test_flops_are_not_counted_where_no_batch_of_the_timed_size_follows(capsys: pytest.CaptureFixture[str]) -> None:
    record = measured([(4, 8)] * 3 + [(1, 8)] * 6, 2)
    assert "cost" not in record.results
    assert "no FLOPs were counted: the batches after the timed steps have other sizes" in capsys.readouterr().err
    assert (record.results["ran"][0]["tokens"], record.results["ran"][0]["samples"]) == (32, 4)


def test_unequal_micro_batches_of_equal_steps_are_added() -> None:
    record = measured([(4, 8), (2, 8)], 2, accumulate=2)
    (ran,) = record.results["ran"]
    assert (ran["tokens"], ran["samples"]) == (48, 6)
    assert "timed_tokens" not in ran
    assert "mixed-batches" not in codes(record)
    assert step_row(record)["model_flops"] > 0


def test_batch_of_another_size_in_the_warm_up_does_not_count() -> None:
    record = measured([(9, 8), *[(4, 8)] * 9], 3)
    assert record.results["ran"][0]["tokens"] == 32
    assert "mixed-batches" not in codes(record)
