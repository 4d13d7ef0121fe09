"""`analyze` and `snapshot` with several files, a folder or an archive."""

from __future__ import annotations

import csv
import io
import shutil
import zipfile
from pathlib import Path

import pytest

from cs_systems.cli import main
from tests.comparison.test_ranks import ARRIVES_US, write


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
    assert lines[0] == f"{folder} · 4 file(s)"
    assert max(map(len, lines[1:10])) <= 80
    # A line of 80 columns may break even a path.
    assert f"readonewith:cs-systemssnapshot{folder}/c.pickle.gz" in "".join(out.split())
    assert "1 other file(s) are neither traces nor snapshots nor records" in out
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
    assert out.splitlines()[0] == f"{archive} · kineto · 3 ranks of one job · 3 step(s)"
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert out.splitlines()[1:] == shown(["analyze", *paths], capsys).splitlines()[1:]
    rows = list(csv.DictReader(io.StringIO(shown(["analyze", archive, "--table", "ranks", "--format", "csv"], capsys))))
    assert [row["file"] for row in rows] == [f"{archive}:traces/{path.name}" for path in paths]


def test_two_ranks_are_merged_by_analyze_and_compared_by_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [write(tmp_path, rank) for rank in (0, 2)]
    assert "2 of 3 ranks are given (0, 2)" in shown(["analyze", *two], capsys)
    assert "B compared with A" in shown(["compare", *two], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["analyze", "FOLDER", "--table", "phases"],
            "5 files that are not the ranks of one job are listed, not analyzed",
        ),
        (
            ["analyze", "FOLDER", "--format", "html", "--output", "x.html"],
            "--format html shows one trace; give one file",
        ),
        (["analyze", "FOLDER/b.json.gz", "--ranks"], "--ranks merges several ranks, and FOLDER/b.json.gz holds one"),
        (
            ["analyze", "FOLDER/a.sqlite", "FOLDER/b.json.gz", "--ranks"],
            "the files cannot be of one job: FOLDER/a.sqlite",
        ),
        (["analyze", "FOLDER/notes.json", "FOLDER/b.json.gz", "--ranks"], "notes.json holds no traceEvents"),
        (["analyze", "a.json", "b.json", "c.json"], "b.json does not exist; give a trace file; c.json does not exist"),
        (["analyze"], "no file is given; give a trace, the traces of all ranks, a folder or an archive"),
        (["snapshot"], "no file is given; give a snapshot, several, a folder or an archive"),
        (["snapshot", "EMPTY"], "contains no snapshot; give a .pickle of torch.cuda.memory._dump_snapshot()"),
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
