"""The value of a cell: one and the same median in every output, for rounds that differ."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.analysis.comparison import precision, strategies
from cs_systems.analysis.comparison.runs import compare, speedups
from cs_systems.analysis.diagnosis._evidence import of_records
from cs_systems.cli import main
from cs_systems.cli._progress import outcome
from cs_systems.config import Precision, RunConfig
from cs_systems.core import statistics
from cs_systems.record import RunRecord, append_record, median_s, read_records
from cs_systems.report.figures import plot
from cs_systems.report.frame import frame
from cs_systems.report.pages import records as page
from cs_systems.report.tables.records import render, tables
from tests.report.conftest import Build, train_config

PROFILES = Path(__file__).parent.parent.parent / "profiles"
ROUNDS_S = (0.1, 0.11, 0.1234, 0.2, 0.3)  # their mean on a log scale, with or without extremes, is another value
STEPS = 15


def skewed(build: Build, config: RunConfig, scale: float = 1.0, repeat: int = 0) -> RunRecord:
    """Return a record with rounds that differ: the median of its steps is `scale` times 0.1234 s."""
    record = build(replace(config, steps=STEPS, rounds=5, warmup=0), 1.0, 1e12, 10**9, repeat=repeat)
    assert record.measurement
    samples = tuple(
        replace(s, wall_s=scale * ROUNDS_S[s.round] * (1 + 0.001 * (i % 3 - 1)), phases_s={"forward": 0.01})
        for i, s in enumerate(record.measurement.samples)
    )
    return replace(record, measurement=replace(record.measurement, samples=samples))


@pytest.fixture(name="pair")
def _pair(build: Build) -> list[RunRecord]:
    """Return a cell in fp32 and in bf16, which takes half the time."""
    return [
        skewed(build, train_config("small", precision=each), scale)
        for each, scale in ((Precision.FP32, 1.0), (Precision.BF16, 0.5))
    ]


def _command(command: str, folders: list[Path], *words: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main([command, *map(str, folders), *words]) == 0
    return out.getvalue()


def _of_csv(records: list[RunRecord]) -> float:
    rows = csv.DictReader(io.StringIO(render(records[:1], "csv")))
    return float(next(row["median_s"] for row in rows if row["phase"] == "step"))


def _of_figure(records: list[RunRecord]) -> float:
    config = records[0].run_config
    longer = replace(config, model=replace(config.model, context_length=2 * config.model.context_length))
    drawn = plot.figure([records[0], replace(records[0], config=longer.to_dict(), key="longer")], "time")
    return float(drawn.axes[0].lines[0].get_ydata()[0]) / 1e3


def _of_text(text: str) -> float:
    """Return the milliseconds 123 or 123.4 that a text for people shows, in seconds."""
    return float(re.search(r"\b12\d(\.\d+)?\b", text)[0]) / 1e3  # type: ignore[index]


NUMBERS: dict[str, Callable[[list[RunRecord]], float | None]] = {
    "record.frame": lambda records: float(records[0].frame().set_index("phase").loc["step", "median_s"]),
    "Measurement.median_s": lambda records: records[0].measurement and records[0].measurement.median_s(),
    "csv": _of_csv,
    "figure": _of_figure,
    "compare": lambda records: compare(records[:1], records[1:]).rows[0]["a_median_s"],
    "compare, candidate": lambda records: compare(records[1:], records[:1]).rows[0]["b_median_s"],
    "--relative-to": lambda records: speedups(records, "precision", [True, False])[1].a,  # type: ignore[union-attr]
    "precision": lambda records: precision.gains({Precision.FP32: records[:1]})[0]["step_s"],
    "strategies": lambda records: strategies.steps(records[:1])[0]["step_s"],
    "diagnoses": lambda records: of_records(records[:1]).step_s,
}
TEXTS: dict[str, Callable[[list[RunRecord]], str]] = {
    "table": lambda records: render(records[:1]),
    "table, markdown": lambda records: render(records[:1], "markdown"),
    "prompt": lambda records: repr(records[0]),
    "progress": lambda records: outcome(replace(records[0], warnings=())),
    "page": lambda records: page.render(records[:1]).partition("<tbody>")[2],
    "--relative-to": lambda records: render(records, relative_to="precision=bf16"),
}


@pytest.mark.parametrize("output", NUMBERS)
def test_output_has_the_median_of_all_steps(output: str, pair: list[RunRecord]) -> None:
    assert pair[0].measurement
    expected = median(pair[0].measurement.durations_s("step"))
    assert expected == pytest.approx(0.1234, rel=1e-3)
    assert NUMBERS[output](pair) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("output", TEXTS)
def test_text_shows_the_median_of_all_steps(output: str, pair: list[RunRecord]) -> None:
    assert _of_text(TEXTS[output](pair)) == pytest.approx(0.1234, rel=5e-3)


@pytest.mark.parametrize(("command", "words"), [("compare", ()), ("compare", ("--format", "csv")), ("report", ())])
def test_command_shows_the_median_of_all_steps(
    command: str, words: tuple[str, ...], pair: list[RunRecord], tmp_path: Path
) -> None:
    folders = [tmp_path / record.config["precision"] for record in pair]
    for folder, record in zip(folders, pair, strict=True):
        folder.mkdir()
        append_record(folder, record)
    text = _command(command, folders if command == "compare" else folders[:1], *words)
    assert "typical" not in text
    assert _of_text(text.replace("0.123", "123.")) == pytest.approx(0.1234, rel=5e-3)


def test_ratio_and_speedup_are_computed_from_medians(pair: list[RunRecord]) -> None:
    (row,) = compare(pair[:1], pair[1:]).rows
    assert row["ratio"] == row["b_median_s"] / row["a_median_s"] == pytest.approx(0.5, rel=1e-9)
    (table,) = tables(pair, relative_to="precision=fp32")
    columns = {column.name: column.values for column in table.columns}
    first, second = columns["median_s"]
    assert columns["speedup"][1] == pytest.approx(first / second)


def test_repeats_of_a_cell_are_taken_together(build: Build) -> None:
    config = train_config("small")
    a, b = ([skewed(build, config, s * scale, i) for i, s in enumerate((1.0, 1.5, 1.1))] for scale in (1.0, 2.0))
    (row,) = compare(a, b).rows
    steps = [step for record in a if record.measurement for step in record.measurement.durations_s("step")]
    assert row["a_median_s"] == median_s(a) == median(steps)
    assert row["b_median_s"] == median_s(b) == pytest.approx(2 * median(steps))
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]


@given(
    st.lists(st.lists(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4), min_size=2, max_size=6), min_size=2),
)
def test_interval_contains_the_ratio_of_medians(processes: list[list[list[float]]]) -> None:
    """Rounds may differ by anything, as those of a machine with one slow round."""
    half = len(processes) // 2
    found = statistics.ratio_interval(processes[:half], processes[half:])
    assert found.ratio == statistics.median(processes[half:]) / statistics.median(processes[:half])
    if found.low is not None and found.high is not None:
        assert found.low <= found.ratio <= found.high
    low, high, _ = statistics.interval(processes[0])
    if low is not None and high is not None:
        assert low <= statistics.median(processes[:1]) * (1 + 1e-12)
        assert high >= statistics.median(processes[:1]) * (1 - 1e-12)


def test_committed_records_are_read_and_compared() -> None:
    records = [r for r in read_records(PROFILES / "step_time")[0] if r.config["profiler"] == "none"]
    (table,) = tables(records, relative_to="precision=fp32")
    columns = {column.name: column for column in table.columns}
    cells = zip(*(columns[n].cells for n in ("size", "context_length")), strict=True)
    by_cell: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for cell, time_s, gain in zip(cells, columns["median_s"].values, columns["speedup"].values, strict=True):
        by_cell.setdefault(cell, []).append((time_s, gain))
    assert len(by_cell) == 24
    for (fp32_s, _), (bf16_s, gain) in by_cell.values():
        assert gain == pytest.approx(fp32_s / bf16_s, rel=1e-9)


def test_step_under_ncu_has_no_time() -> None:
    """ncu replays each kernel alone, with cold caches: the step of its record is not that of the program."""
    (record,) = read_records(PROFILES / "counters_flash_triton")[0]
    assert record.config["profiler"] == "ncu"
    assert record.measurement is not None
    shown = render([record])
    assert "under ncu, not timed" in shown
    assert "to see the counters: cs-systems analyze FILE.ncu-rep" in shown
    assert "tokens/s" not in shown
    data = frame([record])
    assert data["phase"].tolist() == ["step"]
    assert data[["median_s", "tokens_per_s", "mfu"]].isna().all(axis=None)
    assert data["peak_allocated_bytes"].notna().all()
    assert outcome(record) == "done"
