"""Origins of records in reports."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.record import Origin, RunRecord, append_record
from cs_systems.report import origins
from cs_systems.report.frame import frame
from tests.report.browser import Page

DATA = Path(__file__).parents[1] / "data"
TRACE, SNAPSHOT = "kineto_h200_step.json.gz", "snapshot_h200_step.pickle.gz"

AT = 1_795_000_000.0


def written(records: list[RunRecord], *made: Origin | None) -> list[RunRecord]:
    return [replace(record, origin=origin) for record, origin in zip(records, made, strict=False)]


def test_each_command_has_a_line_with_its_dates_and_hosts(train_records: list[RunRecord]) -> None:
    made = [
        Origin(AT + 90_000, "cs-systems time --size large"),
        Origin(AT, "cs-systems time --size small", "a"),
        Origin(AT + 60, "cs-systems time --size small", "b"),
        None,
    ]
    assert origins.lines(written(train_records, *made)) == [
        "recorded 2026-11-18 11:06 to 11:07 UTC on a, b by: cs-systems time --size small",
        "recorded 2026-11-19 12:06 UTC by: cs-systems time --size large",
    ]
    assert origins.lines(written(train_records, Origin(AT, None))) == ["recorded 2026-11-18 11:06 UTC"]
    assert origins.lines(written(train_records, None)) == []
    several = [Origin(AT + number, f"command {number}") for number in range(5)]
    assert origins.lines(written(train_records, *several))[3] == "and by 2 more commands, which the records hold"


def test_report_ends_with_the_origin(
    train_records: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for record in written(train_records, Origin(AT, "cs-systems time --out 'a|b'")):
        append_record(tmp_path, record)
    line = "recorded 2026-11-18 11:06 UTC by: cs-systems time --out 'a|b'\n"
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{line}")
    assert main(["report", str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{line.replace('|', chr(92) + '|')}")
    assert main(["report", str(tmp_path), "--columns", "size", "date", "command", "host", "--format", "csv"]) == 0
    assert (
        capsys.readouterr().out == "size,date,command,host\nsmall,2026-11-18 11:06:40Z,cs-systems time --out 'a|b',\n"
    )
    assert main(["compare", str(tmp_path), str(tmp_path), "--format", "html"]) == 0
    assert line.rstrip() in Page(capsys.readouterr().out).text


def test_old_records_have_no_date(train_records: list[RunRecord]) -> None:
    assert frame(train_records)[["date", "command", "host"]].isna().all(axis=None)


@pytest.mark.parametrize(("command", "name"), [("analyze", TRACE), ("snapshot", SNAPSHOT)])
def test_trace_and_snapshot_state_their_origin(
    command: str, name: str, train_records: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record next to the file knows the command; a file without one states when it was recorded."""
    shutil.copy(DATA / name, tmp_path)

    def shown(*options: str) -> str:
        assert main([command, str(tmp_path / name), *options]) == 0
        return capsys.readouterr().out

    own = {TRACE: "recorded 2026-11-20 10:59 UTC", SNAPSHOT: "recorded 2026-11-20 11:00 UTC"}[name]
    assert shown().count(f"\n{own}\n") == 1
    assert own in Page(shown("--format", "html")).text
    (record,) = written(train_records, Origin(AT, "cs-systems profile --size small", "a"))
    append_record(tmp_path, replace(record, artifacts={"file": name}))
    line = "recorded 2026-11-18 11:06 UTC on a by: cs-systems profile --size small"
    assert shown().count(f"\n{line}\n") == 1
    assert line in Page(shown("--format", "html")).text
    shutil.copy(tmp_path / name, tmp_path / f"b-{name}")
    assert main([command, str(tmp_path / name), str(tmp_path / f"b-{name}"), "--format", "markdown"]) == 0
    assert line in (text := capsys.readouterr().out)
    assert own in text


def test_time_of_a_file_by_another_clock_is_not_shown(tmp_path: Path) -> None:
    times = (None, 12.0, -1.0, float("nan"), 1e18, AT)
    assert [origins.of_file(tmp_path / "t.json", at) for at in times] == [[]] * 5 + [["recorded 2026-11-18 11:06 UTC"]]
    (tmp_path / "records.jsonl").write_text("no record\n")
    assert origins.of_file(tmp_path / "t.json", AT) == ["recorded 2026-11-18 11:06 UTC"]
