"""The command on a CPU: a real search of one lever, its resumption, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from cs_systems.advise.answer import ENDED, Answer, row_of
from cs_systems.advise.lever import ScriptPlan
from cs_systems.advise.sources import Source
from cs_systems.cli import advise, main
from cs_systems.cli._advice import print_continuation
from cs_systems.cli._advise_script import check_version
from cs_systems.cli.advise import Advise
from cs_systems.config import ConfigError
from cs_systems.core import origin
from cs_systems.record import read_records

SIZE = ["--size", "tiny", "--num-layers", "1", "--context-length", "64", "--batch-size", "1"]
CELL = [*SIZE, "--steps", "6", "--rounds", "3", "--warmup", "1"]


def test_search_on_a_cpu_is_recorded_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", *CELL, "--levers", "attention_backend", "tf32", "--train-steps", "10", "--out", str(tmp_path)]
    assert main([*words, "--budget", "10m"]) == 0
    printed = capsys.readouterr()
    assert "to try: attention_backend (attention sdpa_flash)\n" in printed.err
    assert "at most 10m, each option 1 to 24 processes" in printed.err
    assert "does not apply: tf32 (a CPU has no TF32)" in printed.out
    assert "best:    cs-systems time --size tiny --context-length 64 --num-layers 1" in printed.out
    advice = json.loads((tmp_path / "advice.json").read_text())
    (trial,) = [row for row in advice["trials"] if row["change"]]
    assert trial["status"] in ("kept", "rejected")
    if trial["status"] == "kept":
        assert "losses of 11 steps differ by" in trial["numbers"]
    records, _ = read_records(tmp_path)
    assert {record.status for record in records} == {"ok"}
    assert main([*words, "--budget", "9s"]) == 0  # less than the assumed time of a trial with its proof
    assert f"{len(records)} processes recorded before" in capsys.readouterr().err
    again, _ = read_records(tmp_path)
    assert [record.key for record in again] == [record.key for record in records]
    (resumed,) = [row for row in json.loads((tmp_path / "advice.json").read_text())["trials"] if row["change"]]
    assert resumed["processes"] > 0, resumed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention", "naive", "sdpa_flash"], "advise begins with one cell, got 2; give one value for each option"),
        (["--budget", "soon"], "--budget is 'soon'; write a time such as 90s, 10m or 1h"),
        (["--levers", "turbo"], "unknown lever 'turbo'"),
        (["--levers", "tf32", "reduce_overhead"], "reduce_overhead: for scripts only; give the script after --"),
        (["--goal", "memory", "--device", "cpu"], "--goal memory requires a GPU"),
        (["--memory", "1GiB", "--device", "cpu"], "--memory requires a GPU, because the memory of a CPU's step"),
        (
            ["--keep", "strict", "--train-steps", "20"],
            "--keep strict compares one step and trains nothing; leave out --train-steps",
        ),
        (["--train-steps", "2"], "--train-steps is 2; it must be at least 10"),
        (["--memory", "80"], "--memory '80' has no unit; use 80GiB"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *CELL, "--out", str(tmp_path), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "strict"], "--keep strict requires the built-in model, because the gradients of your own are"),
        (["--train-steps", "20"], "your own workload is judged by its last loss; leave out --train-steps"),
    ],
)
def test_checks_of_the_built_in_model_are_refused_for_a_workload(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--workload", "mine.py:factory", "--out", str(tmp_path / "new"), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_search_of_an_edited_script_is_not_resumed(tmp_path: Path) -> None:
    folder, script = tmp_path / "out", tmp_path / "train.py"
    first, edited = (Source(script, f"print({number})") for number in range(2))
    for one in (first, first, edited):  # nothing was measured yet
        check_version(folder, [one])
    (folder / "start-0").mkdir()
    (folder / "start-0" / "records.jsonl").touch()
    check_version(folder, [edited])
    with pytest.raises(
        ConfigError, match=r"are of another version of the script or of a module .*choose another --out"
    ):
        check_version(folder, [first])


def test_dry_run_refuses_what_the_search_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, words = Path("train.py"), ["advise", "--dry-run", "--out", "F", "--", "train.py"]
    script.write_text("import torch\n")
    assert main(words) == 0
    assert not Path("F").exists()
    check_version(Path("F"), [Source(script, script.read_text())])
    Path("F/start-0").mkdir()
    Path("F/start-0/records.jsonl").touch()
    assert main(words) == 0
    script.write_text("import torch, os\n")
    capsys.readouterr()
    assert main(words) == 2
    assert "choose another --out, or undo the edit" in capsys.readouterr().err


def test_options_that_a_script_takes_are_in_the_help() -> None:
    """The help lists them, because the others are refused."""
    told = {*re.findall(r"--[\w-]+", (advise.__doc__ or "").partition("a script takes")[2])}
    fields = {f"--{name.replace('_', '-')}" for name in Advise.__dataclass_fields__}
    refused = {"--script", "--keep", "--change-batch", "--train-steps", "--fresh", "--record-host"}
    assert told == (fields - refused - {"--cells", "--step"}) | {"--warmup"}


def test_dry_run_without_a_lever_that_applies_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *CELL, "--device", "cpu", "--levers", "tf32", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "to try: nothing, because no lever applies: tf32 (a CPU has no TF32)\n" in out
    assert not err


@pytest.mark.parametrize(
    ("budget", "told"),
    [("30s", "at most 30s (longer if the start alone takes longer), each"), ("15m", "at most 15m, each option")],
)
def test_short_budget_is_no_limit_of_the_start(budget: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *CELL, "--device", "cpu", "--dry-run", "--budget", budget]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_dry_run_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *CELL, "--dry-run", "--out", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    assert "to try: " in out, "the answer of the command"
    assert max(map(len, out.splitlines())) <= 80
    assert not err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("processes", "is_interrupted", "is_printed"), [(2, False, True), (0, False, False), (2, True, False)]
)
def test_command_that_goes_on_follows_a_search_that_its_budget_ended(
    processes: int, is_interrupted: bool, is_printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C it is printed with the interruption; before a first trial a longer --budget is asked for."""
    rows = (row_of("bf16", "precision bf16") | {"processes": processes}, row_of("tf32", "precision tf32", reason=ENDED))
    answer = Answer(ScriptPlan(), ScriptPlan(), (), rows, "time", is_interrupted=is_interrupted)
    with origin.by("cs-systems advise --budget 90s --out old -- train.py --out 3"):
        print_continuation(answer, Path("runs/new"))
    command = "go on:   cs-systems advise --budget 90s --out runs/new -- train.py --out 3\n"
    assert capsys.readouterr().out == command * is_printed
