"""Hooks for git: the check of commit messages, and the configuration of pre-commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = ROOT / ".ci" / "check_commit_message.py"
SUBJECT = "Reject negative kernel durations in Kineto traces".ljust(72, "s")
TEMPLATE = "# Please enter the commit message for your changes.\n#\n"
VERBOSE = "# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n" + "+" * 100
LONG = "error: subject has 73 characters, the limit is 72; shorten it and move the reasons to the body\n"
JOINED = "error: line 2 must be empty, got 'They are wrong.'; separate subject and body with an empty line\n"


def check(folder: Path, message: str) -> tuple[int, str]:
    """Return exit status and error text of the check."""
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message)
    done = subprocess.run([sys.executable, CHECK, file], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "message",
    [
        SUBJECT,
        f"\n{SUBJECT}   \n\n" + "reasons " * 20,
        "×" * 72,
        f"fixup! {SUBJECT}",
        f"squash! fixup! {SUBJECT}",
        f"{SUBJECT}\n{TEMPLATE}",
        f"{SUBJECT}\n{TEMPLATE}{VERBOSE}",
        TEMPLATE,
    ],
)
def test_a_subject_of_72_characters_passes(tmp_path: Path, message: str) -> None:
    assert check(tmp_path, message) == (0, "")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (f"{SUBJECT}s", LONG),
        (f"{SUBJECT}s\n\nThey are wrong.\n{TEMPLATE}{VERBOSE}", LONG),
        (f"fixup! {SUBJECT}s", LONG),
        (f"{TEMPLATE}{SUBJECT}s", LONG),
        (f"{SUBJECT}\nThey are wrong.\n", JOINED),
    ],
)
def test_a_long_subject_or_one_without_an_empty_line_below_is_refused(tmp_path: Path, message: str, error: str) -> None:
    assert check(tmp_path, message) == (1, error)


def test_pre_commit_refuses_a_lint_fault_and_a_long_subject(tmp_path: Path) -> None:
    """The hooks are installed into a new repository, with the tools of this environment, and nothing is downloaded."""
    pytest.importorskip("pre_commit", reason="no pre-commit; run make install")
    repository = tmp_path / "repository"
    (repository / ".ci").mkdir(parents=True)
    (repository / ".venv").symlink_to(sys.prefix)
    for name in (".pre-commit-config.yaml", "pyproject.toml", ".gitignore", ".ci/check_commit_message.py"):
        shutil.copy(ROOT / name, repository / name)
    nobody = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "PRE_COMMIT_HOME": str(tmp_path / "home"),
    }
    for who in ("AUTHOR", "COMMITTER"):
        nobody |= {f"GIT_{who}_NAME": "nobody", f"GIT_{who}_EMAIL": "nobody@localhost"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | nobody

    def run(*command: str) -> tuple[int, str]:
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def commit(source: str, subject: str) -> tuple[int, str]:
        (repository / "module.py").write_text(source)
        assert run("git", "add", ".")[0] == 0
        return run("git", "commit", "-m", subject)

    assert run("git", "init", "--quiet")[0] == 0
    status, output = run(sys.executable, "-m", "pre_commit", "install")
    assert status == 0, output
    assert "commit-msg" in output

    status, output = commit("print(unknown)\n", SUBJECT)
    assert (status, "F821" in output) == (1, True), output
    status, output = commit("x  =  1\n", SUBJECT)
    assert (status, (repository / "module.py").read_text()) == (1, "x = 1\n"), output
    status, output = commit("x = 1\n", f"{SUBJECT}s")
    assert (status, LONG in output) == (1, True), output
    status, output = commit("x = 1\n", SUBJECT)
    assert status == 0, output
    assert run("git", "log", "--format=%s")[1] == f"{SUBJECT}\n"
