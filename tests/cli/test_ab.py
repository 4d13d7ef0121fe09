"""Comparison of commands, files and revisions, on programs that take milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import main
from cs_systems.cli._ab import Compared, _losses
from cs_systems.core.sequential import SequentialTest
from cs_systems.measure.runtime.pairs import Ran
from cs_systems.measure.runtime.program import Program, Trial
from tests import forked_python

QUICK, SLOW = "sleep 0.01", "sleep 0.2"


def git(*words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *name, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def ab(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    status = main(["ab", "--format", "json", *words])
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    tables = {table["name"]: table["rows"] for table in document.get("tables", ())}
    found = {**tables["verdict"][0], "sides": tables["compared"], "processes": tables["processes"]} if tables else {}
    return status, found, printed.err


def test_a_slow_command_is_found_and_gives_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, told = ab(capsys, QUICK, SLOW, "--fail-if", "slower:50%")
    assert (status, found["verdict"], found["compared"]) == (1, "slower", "process")
    assert found["sentence"].startswith("B is slower than A: it takes ")
    assert found["ratio_low"] > 1
    assert 8 <= found["pairs"] <= 14
    assert [row["processes"] for row in found["sides"]] == [found["pairs"]] * 2
    assert told.count("\npair ") == found["pairs"]
    assert {row["pair"] for row in found["processes"]} == {*range(found["pairs"] + 1)}


def test_status_without_a_verdict_follows_fail_if(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = ab(capsys, QUICK, QUICK, "--max-pairs", "2", "--fail-if", "slower:3%")
    assert (status, found["verdict"]) == (0, "undecided")
    assert found["sentence"].endswith(
        "after 2 pairs, when the limit of 2 pairs is reached; no slowdown could have been seen yet; "
        "even a large difference takes about 10 pairs: give --max-pairs 20, or more"
    )
    assert ab(capsys, QUICK, QUICK, "--max-pairs", "2", "--fail-if", "slower:3%", "undecided")[0] == 1


def test_a_table_and_the_verdict_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ab", QUICK, SLOW, "--max-pairs", "1", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "durations, A and B in turn, each in a new process"
    assert any(line.startswith("A     sleep 0.01") for line in lines)
    assert "compared: whole processes, because A runs no Python script" in lines
    assert any(line.startswith("undecided: B takes ") for line in lines)
    assert max(map(len, lines)) <= 80
    kept = [json.loads(line) for line in (tmp_path / "processes.jsonl").read_text().splitlines()]
    assert [row["pair"] for row in kept] == [0, 0, 1, 1]


def test_a_command_that_fails_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = ab(capsys, QUICK, "sh -c 'echo no such data >&2; exit 4'")
    assert status == 3
    assert found["sentence"] == ("nothing was compared: B failed: exited with status 4; its last output: no such data")


@pytest.mark.parametrize(
    ("of_a", "of_b", "said"),
    [
        (0.0031, 0.0031 + 2.3e-10, "A's and B's are equal within the rounding of fp32: they differ by 2.3e-10"),
        (0.0031, 0.0031 - 2.2e-9, "A's and B's are equal within the rounding of fp32: they differ by 2.2e-09"),
        (0.0031, 0.0031 + 2.6e-9, "B's is 2.6e-09 higher, outside the range of A's processes"),
        (1e6, 1e6 - 0.5, "A's and B's are equal within the rounding of fp32: they differ by 0.5"),
        (1e6, 1e6 - 1, "B's is 1 lower, outside the range of A's processes"),
        (0.5, 0.5, "A and B differ no more than processes of one side do"),
    ],
)
def test_losses_that_differ_by_rounding_are_called_equal(of_a: float, of_b: float, said: str) -> None:
    program = Program("a.py", (), None, Path())
    ran = [Ran(side, 1, 1, Trial(1.0, loss=loss)) for side, loss in (("A", of_a), ("B", of_b))]
    compared = Compared((program, program), SequentialTest(0.03), "steps", ran=ran)
    assert _losses(compared) == f"loss: {said}"


@pytest.mark.slow
def test_steps_of_two_files_are_compared_with_their_losses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", forked_python.executable())
    loop = """import sys, torch
