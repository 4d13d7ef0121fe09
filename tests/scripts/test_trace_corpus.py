"""Tests of the table of foreign traces: its independent reader agrees with the package, or differences are shown."""

from __future__ import annotations

import gzip
import importlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.readers.test_rocprof import STEPS, as_database, as_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], dict[str, str]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    made: Callable[[Path, Path], dict[str, str]] = importlib.import_module("trace_corpus").row
    return made


def test_independent_reader_agrees_on_each_kind(
    row: Callable[..., dict[str, str]], nsys_path: Path, tmp_path: Path
) -> None:
    kineto = ROOT / "tests" / "data" / "kineto_h200_step.json.gz"
    for path in (nsys_path, kineto):
        made = row(path, path.parent)
        assert (made["kernels"], made["equal"], made["in a phase"]) == ("714", "yes", "100%")
    damaged = json.loads(gzip.decompress(kineto.read_bytes()))
    next(event for event in damaged["traceEvents"] if event.get("cat") == "kernel")["args"] = 3
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    made = row(tmp_path / "damaged.json", tmp_path)
    assert (made["kernels"], made["equal"]) == ("714", "no: 713")
    assert "left out: 1 event without a valid time or number" in made["unknown"]
    (tmp_path / "plain.txt").write_text("no trace")
    assert row(tmp_path / "plain.txt", tmp_path)["equal"] == "refused"


@pytest.mark.parametrize(("write", "kind"), [(as_json, "rocprofv3, JSON"), (as_database, "rocprofv3, rocpd")])
def test_independent_reader_agrees_on_results_of_rocprof(
    row: Callable[..., dict[str, str]], tmp_path: Path, write: Callable[..., Path], kind: str
) -> None:
    made = row(write(tmp_path / "7_results.json", [STEPS]), tmp_path)
    assert (made["kind"], made["kernels"], made["their time"], made["equal"]) == (kind, "4", "4.00 µs", "yes")


def test_processes_of_one_export_are_added_up(
    row: Callable[..., dict[str, str]], nsys_path: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(nsys_path, tmp_path))
    with closing(sqlite3.connect(path)) as database, database:
        (middle,) = database.execute("SELECT avg(correlationId) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        for table, column in (("KERNEL", "globalPid"), ("RUNTIME", "globalTid")):
            query = f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET {column} = {column} + (1 << 24) WHERE correlationId > ?"
            database.execute(query, (middle,))
    made = row(path, tmp_path)
    assert (made["kernels"], made["equal"]) == ("714", "yes")
    assert "2 processes, each read by --process" in made["unknown"]
