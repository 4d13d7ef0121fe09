"""Tests of the fault campaign: its plan of faults and its checks of a sweep's records."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "benchmarks"
INNOCENT = {"fault": None, "cell": 1, "samples": 2}
EXPECTED = {"step": [{"threads": 2}, {"threads": 1}]}


@pytest.fixture(scope="module", autouse=True)
def benchmarks_path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def module(name: str) -> Any:
    return importlib.import_module(name)


def record(
    cell: int, status: str = "ok", repeat: int = 0, threads: int = 2, reason: str | None = None
) -> dict[str, Any]:
    """Return the record of a cell without a fault."""
    row = {"cell": cell, "place": "step", "name": "threads", "value": json.dumps(threads)}
    return {
        "config": {"workload": "scripts/_fault_workload.py:factory", "batch_size": cell},
        "status": status,
        "repeat": repeat,
        "reason": reason,
        "measurement": {"samples": {"wall_s": [0.1, 0.2]}},
        "results": {"saw": [row]},
    }


def journal(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def test_small_campaign_finds_no_failures() -> None:
    only = ["--only", "forks", "channel", "streams", "state", "results", "raising"]
    command = [sys.executable, str(FOLDER / "fault_campaign.py"), "4", "1", *only, "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 4 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in done.stdout


@pytest.mark.parametrize(("count", "only"), [(1, []), (40, []), (7, ["state"]), (9, ["ranks", "journal"])])
def test_same_seed_gives_same_plan_with_requested_faults(count: int, only: list[str]) -> None:
    plan = module("_fault_plan").plan
    sweeps = plan(count, 3, only)
    assert sum(sweep.faults for sweep in sweeps) == count
    assert sweeps == plan(count, 3, only)
    assert sweeps != plan(count, 4, only)
    for sweep in sweeps:
        assert [cell["cell"] for cell in sweep.cells] == [*range(1, len(sweep.cells) + 1)]
        assert sweep.cells[-1]["fault"] is None, "a cell without a fault must follow the last fault"


def test_plan_of_many_faults_has_every_fault() -> None:
    catalogue, sweeps = module("_fault_workload").CATALOGUE, module("_fault_plan").plan(2000, 1)
    drawn = {cell["fault"] for sweep in sweeps for cell in sweep.cells} - {None}
    assert drawn == set(catalogue)


def test_sweep_with_a_fault_that_may_hang_has_timeout() -> None:
    catalogue = module("_fault_workload").CATALOGUE
    for sweep in module("_fault_plan").plan(500, 2):
        if any(cell["fault"] and catalogue[cell["fault"]].needs_timeout for cell in sweep.cells):
            assert "timeout_s" in sweep.options


def doubled(before: bytes, after: bytes) -> list[Any]:
    oracle = module("_fault_oracle")
    return list(oracle.doubled(oracle.lines(before), oracle.lines(after)[len(oracle.lines(before)) :]))


@pytest.mark.parametrize(
    ("before", "new", "count"),
    [
        ([], [record(1), record(2)], 0),
        ([], [record(1), record(1)], 1),
        ([], [record(1), record(1, repeat=1)], 0),
        ([record(1)], [record(1)], 1),
        ([record(1, "oom", reason="x")], [record(1)], 1),
        ([record(1, "error", reason="x")], [record(1)], 0),
        ([record(1, "killed", reason="x")], [record(1), record(1)], 1),
    ],
)
def test_doubled_finds_repeated_records_of_a_finished_cell(
    before: list[dict[str, Any]], new: list[dict[str, Any]], count: int
) -> None:
    assert len(doubled(journal(*before), journal(*before, *new))) == count


def test_lost_finds_cells_without_records() -> None:
    oracle = module("_fault_oracle")
    held = oracle.lines(journal(record(1), record(1, repeat=1), record(3)) + b'{"torn')
    assert [failure.where for failure in oracle.lost(held, [1, 2, 3], 2)] == ["cell 2", "cell 2", "cell 3"]


@pytest.mark.parametrize(
    ("after", "damaged", "count"),
    [
        (journal(record(1), record(2), record(3)), False, 0),
        (journal(record(1)), False, 1),
        (journal(record(2), record(1)), False, 1),
        (journal(record(1), record(3), record(2)), True, 0),
        (journal(record(2), record(3)), True, 1),
    ],
)
def test_changed_finds_altered_earlier_records(after: bytes, damaged: bool, count: int) -> None:
    assert len(list(module("_fault_oracle").changed(journal(record(1), record(2)), after, damaged))) == count


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (record(1), []),
        (record(1, threads=1), []),
        (record(1, threads=3), ["threads: 3 was 2"]),
        (record(1, "killed", reason="the worker was lost"), ["killed: the worker was lost"]),
        (record(1) | {"results": {"saw": record(2)["results"]["saw"]}}, ["its record is that of cell {2}"]),
        (record(1) | {"results": {}}, ["its record does not hold what it saw"]),
        (record(1) | {"measurement": {"samples": {"wall_s": [0.1]}}}, ["1 samples, not 2"]),
    ],
)
def test_contaminated_finds_traces_of_faults_in_innocent_cell(what: dict[str, Any], found: list[str]) -> None:
    oracle = module("_fault_oracle")
    [line] = oracle.lines(journal(what))
    failures = oracle.contaminated(line, INNOCENT, EXPECTED, "/nowhere")
    assert [failure.what for failure in failures] == found


@pytest.mark.parametrize(
    ("fault", "variant", "status", "reason", "found"),
    [
        ("raises", "KeyError", "error", "KeyError: 'x'", ""),
        ("raises", "KeyError", "killed", "exited with status 1", "killed, not error"),
        ("raises", "KeyError", "error", "ValueError", "does not name 'KeyError'"),
        ("child_lingers_while_worker_dies", "SIGSEGV", "killed", "killed by SIGSEGV", ""),
        ("child_lingers_while_worker_dies", "SIGSEGV", "killed", 'SIGSEGV;  File "x"', "last words are not one line"),
        ("child_lingers_while_worker_dies", "SIGSEGV", "timeout", "no answer", "timeout, not killed"),
        ("rank_dies", "SIGKILL", "killed", "rank 1 on cpu killed by SIGKILL", ""),
        ("rank_dies", "SIGKILL", "killed", "rank 0 on cpu killed by SIGKILL", "does not name 'rank 1.*SIGKILL'"),
        ("hangs", "sleep", "ok", None, "ok, not timeout"),
    ],
)
def test_wrong_finds_unexpected_status_or_reason_of_fault(
    fault: str, variant: str, status: str, reason: str | None, found: str
) -> None:
    oracle = module("_fault_oracle")
    [line] = oracle.lines(journal(record(1, status, reason=reason)))
    plan = {"cell": 1, "fault": fault, "variant": variant, "place": "step", "rank": 1}
    failures = [failure.what for failure in oracle.wrong(line, plan)]
    assert found in "".join(failures)
    assert bool(failures) is bool(found)


def test_wrong_finds_forged_record() -> None:
    oracle, workload = module("_fault_oracle"), module("_fault_workload")
    forged = record(1) | {"measurement": {"samples": {"wall_s": [workload.FORGED_S]}}}
    plan = {"cell": 1, "fault": "noise", "variant": "forged record", "place": "step"}
    [line] = oracle.lines(journal(forged))
    assert [failure.what for failure in oracle.wrong(line, plan)] == ["a record that the cell has forged was taken"]


@pytest.mark.parametrize(
    ("output", "is_one"),
    [
        ('Traceback (most recent call last):\n  File "x"\nKeyError: 3\n', True),
        ("Exception ignored in: <function f>\n", True),
        ("cs-systems: no room in /x/records.jsonl\n", False),
    ],
)
def test_tracebacks_finds_exceptions_in_output(output: str, is_one: bool) -> None:
    assert bool(list(module("_fault_oracle").tracebacks(output, "run 1"))) is is_one


def readable_records(damage: Callable[..., bytes], how: str, seed: int) -> int:
    oracle = module("_fault_oracle")
    return len(oracle.lines(damage(journal(*map(record, range(1, 6))), how, Random(seed))))


@pytest.mark.parametrize("seed", range(5))
def test_damage_leaves_expected_number_of_records(seed: int) -> None:
    damage = module("_fault_sweeps").damage
    for how, left in {
        "empty": 0,
        "all null bytes": 0,
        "first line torn": 4,
        "last line torn": 4,
        "blank lines": 5,
    }.items():
        assert readable_records(damage, how, seed) in (left, left - 1), how


@pytest.mark.parametrize(("lenient", "found"), [(True, []), (False, ["wrong"])])
def test_killed_worker_excuses_the_faulty_cell_that_it_ran(lenient: bool, found: list[str]) -> None:
    cell = {"fault": "program_lingers", "variant": "", "place": "step", "cell": 2, "samples": 2, "extra": True}
    sweeps = module("_fault_sweeps")
    plan = module("_fault_plan").Sweep(1, "parent", [cell], (), "time", {}, False, "terminal")
    stage = sweeps.Stage(plan, None)
    after = journal(record(2, "killed", reason="the worker was lost: killed by SIGKILL"))
    stage.judge(sweeps.Run(0, True, b"", after, ""), lenient=lenient)
    shutil.rmtree(stage.folder)
    assert [failure.category for failure in stage.failures] == found
