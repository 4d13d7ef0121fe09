"""Tests of the journal, which skips damaged lines, keeps users' files, and reports a full disk."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import cs_systems
from cs_systems import sweep
from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, Mode, RunConfig
from cs_systems.measure.runtime.journal import Journal
from cs_systems.record import RunRecord, append_record, read_records
from cs_systems.report.frame import frame

TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, mode=Mode.FORWARD, device="cpu", warmup=0, steps=2)
FOREIGN = ['{"schema_version": 4}\n', '{"schema_version": 4, "key": 1, "config": 3, "status": []}\n']


def some(key: str) -> RunRecord:
    return RunRecord(key, RunConfig().to_dict(), "ok")


@pytest.mark.parametrize(
    "damage",
    [
        b'{"schema_version":1,"key":"cut in the mid',
        b"\0" * 100,
        b"\xff\xfe\n\n",
        b"[1]\n",
    ],
)
def test_damaged_line_is_kept_and_skipped(damage: bytes, tmp_path: Path) -> None:
    """A damaged line is skipped as the only and as the first line; its bytes are kept."""
    file = tmp_path / "records.jsonl"
    file.write_bytes(damage)
    journal = Journal.prepare(tmp_path)
    assert journal.read()[0] == []
    assert "records.jsonl:1 " in journal.read()[1][0]
    journal.append(some("a"))
    records, complaints = journal.read()
    assert ([r.key for r in records], len(complaints)) == (["a"], 1)
    assert file.read_bytes().startswith(damage)


@pytest.mark.parametrize("line", ['{"name": "of another program"}\n', *FOREIGN])
def test_foreign_lines_are_refused_before_the_first_cell(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "records.jsonl"
    file.parent.mkdir()
    file.write_text(line)
    words = ["time", "--size", "tiny", "--device", "cpu", "--out", str(file.parent)]
    assert main(words) == 2
    remedy = "choose another --out, or start over with --fresh"
    error = capsys.readouterr().err
    assert error.startswith(f"cs-systems: {file}:1")
    assert error.endswith(f"; {remedy}\n")
    with pytest.raises(ConfigError, match=r"; choose another out, or start over with fresh$"):
        next(sweep([TINY], out=file.parent))
    assert file.read_text() == line
    assert [r.status for r in sweep([TINY], out=file.parent, fresh=True)] == ["ok"]


def _record_a_loop(out: Path) -> None:
    with cs_systems.Recorder(out=out):
        pytest.fail("the folder was taken")


@pytest.mark.parametrize(
    "measure",
    [
        lambda out: cs_systems.run(TINY, out=out),
        lambda out: cs_systems.run(workload=lambda: None, device="cpu", out=out),
        _record_a_loop,
    ],
    ids=["run", "run of a live object", "Recorder"],
)
def test_refused_folder_names_no_option_that_the_caller_lacks(
    measure: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_text(FOREIGN[0])
    with pytest.raises(
        ConfigError, match=r"records\.jsonl:1 is not a record of this version \(it lacks .*\); choose another out$"
    ):
        measure(tmp_path)


def test_folder_refused_to_a_script_names_no_option_that_the_command_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_text(FOREIGN[0])
    (tmp_path / "train.py").touch()
    assert main(["run", "--out", str(tmp_path), "--", str(tmp_path / "train.py")]) == 2
    assert capsys.readouterr().err.endswith("; choose another --out\n")


def test_sweep_resumes_after_an_incomplete_first_record(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(b'{"schema_version":1,"key":"cut\0\0\0')
    notes: list[str | None] = []
    (record,) = sweep([TINY], out=tmp_path, on_progress=lambda p: notes.append(p.note))
    assert record.status == "ok"
    assert any(
        "records.jsonl:1 is incomplete (the run was interrupted while writing it); skipped" in (note or "")
        for note in notes
    )
    assert list(sweep([TINY], out=tmp_path)) == []
    assert [r.key for r in read_records(tmp_path)[0]] == [record.key]


def test_lines_other_than_json_objects_are_skipped(tmp_path: Path) -> None:
    (record,) = sweep([TINY], out=tmp_path)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write("3\nnull\n[1, 2]\n")
    assert list(sweep([TINY], out=tmp_path)) == []
    records, complaints = read_records(tmp_path)
    assert [r.key for r in records] == [record.key]
    assert [c.partition(":")[2] for c in complaints] == [
        f"{line} is not a record of cs_systems (no JSON object); skipped" for line in (2, 3, 4)
    ]


@pytest.mark.parametrize("name", [".lock", "records.jsonl", "worker.log"])
def test_fifo_in_place_of_a_sweep_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file; remove it, or choose another out"):
        list(sweep([TINY], out=tmp_path))


def test_link_as_lock_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").symlink_to(target)
    (out / ".probe").symlink_to(target)
    with pytest.raises(ConfigError, match=r"\.lock is a link; remove it, or choose another out"):
        list(sweep([TINY], out=out))
    assert target.read_text() == "precious"
    assert (out / ".probe").is_symlink()


def test_user_files_with_reserved_names_keep_their_content(tmp_path: Path) -> None:
    for name in (".lock", ".probe"):
        (tmp_path / name).write_text("precious")
    with Journal.prepare(tmp_path).locked():
        pass
    assert [(tmp_path / name).read_text() for name in (".lock", ".probe")] == ["precious", "precious"]


APPENDS = """
import sys
from cs_systems.config import RunConfig
from cs_systems.record import RunRecord, append_record
try:
    append_record(sys.argv[1], RunRecord("b", RunConfig().to_dict(), "ok", reason="x" * 5000))
except OSError as error:
    print(error)
"""


def test_record_that_exceeds_the_disk_leaves_the_file_unchanged(tmp_path: Path) -> None:
    append_record(tmp_path, some("a"))
    file = tmp_path / "records.jsonl"
    before = file.read_bytes()

    def disk_with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 2000,) * 2)

    done = subprocess.run(
        [sys.executable, "-c", APPENDS, str(tmp_path)], capture_output=True, text=True, preexec_fn=disk_with_little_room
    )
    assert "cannot write the record: File too large" in done.stdout
    assert str(file) in done.stdout
    assert file.read_bytes() == before


def test_oversized_cell_fails_no_other_cell(tmp_path: Path) -> None:
    large = replace(TINY, model=replace(TINY.model, context_length=999_999_999_999))
    records = list(sweep([large, TINY], out=tmp_path))
    assert records[0].status in ("oom", "error", "unavailable")
    assert records[1].status == "ok"
    table = frame(read_records(tmp_path)[0])
    assert set(table["status"]) == {records[0].status, "ok"}
    for line in (tmp_path / "records.jsonl").read_text().splitlines():
        json.loads(line)
