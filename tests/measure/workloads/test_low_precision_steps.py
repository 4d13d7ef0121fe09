"""Failing training steps in low precision: an overflow in fp16 and a loss that is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cs_systems
from cs_systems.analysis.comparison.runs import compare
from cs_systems.cli._progress import outcome
from cs_systems.config import PRESETS, ConfigError, Precision, RunConfig
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.record import RunRecord, append_record, read_records
from cs_systems.report.figures.plot import kinds
from cs_systems.report.pages import records as html
from cs_systems.report.tables.records import render

TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, device="cpu", warmup=0, steps=3)


def one_step(made: TrainStep) -> None:
    made.prepare()
    for _, run in made.step():
        run()


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw"])
def test_scaler_skips_overflowing_steps_and_recovers(optimizer: str) -> None:
    made = TrainStep(Cell(replace(TINY, precision=Precision.FP16, optimizer=optimizer)), resolve("cpu"))
    made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # beyond fp16: gradients become inf
    before = [p.detach().clone() for p in made.model.parameters()]
    skipped = 0
    while all(map(torch.equal, before, made.model.parameters())):
        scale = 2.0 ** (40 - skipped)
        one_step(made)
        lost = any(bool((~p.grad.isfinite()).any()) for p in made.model.parameters() if p.grad is not None)
        assert made.scaler.get_scale() == (scale / 2 if lost else scale)
        skipped += lost
        assert skipped < 40, "the scaler never recovered"
    assert 10 < skipped < 40
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())
    one_step(made)
    loss = made.describe()["loss"]
    assert isinstance(loss, float)
    assert 0 < loss < 10


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    """Return the records of a valid step and of one with a loss of NaN, read from a folder."""
    source = tmp_path_factory.mktemp("nan") / "broken.py"
    source.write_text(
        "from cs_systems.model.attention.naive import attention\n\n"
        "def attend(q, k, v, **options):\n    return attention(q, k, v, **options) * float('nan')\n"
    )
    for attention in ("naive", f"{source}:attend"):
        append_record(source.parent, cs_systems.run(replace(TINY, attention=attention), in_process=True))
    return read_records(source.parent)[0]


def test_step_with_nan_loss_has_a_row_without_time(records: list[RunRecord]) -> None:
    valid, broken = records
    assert (valid.is_timing, broken.is_timing) == (True, False)
    assert [w.code for w in broken.warnings if w.code == "nan-loss"] == ["nan-loss"]
    assert broken.measurement is not None
    assert len(broken.measurement.timed) == 3  # the samples stay in the record
    data = cs_systems.run(TINY, in_process=True).frame()
    assert set(data["phase"]) == {"forward", "loss", "backward", "optimizer", "step"}
    (row,) = broken.frame().to_dict("records")
    assert row["status"] == "ok"
    assert "nan-loss" in row["warnings"]
    assert row["median_s"] != row["median_s"]
    assert row["reason"] == (
        "the loss is NaN, so that its times are left out; lower the learning rate or use another precision"
    )
    assert outcome(broken) == "the loss is NaN, so that its times are left out [nan-loss]"


def test_reports_show_no_time_of_step_with_nan_loss(records: list[RunRecord]) -> None:
    table = render(records, "csv", ("attention", "forward.median_ms", "median_ms", "tokens_per_s", "note"))
    valid, broken = table.strip().splitlines()[1:]
    assert valid.startswith("naive,")
    assert ",,,," not in valid
    assert ":attend,,,," in broken
    assert "nan-loss" in broken
    assert "nan-loss (1 cell): the loss is NaN, so that its times are left out → lower the learning rate" in render(
        records, "markdown"
    ).replace("\\", "")
    assert kinds(records[1:]) == []
    assert "nan-loss" in html.render(records)
    assert "nan-loss" in html.render(records[1:])


def test_compare_leaves_out_step_with_nan_loss_with_a_note(records: list[RunRecord]) -> None:
    valid, broken = records
    other: Any = replace(broken, config=valid.config)
    found = compare([valid], [valid, other])
    assert len(found.rows) == 1
    assert "left out: 1 record of the candidate with a loss that is NaN or infinite" in found.doubts
    with pytest.raises(ConfigError, match="no valid timing, because its loss is NaN or infinite; lower the learning"):
        compare([valid], [broken])
