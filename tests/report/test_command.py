"""`cs-systems report`: its tables, page, figures and error messages."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.record import RunRecord, append_record


@pytest.fixture
def folder(tmp_path: Path, train_records: list[RunRecord]) -> Path:
    for record in train_records:
        append_record(tmp_path, record)
    return tmp_path


def test_report_prints_table_of_80_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(folder)]) == 0
    sentences, _, table = capsys.readouterr().out.partition("\n\n")
    assert sentences.startswith("1. 90% of the step is forward and backward in fp32")
    assert table.startswith("train_step on NVIDIA H200")
    assert max(map(len, [*sentences.splitlines(), *table.splitlines()])) <= 80


def test_markdown_begins_with_the_sentences_and_csv_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--format", "markdown"]) == 0
    first, empty, caption, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("1. 90% of the step is forward and backward in fp32")
    assert (empty, caption[:2]) == ("", "**")
    assert main(["report", str(folder), "--format", "csv"]) == 0
    assert "at best" not in capsys.readouterr().out


def test_report_applies_columns_phase_and_pivot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--columns", "size,mfu", "--phase", "forward,backward", "--format", "csv"]) == 0
    commas = capsys.readouterr().out
    assert commas.splitlines()[0] == "size,mfu"
    spaces = ["--columns", "size", "mfu", "--phase", "forward", "backward", "--format", "csv"]
    assert main(["report", str(folder), *spaces]) == 0
    assert capsys.readouterr().out == commas
    assert main(["report", str(folder), "--pivot", "size,context_length:attention:median_ms"]) == 0
    assert "sdpa_flash" in capsys.readouterr().out


def test_report_writes_page_and_figure_into_new_folders(folder: Path) -> None:
    page, figure = folder / "new" / "pages" / "report.html", folder / "drawn" / "figure.svg"
    assert main(["report", str(folder), "--format", "html", "--output", str(page), "--figure", str(figure)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "<svg" in figure.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--output", "--figure"])
def test_unwritable_output_exits_with_2(folder: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    (folder / "figure.svg").mkdir(exist_ok=True)
    for file, remedy in {
        folder / "records.jsonl" / "x.svg": "correct the folder in the path",
        folder / "figure.svg": "name a file in it",
    }.items():
        assert main(["report", str(folder), option, str(file)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"cs-systems: cannot write {file}: ")
        assert error.endswith(f"; {remedy}\n")
    assert main(["report", str(folder), option, str(folder / f"{'x' * 300}.svg")]) == 2
    assert capsys.readouterr().err.endswith(": File name too long; choose a shorter name\n")


def test_figure_of_two_workloads_is_drawn_for_each(
    folder: Path, attention_records: list[RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    for record in attention_records:
        append_record(folder, record)
    first, second = folder / "figure.svg", folder / "figure-2.svg"
    assert main(["report", str(folder), "--figure", str(first)]) == 0
    assert capsys.readouterr().err == f"figure: {first} (train_step)\nfigure: {second} (attention)\n"
    assert "<svg" in second.read_text(encoding="utf-8") != first.read_text(encoding="utf-8")
    assert main(["report", str(folder), "--figure", str(first), "--figure-kind", "phases"]) == 0
    error = capsys.readouterr().err
    assert error == f"figure: {first} (train_step)\nno figure of attention: these records lack its data\n"
    assert main(["report", str(folder), "--figure", str(first), "--figure-kind", "sums"]) == 2
    assert "these records have no data for the figure 'sums'; choose " in capsys.readouterr().err


@pytest.mark.parametrize("format", ["terminal", "csv"])
def test_phase_is_checked_also_without_timed_cells(
    tmp_path: Path, train_records: list[RunRecord], capsys: pytest.CaptureFixture[str], format: str
) -> None:
    append_record(tmp_path, replace(train_records[0], status="oom", measurement=None))
    assert main(["report", str(tmp_path), "--phase", "fwd", "--format", format]) == 2
    assert "unknown phase 'fwd'; did you mean forward? The names are step, input, forward, " in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--phase", "forward", "--format", format]) == 0


def test_page_is_not_printed_into_a_terminal(
    tmp_path: Path,
    train_records: list[RunRecord],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append_record(folder := tmp_path, train_records[0])
    main_end, terminal = os.openpty()
    try:
        with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            for command in (["report", str(folder)], ["analyze", "trace.json"], ["snapshot", "snapshot.pickle"]):
                assert main([*command, "--format", "html"]) == 2
    finally:
        os.close(main_end)
    message = "--format html would print a page into the terminal; add --output FILE.html, or use a pipe"
    assert capsys.readouterr().err.count(message) == 3
    assert main(["report", str(folder), "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_incomplete_record_line_is_named_and_others_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "records.jsonl").open("a") as stream:
        stream.write('{"schema_version": 1, "key"')
    assert main(["report", str(folder)]) == 0
    assert "records.jsonl:13 is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "medain_ms"], "did you mean median"),
        (["--format", "html", "--columns", "size"], "leave out --columns, --pivot and --phase"),
        (["--figure", "figure.bmp"], "its name must end in .svg, .png or .pdf"),
    ],
)
def test_malformed_option_exits_with_2_and_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["report", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_records_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "; give the folder of a run" in capsys.readouterr().err
    (tmp_path / "records.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "has no record yet; repeat the measurement" in capsys.readouterr().err


def test_figure_option_prints_table_only_when_requested(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ["report", str(folder), "--figure", str(tmp_path / "figure.svg")]
    assert main(drawn) == 0
    assert capsys.readouterr().out == ""
    assert main([*drawn, "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("record,")
    assert main([*drawn, "--columns", "sizze"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("cs-systems: unknown column 'sizze'; did you mean size or ")
    assert said.endswith(f"? List the names with cs-systems report {folder} --format csv | head -1")
    assert main([*drawn, "--columns", "foo"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"cs-systems: unknown column 'foo'; list the names with cs-systems report {folder} --format csv | head -1"
    )
