"""Tests of failures of one rank: each quickly fails only its cell, and names the rank; real ranks with gloo on CPUs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems import sweep
from cs_systems.config import RunConfig
from cs_systems.measure.runtime.fork_client import server_pids, unavailable
from cs_systems.measure.runtime.guardian import descendants
from cs_systems.measure.runtime.processes import START_TIMEOUT_S
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import read_records
from tests.measure.runtime.leftover import nothing_left
from tests.measure.runtime.test_survival import WORKLOADS, cell, is_running, wait_for

LIMIT_S = 30.0
NO_SHAPE = "ValueError: rank 1 has a different model from rank 0: parameter 0.weight (4, 4) float32 instead of "


def on_ranks(name: str, **rest: object) -> RunConfig:
    return cell(name, world_size=2, **rest)


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.fixture
def no_leftover_process() -> Iterator[None]:
    with nothing_left():
        yield


DEATHS = {
    "rank_1_is_killed": ("killed", r"rank 1 on cpu killed by SIGKILL .*last output: the last line"),
    "rank_1_exits": ("killed", "rank 1 on cpu exited with status 7"),
}
ERRORS = {
    "rank_1_raises": ("error", "rank 1 on cpu: ZeroDivisionError: the numerator was fine"),
    "rank_1_runs_out_of_memory": ("oom", "rank 1 on cpu: .*can't allocate memory: you tried to allocate"),
    "every_rank_another_shape": ("error", re.escape(NO_SHAPE)),
}
HANGS = {
    "rank_1_hangs_in_nccl": ("timeout", "rank 1 on cpu kept the others waiting for 3 s: .*hangs"),
    "rank_1_hangs_in_nccl_that_stays": ("timeout", "rank 1 on cpu kept the others waiting for 3 s: .*hangs"),
    "rank_1_hangs_alone": ("timeout", "rank 1 on cpu kept the others waiting for 3 s: .*hangs"),
    "rank_1_hangs": (
        "timeout",
        r"rank 1 on cpu kept the others waiting for 3 s: rank 1 on cpu is in hangs \(workloads_that_die.py:\d+\); "
        "if only slow, set timeout_s above 3, else make all ranks call the same collectives$",
    ),
}
OF_CELL = {"every_rank_another_shape": {"strategy": "ddp_flat"}, "rank_1_hangs_alone": {"steps": 1}}


@pytest.mark.parametrize("expected", [DEATHS, ERRORS, HANGS], ids=["deaths", "errors", "hangs"])
@pytest.mark.usefixtures("no_leftover_process")
def test_failing_rank_is_named_and_sweep_continues_with_new_ranks(
    expected: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Set a launcher's variables to a port in use, which the ranks must ignore."""
    monkeypatch.setattr("cs_systems.measure.runtime.ranks.PATIENCE_S", 3.0)
    cells = [on_ranks(name, **OF_CELL.get(name, {})) for name in expected]
    took: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for variable in ("MASTER_PORT", "PET_MASTER_PORT"):
            monkeypatch.setenv(variable, str(taken.getsockname()[1]))
        began = time.monotonic()
        found = []
        for record in sweep([*cells, on_ranks("fine")], out=tmp_path):
            found.append(record)
            took.append(time.monotonic() - began)
            began = time.monotonic()
    *died, fine = found
    assert fine.status == "ok"
    for record, (status, reason), seconds in zip(died, expected.values(), took[:-1], strict=True):
        assert record.status == status, record.reason
        assert re.match(reason, record.reason or ""), record.reason
        assert seconds < LIMIT_S
    assert read_records(tmp_path)[0] == found


@pytest.mark.usefixtures("no_leftover_process")
def test_failing_interleaved_cells_are_attributed_to_themselves() -> None:
    """Let rank 1 reach the second cell while rank 0 waits in the first."""
    names = {"rank_1_raises": "error", "rank_1_is_killed": "killed", "fine": "ok"}
    records = sweep([on_ranks(name, rounds=2) for name in names], interleave=True)
    assert {r.run_config.workload.rpartition(":")[2]: r.status for r in records} == names


@pytest.mark.usefixtures("no_leftover_process")
def test_ranks_that_cannot_connect_fail_only_their_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_systems.measure.runtime.ranks.LOOPBACK", "nowhere0")
    apart, alone = sweep([on_ranks("fine"), cell("fine")])
    assert (apart.status, alone.status) == ("error", "ok")
    assert re.match("2 ranks did not start: rank [01] exited with status 1; .*nowhere0", apart.reason or ""), (
        apart.reason
    )


@pytest.mark.parametrize(
    ("program", "patience_s", "reason"),
    [
        ("raise SystemExit(1)", START_TIMEOUT_S, "rank [01] exited with status 1"),
        ("import time; time.sleep(60)", 3.0, "rank 0, rank 1 did not answer within 3 s; run cs-systems doctor, .*"),
    ],
    ids=["end", "hang"],
)
@pytest.mark.usefixtures("no_leftover_process")
def test_ranks_that_do_not_register_fail_only_their_cell(
    program: str, patience_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a driver that does not answer when a rank looks for its device."""
    monkeypatch.setattr("cs_systems.measure.runtime.ranks.START_TIMEOUT_S", patience_s)
    monkeypatch.setattr("cs_systems.measure.runtime.ranks.worker_command", lambda *_: [sys.executable, "-c", program])
    apart, alone = sweep([on_ranks("fine"), cell("fine")])
    assert (apart.status, alone.status) == ("error", "ok")
    assert re.fullmatch(f"2 ranks did not start: {reason}", apart.reason or ""), apart.reason


@pytest.mark.usefixtures("no_leftover_process")
def test_timeout_names_the_position_of_each_rank() -> None:
    (record,) = sweep([on_ranks("rank_1_hangs")], timeout_s=4)
    assert record.status == "timeout"
    assert re.match(
        r"the ranks did not answer within 4 s \(rank 0 on cpu is in \w+ \(.*\); rank 1 on cpu is in hangs .*; raise t",
        record.reason or "",
    )


@pytest.mark.usefixtures("no_leftover_process")
def test_equal_failure_of_all_ranks_is_reported_once_and_keeps_them(tmp_path: Path) -> None:
    guardians = set()

    def look(progress: Progress) -> None:
        servers = server_pids()
        parents = servers or {os.getpid()}
        guardians.update(pid for pid in descendants(os.getpid()) - servers if parent_of(pid) in parents)

    failed, fine = sweep([on_ranks("raises"), on_ranks("fine")], on_progress=look)
    assert (failed.status, fine.status) == ("error", "ok")
    assert re.fullmatch(r"ZeroDivisionError: the numerator was fine \(workloads_that_die.py:\d+\)", failed.reason or "")
    assert len(guardians) == 1


def test_ranks_end_with_a_killed_sweep(tmp_path: Path) -> None:
    """Kill the sweep while its ranks hang."""
    program = (
        "import cs_systems\n"
        "from cs_systems.config import PRESETS, RunConfig\n"
        f"config = RunConfig(model=PRESETS['tiny'], workload={f'{WORKLOADS}:hangs'!r}, device='cpu', world_size=2)\n"
        "list(cs_systems.sweep([config]))\n"
    )
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"TEST_PID_FILE": str(pid_file)})
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    children = [*descendants(parent.pid)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert len(children) == (3 if unavailable() else 4)  # a guardian and two ranks, and the fork server
    wait_for(lambda: not any(map(is_running, children)), seconds=10)
