"""Strategies of the user's own on two gloo ranks: next to one process, timed, traced, and refused with the reason."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.comparison import strategies
from cs_systems.analysis.comparison.own_code import (
    LOW_PRECISION,
    SAME,
    SAME_LOSS,
    StrategyErrorRow,
    compared,
    judged,
    same_as_one_process,
)
from cs_systems.cli import main
from cs_systems.core.tables import first_row
from cs_systems.measure.workloads.strategy_error import KEPT_GRADIENTS, LEFT_WHOLE
from cs_systems.record import read_records
from tests.measure.runtime.own_strategies import compared_with_one_process
from tests.model.parallel.launch import launch

OWN = Path(__file__).parents[2] / "data" / "own_code"
SMALL = "--size tiny --context-length 8 --batch-size 1 --device cpu --warmup 1 --steps 2".split()  # noqa: SIM905
RIGHT = (
    *(
        "ddp_bucketed",
        "student.py:DDP",
        "student.py:Plain",
        "student.py:hooked",
        "student.py:average_on_after_backward",
        "student.py:FSDP",
    ),
    *("student.py:DDP+zero1", "ddp_naive+student.py:ShardedOptimizer", "adapters.py:get_ddp", "adapters.py:get_fsdp"),
    *(
        "adapters.py:get_ddp_bucketed",
        "student.py:FSDPOfOthers",
        "adapters.py:get_ddp+adapters.py:get_sharded_optimizer",
    ),
)
WRONG = ("student.py:Unsynchronized", "student.py:Summed", "ddp_naive+student.py:OwnGroups")
SHARDED = "ddp_naive+adapters.py:get_sharded_optimizer"
MEASURED = ("ddp_naive", "adapters.py:get_ddp", SHARDED, "student.py:crashes")
OTHERS = "--optimizer adapters.py:get_adamw_cls --loss adapters.py:run_cross_entropy".split()  # noqa: SIM905
FAILING = {
    "student.py:crashes": "RuntimeError: no rank has this",
    "student.py:number": "student.py:number returned 3, which is not a module; name a module such as DDP(module)",
    "student.py:Quiet": "leaves a rank fewer parameters, but its name does not say so; name a class",
    "student.py:three": "student.py:three(a, b, c) requires b, c; add :b=VALUE to its name and :c=VALUE to its name",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by name the row of each strategy next to one process, or the error."""
    folder = tmp_path_factory.mktemp("own")
    _copy_to(folder)
    (folder / "names.json").write_text(json.dumps([*RIGHT, *WRONG, *FAILING]))
    launch(compared_with_one_process, 2, folder, limit_s=50)
    found: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return found


def _copy_to(folder: Path) -> None:
    for name in ("student.py", "adapters.py"):
        shutil.copy(OWN / name, folder)


@pytest.mark.parametrize("name", RIGHT)
def test_correct_code_trains_to_the_parameters_of_one_process(rows: Any, name: str) -> None:
    assert isinstance(rows[name], dict), rows[name]
    assert same_as_one_process(rows[name]) == "yes", rows[name]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_a_row_with_the_difference(rows: Any, name: str) -> None:
    assert same_as_one_process(rows[name]) == "no", rows[name]
    assert rows[name]["error"] > 0.1


@pytest.mark.parametrize("name", FAILING)
def test_failing_code_is_refused_with_the_reason(rows: Any, name: str) -> None:
    assert FAILING[name] in rows[name]


def test_code_that_divides_no_parameter_has_a_note(rows: Any) -> None:
    notes = {name: rows[name]["note"] for name in ("student.py:FSDPOfOthers", "student.py:FSDP", "student.py:DDP")}
    assert [*notes.values()] == [LEFT_WHOLE, "", ""]


def test_optimizer_that_keeps_gradients_of_other_ranks_has_a_note(rows: Any) -> None:
    assert rows["ddp_naive+student.py:OwnGroups"]["note"] == KEPT_GRADIENTS
    assert rows["ddp_naive+student.py:ShardedOptimizer"]["note"] == ""


