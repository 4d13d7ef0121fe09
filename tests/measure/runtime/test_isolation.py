"""Tests of the isolation of cells: no change of a step to its process, children or channel reaches another cell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems import sweep
from cs_systems.config import RunConfig
from cs_systems.record import RunRecord, read_records
from cs_systems.report.frame import frame
from tests.measure.runtime.leftover import leftover
from tests.measure.runtime.test_survival import wait_for

WORKLOADS = Path(__file__).with_name("disturbing_workloads.py")
TINY = RunConfig(device="cpu", warmup=0, steps=2)

# Expected status and reason of each cell; the cell after it must find the same process state as the first.
LIVING = {
    "changes_restorable_state": ("ok", None),
    "closes_its_streams": ("ok", None),
    "replaces_its_streams": ("ok", None),
    "closes_the_descriptor_of_its_requests": ("ok", None),
    "makes_every_descriptor_nonblocking": ("ok", None),
    "leaves_a_thread": ("ok", None),
    "leaves_a_process": ("ok", None),
    "leaves_a_detached_process": ("ok", None),
    "has_a_child_that_returns": ("ok", None),
    "has_a_child_that_raises": ("ok", None),
}
DYING = {
    "raises_unprintable_exception": ("error", "Silent, whose message cannot be read"),
    "dies_while_its_child_lives": ("killed", "the worker was lost: killed by SIGKILL"),
    "writes_to_every_descriptor": ("error", "the step wrote to the worker's pipe"),
    "closes_every_descriptor": ("killed", "the worker was lost: the step closed or replaced the worker's pipe"),
    "puts_a_file_in_every_descriptor": ("killed", "the worker was lost: the step closed or replaced"),
    "HasInvalidTable": (
        "error",
        "'x' in row 0 of table 'mine' is of type set; use None, or Python's bool, int, float or str",
    ),
    "HasReservedTable": (
        "error",
        "tables() has a table 'kernels', a name that cs_systems reserves; choose another name",
    ),
    "DescribesATensor": ("error", "'tokens' in the result of describe() is of type Tensor; use None"),
    "predicts_a_text": ("error", "predicts_a_text returned 'many'; return the bytes as an int of at least 0, or None"),
    "predicts_too_much": ("error", "returned a number that is too large; return the bytes as an int"),
    "DescribesAFraction": (
        "error",
        "'tokens' in the result of describe() is 1023.5; give the tokens of a step as an int",
    ),
    "DescribesTooMuch": ("error", "'tokens' in the result of describe() does not fit into 64 bits; give it as a float"),
}


def cell(name: str, **rest: object) -> RunConfig:
    return replace(TINY, workload=f"{WORKLOADS}:{name}", **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("expected", [LIVING, DYING], ids=["living", "dying"])
def test_disturbing_step_fails_no_other_cell(
    expected: dict[str, tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # workers write to this file, because a variable would need another fork server
    before = leftover()
    cells = [cell("ReportsState", steps=1)]
    for number, name in enumerate(expected):
        cells += [cell(name), cell("ReportsState", steps=2 + number)]
    records = list(sweep(cells, out=tmp_path / "run", timeout_s=20))
    first, disturbing, others = records[0], records[1::2], records[2::2]
    for record, (name, (status, reason)) in zip(disturbing, expected.items(), strict=True):
        assert record.status == status, (name, record.reason)
        assert (reason or "") in (record.reason or ""), name
    for record, name in zip(others, expected, strict=True):
        assert record.status == "ok", (name, record.reason)
        assert state(record) == state(first), name
    assert len(read_records(tmp_path / "run")[0]) == len(cells)
    assert len(frame(records)["record"].unique()) == len(cells), "every record can be reported"
    assert leftover(before) == {}
    file = tmp_path / "file"
    assert not file.exists() or file.read_bytes() == b"", "no message was written to the step's file"


def state(record: RunRecord) -> dict[str, object]:
    """Return the process state that the workload observed, without the PID."""
    (ran,) = record.results["ran"]
    return {name: value for name, value in ran.items() if name != "pid"}


def test_restorable_state_needs_no_new_worker() -> None:
    first, changing, second = sweep(
        [cell("ReportsState"), cell("changes_restorable_state"), cell("ReportsState", steps=3)]
    )
    assert changing.status == "ok"
    assert first.results["ran"][0]["pid"] == second.results["ran"][0]["pid"]


def test_interleaved_cells_keep_their_own_state() -> None:
    cells = [cell("ReportsState", rounds=2), cell("changes_restorable_state", rounds=2)]
    records = {r.run_config.workload.rpartition(":")[2]: r for r in sweep(cells, interleave=True)}
    assert [r.status for r in records.values()] == ["ok", "ok"]
    (alone,) = sweep([cell("ReportsState", rounds=2)])
    assert state(records["ReportsState"]) == state(alone)


def test_interleaved_cell_that_leaves_a_thread_fails_alone() -> None:
    cells = [cell("leaves_a_thread", rounds=2), cell("ReportsState", rounds=2)]
    records = {r.run_config.workload.rpartition(":")[2]: r for r in sweep(cells, interleave=True)}
    assert records["ReportsState"].status == "ok"
    assert records["leaves_a_thread"].status == "error"
    assert re.search("cell left thread .*; measure it without interleave", records["leaves_a_thread"].reason or "")


def test_interleaved_cell_that_detaches_a_stream_fails_no_other() -> None:
    cells = [cell("detaches_its_stream", rounds=2), cell("ReportsState", rounds=2)]
    records = {r.run_config.workload.rpartition(":")[2]: r for r in sweep(cells, interleave=True)}
    assert records["ReportsState"].status == "ok"
    assert records["detaches_its_stream"].status in ("ok", "error"), records["detaches_its_stream"].reason


def test_import_side_effects_reach_only_cells_of_that_code(tmp_path: Path) -> None:
    changing = tmp_path / "changing.py"
    changing.write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\n"
        f"exec(open({str(WORKLOADS)!r}).read().replace('from __future__ import annotations', ''))\n"
    )
    changed = [replace(TINY, workload=f"{changing}:ReportsState", steps=steps) for steps in (1, 2)]
    records = list(sweep([*changed, cell("ReportsState")]))
    assert [r.status for r in records] == ["ok"] * 3
    assert [r.results["ran"][0]["dtype"] for r in records] == ["torch.float64", "torch.float64", "torch.float32"]
    assert state(records[0]) == state(records[1])


@pytest.mark.parametrize("profiler", ["memory", "kineto"])
def test_profiled_cell_with_leftover_thread_ends_soon(profiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the worker after its grace period; without that the record would not be written."""
    monkeypatch.setattr("cs_systems.measure.runtime.processes.GRACE_S", 1.0)
    before = leftover()
    (record,) = sweep([cell("leaves_a_thread", profiler=profiler)])
    assert record.status == "ok", record.reason
    assert leftover(before) == {}


