"""Bench for an unedited script: each process runs it with levers applied from outside, until its steps are recorded.

The script is never edited. Records and logs are kept in the folder of the search, and each patched copy in a separate
folder. The first process shows what the script imports of torch, and its record tells what takes the time, because the
stack is sampled in further steps. The later ones are forks of a process that has imported it, unless the script would
run in another way then; imports take most of the time of a trial.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cs_systems.advise import numerics
from cs_systems.advise.budget import Budgeted
from cs_systems.advise.in_script import APPLIED, PARTLY, UNUSED
from cs_systems.advise.lever import CODE, Cell, CodeRow, Lever, ScriptPlan
from cs_systems.advise.numerics import Check
from cs_systems.advise.sources import SKIPPED, Source, top_of
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.printable import plain
from cs_systems.core.units import human
from cs_systems.measure.runtime.program import end
from cs_systems.measure.runtime.script_forks import Imports, NoForks, ScriptForks
from cs_systems.record import RunRecord, read_records, records_path
from cs_systems.report.advice import folder_name

SEEDS = 3  # number of runs of the start; the spread of their losses is how much a lever may change them
FIRST = "first"  # folder of the process that shows what the script imports; its times are no trial's
SAMPLED = "sampled"  # folder of its record, which a report of the search does not read
IMPORTS = "imports.json"
TOO_LONG = "it took longer than a trial may; give a longer --budget"
MOST_COPIED_BYTES = 200 << 20  # largest folder that is copied to try a patch
LINKED_BYTES = 10 << 20  # size from which a file, such as data, is linked instead of copied
ERROR = re.compile(r"(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
OF_LAUNCHER = "ChildFailedError"  # says only that a rank failed
NOTHING_RECORDED = "cs-systems: nothing was recorded, because "
ENDED = "the script ended with exit status"
OF_RUN = re.compile(r"--steps (\d+):(\d+)")  # steps as `cs-systems run` takes them: the first timed one, and the end
MOST_SHOWN = 200  # characters of a reason


@dataclass
class ScriptBench(Budgeted):
    """Bench that measures a script.

    Attributes:
        words: the script with its arguments.
        sources: the text of the script, then of its own modules.
        levers: all levers, by name.
        folder: the folder of the search.
        command: returns the command that runs words in a process that records them, given the recorder's options.
        options: the recorder's options, except its folder.
        budget_s: the time for the whole search.
        clock: returns seconds; for tests.
        copy: the folder of the patched copy, once there is one.
        may_fork: whether the script is started as one process, and not by a launcher.
    """

    words: Sequence[str]
    levers: Mapping[str, Lever]
    folder: Path
    command: Callable[[dict[str, Any], list[str]], list[str]]
    options: Mapping[str, Any]
    budget_s: float = 900.0
    clock: Callable[[], float] = time.monotonic
    sources: Sequence[Source] = ()
    copy: Path | None = None
    may_fork: bool = False
    first_s = 20.0
    _servers: dict[tuple[tuple[str, str], ...], ScriptForks | None] = field(default_factory=dict)

    def close(self) -> None:
        """End the processes from which trials were forked."""
        for server in filter(None, self._servers.values()):
            server.close()
        self._servers.clear()

    def measure(self, cell: Cell, number: int) -> RunRecord:
        assert isinstance(cell, ScriptPlan)
        folder = self.folder / _name(cell, number)
        if known := _recorded(folder):
            self.knows()
            return known
        if self.may_fork and self.sampled() is None:
            first = self.folder / FIRST
            of_first = {"imports": first / IMPORTS, "out": first / SAMPLED}
            paths = {name: str(path.absolute()) for name, path in of_first.items()}
            error = self._timed(ScriptPlan(), first, paths | {"stacks": True})
            if self.sampled() is None:
                return _failed(error or _why_missing(first))
        error = self._timed(cell, folder)
        if (unused := folder / UNUSED).exists():
            return _failed(f"{' and '.join(json.loads(unused.read_text()))} found nothing to change in this run")
        return _recorded(folder) or _failed(error or _why_missing(folder))

    def sampled(self) -> RunRecord | None:
        return _recorded(self.folder / FIRST / SAMPLED)

    def check(self, cell: Cell) -> Check:
        """Compare the losses of the recorded steps with the start's; the limit is the start's spread over seeds.

        Where one seed's are too far apart, the losses of all seeds decide: workers of a loader, for example, leave
        the random state of the script in another place, and so change the order of its samples.
        """
        assert isinstance(cell, ScriptPlan)
        starts = [self.measure(ScriptPlan(seed=seed), 0) for seed in range(SEEDS)]
        found = numerics.training([self.measure(cell, 0)], starts)
        if found.passed or not found.is_comparable:
            return found
        return numerics.training([self.measure(replace(cell, seed=seed), 0) for seed in range(SEEDS)], starts)

    def _timed(self, plan: ScriptPlan, folder: Path, more: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """Run the script in an empty folder of records, and count its time."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | self.environment(plan)
        forks = self._forks(plan, environment)
        began_s = self.clock()
        error = self._run(plan, folder, more, environment, forks)
        if error != TOO_LONG or _recorded(folder):
            self.took(self.clock() - began_s)
        return error

    def _run(
        self,
        plan: ScriptPlan,
        folder: Path,
        more: Mapping[str, Any],
        environment: dict[str, str],
        forks: ScriptForks | None,
    ) -> str | None:
        """Run the script up to its last recorded step; return why it was ended earlier, or None.

        more: options of the process besides the usual ones. forks: starts it; None for a new process.
        """
        names = () if plan.is_patched else plan.levers
        options = {**self.options, "out": str(folder.absolute()), "levers": list(names), "seed": plan.seed}
        options |= {"files": [str(each.path) for each in self.sources[1:]], **more}
        words = [*self.words]
        if forks is not None:
            try:
                (folder / "log.txt").touch()
                forks.run([json.dumps(options), *words], folder / "log.txt", self.timeout_s())
            except TimeoutError:
                return TOO_LONG
            except NoForks as error:  # a new process must not be compared with earlier forks
                self._servers = {key: server for key, server in self._servers.items() if server is not forks}
                return str(error)
            return None
        where = self.copy if plan.is_patched else None
        if where is not None:
            words[0], environment["PYTHONPATH"] = _below_here(Path(words[0])), _paths(where)
        log = (folder / "log.txt").open("wb")
        with (
            log,
            subprocess.Popen(
                self.command(options, words),
                cwd=where,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                process.wait(self.timeout_s())
            except subprocess.TimeoutExpired:
                return TOO_LONG
            finally:
                end(process)
        return None

    def _imports(self) -> Imports | None:
        """Return what the first process left; None if it did not run, or not to its end."""
        return Imports.read(self.folder / FIRST / IMPORTS)

    def _forks(self, plan: ScriptPlan, environment: Mapping[str, str]) -> ScriptForks | None:
        """Return the server that forks the process of a plan, started with its variables; None for a new process.

        A patched copy has other modules; what is compared with it must be a new process too.
        """
        imports, key = self._imports(), tuple(sorted(self.environment(plan).items()))
        if not self.may_fork or plan.is_patched or self.copy or imports is None:
            return None
        if key not in self._servers:
            self._servers[key] = None
            with suppress(NoForks):
                self._servers[key] = ScriptForks(Path(self.words[0]), imports, environment, max(0.0, self.left_s()))
        return self._servers[key]

    def environment(self, plan: ScriptPlan) -> dict[str, str]:
        """Return the variables of the plan's levers."""
        scripts = [script for name in plan.levers if (script := self.levers[name].script) is not None]
        return {name: value for script in scripts for name, value in script.environment.items()}

    def patched(self, plan: ScriptPlan) -> tuple[dict[Path, str], list[str]]:
        """Return the changed texts with the plan's levers, by file, and the levers that no edit can express."""
        texts, missing = {each.path: each.text for each in self.sources}, []
        partly = self.partly(plan)
        for name in plan.levers:
            if name in partly:
                missing.append(name)
                continue
            script = self.levers[name].script
            assert script is not None
            files = [*texts][:1] if script.in_script_alone else [*texts]
            edited = {file: text for file in files if script.patch and (text := _valid(script.patch(texts[file])))}
            texts |= edited
            if not edited and not script.environment:
                missing.append(name)
        return {each.path: texts[each.path] for each in self.sources if texts[each.path] != each.text}, missing

    def partly(self, plan: ScriptPlan) -> set[str]:
        """Return the plan's levers that left objects as they are in a trial, which a patch of them would change."""
        files = self.folder.glob(f"{_name(ScriptPlan(plan.levers), 0).removesuffix('0')}*/{PARTLY}")
        return {name for file in files for name in json.loads(file.read_text())}

    def copied(self, texts: Mapping[Path, str], to: Path) -> None:
        """Copy the current folder, with these texts as files. Raises ConfigError if the folder is too large.

        Large files are linked. A link leads to the copy of its target if there is one, else to the target.
        """
        here, files_of_run = Path.cwd().resolve(), (*texts, Path(self.words[0]))
        if outside := [file for file in files_of_run if not file.resolve().is_relative_to(here)]:
            raise ConfigError(f"{outside[0]} is outside the current folder; run the command in a folder above it")
        files = {file: file.is_symlink() or file.stat().st_size >= LINKED_BYTES for file in _files(here)}
        size = sum(file.stat().st_size for file, is_linked in files.items() if not is_linked)
        if size > MOST_COPIED_BYTES:
            limit = human(MOST_COPIED_BYTES, "bytes")
            raise ConfigError(
                f"--apply-patch copies the current folder, which has {human(size, 'bytes')}, more than {limit}; "
                "run the command in the folder of the script, or apply the diff yourself"
            )
        for file, is_linked in files.items():
            target = to / file.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            if is_linked and file not in texts:
                real = file.resolve()
                has_copy = file.is_symlink() and _is_copied(real, here)
                target.symlink_to(to / real.relative_to(here) if has_copy else real)
            else:
                shutil.copy2(file, target)
        for file, text in texts.items():
            target = to / file.relative_to(here)
            if not target.resolve().is_relative_to(to.resolve()):
                raise ConfigError(f"{file} is behind a link to a folder that is not copied; apply the diff yourself")
            with target.open("w", encoding="utf-8", newline="") as stream:
                stream.write(text)
        self.copy = to


def git_status(records: Path) -> frozenset[str] | None:
    """Return the lines of git's status of the repository around the current folder; None outside of one.

    records: the folder of the search's own files, which are left out.
    """
    top, folder = top_of(Path.cwd()), records.resolve()
    if top is None:
        return None
    without = [f":(exclude,literal){folder}"] if folder != top and folder.is_relative_to(top) else []
    command = ["git", "status", "--porcelain", "--", ":(top)", *without]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return frozenset(done.stdout.splitlines()) if done.returncode == 0 else None


def changed_files(before: frozenset[str] | None, after: frozenset[str] | None) -> list[str]:
    """Return the files that git's status lists differently, also deleted untracked ones; [] if unknown."""
    return [] if before is None or after is None else sorted({line[3:] for line in before ^ after})


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, and the links to files and folders."""
    found = []
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if Path(root, name).is_symlink()]
        folders[:] = [name for name in folders if name not in SKIPPED and name not in links]
        found += [file for name in (*names, *links) if (file := Path(root, name)).is_file() or file.is_dir()]
    return found


def _valid(text: str | None) -> str | None:
    """Return an edited text if it is still Python."""
    try:
        ast.parse(text or "")
    except (SyntaxError, ValueError):
        return None
    return text


def _below_here(path: Path) -> str:
    """Return a path relative to the current folder, which names the copy's file in a copy of it."""
    return path.resolve().relative_to(Path.cwd().resolve()).as_posix()


def _paths(copy: Path) -> str:
    """Return a PYTHONPATH with which modules of the current folder are imported from its copy."""
    here = Path.cwd().resolve()
    paths = [Path(each).resolve() for each in sys.path[1:] if each]
    mine = [str(copy / path.relative_to(here)) for path in paths if _is_copied(path, here)]
    theirs = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    others = [each for each in theirs if not _is_copied(Path(each).resolve(), here)]
    return os.pathsep.join([*mine, *others])


def _is_copied(path: Path, here: Path) -> bool:
    return path.is_relative_to(here) and not SKIPPED & {*path.relative_to(here).parts}


def _name(plan: ScriptPlan, number: int) -> str:
    return folder_name(plan.levers, number, plan.seed, is_patched=plan.is_patched)


def _recorded(folder: Path) -> RunRecord | None:
    """Return the record that a process left, with the code of its levers; None if it has no time."""
    if not records_path(folder).exists():
        return None
    records, _ = read_records(folder)
    found = next((record for record in records if record.measurement is not None), None)
    if found is None or not (file := folder / APPLIED).exists():
        return found
    rows: list[CodeRow] = [
        {"lever": name, "code": line} for name, lines in json.loads(file.read_text()).items() for line in lines
    ]
    return replace(found, results={**found.results, **CODE.filled(rows)})


def _failed(reason: str) -> RunRecord:
    return RunRecord("", RunConfig().to_dict(), "error", reason=reason)


def _why_missing(folder: Path) -> str:
    """Return why a process left no times, in a line.

    That is the last error in its log, else the reason of its record, else why nothing was recorded, with the script's
    last line if that failed.
    """
    lines = [line for line in (folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := ERROR.match(line)) and OF_LAUNCHER not in line]
    if errors:
        return _short(errors[-1])
    left = [each for each in (folder, folder / SAMPLED) if records_path(each).exists()]
    records = [record for each in left for record in read_records(each)[0]]
    if reason := next((record.reason for record in records if record.reason), None):
        return _short(OF_RUN.sub(_as_options, reason))
    if not lines:
        return "it ended and printed nothing"
    *before, last = lines
    reason = last.removeprefix(NOTHING_RECORDED)
    if reason == last or not before or not reason.startswith(ENDED):
        return _short(reason)
    return _short(f"{reason.partition(';')[0]}; its last line is: {before[-1]}")


def _short(reason: str) -> str:
    """Return a reason with the paths below the current folder relative to it, cut where it is too long."""
    return plain(reason.replace(f"{Path.cwd()}{os.sep}", ""))[:MOST_SHOWN]


def _as_options(steps: re.Match[str]) -> str:
    first, end = map(int, steps.groups())
    return f"--warmup {first} --steps {end - first}"
