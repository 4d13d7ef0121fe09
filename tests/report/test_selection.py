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
    ("conditions", "count"),
    [
        (["attention=naive"], 6),
        (["attention=naive,sdpa_flash"], 12),
        (["attention=naive", "sdpa_flash"], 12),
        (["size!=small", "context_length=256"], 4),
        (["status=oom"], 1),
        (["median_ms<20"], 1),
        (["median_ms<2E1"], 1),
        (["step>=0.02", "size=small"], 3),
        (["context_length>256", "status=ok"], 5),
    ],
)
def test_where_keeps_cells_that_meet_every_condition(
    conditions: list[str], count: int, train_records: list[RunRecord]
) -> None:
    assert len(select(train_records, conditions)) == count


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (
            ["attention=naive", "size=xxl"],
            "no record that meets 'attention=naive' also meets --where 'size=xxl'; change this condition to "
            "fit their values of size: ",
        ),
        (
            ["attention=naiv"],
            "no record meets --where 'attention=naiv'; change this condition to fit the values of attention: naive, "
            "sdpa_flash",
        ),
        (["median_ms=1"], "; change this condition to fit the values of median_ms: about "),
        (["tp_degree=2"], "'tp_degree=2'; leave out this condition, because tp_degree is unknown"),
        (["atention=naive"], "did you mean attention"),
        (
            ["naive"],
            "--where 'naive' is not a condition; write COLUMN=VALUE, such as attention=naive (other operators: !=, <=",
        ),
        (["attention==naive"], "'==' is not an operator of --where in 'attention==naive'; write attention=naive"),
        (["median_ms=<3"], "'=<' is not an operator of --where in 'median_ms=<3'; write median_ms<=3"),
        (["size~=xl"], "'~=' is not an operator of --where in 'size~=xl'; use =, !=, <=, >=, < or >"),
        (
            ["size<xl"],
            "< in --where 'size<xl' compares numbers, but 'xl' is not one number; give a number such as 1000",
        ),
        (["median_ms<1.2.3"], "but '1.2.3' is not one number; give a number such as 1000"),
        (["median_ms<1,000"], "but '1,000' is not one number; give a number such as 1000"),
    ],
)
def test_malformed_condition_is_rejected_with_remedy(
    conditions: list[str], message: str, train_records: list[RunRecord]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        select(train_records, conditions)


def test_condition_may_have_spaces(train_records: list[RunRecord]) -> None:
    assert select(train_records, ["attention = naive"]) == select(train_records, ["attention=naive"])


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
    assert [record.config["batch_size"] for record in select(records, ["batch=2"])] == [2]
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


def test_relative_to_rejects_what_is_no_baseline(train_records: list[RunRecord]) -> None:
    for wrong, message in (
        ("attention", "--relative-to 'attention' is not a condition; write COLUMN=VALUE, such as attention=naive"),
        (
            "attention=flex",
            r"no cell of train_step meets --relative-to 'attention=flex'; .* of attention \(naive, sdpa_flash\), or",
        ),
        ("mfu=0", "'mfu' is not a setting by which cells are compared; use a setting such as attention, precision, "),
        ("attention!=naive", "'!=' is not an operator of --relative-to in 'attention!=naive'; write attention=naive"),
        ("device_name=NVIDIA H200", "'device_name' is not a setting by which cells are compared"),
    ):
        with pytest.raises(ConfigError, match=message):
            tables(train_records, relative_to=wrong)
