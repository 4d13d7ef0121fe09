"""Bench for an unedited script: each process runs it with levers applied from outside, until its steps are recorded.

The script is never edited. Records and logs are kept in the folder of the search, and each patched copy in a separate
folder.
"""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_systems.advise import numerics
from cs_systems.advise.budget import Budgeted
from cs_systems.advise.lever import Cell, Lever, ScriptPlan
from cs_systems.advise.numerics import Check
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.printable import plain
from cs_systems.core.units import human
from cs_systems.record import RunRecord, read_records, records_path

SEEDS = 3  # number of runs of the start; the spread of their losses is how much a lever may change them
MOST_COPIED_BYTES = 200 << 20  # largest folder that is copied to try a patch
NOT_COPIED = (".git", ".venv", "venv", "node_modules", "__pycache__", "runs", "wandb")


@dataclass
class ScriptBench(Budgeted):
    """Bench that measures a script.

    Attributes:
        words: the script with its arguments.
        levers: all levers, by name.
        folder: the folder of the search.
        command: returns the command that runs words in a process that records them, given the recorder's options.
        options: the recorder's options, except its folder.
        budget_s: the time for the whole search.
        clock: returns seconds; for tests.
    """

    words: Sequence[str]
    levers: Mapping[str, Lever]
    folder: Path
    command: Callable[[dict[str, Any], list[str]], list[str]]
    options: Mapping[str, Any]
    budget_s: float = 900.0
    clock: Callable[[], float] = time.monotonic
    copy: Path | None = None
    first_s = 20.0

    def measure(self, cell: Cell, number: int) -> RunRecord:
        assert isinstance(cell, ScriptPlan)
        folder = self.folder / _name(cell, number)
        if known := _recorded(folder):
            return known
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        began_s = self.clock()
        error = self._run(cell, folder)
        self.took(self.clock() - began_s)
        return _recorded(folder) or _failed(error or _last_line(folder / "log.txt"))

    def check(self, cell: Cell) -> Check:
        """Compare the losses of the recorded steps with the start's; the limit is the start's spread over seeds."""
        assert isinstance(cell, ScriptPlan)
        others = [self.measure(ScriptPlan(seed=seed), 0) for seed in range(1, SEEDS)]
        return numerics.training(self.measure(cell, 0), self.measure(ScriptPlan(), 0), others)

    def _run(self, plan: ScriptPlan, folder: Path) -> str | None:
        """Run the script up to its last recorded step; return why it was ended earlier, or None."""
        names = () if plan.is_patched else plan.levers
        options = {**self.options, "out": str(folder.absolute()), "levers": list(names), "seed": plan.seed}
        where = self.copy if plan.is_patched else None
        log = (folder / "log.txt").open("wb")
        with (
            log,
            subprocess.Popen(
                self.command(options, [*self.words]),
                cwd=where,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | self.environment(plan),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                process.wait(self.timeout_s())
            except subprocess.TimeoutExpired:
                return "it took longer than a trial may; give a longer --budget"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # kills processes that the script left running
        return None

    def environment(self, plan: ScriptPlan) -> dict[str, str]:
        """Return the variables of the plan's levers."""
        scripts = [script for name in plan.levers if (script := self.levers[name].script) is not None]
        return {name: value for script in scripts for name, value in script.environment.items()}

    def patched(self, plan: ScriptPlan, source: str) -> tuple[str, list[str]]:
        """Return the script's text with the plan's levers written into it, and the levers that no edit can express."""
        missing = []
        for name in plan.levers:
            script = self.levers[name].script
            assert script is not None
            edited = script.patch(source) if script.patch else None
            if edited is not None:
                source = edited
            elif not script.environment:
                missing.append(name)
        return source, missing

    def copied(self, script: Path, text: str, to: Path) -> None:
        """Copy the current folder, with `text` as the script. Raises ConfigError if the folder is too large."""
        here = Path.cwd()
        if not script.resolve().is_relative_to(here):
            raise ConfigError(f"{script} is outside the current folder; run the command in the folder of the script")
        size = sum(file.stat().st_size for file in _files(here))
        if size > MOST_COPIED_BYTES:
            limit = human(MOST_COPIED_BYTES, "bytes")
            raise ConfigError(
                f"--apply-patch copies the current folder, which has {human(size, 'bytes')}, more than {limit}; "
                "run the command in the folder of the script, or apply the diff yourself"
            )
        for file in _files(here):
            target = to / file.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        (to / script.resolve().relative_to(here)).write_text(text)
        self.copy = to


def diff(name: str, before: str, after: str) -> str:
    """Return the unified diff of a script, in the form that `git apply` and `patch -p1` read."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def git_status() -> str | None:
    """Return the changes that git reports in the current folder; None outside of a repository."""
    try:
        done = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _files(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        found += [file for name in names if (file := Path(root, name)).is_file() and not file.is_symlink()]
    return found


def _name(plan: ScriptPlan, number: int) -> str:
    levers = "+".join(plan.levers) or "start"
    return "-".join([levers, *(["patched"] * plan.is_patched), *([f"seed{plan.seed}"] * bool(plan.seed)), str(number)])


def _recorded(folder: Path) -> RunRecord | None:
    """Return the record that a process left; None if it has no time."""
    if not records_path(folder).exists():
        return None
    records, _ = read_records(folder)
    return next((record for record in records if record.measurement is not None), None)


def _failed(reason: str) -> RunRecord:
    return RunRecord("", RunConfig().to_dict(), "error", reason=reason)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return plain(lines[-1])[:200] if lines else "it ended and printed nothing"
