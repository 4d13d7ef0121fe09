"""Tasks of the systems course: commands that exist, sizes that fit, and the state of a folder of results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from cs_systems.cli import _course, _dispatch, main
from cs_systems.cli._course import Machine, carried_out, planned, state
from cs_systems.config import ConfigError
from cs_systems.core.course import Task, tasks

CPU, CARD, H100, PAIR = Machine(0, None), Machine(1, 24 << 30), Machine(1, 79 << 30), Machine(2, 79 << 30)
MEASURED = [*tasks().values()]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_course, "machine", lambda: CPU)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("machine", [CPU, PAIR], ids=str)
@pytest.mark.parametrize("task", MEASURED, ids=lambda task: task.name)
def test_commands_of_a_task_have_only_known_options(
    task: Task, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(task, machine, Path("out"), renewed=set())
    assert plan.scale in ("tiny", "full", "fitting")
    for name, *rest in plan.commands:
        monkeypatch.setattr(importlib.import_module(f"cs_systems.cli.{name}"), "run", lambda args: 0)
        assert _dispatch(name, rest) == 0


def test_every_task_has_a_question_and_criteria_of_a_good_answer() -> None:
    assert len(tasks()) == 27
    assert all(task.asks and task.look and task.good and task.mistakes for task in tasks().values())


@pytest.mark.parametrize(
    ("task", "machine", "scale", "size"),
    [
        ("benchmarking_script", CPU, "tiny", "tiny"),
        ("benchmarking_script", CARD, "fitting", "small medium large xl-2026"),
        ("benchmarking_script", H100, "full", "small medium large xl-2026 10B"),
        ("naive_ddp_benchmarking", H100, "tiny", "tiny"),
        ("naive_ddp_benchmarking", PAIR, "full", "xl-2026"),
        ("naive_ddp_benchmarking", Machine(2, 24 << 30), "fitting", "large"),
        ("gradient_checkpointing", H100, "full", "xl-2026"),  # fits with checkpoints alone
        ("leaderboard", PAIR, "full", "8B"),  # no formula predicts its memory
    ],
)
def test_default_size_fits_the_machine(task: str, machine: Machine, scale: str, size: str) -> None:
    plan = planned(tasks()[task], machine, Path("out"))
    words = plan.commands[0]
    at = words.index("--size") + 1
    assert (plan.scale, words[at : at + len(size.split())]) == (scale, size.split())
    assert words[at + len(size.split())].startswith("--")


def test_size_that_does_not_fit_is_named_with_its_memory() -> None:
    plan = planned(tasks()["naive_ddp_benchmarking"], Machine(2, 24 << 30), Path("out"))
    assert plan.size.startswith("at size large, which fits 2 GPUs of 24.0 GiB by prediction; xl-2026 needs ")


def test_number_of_ranks_follows_the_gpus() -> None:
    task = tasks()["distributed_communication_single_node"]
    ends = [planned(task, Machine(gpus, 79 << 30), Path("out")).commands[0] for gpus in (2, 4, 6)]
    assert [words[words.index("--world-size") + 1 : words.index("--out")] for words in ends] == [
        ["2"],
        ["2", "4"],
        ["2", "4", "6"],
    ]


def test_own_code_has_a_row_next_to_the_built_in() -> None:
    flash = planned(tasks()["flash_forward"], CPU, Path("out"), code="mine.py:attend").commands[0]
    assert flash[flash.index("--attention") + 1 :][:3] == ["naive", "flash_torch", "mine.py:attend"]
    for name, rows in {
        "optimizer_state_sharding": ["ddp_naive+zero1", "ddp_naive+a.py:make"],
        "optimizer_state_sharding_accounting": ["zero1_flat", "ddp_overlap+a.py:make"],
        "naive_ddp_benchmarking": ["ddp_naive", "a.py:make"],
        "fsdp_accounting": ["fsdp", "a.py:make"],
    }.items():
        words = planned(tasks()[name], CPU, Path("out"), code="a.py:make").commands[0]
        assert words[words.index(rows[1]) - 1 :][:3] == [*rows, "--steps" if name == "fsdp_accounting" else "--with"]


def test_own_strategy_with_buckets_is_measured_at_several_bucket_sizes(tmp_path: Path) -> None:
    (file := tmp_path / "adapters.py").write_text("def get_ddp_bucketed(module, bucket_size_mb): ...\n")
    task = tasks()["ddp_overlap_individual_parameters"]
    ends = [planned(task, machine, Path("out"), code=f"{file}:get_ddp_bucketed").commands[0] for machine in (CPU, PAIR)]
    assert [words[words.index("--bucket-size-mb") + 1 :][:2] for words in ends] == [["0.1", "1"], ["1", "10"]]


def test_fresh_task_keeps_the_cells_of_the_others_in_its_folder() -> None:
    renewed: set[str] = set()
    names = ("naive_ddp", "fsdp", "benchmarking_script")
    plans = [planned(tasks()[name], CPU, Path("out"), renewed=renewed) for name in names]
    assert [["--fresh" in words for words in plan.commands] for plan in plans] == [
        [True],
        [False],
        [True, False, True, False],
    ]


def test_commands_that_ran_anew_keep_their_status_in_a_later_plan(tmp_path: Path) -> None:
    fresh = planned(tasks()["benchmarking_script"], CPU, tmp_path, renewed=set())
    fresh.out.mkdir()
    done = [{"command": [*words, "--skip-oom"], "status": 0, "seconds": 1.5} for words in fresh.commands]
    _course._write_state(fresh, done)
    rows = _course.command_rows(planned(tasks()["benchmarking_script"], CPU, tmp_path))
    assert {(row["status"], row["took_s"]) for row in rows} == {(0, 1.5)}
    assert not any("--fresh" in row["command"] for row in rows)


def test_size_given_on_a_cpu_says_which_context_it_has() -> None:
    plan = planned(tasks()["benchmarking_script"], CPU, Path("out"), sizes=["small"])
    assert plan.size == (
        "size small, as given; context 64, the handout's is 512 (--context-length); the rest is tiny, because the "
        "handout's needs a GPU and this is a CPU"
    )
    longer = planned(tasks()["memory_profiling"], CPU, Path("out"), sizes=["small"], contexts=["128", "256"])
    assert longer.size.startswith("size small and context 128 256, as given; the rest")
    words = [command[command.index("--context-length") + 1 :] for command in longer.commands[:2]]
    assert words[0][:2] == ["128", "256"]
    assert words[1][0] == "256"


def test_own_model_takes_the_place_of_the_built_in() -> None:
    first, report, *_ = planned(tasks()["benchmarking_script"], CPU, Path("out"), model="mine:LM").commands
    assert first[-2:] == ["--workload", "mine:LM"]
    assert "--workload" not in report


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "flash_forward --model mine:LM": "flash_forward has no model; leave out --model",
        "flash_foward": "unknown task 'flash_foward'; did you mean flash_forward or ",
        "foo": "unknown task 'foo'; choose among\n  benchmarking_script, nsys_profile, mixed_precision_accumulation,\n",
        "naive_ddp --full": "the handout's size needs 2 GPUs, and this is a CPU; leave out --full",
        "flash_forward --size tiny": "flash_forward has no model; leave out --size",
        "flash_forward --code no.py:f --dry-run": "file 'no.py' (from 'no.py:f') does not exist; correct the path",
        "naive_ddp --code no.py:f": "file 'no.py' (from 'no.py:f') does not exist; correct the path",
        "naive_ddp --code ddp_nave --dry-run": "unknown parallel strategy 'ddp_nave'; did you mean ddp_naive",
        "naive_ddp --model no.py:LM --dry-run": "file 'no.py' (from 'no.py:LM') does not exist; correct the path",
        "--all --model no.py:LM --dry-run": "file 'no.py' (from 'no.py:LM') does not exist; correct the path",
        "torch_compile --code mine.py:f": "torch_compile takes no code of your own; leave out --code",
        "--all --code mine.py:f": "--code is for one kind of task; leave out --all, and name the tasks",
        "naive_ddp --gpus 1": "--gpus requires --all; add --all, or leave out --gpus",
        "naive_ddp --all": "--all runs every task; leave out --all, or naive_ddp",
        "--all --gpus 3": "no task takes 3 GPUs; use --gpus 0, 1 or 2",
        "--full": "--full requires a task; add its name, or --all",
        "naive_ddp --budget-s 0": "--budget-s must be more than 0 s, got 0",
    }.items(),
)
@pytest.mark.usefixtures("on_a_cpu")
def test_malformed_request_names_the_remedy(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_cpu")
def test_task_runs_prints_its_answer_and_is_listed_as_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", "flash_forward"]) == 0
    shown = capsys.readouterr().out
    assert "at tiny size, because the handout's needs a GPU and this is a CPU" in shown
    assert "\n    cs-systems attention --batch 4" in shown
    assert "a good answer: Inputs, output and one tensor" in shown.replace("\n", " ")
    folder = Path("runs/course/flash_forward")
    assert (folder / "records.jsonl").is_file()
    assert "flash_torch" in (folder / "flash_forward.txt").read_text()
    assert main(["course"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith(("flash_forward", "flash_backward"))] == [
        "run at tiny size, on a CPU",
        "not begun",
    ]


def test_command_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    task = Task("one", "", 0, "", "", (), ("report {out}/nothing", "doctor --no-such-option", "report --help"))
    plan = planned(task, CPU, tmp_path)
    assert carried_out(plan) == 2
    steps = json.loads((tmp_path / "one" / "one.json").read_text())["steps"]
    assert [step["status"] for step in steps] == [2, 2, 0]
    assert state(task, tmp_path) == "1 of 3 commands done on a CPU"


def test_without_time_records_are_still_reported(tmp_path: Path) -> None:
    task = Task("one", "", 0, "", "", (), ("time --out {out}", "report --help"))
    assert carried_out(planned(task, CPU, tmp_path), deadline=0) == 0
    steps = json.loads((tmp_path / "one" / "one.json").read_text())["steps"]
    assert [step["status"] for step in steps] == [None, 0]
    assert (tmp_path / "one" / "one.txt").read_text().startswith("$ cs-systems time --out ")


def test_damaged_state_is_named(tmp_path: Path) -> None:
    task = tasks()["naive_ddp"]
    file = tmp_path / task.folder / "naive_ddp.json"
    file.parent.mkdir()
    file.write_text("{}")
    assert state(task, tmp_path) == f"unknown: {file} is damaged; run the task again"


def test_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="smal"):
        planned(tasks()["benchmarking_script"], CPU, Path("out"), sizes=["smal"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for all tasks, some of which share cells."""
    return tmp_path_factory.mktemp("course")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", MEASURED, ids=lambda task: task.name)
def test_every_task_runs_on_a_cpu(task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_course, "machine", lambda: CPU)
    monkeypatch.chdir(folder)
    assert main(["course", task.name]) == 0
    assert state(task, Path("runs/course")).startswith(("run at tiny size", "done at the handout's size"))
