"""Cells to keep, their order, and speed-ups: --where, --sort and --relative-to of `report`."""

import re
from pathlib import Path

import pytest

from cs_systems.config import ConfigError, RunConfig, preset
from cs_systems.record import RunRecord
from cs_systems.report.tables.records import tables
from cs_systems.report.tables.selection import select
from tests.report.conftest import Build

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ('attention == "naive"', 6),
        ('attention in ["naive", "sdpa_flash"]', 12),
        ('attention == ["naive", "sdpa_flash"]', 12),
        ('size != "small" and context_length == 256', 4),
        ('size != "small" & context_length == 256', 4),
        ('(size == "small" or size == "large") and not context_length == 256', 4),
        ('status == "oom"', 1),
        ("median_ms < 20", 1),
        ("median_ms < 2e1", 1),
        ("step.median_ms < 20", 1),
        ('step >= 0.02 and size == "small"', 3),
        ('256 < context_length <= 1024 and status == "ok"', 5),
        ("median_ms.isna()", 1),
        ("median_ms.notna() and context_length / 2 > 128", 5),
        ('attention.str.contains("flash")', 6),
        ('not attention.str.contains("FLASH", case=False)', 6),
        ("context_length.isin([256, 512]) and batch_size.between(1, 1000)", 6),
    ],
)
def test_where_keeps_cells_that_meet_the_condition(condition: str, count: int, train_records: list[RunRecord]) -> None:
    assert len(select(train_records, condition)) == count


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            'attention == "naiv"',
            "no record meets --where 'attention == \"naiv\"'; change it to fit the records' values "
            "(attention: naive, sdpa_flash)",
        ),
        ('median_ms == 1 and size == "xl"', "(median_ms: "),
        ("tp_degree == 2", "(tp_degree: unknown)"),
        (
            'atention == "naive"',
            "unknown column 'atention'; did you mean attention or attention_version? Put text into quotes: \"atenti",
        ),
        ("attention == naive", "unknown column 'naive'; put text into quotes: \"naive\""),
        (
            "attention=naive",
            "--where 'attention=naive' is not a condition; write a condition as for DataFrame.query, such",
        ),
        ("median_ms =< 3", "is not a condition"),
        ("", "is not a condition"),
        ("size < 3", "--where 'size < 3' cannot be evaluated (TypeError: "),
        ("median_ms", "--where 'median_ms' is not true or false for a record; write a condition as for"),
        ("3", "is not true or false"),
    ],
)
def test_malformed_condition_is_rejected_with_remedy(
    condition: str, message: str, train_records: list[RunRecord]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        select(train_records, condition)


@pytest.mark.parametrize(
    "condition",
    [
        '@__import__("os").mkdir("made")',
        '__import__("os").mkdir("made")',
        "@pd",
        "attention.__class__",
        "attention.str.__class__.__mro__",
        "().__class__",
        '"".format.__globals__',
        'attention.to_csv("made")',
        'attention.str.join("made")',
        "attention.isna.__self__",
        '`attention` == "naive"',
        "[x for x in attention]",
        "(lambda: attention)()",
        "sqrt(median_ms) < 3",
        "attention[0]",
        "9**9**9",
        "(attention := 3)",
        'f"{attention}"',
        "not " * 500 + "attention",
        "(" * 500,
    ],
)
def test_condition_can_access_only_columns(
    condition: str, train_records: list[RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--where "):
        select(train_records, condition)
    assert not [*tmp_path.iterdir()]


def test_sort_orders_rows_by_any_column(train_records: list[RunRecord]) -> None:
    for sort in ("step", "median_ms:desc"):
        (table,) = tables(train_records, sort=sort, columns=["median_ms"])
        known = [value for value in table.columns[0].values if value is not None]
        assert known == sorted(known, reverse=":" in sort)
        assert table.columns[0].values[-1] is None, "a cell without a number is the last"
    with pytest.raises(ConfigError, match="order of --sort"):
        tables(train_records, sort="step:down")


def test_heading_names_its_column_where_the_column_of_that_name_is_unknown(build: Build) -> None:
    records = [build(RunConfig(batch_size=n), 0.01 * n, 1e12, 10**9) for n in (1, 2)]
    assert [record.config["batch_size"] for record in select(records, "batch == 2")] == [2]
    (table,) = tables(records, columns=["batch", "median_ms"], sort="batch:desc", relative_to="batch=1")
    columns = {column.title: column.cells for column in table.columns}
    assert columns["batch"] == ("2", "1")
    assert columns["speed-up"] == ("0.50×", "1")


def test_relative_to_shows_speedup_over_the_same_cell(train_records: list[RunRecord], build: Build) -> None:
    (table,) = tables(train_records, relative_to="attention=naive")
    columns = {column.name: column for column in table.columns}
    rows = dict(
        zip(
            zip(*(columns[n].cells for n in ("size", "context_length", "attention")), strict=True),
            zip(columns["speedup"].cells, columns["speedup_range"].values, strict=True),
            strict=True,
        )
    )
    assert rows["small", "256", "naive"][0] == "1"
    assert rows["small", "256", "sdpa_flash"][0] == "1.25×"
    low, high = rows["small", "256", "sdpa_flash"][1]
    assert low < 1.25 < high
    assert rows["large", "1024", "sdpa_flash"][0] == "–", "its baseline ran out of memory"
    assert "speed-up: median step of the cell with attention=naive over this cell's" in columns["speedup"].legend
    twice = [build(RunConfig(batch_size=n), 0.01 * n, 1e12, 10**9) for n in (1, 2)]
    (table,) = tables(twice, relative_to="batch_size=1")
    assert [c.cells for c in table.columns if c.name == "speedup"] == [("1", "0.50×")]
    twice = [build(RunConfig(model=preset("tiny", context_length=n)), 1e-4 * n, 1e12, 10**9) for n in (64, 128)]
    (table,) = tables(twice, relative_to="ctx=64")  # the heading of the column
    assert [c.cells for c in table.columns if c.name == "speedup"] == [("1", "0.50×")]


def test_relative_to_rejects_a_condition_that_selects_no_baseline(train_records: list[RunRecord]) -> None:
    for wrong, message in (
        ("attention", "--relative-to 'attention' has no setting and value; write it as attention=naive"),
        (
            "attention=flex",
            r"no cell of train_step meets --relative-to 'attention=flex'; .* of attention \(naive, sdpa_flash\), or",
        ),
        ("mfu=0", "'mfu' is not a setting by which cells are compared; use a setting such as attention, precision, "),
        ("attention!=naive", "--relative-to 'attention!=naive' has no setting and value; write it as att"),
        ("attention==naive", "--relative-to 'attention==naive' has no setting and value"),
        ("device_name=NVIDIA H200", "'device_name' is not a setting by which cells are compared"),
    ):
        with pytest.raises(ConfigError, match=message):
            tables(train_records, relative_to=wrong)
