"""Regression tests of sweeps, one for each defect that was found."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import ConfigError, Mode
from cs_systems.measure.runtime import supervisor
from cs_systems.measure.runtime.processes import Worker
from cs_systems.measure.runtime.sweep import preflight, sweep
from cs_systems.record import RunRecord, read_records
from tests.measure.runtime.test_survival import TINY, cell


@dataclass(frozen=True)
class Sweep:
    """Sweep shared by several tests: its folder, its records, and the errors of simultaneous sweeps."""

    folder: Path
    records: list[RunRecord]
    refusals: list[str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Return a sweep of a repeated cell, one that raises, and one that exits, begun with an empty marker."""
    folder, refusals = tmp_path_factory.mktemp("done"), []
    (folder / ".running").touch()
    first = sweep([*[cell("fine")] * 3, cell("raises"), cell("exits")], out=folder)
    records = [next(first)]
    for fresh in (False, True):
        with pytest.raises(ConfigError) as refused:
            next(sweep([cell("fine")], out=folder, fresh=fresh))
        refusals.append(str(refused.value))
    return Sweep(folder, [*records, *first], refusals)


def test_second_sweep_in_a_locked_folder_is_refused(done: Sweep) -> None:
    assert len(done.refusals) == 2  # also with fresh
    for refusal in done.refusals:
        assert re.match("another sweep is writing to .*; wait for it, or choose another out", refusal)
    assert len(read_records(done.folder)[0]) == 3  # no record was moved
    assert list(sweep([cell("fine")], out=done.folder)) == []  # recorded already, and the lock is free


def test_repeated_cell_is_measured_once(done: Sweep) -> None:
    assert [r.status for r in done.records] == ["ok", "error", "killed"]


def test_resume_removes_an_empty_running_marker(done: Sweep) -> None:
    assert [file.name for file in done.folder.iterdir() if file.name == ".running"] == []


def test_reason_has_only_the_cells_own_output(done: Sweep) -> None:
    _, raised, killed = done.records
    assert raised.status == "error"
    assert killed.reason == "the worker was lost: exited with status 7"  # not the traceback of its neighbour


def test_cell_that_dies_during_prediction_is_named(tmp_path: Path) -> None:
    boom = tmp_path / "boom.py"
    boom.write_text("import os\nos._exit(9)\ndef attend(q, k, v): ...\n")
    cells = [
        replace(TINY, rounds=2),
        replace(TINY, attention=f"{boom}:attend", rounds=2),
        replace(TINY, attention="sdpa_math", rounds=2),
    ]
    found = {r.config["attention"]: r.status for r in sweep(cells, interleave=True)}
    assert found == {"naive": "ok", f"{boom}:attend": "killed", "sdpa_math": "ok"}
    rows = preflight(cells)
    assert [row["reason"] is None for row in rows] == [True, False, True]
    assert "the memory prediction killed the worker: exited with status 9" in rows[1]["reason"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Return the workers that supervisors start."""
    found: list[Worker] = []

    class Noted(Worker):
        def __init__(self, *args: Any) -> None:
            found.append(self)
            super().__init__(*args)

    monkeypatch.setattr(supervisor, "Worker", Noted)
    return found


def test_unavailable_cell_is_retried_once_available(tmp_path: Path, started: list[Worker]) -> None:
    """Only a worker that has run code from outside is replaced before a measurement."""
    source = tmp_path / "moody.py"
    source.write_text(
        "import os\n"
        "from cs_systems.model.attention import AttentionBackend\n"
        "from cs_systems.model.attention.naive import attention\n"
        "moody = AttentionBackend(attention, lambda call: None if os.path.exists(__file__ + '.ok') else 'in a mood')\n"
    )
    config = replace(TINY, mode=Mode.FORWARD, attention=f"{source}:moody")
    assert [r.status for r in sweep([config], out=tmp_path / "out")] == ["unavailable"]
    assert len(started) == 1
    assert list(sweep([config], out=tmp_path / "out")) == []
    assert len(started) == 2  # the worker that described the machine also asked the backend
    source.with_name("moody.py.ok").touch()
    assert [r.status for r in sweep([config], out=tmp_path / "out")] == ["ok"]
    assert len(started) == 4


def test_worker_that_described_the_machine_measures_the_first_profiled_cell(started: list[Worker]) -> None:
    config = replace(TINY, mode=Mode.FORWARD, device="auto", profiler="dtypes")
    assert [r.status for r in sweep([config, replace(config, seed=1)])] == ["ok", "ok"]
    assert len(started) == 2  # each profiled cell has a process of its own
