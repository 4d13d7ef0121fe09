"""Regression tests of sweeps, one for each defect that was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.config import ConfigError
from cs_systems.record import read_records
from cs_systems.runtime.sweep import preflight, sweep
from tests.runtime.test_survival import TINY, cell


@pytest.mark.parametrize("fresh", [False, True])
def test_second_sweep_in_a_locked_folder_is_refused(tmp_path: Path, fresh: bool) -> None:
    first = sweep([cell("fine"), cell("fine", seed=1)], out=tmp_path)
    next(first)
    with pytest.raises(ConfigError, match=r"another sweep is writing to .*; wait for it, or choose another --out"):
        next(sweep([cell("fine")], out=tmp_path, fresh=fresh))
    assert [r.status for r in first] == ["ok"]
    assert len(read_records(tmp_path)[0]) == 2  # no record was moved
    assert list(sweep([cell("fine")], out=tmp_path)) == []  # recorded already, and the lock is free


def test_repeated_cell_is_measured_once(tmp_path: Path) -> None:
    assert len(list(sweep([cell("fine")] * 3, out=tmp_path))) == 1


def test_resume_removes_an_empty_running_marker(tmp_path: Path) -> None:
    (tmp_path / ".running").touch()
    assert [r.status for r in sweep([cell("fine")], out=tmp_path)] == ["ok"]
    assert [file.name for file in tmp_path.iterdir() if file.name == ".running"] == []


def test_reason_has_only_the_cells_own_output(tmp_path: Path) -> None:
    raised, killed = sweep([cell("raises"), cell("exits")], out=tmp_path)
    assert raised.status == "error"
    assert killed.reason == "the worker was lost: exited with status 7"  # not the traceback of its neighbour


def test_cell_that_dies_during_prediction_is_named(tmp_path: Path) -> None:
    boom = tmp_path / "boom.py"
    boom.write_text("import os\nos._exit(9)\n")
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


def test_unavailable_cell_is_retried_once_available(tmp_path: Path) -> None:
    source = tmp_path / "moody.py"
    source.write_text(
        "import os\n"
        "from cs_systems.attention import AttentionBackend\n"
        "from cs_systems.attention.naive import attention\n"
        "moody = AttentionBackend(attention, lambda call: None if os.path.exists(__file__ + '.ok') else 'in a mood')\n"
    )
    config = replace(TINY, attention=f"{source}:moody")
    assert [r.status for r in sweep([config], out=tmp_path / "out")] == ["unavailable"]
    assert list(sweep([config], out=tmp_path / "out")) == []
    source.with_name("moody.py.ok").touch()
    assert [r.status for r in sweep([config], out=tmp_path / "out")] == ["ok"]
