"""Tests of loops with batches of different sizes: tokens/s of all timed steps together, or none, and a caveat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems import Recorder
from cs_systems.config import ConfigError
from cs_systems.measure.recorder._ranks import merged_loop
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.record import RunRecord
from tests.measure.recorder.loops import CLEAN, Ticks, net

BEGIN = "the batches of the timed steps differ in size; "


def recorded(
    out: Path, rows: Sequence[int], *, given: bool = False, model: Any = None, optimizer: Any = None, **options: Any
) -> RunRecord:
    """Record a loop with its first batch as the warm-up; `given`: the loop passes the rows as tokens of each step."""
    model = net() if model is None else model
    with Recorder(model, optimizer, out=out, **CLEAN | {"steps": 4} | options) as recorder:
        for count in rows:
            with recorder.step(tokens=count if given else None):
                model(torch.ones(count, 4)).sum().backward()
                if optimizer is not None and count % 2:  # an even batch accumulates gradients
                    optimizer.step()
    (record,) = recorder.records
    assert record.status == "ok", record.reason
    return record


def rate(record: RunRecord) -> float | None:
    frame = record.frame()
    found = frame[frame["phase"] == "step"]["tokens_per_s"].iloc[0]
    return None if found != found else float(found)


def mixed(record: RunRecord) -> list[str]:
    return [caveat.message for caveat in record.warnings if caveat.code == "mixed-batches"]


def seconds(record: RunRecord) -> float:
    assert record.measurement is not None
    return sum(record.measurement.durations_s("step"))


def test_tokens_of_each_step_give_the_rate_of_all_of_them(tmp_path: Path) -> None:
    record = recorded(tmp_path, [90, 8, 16, 8, 32], given=True)
    assert {name: record.results["ran"][0][name] for name in ("tokens", "timed_tokens")} == {
        "tokens": None,
        "timed_tokens": 64,
    }
    assert rate(record) == pytest.approx(64 / seconds(record))
    assert mixed(record) == [BEGIN + "tokens/s is for all of them together"]


def test_tokens_of_one_step_are_not_used_for_unequal_steps(tmp_path: Path) -> None:
    record = recorded(tmp_path, [8, 8, 16, 8, 32], tokens=8)
    assert (record.results["ran"][0]["tokens"], rate(record)) == (None, None)
    assert mixed(record) == [BEGIN + "tokens=8 does not hold for each of them, so that tokens/s is unknown"]
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "mixed-batches")
    assert caveat.remedy == (
        "compare tokens/s, given by `with recorder.step(tokens=…):`, not times; or pad to one length, and drop the "
        "last short batch"
    )


def test_equal_batches_keep_the_tokens_of_a_step(tmp_path: Path) -> None:
    record = recorded(tmp_path, [90, 8, 8, 8, 8], tokens=1000)  # the warm-up does not count
    assert (record.results["ran"][0]["tokens"], mixed(record)) == (1000, [])
    assert "timed_tokens" not in record.results["ran"][0]
    record = recorded(tmp_path, [8] * 5, given=True)
    assert (record.results["ran"][0]["tokens"], mixed(record)) == (8, [])


def test_samples_of_a_step_are_kept_where_only_their_length_differs(tmp_path: Path) -> None:
    model = nn.Embedding(10, 2)
    with Recorder(model, out=tmp_path, tokens=3, **CLEAN) as recorder:
        for length in (5, 5, 7, 9):
            with recorder.step():
                model(torch.zeros(3, length, dtype=torch.long)).sum().backward()
    (record,) = recorder.records
    assert (record.results["ran"][0]["tokens"], record.results["ran"][0]["timed_tokens"]) == (3, 9)
    assert rate(record) == pytest.approx(9 / seconds(record))
    assert mixed(record) == [BEGIN + "tokens/s is for all of them together"]


def test_tokens_of_accumulated_batches_are_added(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record = recorded(tmp_path, [4, 3, 8, 1, 6, 3], given=True, model=model, optimizer=optimizer, steps=2)
    assert record.results["ran"][0]["tokens"] == 9  # 8 + 1, and 6 + 3
    assert mixed(record) == []


def test_unequal_batches_of_a_loop_without_tokens_are_mentioned(tmp_path: Path) -> None:
    record = recorded(tmp_path, [8, 8, 16, 8, 32])
    assert (rate(record), mixed(record)) == (None, [BEGIN + "the median mixes sizes"])


def test_unequal_batches_of_a_script_are_mentioned(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = ScriptRecorder("script", out=tmp_path, **CLEAN)
    for count in (8, 8, 8, 16, 8, 8):
        model(torch.ones(count, 4)).sum().backward()
        optimizer.step()
    recorder.close()
    assert mixed(recorder.records[0]) == [BEGIN + "the median mixes sizes"]


@pytest.mark.parametrize(
    ("calls", "differ"),
    [
        ([[3], [3, 3], [3]], False),  # a second call in some steps
        ([[4, 4], [4], [4, 4]], False),  # fewer batches are accumulated at the end of an epoch
        ([[4], [4, 2], [4]], False),  # as a penalty on a part of the batch, or the other model of a GAN
        ([[], [4], [4]], False),
        ([[8, 1], [6, 3], [5, 4]], False),  # unequal micro-batches of equal steps
        ([[4], [2], [4]], True),
        ([[4, 4], [4, 2], [4, 4]], True),
        ([[4, 4], [2], [4, 4]], True),
    ],
)
def test_only_shapes_of_batches_make_them_unequal(calls: list[list[int]], differ: bool, tmp_path: Path) -> None:
    model, penalized = net(), torch.ones((), requires_grad=True)
    with Recorder(model, out=tmp_path, **CLEAN | {"warmup": 0}) as recorder:
        for counts in calls:
            with recorder.step():
                sum((model(torch.ones(count, 4)).sum() for count in counts), penalized * 1).backward()
    assert bool(mixed(recorder.records[0])) == differ


@pytest.mark.parametrize("trains", [True, False])
def test_evaluation_in_a_training_loop_does_not_count_as_a_batch(trains: bool, tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN | {"warmup": 0}) as recorder:
        for count in (8, 6, 2):
            with recorder.step():
                with torch.no_grad():
                    model(torch.ones(count, 4))
                if trains:
                    model(torch.ones(4, 4)).sum().backward()
    assert bool(mixed(recorder.records[0])) != trains


def test_unequal_batches_do_not_hide_other_caveats(tmp_path: Path) -> None:
    """Run steps of 1 to 8 clock readings each, so that their times scatter too."""
    model = net()
    with Recorder(model, out=tmp_path, clock=(clock := Ticks()), **CLEAN | {"steps": 8}) as recorder:
        for count in range(1, 10):
            with recorder.step():
                model(torch.ones(count, 4)).sum().backward()
                clock.now += count**3
    assert {"unstable", "mixed-batches"} <= {caveat.code for caveat in recorder.records[0].warnings}


def test_step_that_failed_leaves_no_tokens(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for i in range(6):
            try:
                with recorder.step(tokens=8):
                    model(torch.ones(8, 4)).sum().backward()
                    if i == 2:
                        raise ValueError("handled by the loop")
            except ValueError:
                continue
    assert recorder.records[0].results["ran"][0]["tokens"] == 8


def test_tokens_of_ranks_are_added(tmp_path: Path) -> None:
    ranks = {rank: recorded(tmp_path / str(rank), [9, 8, 16, 8, 32 + rank], given=True) for rank in (0, 1)}
    ranks = {rank: replace(record, config=record.config | {"world_size": 2}) for rank, record in ranks.items()}
    whole = merged_loop(ranks, [])
    assert whole.results["ran"][0]["timed_tokens"] == 64 + 65
    assert rate(whole) == pytest.approx(129 / seconds(whole))
    assert mixed(whole) == [BEGIN + "tokens/s is for all of them together"]
    assert ranks[1].measurement is not None
    shorter = replace(ranks[1], measurement=replace(ranks[1].measurement, samples=ranks[1].measurement.samples[:3]))
    assert rate(merged_loop({0: ranks[0], 1: shorter}, [])) is None


def test_tokens_of_a_step_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    recorder = Recorder(net(), out=tmp_path, tokens=8, **CLEAN)
    with pytest.raises(ConfigError, match=r"tokens= of Recorder and of step\(\) exclude each other; leave out tokens="):
        recorder.step(tokens=8)
    with pytest.raises(ConfigError, match=r"tokens is 1\.5; give the number of tokens or samples of the step, a"):
        Recorder(net(), out=tmp_path, **CLEAN).step(tokens=1.5)  # type: ignore[arg-type]
