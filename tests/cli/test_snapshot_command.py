"""`cs-systems snapshot`: its tables, formats and error messages."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.tables import TABLES
from cs_systems.analysis.memory.tensor_names import parameter_shapes
from cs_systems.cli import main
from cs_systems.cli.snapshot import DIFFERENT, IF_ANY
from cs_systems.config import PRESETS
from tests.analysis.memory.caching_allocator import CachingAllocator
from tests.report.browser import Page

Write = Callable[..., Path]


def snapshot(*words: object) -> int:
    return main(["snapshot", *map(str, words)])


def test_snapshot_prints_every_table_in_80_columns(
    snapshot_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert snapshot(snapshot_path, "--all") == 0
    sentence, _, rest = capsys.readouterr().out.partition("\n\n")
    assert sentence.startswith("1. activations other than logits and loss take 40% of the memory at the peak:\n")
    lines = rest.splitlines()
    wide = [line for line in [*sentence.splitlines(), *lines[1:]] if len(line) > 80]
    assert wide == []
    assert lines[0] == f"{snapshot_path} · device 0 · 1,356 events in 10.4 ms · 47 segments"
    assert lines[1] == "recorded 2026-11-20 11:00 UTC"
    assert lines[2].startswith("peak 204 MiB (213,795,840 bytes) at event 161")
    captions = {table.caption for name, table in TABLES.items() if name not in IF_ANY}
    assert captions | {TABLES["annotations"].caption} <= {*lines}
    assert TABLES["out_of_memory"].caption not in lines
    assert any("total 213,795,840 bytes at the peak; category unknown for 0" in line for line in lines)


def test_snapshot_without_events_names_no_peak(
    snapshot_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pickle.loads(gzip.decompress(snapshot_path.read_bytes()))
    kept = data["segments"][0] | {  # by the allocator, after a peak that is unknown
        "address": 1 << 50, "total_size": 8 << 30,
        "blocks": [{"address": 1 << 50, "size": 8 << 30, "state": "inactive"}],
    }  # fmt: skip
    ended = data | {"device_traces": [[]], "segments": [*data["segments"], kept]}
    (path := tmp_path / "end.pickle").write_bytes(pickle.dumps(ended))
    assert snapshot(path) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "peak" in line]
    assert said == [
        "cannot be told: the peak, because the snapshot has no events; call",
        "missing: no events: the peak and the timeline are unknown, only the memory at",
    ]
    assert snapshot(path, "--format", "html", "--output", tmp_path / "page.html") == 0
    text = Page((tmp_path / "page.html").read_text()).text
    assert "allocated at the end106 MiB" in text
    assert "Largest allocations at the end" in text
    assert "Allocated memory at the end" in text
    assert "events are drawn 1 µs apart" not in text


@pytest.mark.parametrize("table", [table for table in TABLES if table != "out_of_memory"])
def test_csv_has_all_columns_and_rows(snapshot_path: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    assert snapshot(snapshot_path, "--table", table, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {*TABLES[table].columns} == {*rows[0]}
    if table == "composition":
        assert sum(int(row["bytes"]) for row in rows) == 213_795_840
    if table == "segments":
        assert len(rows) == 47


@pytest.mark.parametrize(
    ("format", "sign"), [("markdown", "| category"), ("latex", r"\begin{table}"), ("typst", "#figure(")]
)
def test_document_has_heading_and_total(
    snapshot_path: Path, capsys: pytest.CaptureFixture[str], format: str, sign: str
) -> None:
    assert snapshot(snapshot_path, "--table", "composition", "--format", format) == 0
    out = capsys.readouterr().out
    assert sign in out
    assert "213,795,840" in out


def test_long_tensor_names_fit_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "large.pickle"
    allocator = CachingAllocator(recording=True)
    caller = {"filename": "src/model.py", "line": 109, "name": "__init__"}
    for shape in parameter_shapes(PRESETS["large"]).values():
        allocator.alloc(4 * prod(shape), (caller | {"line": 26}, caller))
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    assert snapshot(path, "--table", "top") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert snapshot(path, "--table", "top", "--format", "markdown") == 0
    output = capsys.readouterr().out.replace("\\", "")
    assert "token_embeddings or lm_head, 10,000 × 1280 × 4; model.py:26 __init__" in output


def test_top_limits_the_rows(snapshot_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshot(snapshot_path, "--table", "segments", "--top", "3") == 0
    assert "44 more rows; --top shows more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peak", "message"),
    [
        (213_795_840, "the peak equals torch.cuda.max_memory_allocated(), to the byte"),
        (213_795_841, "returned 213,795,841 bytes: 1 more than the peak of the events"),
        (213_795_839, "returned 213,795,839 bytes: 1 less than the peak of the events"),
    ],
)
def test_peak_is_compared_with_that_of_pytorch(
    peak: int, message: str, snapshot_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(snapshot_path.read_bytes())
    known = {"schema_version": 1, "config": None, "max_allocated_bytes": peak, "tensors": []}
    (tmp_path / "run.pickle.json").write_text(json.dumps(known))
    assert snapshot(path, "--table", "composition") == 0
    assert message in " ".join(capsys.readouterr().out.split())


def test_phases_around_the_peak_are_shown(snapshot_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshot(snapshot_path, "--table", "timeline", "--top", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("backward") and line.endswith("yes") for line in lines)
    assert "8 more rows, around the peak; --top shows more" in lines


def test_two_snapshots_are_compared(
    snapshot_path: Path, write_snapshot: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = CachingAllocator(recording=True)
    allocator.alloc(1024)
    other = write_snapshot(allocator.snapshot())
    assert snapshot(snapshot_path, other) == 0
    out = capsys.readouterr().out
    heading = [
        "the candidate's peak is 1.00 KiB instead of 204 MiB (−204 MiB): activations −90.2 MiB, workspaces −64.0 MiB, "
        "optimizer state −27.9 MiB, parameters −14.0 MiB",
        f"baseline: {snapshot_path} · peak 213,795,840 bytes · recorded 2026-11-20 11:00 UTC",
        f"candidate: {other} · peak 1,024 bytes",
        "change: −204 MiB (-213,794,816 bytes)",
    ]
    assert "".join(out.split()).startswith("".join(" ".join(heading).split()))  # a long path wraps
    assert [line for line in out.splitlines() if line.startswith("memory at the peak by")] == [
        f"memory at the peak by {name}, candidate compared with baseline" for name in DIFFERENT
    ]
    assert "no layer" in out
    assert snapshot(snapshot_path, other, "--table", "top") == 2
    assert "unknown table of a comparison 'top'; choose among category, layer, site" in capsys.readouterr().err


def test_markup_in_stack_frames_is_escaped(write_snapshot: Write, capsys: pytest.CaptureFixture[str]) -> None:
    evil = {"filename": "<script>\x1b[31m\n| fake | row |.py", "line": 1, "name": "<b>\x1b[2J"}
    allocator = CachingAllocator(recording=True)
    allocator.alloc(1024, (evil,))
    path = write_snapshot(allocator.snapshot())
    for format in ("terminal", "markdown", "latex", "typst"):
        assert snapshot(path, "--format", format) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\n| fake" not in out
        assert "<script>" not in out or format != "markdown"


def test_out_of_memory_and_missing_segments_are_reported(
    write_snapshot: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"filename": "src/train.py", "line": 7, "name": "step"}
    events: list[Any] = [
        {"action": "alloc", "addr": 512, "size": 2048, "frames": []},
        {"action": "oom", "size": 3 * 2**30, "device_free": 2**20, "frames": [step]},
    ]
    assert snapshot(write_snapshot({"device_traces": [events]})) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "out of memory at event 1: 3.00 GiB requested, 1.00 MiB free on the device, 2.00 KiB allocated" in out
    assert "2.00 KiB allocated, at train.py:7 step" in out
    assert "missing: no segments" in out


def test_output_creates_its_folder(snapshot_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a" / "b.csv"
    assert snapshot(snapshot_path, "--table", "layers", "--format", "csv", "--output", file) == 0
    assert file.read_text().startswith("layer,allocations,bytes")
    assert snapshot(snapshot_path, "--output", file / "c.txt") == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "peak"], "unknown table 'peak'; choose among composition"),
        (["--top", "0"], "--top is 0; it must be at least 1"),
        (["--format", "csv"], "--format csv writes one table; choose one with --table:"),
        (["--size", "huge"], "unknown size 'huge'"),
        (
            ["--size", "large"],
            "--size large does not match device 0 of the snapshot, which lacks tensors of that preset; leave out --siz",
        ),
        (["--device", "3"], "holds no data of GPU 3; choose --device 0"),
    ],
)
def test_invalid_options_exit_2(
    snapshot_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert snapshot(snapshot_path, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_file_without_device_memory_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    assert snapshot(path) == 2
    assert "holds no memory of a CUDA device" in capsys.readouterr().err


def test_tables_import_neither_torch_nor_pandas(snapshot_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from cs_systems.analysis.memory import allocations, tensor_names; "
        "from cs_systems.readers import snapshot; "
        "from cs_systems.analysis.memory import categories as memory_categories, tables as memory_tables; "
        "made = memory_categories.attribute(allocations.replay(snapshot.read(Path(sys.argv[1])))); "
        "[table(made, tensor_names.tensor_names(made)) for table in memory_tables.TABLES.values()]; "
        "print([name for name in ('torch', 'pandas', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(snapshot_path)], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
