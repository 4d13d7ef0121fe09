"""The two sides of `ab`: commands, files, or a script in two revisions, each as a program that runs in a folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cs_systems.config import ConfigError
from cs_systems.core.validation import shown
from cs_systems.measure.runtime.pairs import SIDES
from cs_systems.measure.runtime.program import Program, run_program

_SHELL = re.compile(r"[|&;<>$`*?(){}\[\]~#\n]")  # a command that contains one of these characters needs a shell
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python[\d.]*")


def kind_of(a: str, b: str, rest: Sequence[str]) -> str:
    """Return the kind of both sides: "files", "revisions" or "commands". Raises ConfigError."""
    if not a or not b:
        raise ConfigError("ab compares two sides; give two commands, two files, or two revisions and -- SCRIPT")
    scripts = [side.endswith(".py") and " " not in side for side in (a, b)]
    if all(scripts):
        for name in (a, b):
            if not Path(name).is_file():
                raise ConfigError(f"script {name!r} does not exist; correct the path")
        return "files"
    if rest:
        if any(scripts):
            other = b if scripts[0] else a
            raise ConfigError(f"{other!r} is not a script, but the other side is; give two files, or two revisions")
        return "revisions"
    return "commands"


def of_files(a: str, b: str, rest: Sequence[str]) -> tuple[Program, Program]:
    """Return the sides that run two scripts with the same arguments."""
    sides = [Program(shlex.join([name, *rest]), (name, *rest), sys.executable, Path.cwd()) for name in (a, b)]
    return sides[0], sides[1]


def of_commands(a: str, b: str) -> tuple[Program, Program]:
    """Return the sides that run two commands. Raises ConfigError."""
    return _of_command("A", a), _of_command("B", b)


def _of_command(name: str, command: str) -> Program:
    """Return the side of a command. One that needs a shell is run by a shell, and its loop is not recorded."""
    if _SHELL.search(command):
        return Program(command, ("/bin/sh", "-c", command), None, Path.cwd())
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{name}, {shown(command)}, is not a command: {error}; close its quotes") from None
    environment = {}
    while words and _VARIABLE.match(words[0]):
        variable, _, value = words.pop(0).partition("=")
        environment[variable] = value
    if not words:
        raise ConfigError(f"{name}, {shown(command)}, is not a command; give one, such as 'python train.py --lr 1e-3'")
    if words[0].endswith(".py") and Path(words[0]).is_file() and not os.access(words[0], os.X_OK):
        words.insert(0, sys.executable)
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"{name} begins with {words[0]!r}, which is not a program on this machine; correct it")
    is_script = words[1:] and (words[1].endswith(".py") or words[1] == "-m")
    if _PYTHON.fullmatch(Path(words[0]).name) and is_script:
        return Program(command, tuple(words[1:]), program, Path.cwd(), environment)
    return Program(command, (program, *words[1:]), None, Path.cwd(), environment)


@contextmanager
def of_revisions(
    revisions: Sequence[str], rest: Sequence[str], scratch: Path, setup: str | None, links: Sequence[Path]
) -> Iterator[tuple[Program, Program]]:
    """Yield the sides that run a script in two revisions, each in a git worktree that exists as long as the context.

    Args:
        revisions: anything that names a commit of the repository of the current folder.
        rest: the script and its arguments; it runs in the folder of the worktree that corresponds to the current one.
        scratch: an empty folder outside of the repository.
        setup: the command that prepares an environment for each revision; None to use the current environment.
        links: files and folders that are not in git, such as data; each worktree gets symbolic links to them.

    Raises:
        ConfigError: a revision, the script or a link does not exist, or the setup failed.
    """
    root = Path(_git("rev-parse", "--show-toplevel"))
    within = Path.cwd().resolve().relative_to(root.resolve())
    commits = [_commit(revision) for revision in revisions]
    trees = [scratch / f"tree-{name}" for name in SIDES]
    try:
        for tree, commit in zip(trees, commits, strict=True):
            _git("-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--quiet", "--detach", str(tree), commit)
            _link(root, tree, links)
        sides = []
        for name, revision, commit, tree in zip(SIDES, revisions, commits, trees, strict=True):
            title = revision if commit.startswith(revision) else f"{revision} ({commit[:7]})"
            folder = tree / within
            if rest[0] != "-m" and not (folder / rest[0]).is_file():
                raise ConfigError(f"{revision} has no script {rest[0]!r}; correct the path, or choose another revision")
            # The revision's own modules come before an editable installation of the user's folder.
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, [*_sources(tree), os.environ.get("PYTHONPATH")]))}
            python = sys.executable
            if setup is not None:
                python = _environment(scratch / f"environment-{name}", setup, folder, revision)
                environment |= _activated(Path(python).parent)
            sides.append(Program(title, tuple(rest), python, folder, environment))
        yield sides[0], sides[1]
    finally:
        _remove(root, [tree for tree in trees if tree.exists()])


def _sources(tree: Path) -> list[str]:
    return [str(tree), *([str(tree / "src")] if (tree / "src").is_dir() else [])]


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except ConfigError:
        raise ConfigError(
            f"{revision!r} names no commit of this repository; give a revision that git log shows, or two commands in "
            "quotes"
        ) from None


def _git(*words: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"revisions require git, which cannot be started: {error.strerror}; install it") from None
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise ConfigError(f"git {words[0]} failed: {said}; run the command in the folder of the repository")
    return done.stdout.strip()


def _link(root: Path, tree: Path, links: Sequence[Path]) -> None:
    """Link files of the user's folder that are not in git to the same place in a worktree."""
    for link in links:
        target = Path(os.path.abspath(link))  # noqa: PTH100 (a link of the user's stays a link)
        if not target.exists() or not target.is_relative_to(root):
            where = "does not exist" if not target.exists() else f"is outside of the repository {root}"
            raise ConfigError(f"--link {link} {where}; give a path inside of it, or leave it out")
        place = tree / target.relative_to(root)
        if place.exists() and place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        if place.exists():
            raise ConfigError(f"--link {link} is in the revision already; leave it out")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def _environment(folder: Path, setup: str, tree: Path, revision: str) -> str:
    """Return the Python interpreter of a new virtual environment; it also sees the packages of the current one."""
    made = run_program([sys.executable, "-m", "venv", str(folder)], folder=tree)
    if made.reason is not None:
        raise ConfigError(f"no environment can be made for {revision}, because venv {made.reason}; leave out --setup")
    python = folder / "bin" / "python"
    own = next((folder / "lib").glob("python*/site-packages"))
    inherited = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    (own / "inherited.pth").write_text("".join(f"{path}\n" for path in inherited))
    done = run_program(["/bin/sh", "-c", setup], folder=tree, environment=_activated(python.parent))
    if done.reason is not None:
        raise ConfigError(f"--setup failed in {revision}: {done.reason}; correct the command")
    return str(python)


def _activated(programs: Path) -> dict[str, str]:
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(programs.parent),
    }


def _remove(root: Path, trees: Sequence[Path]) -> None:
    """Remove worktrees with everything that was written into them, and git's entries for them."""
    for tree in trees:
        with suppress(ConfigError):
            _git("worktree", "remove", "--force", "--force", str(tree), folder=root)
        if tree.exists():
            shutil.rmtree(tree, ignore_errors=True)
            with suppress(ConfigError):
                _git("worktree", "prune", folder=root)
