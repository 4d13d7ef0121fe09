"""Tests of records with extreme or malformed values, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import main
from cs_systems.record import RunRecord, append_record
from cs_systems.report.figures import plot
from cs_systems.report.pages import records as html
from cs_systems.report.reading import some_records
from cs_systems.report.tables.formats import FORMATS
from cs_systems.report.tables.records import render, tables
from tests.report.conftest import failed, ok, train_config

LARGE = 258_000_000_000_000_000_000_000_000  # bytes


@pytest.fixture(scope="module")
def beyond_64_bits() -> list[RunRecord]:
    refused = failed(train_config("tiny", context=10**12), "oom", "out of memory", LARGE)
    return [refused, ok(train_config("tiny"), 0.01, 1e9, 10**6)]


@pytest.mark.parametrize("format", FORMATS)
def test_prediction_beyond_64_bits_is_in_every_format(format: str, beyond_64_bits: list[RunRecord]) -> None:
    assert "oom" in render(beyond_64_bits, format)
    columns = render(beyond_64_bits, format, columns=["size", "predicted_peak_bytes"])
    assert "2.58e+26" in columns if format == "csv" else "e+" in columns


def test_prediction_beyond_64_bits_is_in_page_and_figure(beyond_64_bits: list[RunRecord]) -> None:
    records = beyond_64_bits
    assert "oom: predicted 2.40e+17 GiB" in tables(records)[0].columns[-1].cells
    assert "2.40e+17 GiB" in html.render(records)
    assert plot.svg(records, plot.kinds(records)[0])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("repeat",), "1", "repeat is '1', not a whole number"),
        (("status",), "fine", "status is 'fine'"),
        (("reason",), ["x"], "reason is a list, not a text or null"),
        (("config",), {}, "config lacks model"),
        (("config", "profiler"), [], r"config.profiler is \[\]"),
        (("config", "model", "d_model"), "64", "config.model.d_model is '64'"),
        (("environment", "device_name"), 7, "record.environment.device_name is 7"),
        (("measurement", "setup_s"), "long", "record.measurement.setup_s is 'long'"),
        (("results", "ran", 0, "optimizer"), [1], r"optimizer in table ran is \[1\]"),
        (("artifacts",), {"trace": 5}, "record.artifacts.trace is 5"),
    ],
)
def test_malformed_value_is_named_with_line_or_field(
    tmp_path: Path, path: tuple[Any, ...], value: object, message: str
) -> None:
    data = json.loads(ok(train_config("small"), 0.01, 1e12, 10**9).to_json())
    parent = data
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    (tmp_path / "records.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(ValueError, match=f"malformed: {message}; delete the line.*, or measure again into another"):
        some_records(tmp_path)


def test_extreme_times_are_shown_or_rejected(tmp_path: Path, train_records: list[RunRecord]) -> None:
    for record in train_records[:2]:
        append_record(tmp_path, record)
    text = (tmp_path / "records.jsonl").read_text()
    data = [json.loads(line) for line in text.splitlines()]
    for value in (1e308, -1.0, 0.0, float("inf"), float("nan")):
        samples = data[0]["measurement"]["samples"]
        samples["wall_s"] = [value] * len(samples["wall_s"])
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        for format in (*FORMATS, "html"):
            assert main(["report", str(tmp_path), "--format", format, "--output", str(tmp_path / "out")]) in (0, 2)


def test_record_is_not_drawn_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `repr` of a record is a table, which takes 60 ms to make."""
    append_record(tmp_path, ok(train_config("tiny"), 0.01, 1e9, 10**6))

    def drawn(record: RunRecord) -> str:
        raise AssertionError("a table was made")

    monkeypatch.setattr(RunRecord, "__repr__", drawn)
    assert len(some_records(tmp_path)[0]) == 1
