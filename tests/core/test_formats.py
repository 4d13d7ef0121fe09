"""Tests of finding the command for a file by its content, whatever its name."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.core.formats import command_for

DATA = Path(__file__).parents[1] / "data"
RECORDS = Path(__file__).parents[2] / "profiles" / "step_time" / "records.jsonl"
READERS = {
    "report": "report {file}",
    "analyze": "analyze {file}",
    "snapshot": "snapshot {file}",
    "compare": f"compare {RECORDS} {{file}}",
    "memory": "memory --show {file}",
    "precision": "precision --show {file}",
}
OF_RECORDS = {"report", "compare", "memory", "precision"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write each command's input under a name with a space and without a known suffix."""
    folder = tmp_path_factory.mktemp("kinds")
    sources = {
        "records": RECORDS.read_bytes(),
        "nsys": gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()),
        "kineto": (DATA / "kineto_h200_step.json.gz").read_bytes(),
        "pickle": gzip.decompress((DATA / "snapshot_h200_step.pickle.gz").read_bytes()),
        "zipped pickle": (DATA / "snapshot_h200_step.pickle.gz").read_bytes(),
        "cut kineto": (DATA / "kineto_h200_step.json.gz").read_bytes()[:5000],
        "zipped records": gzip.compress(RECORDS.read_bytes()),
        "noise": bytes(range(255, 0, -1)) * 20,
        "zipped noise": gzip.compress(bytes(range(255, 0, -1)) * 20),
        "list": b"[1, 2]\n",
        "null": b"null\n",
        "empty": b"",
    }
    files = {name: folder / f"{name} ü.dat" for name in sources}
    for name, path in files.items():
        path.write_bytes(sources[name])
    return files


KINDS = {
    "records": "report", "zipped records": "report", "nsys": "analyze", "kineto": "analyze", "cut kineto": "analyze",
    "pickle": "snapshot", "zipped pickle": "snapshot", "noise": None, "zipped noise": None, "list": None, "empty": None,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_command_is_found_by_file_content(name: str, files: dict[str, Path]) -> None:
    assert command_for(files[name]) == KINDS[name]


WRONG = [
    (name, reader)
    for name in ("records", "nsys", "kineto", "cut kineto", "pickle", "zipped pickle")
    for reader in READERS
    if KINDS[name] != ("report" if reader in OF_RECORDS else reader)
]


@pytest.mark.parametrize(("name", "reader"), WRONG)
def test_wrong_command_names_the_right_one(
    name: str, reader: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(file=files[name]) for word in READERS[reader].split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    command = f"cs-systems {KINDS[name]} '{files[name]}'"
    assert re.search(rf"read (it|the trace) with {re.escape(command)}", captured.err)
    assert captured.err.count("\n") == 1


UNREADABLE = {
    "noise": "has no readable record, because line 1 is damaged; give the records.jsonl of another run",
    "zipped records": "is compressed; gunzip it first",
    "list": "has no readable record, because line 1 is not a record of cs_systems (no JSON object); ",
    "null": "has no readable record, because line 1 is not a record of cs_systems (no JSON object); ",
    "empty": "has no record yet; repeat the measurement that writes to it",
}


@pytest.mark.parametrize("reader", sorted(OF_RECORDS))
@pytest.mark.parametrize("name", UNREADABLE)
def test_readers_of_records_refuse_files_without_records(
    name: str, reader: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(file=files[name]) for word in READERS[reader].split()]) == 2
    error = capsys.readouterr().err
    assert str(files[name]) in error
    assert UNREADABLE[name] in error


def test_compressed_file_without_pickle_is_not_called_damaged(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(files["zipped noise"])]) == 2
    assert "is not a pickle file, as every memory snapshot of PyTorch is; write one with" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".ncu-rep", ".nsys-rep", ".qdrep", ".hatchet"])
def test_empty_profiler_report_is_refused_without_its_reader(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"run{suffix}").touch()
    assert main(["analyze", str(tmp_path / f"run{suffix}")]) == 2
    error = capsys.readouterr().err
    assert "is empty: the " in error
    assert "was never written" in error


@pytest.mark.parametrize("command", ["analyze", "snapshot"])
def test_only_file_of_a_folder_is_read(
    command: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / {"analyze": "a.trace.json", "snapshot": "a.pickle"}[command]
    shutil.copy(files[{"analyze": "kineto", "snapshot": "pickle"}[command]], inside)
    (tmp_path / "records.jsonl").write_bytes(RECORDS.read_bytes())
    assert main([command, str(tmp_path)]) == 0
    assert f"{inside} · " in capsys.readouterr().out


def test_folder_of_records_names_the_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RECORDS, tmp_path / "records.jsonl")
    assert main(["analyze", str(tmp_path)]) == 2
    assert f"contains records of runs; read it with cs-systems report {tmp_path}" in capsys.readouterr().err
    assert main(["snapshot", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no snapshot; give the .pickle" in (printed := capsys.readouterr().err)
    assert f"or read its records with cs-systems report {tmp_path}" in printed
    (folder := tmp_path / "counters.ncu-rep").mkdir()
    assert main(["analyze", str(folder)]) == 2
    assert (
        f"{folder} contains no trace; give a folder of traces, or\n  a Chrome trace of torch.profiler (.json, "
        in capsys.readouterr().err
    )


def test_trace_and_another_file_are_not_compared(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for pair in (("kineto", "records"), ("records", "kineto")):
        assert main(["compare", *(str(files[name]) for name in pair)]) == 2
        error = capsys.readouterr().err
        assert (
            f"{files['kineto']} is a trace, and {files['records']} is not; read the trace with cs-systems analyze"
            in error
        )
        assert error.endswith(", or give two traces or two runs\n")


def test_traces_with_any_names_are_compared(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    two = [str(files["nsys"]), str(files["kineto"])]
    assert main(["compare", *two]) == 0
    assert "kernel time per step by phase, candidate compared with baseline" in capsys.readouterr().out
    assert main(["compare", *two, "--phase", "forward"]) == 2
    assert "--phase has no effect on two traces" in capsys.readouterr().err
