"""Output files never overwrite an input, are written whole or not at all, and each run has its own folder."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.cli._options import Sweep
from cs_systems.core.printable import command_line, text_cell
from cs_systems.record import append_record
from cs_systems.report.files import write_file
from tests.report.conftest import ok, train_config

DATA = Path(__file__).parents[1] / "data"
MEASURES = ("comm --size 1KiB", "parallel --size tiny", "precision --size tiny")
OWN_CODE = (
    *("--attention mine.py:it", "--workload mine.py:it", "--workload mine:it"),
    "--workload torch.nn:Identity --inputs mine.py:it",
)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run with an artifact, and links to its records, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("a run")
    folder.mkdir()
    record = ok(train_config("small"), 0.01, 1e12, 10**9)
    record.artifacts["trace"] = "cell.trace.json"
    append_record(folder, record)
    (folder / "cell.trace.json").write_text("{}")
    (folder / "worker.log").write_text("said")
    Path("mine.py").write_text("def it(): ...")
    Path("link").symlink_to(folder / "records.jsonl")
    os.link(folder / "records.jsonl", "hard link")
    Path("nsys.sqlite").write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    Path("memory.pickle").write_bytes(gzip.decompress((DATA / "snapshot_h200_step.pickle.gz").read_bytes()))
    Path("memory.pickle.json").write_text("{}")
    return folder


PROTECTED = ("a run/records.jsonl", "a run/../a run/records.jsonl", "link", "hard link", "a run/cell.trace.json",
       "a run/worker.log", "a run/worker-rank3.log", "a run/.lock", "a run/records-until-x.jsonl")  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        *(["report", "a run", "--output", file] for file in PROTECTED),
        ["report", "a run/records.jsonl", "--format", "html", "--output", "link"],
        ["report", "link", "--output", "a run/records.jsonl"],
        ["compare", "a run", "a run", "--output", "link"],
        ["analyze", "nsys.sqlite", "--output", "nsys.sqlite"],
        ["compare", "nsys.sqlite", "nsys.sqlite", "--output", "./nsys.sqlite"],
        ["snapshot", "memory.pickle", "--output", "memory.pickle"],
        ["snapshot", "memory.pickle", "--output", "memory.pickle.json"],
        ["snapshot", "memory.pickle", "memory.pickle", "--output", "memory.pickle"],
        ["precision", "--show", "a run", "--output", "hard link"],
        *([*f"{words} {own}".split(), "--output", "mine.py"] for words in MEASURES[1:] for own in OWN_CODE),
        *([*words.split(), "--out", "a run", "--output", "link"] for words in MEASURES),
        *([*words.split(), "--out", "a run", "--output", "a run/records.jsonl"] for words in MEASURES),
        *([*words.split(), "--out", "new", "--output", "new/records.jsonl"] for words in MEASURES),
    ],
    ids=" ".join,
)
def test_output_never_overwrites_an_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("cs-systems: --output ")
    assert error.endswith("; name another file\n")
    assert {path: path.read_bytes() for path in before} == before


def test_figure_overwrites_neither_records_nor_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.svg").symlink_to("a run/records.jsonl")
    assert main(["report", "a run", "--figure", "link.svg"]) == 2
    assert "--figure link.svg would overwrite the records of a run; name another file" in capsys.readouterr().err
    assert main(["report", "a run", "--figure", "x.svg", "--output", "./x.svg"]) == 2
    assert "--output and --figure name the same file, x.svg; give each a different file" in capsys.readouterr().err


def test_full_disk_keeps_the_earlier_file() -> None:
    Path("page.html").write_text("earlier")
    command = [sys.executable, "-m", "cs_systems", "report", "a run", "--format", "html", "--output", "page.html"]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cs-systems: cannot write page.html: File too large; ")
    assert Path("page.html").read_text() == "earlier"
    assert not [*Path().glob("*.part"), *Path().glob(".*.part")]


def test_full_device_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "a run", "--output", "/dev/full"]) == 2
    full = "cannot write /dev/full: No space left on device; free some space, then run the same command again\n"
    assert capsys.readouterr().err.endswith(full)
    with Path("/dev/full").open("w") as stdout:
        command = [sys.executable, "-m", "cs_systems", "report", "a run"]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "standard output: No space left on device" in done.stderr


def test_overwritten_file_keeps_links_and_permissions() -> None:
    Path("kept").write_text("earlier")
    Path("kept").chmod(0o640)
    Path("to it").symlink_to("kept")
    write_file(Path("to it"), b"new")
    assert Path("to it").is_symlink()
    assert Path("kept").read_text() == "new"
    assert Path("kept").stat().st_mode & 0o777 == 0o640


def test_fifo_is_written_if_it_has_a_reader_and_refused_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    assert main(["report", "a run", "--output", "pipe"]) == 2
    assert "cannot write pipe: No such device or address; start the program that reads the FIFO first" in (
        capsys.readouterr().err.replace(" (pipe)", "")
    )
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_text()))
    reader.start()
    while main(["report", "a run", "--format", "csv", "--output", "pipe"]):
        pass  # until the reader has opened it
    reader.join()
    assert got[0].startswith("record,key,repeat")
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("file", ["a run", "/", "."])
def test_folder_as_output_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a run", "a run", "--output", file]) == 2
    remedy = "name another file" if file == "a run" else "name a file in it"
    assert remedy in capsys.readouterr().err


def test_simultaneous_commands_get_separate_folders() -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = [*pool.map(lambda _: Sweep().claim("time"), range(24))]
    assert len({*folders}) == 24
    assert all(folder.is_dir() for folder in folders)
    assert any(folder.name.endswith("-time-2") for folder in folders)


def test_refused_command_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", "--size", "tiny", "--attention", "nobody"]) == 2
    assert [*Path("runs").glob("*")] == []


def test_printed_command_line_is_quoted() -> None:
    assert command_line("cs-systems", "report", Path("a run/it's")) == "cs-systems report 'a run/it'\"'\"'s'"
    quoted = command_line("cat", "a\x1b[31m'\\b\n")
    assert quoted == "cat $'a\\x1b[31m\\'\\\\b\\n'"
    done = subprocess.run(["bash", "-c", quoted.replace("cat", "printf %s")], capture_output=True, text=True)
    assert done.stdout == "a\x1b[31m'\\b\n"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("+1+1", "'+1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("-A1", "'-A1"),
        ("\t=1+1", "'=1+1"), ("\r\n=1", "'=1"), ("-1.5", "-1.5"), ("+3", "+3"), ("-1e-05", "-1e-05"), ("-inf", "-inf"),
        ("+12.5%", "+12.5%"), ("small", "small"), ("-2+3", "'-2+3"), ("a=b", "a=b"), ("\x1b[31mred", "[31mred"),
    ],
)  # fmt: skip
def test_csv_cell_escapes_formulas_and_keeps_numbers(text: str, cell: str) -> None:
    assert text_cell(text) == cell
