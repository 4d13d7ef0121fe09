"""`analyze` and `snapshot` with several files, a folder or an archive."""

from __future__ import annotations

import csv
import io
import shutil
import zipfile
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.core.printable import shortened, within
from tests.analysis.comparison.test_ranks import ARRIVES_US, write
from tests.analysis.diagnosis.test_memory_rules import FAULTS
from tests.report.browser import Page


@pytest.fixture
def folder(tmp_path: Path, nsys_path: Path, kineto_path: Path, snapshot_path: Path) -> Path:
    (folder := tmp_path / "mixed").mkdir()
    for path, name in ((nsys_path, "a.sqlite"), (kineto_path, "b.json.gz"), (snapshot_path, "c.pickle.gz")):
        shutil.copy(path, folder / name)
    (folder / "broken.json").write_text('{"traceEvents": [{"ph": "X", ')
    (folder / "notes.json").write_text('{"a": 1}')
    return folder


def shown(words: list[object], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_folder_lists_what_each_file_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(["analyze", folder], capsys)
    lines = out.splitlines()
    assert lines[0] == f"{folder} · 4 files"
    assert max(map(len, lines[1:10])) <= 80
    # A line of 80 columns may break even a path.
    assert f"readonewith:cs-systemssnapshot{folder}/c.pickle.gz" in "".join(out.split())
    assert "not listed: 1 other file (no trace, snapshot or records)" in out
    assert "broken.jsonistruncated" in "".join(out.split())
    rows = list(csv.DictReader(io.StringIO(shown(["analyze", folder, "--format", "csv"], capsys))))
    found = [(Path(row["file"]).name, row["format"], row["kernels"], row["steps"], row["command"]) for row in rows]
    assert found == [
        ("a.sqlite", "nsys", "714", "3", "analyze"),
        ("b.json.gz", "kineto", "714", "3", "analyze"),
        ("broken.json", "unreadable", "", "", ""),
        ("c.pickle.gz", "snapshot", "", "", "snapshot"),
    ]


def test_ranks_in_an_archive_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path, rank) for rank in ARRIVES_US]
    with zipfile.ZipFile(archive := tmp_path / "job.zip", "w") as file:
        for path in paths:
            file.write(path, f"traces/{path.name}")
    out = shown(["analyze", archive], capsys)
    answer, _, rest = out.partition("\n\n")
    assert "is transfer between ranks" in answer
    lines = rest.splitlines()
    assert lines[0] == f"{archive} · kineto · 3 ranks of one job · 3 steps"
    assert max(map(len, [*answer.splitlines(), *lines[1:]])) <= 80
    again, _, same = shown(["analyze", *paths], capsys).partition("\n\n")
    assert (again, same.splitlines()[1:]) == (answer, lines[1:])
    rows = list(csv.DictReader(io.StringIO(shown(["analyze", archive, "--table", "ranks", "--format", "csv"], capsys))))
    assert [row["file"] for row in rows] == [f"{archive}:traces/{path.name}" for path in paths]


def test_two_ranks_are_merged_by_analyze_and_compared_by_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [write(tmp_path, rank) for rank in (0, 2)]
    assert "2 of 3 ranks are given (0, 2)" in shown(["analyze", *two], capsys)
    assert "candidate compared with baseline" in shown(["compare", *two], capsys)


def test_table_of_ranks_of_one_trace_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ranks", "collectives", "beside"):
        assert main(["analyze", str(folder / "b.json.gz"), "--table", name]) == 2
        message = f"--table {name} requires the traces of several ranks; give all of them and add --ranks, or choose "
        assert message in capsys.readouterr().err


def test_compare_of_two_snapshots_names_the_command(snapshot_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(snapshot_path), str(snapshot_path)]) == 2
    assert f"compare them with cs-systems snapshot {snapshot_path} {snapshot_path}\n" in capsys.readouterr().err