model = torch.nn.Linear(2, 1)
torch.nn.init.constant_(model.weight, 1.0)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]) * RATE)
for _ in range(9):
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    optimizer.step()
"""
    for name, rate in (("a.py", "1"), ("b.py", "2")):
        Path(name).write_text(loop.replace("RATE", rate))
    words = ("a.py", "b.py", "--steps", "2:5", "--max-pairs", "1", "--out", "kept", "--", "0.001")
    status, found, _ = ab(capsys, *words)
    assert (status, found["compared"], found["pairs"]) == (0, "steps", 1)
    assert [row["program"] for row in found["sides"]] == ["a.py 0.001", "b.py 0.001"]
    losses = [float(row["loss"]) for row in found["sides"]]
    assert losses[1] < losses[0] < 4
    assert (tmp_path / "kept" / "A" / "records.jsonl").is_file()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with two revisions of a script, `old` and `new`, and data outside of git."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q", "-b", "main")
    script = "import helper, time\ntime.sleep(helper.PAUSE_S)\nopen('data/written', 'w').close()\n"
    Path("train.py").write_text(script)
    Path(".gitignore").write_text("data\n")
    for tag, pause in (("old", "0.0"), ("new", "0.2")):
        Path("helper.py").write_text(f"PAUSE_S = {pause}\n")
        git("add", "-A")
        git("commit", "-qm", tag)
        git("tag", tag)
    Path("data").mkdir()
    return folder


def test_revisions_run_in_worktrees_that_are_removed(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    words = ("old", "new", "--measure", "process", "--max-pairs", "2", "--link", "data", "--", "train.py")
    status, found, _ = ab(capsys, *words)
    assert (status, found["pairs"]) == (0, 2), found
    assert found["ratio"] > 1
    assert found["sides"][0]["program"].startswith("old (")
    assert git("status", "--porcelain") == ""
    assert len(git("worktree", "list").splitlines()) == 1
    assert (repository / "data" / "written").is_file()


def test_ctrl_c_keeps_the_pairs_so_far_and_removes_the_worktrees(repository: Path) -> None:
    command = [sys.executable, "-m", "cs_systems", "ab", "old", "new", "--measure", "process"]
    running = subprocess.Popen(
        [*command, "--link", "data", "--", "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert running.stderr is not None
    while not running.stderr.readline().startswith("pair 1"):
        assert running.poll() is None
    running.send_signal(2)
    out, told = running.communicate(timeout=30)
    assert running.returncode == 130, told
    assert "when interrupted" in out.replace("\n", " ")
    assert git("status", "--porcelain") == ""
    assert len(git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_setup_prepares_an_environment_of_each_revision(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    Path("train.py").write_text("import own, torch.version\n")
    git("commit", "-qam", "needs a package")
    write = "import sysconfig; open(sysconfig.get_path('purelib') + '/own.py', 'w').close()"
    setup = f'python -c "{write}" && test $(which pip) = $VIRTUAL_ENV/bin/pip'
    words = ("HEAD", "main", "--measure", "process", "--max-pairs", "1", "--setup", setup, "--", "train.py")
    status, found, _ = ab(capsys, *words)
    assert (status, found["pairs"]) == (0, 1), found
    assert git("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "ab compares two sides; give two commands, two files, or two revisions and -- SCRIPT"),
        (("old", "nothing", "--", "train.py"), "'nothing' names no commit of this repository; give a revision"),
        (("old", "new", "--", "lost.py"), "old has no script 'lost.py'; correct the path, or choose another"),
        (("old", "new", "--link", "lost", "--", "train.py"), "--link lost does not exist; give a path inside of it"),
        (("a.py", "b.py"), "script 'a.py' does not exist; correct the path"),
        (
            ("train.py", "old", "--", "x"),
            "'old' is not a script, but the other side is; give two files, or two revisions",
        ),
        ((QUICK, "nonesuch 1"), "B begins with 'nonesuch', which is not a program on this machine; correct it"),
        ((QUICK, SLOW, "--setup", "true"), "--setup requires two revisions and -- SCRIPT; leave it out"),
        ((QUICK, SLOW, "--measure", "steps"), "--measure steps cannot be applied, because A runs no Python script"),
        ((QUICK, SLOW, "--fail-if", "faster:3%"), "--fail-if is 'faster:3%'; write slower:3% or undecided, or both"),
        (("--fail-if", "slower:3%", QUICK), "A or B is missing, because --fail-if takes the words that follow it"),
        ((QUICK, "--fail-if", "slower:3%", SLOW), "takes the words that follow it; write A B --fail-if"),
        (
            ("--fail-if", "slower:3%", QUICK, "--find", "3%", SLOW),
            "takes the words that follow it; write A B --fail-if",
        ),
        (("--link", "data", "old", "new", "--", "train.py"), "because --link takes the words that follow it"),
        ((QUICK, SLOW, "--find", "3"), "--find has '3', which is not a share; write it as 3%"),
        ((QUICK, SLOW, "--find", "0.5%"), "the difference to find is 0.500%; give at least 1% and less than 1000%"),
        ((QUICK, SLOW, "--budget", "10"), "--budget is '10'; write a time such as 90s, 10m or 1h"),
        ((QUICK, SLOW, "--max-pairs", "0"), "--max-pairs is 0; give at least 1"),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    assert main(["ab", *words]) == 2
    assert told in capsys.readouterr().err
    assert len(git("worktree", "list").splitlines()) == 1


def test_dry_run_runs_nothing(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    assert main(["ab", "old", "new", "--dry-run", "--", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert "compared: the steps of their loops, if they can be recorded\n" in printed
    assert "at most 100 pairs of processes, in at most 600 s\n" in printed
    assert len(git("worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("conditions", [("slower:3%",), ("undecided",), ("slower:3%", "undecided")])
def test_sides_may_follow_fail_if(conditions: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--fail-if", *conditions, QUICK, SLOW, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"A: {QUICK}\nB: {SLOW}\n")


def test_fail_if_ignores_a_slowdown_below_its_share() -> None:
    """A proven slowdown of 2% does not fail slower:5%, because 5% is excluded."""
    from cs_systems.cli._ab import Question, _status

    test = SequentialTest(0.05, asks=("slower",), seed=0)
    for i in range(13):
        test.draw()
        test.add(1 + i % 3 * 1e-4, 1.02)
    standing = test.standing()
    assert standing.verdict == "slower"
    assert _status(test, standing, Question(0.05, 0.05, False)) == 0
    assert _status(test, standing, Question(0.019, 0.019, False)) == 1