def test_rank_that_prints_like_nccl_and_dies_is_named() -> None:
    (record,) = sweep([cell("prints_like_nccl_and_dies", world_size=2)])
    assert record.status == "killed"
    assert (record.reason or "").startswith("rank 0 on cpu killed by SIGABRT")


def test_rank_that_prints_like_nccl_and_continues_is_not_hung() -> None:
    (record,) = sweep([cell("prints_like_nccl_and_continues", world_size=2, warmup=0, steps=1)])
    assert record.status == "ok", record.reason


def test_error_that_mentions_a_lost_peer_names_its_rank() -> None:
    (record,) = sweep([cell("raises_lost_peer_error", world_size=2)])
    assert record.status == "error"
    assert (record.reason or "").startswith("rank 0 on cpu: RuntimeError: [gloo/transport/tcp/pair.cc:547]")


def test_only_processes_of_the_sweep_count_as_left() -> None:
    """A process that ran before, such as a browser, may start another one at any time."""
    before, shell = leftover(), ["sh", "-c", "read line; sleep 60 & wait"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE) as earlier, subprocess.Popen(["sleep", "60"]) as later:
        try:
            assert earlier.stdin is not None
            earlier.stdin.write(b"go\n")
            earlier.stdin.flush()
            wait_for(lambda: len(leftover(before)) == 3)
            assert leftover({*before, earlier.pid}) == {later.pid: "sleep 60 "}
        finally:
            for pid in leftover(before):
                os.kill(pid, signal.SIGKILL)


def test_ranks_on_one_machine_listen_on_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (record,) = sweep([cell("listens", world_size=2)])
    assert record.status == "ok", record.reason
    addresses = {rank: (tmp_path / rank).read_text().split() for rank in ("0", "1")}
    assert all(addresses.values()), "gloo listens at some address"
    assert {address for rank in addresses.values() for address in rank} == {"0100007F"}, "only 127.0.0.1"