def test_ranks_listings_and_comparisons_have_pages(
    tmp_path: Path, folder: Path, snapshot_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [write(tmp_path, rank) for rank in range(3)]
    trace = folder / "b.json.gz"
    for words, title, texts in (
        (["analyze", *ranks], f"3 ranks of {tmp_path}/", ["is transfer between ranks", "Ranks, per step"]),
        (
            ["analyze", folder],
            f"Files of {folder}",
            ["files are not known to be ranks of one job", "Contents of the files", "a.sqlite"],
        ),
        (["analyze", trace, trace], "b.json.gz compared with b.json.gz", ["change"]),
        (["compare", trace, trace], "b.json.gz compared with b.json.gz", ["change"]),
        (["snapshot", snapshot_path, snapshot_path], "compared with", ["peak is 204 MiB, as the baseline's"]),
        (["snapshot", *[snapshot_path] * 3], "Memory of 3 snapshots", ["Peaks of the snapshots"]),
    ):
        text = Page(shown([*words, "--format", "html"], capsys)).text
        assert [part for part in (title, *texts) if part not in text] == []


@pytest.mark.parametrize("command", ["analyze", "snapshot"])
def test_open_shows_the_page_in_a_browser(
    command: str, folder: Path, snapshot_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    file = {"analyze": folder / "b.json.gz", "snapshot": snapshot_path}[command]
    shown([command, file, "--open"], capsys)
    assert opened[0].startswith("file:///")
    assert opened[0].endswith(f"/{command}.html")
    shown([command, file, "--open", "--output", tmp_path / "own.html"], capsys)
    assert opened[1] == (tmp_path / "own.html").as_uri()
    assert "<canvas" in (tmp_path / "own.html").read_text()
    words = [command, file, "--open", "--format", "csv"]
    monkeypatch.chdir(tmp_path)
    assert main([str(word) for word in words]) == 2
    assert "--open requires --format html, got --format csv; leave out one of them" in capsys.readouterr().err


def test_shortened_names_of_files_stay_distinct() -> None:
    names = [f"trace_of_a_long_job_name_on_gpu_{rank}_of_the_whole_training_run.json.gz" for rank in (3, 14)]
    short = shortened([*names, "other.json"], 40)
    assert short == [
        "trace_of_a_long_jo…3…aining_run.json.gz",
        "trace_of_a_long_jo…14…aining_run.json.gz",
        "other.json",
    ]
    assert shortened(["a" * 60, "a" * 61], 20) != [within("a" * 60, 20)] * 2


def test_names_that_differ_in_a_long_part_are_shortened_and_numbered() -> None:
    """AMD's products of matrices have names of 400 characters that differ in numbers far from each other."""
    names = [f"Cijk_Alik_Bljk_{number}{'x' * 300}{number}_WS64_WG32_8_1" for number in (1, 2)]
    assert shortened(names, 20) == ["Cijk_Ali…G32_8_1 (1)", "Cijk_Ali…G32_8_1 (2)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["analyze", "FOLDER", "--table", "phases"],
            "5 files at once, which are only listed; give one file, or leave out --table, or add --ranks if the files",
        ),
        (
            ["analyze", "EMPTY/a.ncu-rep", "EMPTY/b.ncu-rep", "--ranks"],
            "applied to 2 files at once, which are only listed; give one file, or leave out --ranks\n",
        ),
        (
            ["analyze", "FOLDER/b.json.gz", "--ranks"],
            "--ranks merges the traces of several ranks, but FOLDER/b.json.gz is of one rank",
        ),
        (["analyze", "none.sqlite", "--ranks"], "none.sqlite does not exist; give a trace file"),
        (["analyze", "FOLDER/broken.json", "--ranks"], "FOLDER/broken.json is truncated"),
        (
            ["analyze", "FOLDER/a.sqlite", "FOLDER/b.json.gz", "--ranks"],
            "the traces cannot be merged as the ranks of one job: FOLDER/a.sqlite",
        ),
        (["analyze", "FOLDER/notes.json", "FOLDER/b.json.gz", "--ranks"], "notes.json is not a trace"),
        (
            ["analyze", "a.json", "b.json", "c.json"],
            "none of the 3 files can be read:\n  a.json does not exist; give a trace file\n  b.json does not",
        ),
        (["analyze", "FOLDER/b.json.gz", "EMPTY"], "EMPTY contains no trace; leave it out"),
        (["snapshot", "FOLDER/c.pickle.gz", "EMPTY"], "EMPTY contains no snapshot; leave it out"),
        (["analyze"], "no file is given; give a trace, the traces of all ranks, a folder or an archive"),
        (
            ["analyze", "--table", "kernels", __file__],
            f"no file is given, because --table took {__file__} as a value; write the files before the options",
        ),
        (["snapshot"], "no file is given; give a snapshot, several, a folder or an archive"),
        (["snapshot", "EMPTY"], "contains no snapshot; give the .pickle that torch.cuda.memory._dump_snapshot() or"),
    ],
)
def test_request_that_does_not_suit_the_files_exits_2(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    real = [word.replace("FOLDER", str(folder)) for word in words]
    assert message.replace("FOLDER", str(folder)) in shown(list(real), capsys, status=2)


def test_ranks_of_one_report_need_its_export(
    tmp_path: Path, nsys_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (report := tmp_path / "a.nsys-rep").write_bytes(b"\x01\x02\x03")
    (nsys := tmp_path / "nsys").write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n/bin/cp {nsys_path} "$2"\n'
    )
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    export = "nsys export -t sqlite --lazy=false --force-overwrite=true a.nsys-rep"
    assert f"--ranks cannot find several ranks inside the report {report}; run `{export}` in its folder and give" in (
        shown(["analyze", report, "--ranks"], capsys, status=2)
    )


def test_snapshots_of_ranks_begin_with_the_causes_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, fault in enumerate(("no_grad", "kept_graphs", "kept_gradients")):
        shutil.copy(FAULTS / f"{fault}.pickle.gz", tmp_path / f"rank{number}.pickle.gz")
    out = shown(["snapshot", tmp_path], capsys)
    words = " ".join(out.split())
    assert words.startswith("1. 1.39 GiB of each step's graph stay alive, 1,389 GiB in 1,000 steps (forward called at")
    assert "6 steps recorded; rank 1 alone): something keeps the loss" in words
    assert "(rank 2 alone): checkpoint each block" in words
    assert "3 snapshots of the ranks of one job, the highest peak first" in words
    rows = csv.DictReader(io.StringIO(shown(["snapshot", tmp_path, "--format", "csv"], capsys)))
    assert [row["file"][-15:] for row in rows] == [f"rank{number}.pickle.gz" for number in (1, 2, 0)]


def test_snapshots_of_a_folder_are_listed_by_their_peaks(
    tmp_path: Path, snapshot_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(snapshot_path, tmp_path / "rank0.pickle.gz")
    shutil.copy(snapshot_path, tmp_path / "rank1.pickle.gz")
    rows = list(csv.DictReader(io.StringIO(shown(["snapshot", tmp_path, "--format", "csv"], capsys))))
    assert [(row["events"], row["peak_bytes"], row["category"]) for row in rows] == [
        ("1356", "213795840", "activations")
    ] * 2
    assert "--top" in shown(["snapshot", tmp_path, "--top", "3"], capsys, status=2)