def test_parameters_of_rank_0_reach_the_others_only_where_the_code_sends_them(rows: Any) -> None:
    begins = {name: rows[name]["begins_equal"] for name in ("student.py:DDP", "student.py:FSDP", "student.py:hooked")}
    assert begins == {"student.py:DDP": True, "student.py:FSDP": True, "student.py:hooked": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the printed tables, the records and the folder of one run."""
    folder = tmp_path_factory.mktemp("run")
    _copy_to(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        options = [*SMALL, *OTHERS, "--with", "overlap", "--out", "run", "--output", "t.txt"]
        main(["parallel", *options, "--strategy", *MEASURED])
        return (folder / "t.txt").read_text(), read_records(folder / "run")[0], folder


def test_own_code_is_timed_and_traced_like_built_in_code(run: Any) -> None:
    _, records, _ = run
    timed = [r for r in records if r.config["workload"] == "train_step"]
    statuses = {(r.config["strategy"], r.config["profiler"]): r.status for r in timed}
    for strategy in ("ddp_naive", "adapters.py:get_ddp", SHARDED):
        assert statuses[strategy, "none"] == statuses[strategy, "overlap"] == "ok"
    (group,) = strategies.groups(timed).values()
    assert [row["strategy"] for row in strategies.steps(group)] == ["single", *MEASURED]
    traced = {row["strategy"]: row["in_trace_s"] for row in strategies.communication(group)}
    assert (traced["ddp_naive"] is None, traced["adapters.py:get_ddp"] is None) == (False, False)


def test_table_compares_each_strategy_with_one_process_also_where_its_code_fails(run: Any) -> None:
    text, records, _ = run
    assert {row["strategy"]: row["same"] for row in judged(records)} == {
        "ddp_naive": "yes", "adapters.py:get_ddp": "yes", SHARDED: "yes", "student.py:crashes": "failed",
    }  # fmt: skip
    assert "each strategy on gloo next to one process on the whole batch" in text
    assert text.index("your own code next to the built-in") < text.index("run_cross_entropy  F.cross_entropy    yes")
    assert {(row["code"], row["same"]) for row in compared(records)} == {(OTHERS[1], "yes"), (OTHERS[3], "yes")}
    (crashed,) = (row for row in judged(records) if row["same"] == "failed")
    assert "no rank has this" in crashed["note"]
    assert crashed["note"].split()[0] in text


def test_record_has_the_hash_of_the_file_and_of_what_it_imports(run: Any) -> None:
    _, records, folder = run
    (record,) = (
        r for r in records
        if (r.config["strategy"], r.config["profiler"], r.config["workload"])
        == ("adapters.py:get_ddp", "none", "train_step")
    )  # fmt: skip
    ran = first_row(record.results, "ran")
    assert ran["strategy_path"] == "adapters.py"
    each = (hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("adapters.py", "student.py"))
    assert ran["strategy_sha256"] == hashlib.sha256("".join(each).encode()).hexdigest()


def test_run_is_read_after_its_files_are_deleted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run[2] / "run", tmp_path / "run")
    assert main(["report", "run"]) == 0
    assert "to see the results: repeat cs-systems parallel with --out DIR" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("error", "between", "loss", "answer"),
    [
        (SAME, SAME, 1.0, "yes"),
        (1.01 * SAME, 0.0, 0.0, "in low precision"),
        (0.0, 1.01 * SAME, 0.0, "in low precision"),
        (LOW_PRECISION, 0.0, 0.0, "in low precision"),
        (1.01 * LOW_PRECISION, 0.0, 0.0, "no"),
        (math.nan, math.nan, math.nan, "no"),
        (None, None, SAME_LOSS, "yes"),
        (None, None, 1.01 * SAME_LOSS, "no"),
        (None, None, None, "failed"),
    ],
)
def test_same_as_one_process_is_decided_at_its_limits(
    error: float | None, between: float | None, loss: float | None, answer: str
) -> None:
    row: StrategyErrorRow = {
        "strategy": "x", "ranks": 2, "steps": 3, "error": error, "between_ranks": between, "loss_error": loss,
        "begins_equal": None, "note": "",
    }  # fmt: skip
    assert same_as_one_process(row) == answer


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("student.py", "'student.py' names a file, but no object in it; write student.py:name"),
        ("student.py:DPD", "student.py has no 'DPD'; did you mean DDP?"),
        ("student.py:DDP:size=3", "strategy student.py:DDP has no option 'size'; leave out size"),
        ("student.py:Bucketed:verbos=3", "has no option 'verbos'; did you mean verbose?"),
        (
            "student.py:ShardedOptimizer",
            "does not average gradients over the ranks; use ddp_bucketed+student.py:Sharded",
        ),
        ("student.py:FSDP+zero1", "student.py:FSDP and zero1 both divide the optimizer; choose one"),
        ("student.py:DDP+ddp_naive", "student.py:DDP and ddp_naive both divide the batch; choose one"),
    ],
)
def test_name_without_a_form_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], strategy: str, message: str
) -> None:
    monkeypatch.chdir(OWN)
    assert main(["parallel", "--strategy", strategy]) == 2
    assert message in capsys.readouterr().err


def test_help_has_a_line_for_each_built_in_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["parallel", "--help"])
    text = capsys.readouterr().out
    assert "zero1_flat: ZeRO stage 1 with flat shards" in text
    assert "ddp_overlap: One all-reduce per parameter, started as soon as backward" in " ".join(text.split())
    assert "ShardedOptimizer(params, optimizer_cls, **kwargs)" in " ".join(text.split())
