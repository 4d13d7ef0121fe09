"""Sweeps of the fault campaign: started, killed, damaged, run again, and judged by what they leave."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import _fault_oracle as oracle
from _fault_oracle import Failure
from _fault_plan import SIGNALS, Sweep
from _fault_workload import CATALOGUE

HERE = Path(__file__).parent
WORKLOAD = (HERE / "_fault_workload.py").read_bytes()  # each sweep has a copy, which stays as it is
OF_CELLS = ("pymp-", "torchinductor_")  # temporary files of the cells' own libraries
ENVIRONMENT = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
GRACE_S = 5.0  # for what a run leaves to end: processes of a killed parent notice it
BASE_DEADLINE_S, INNOCENT_S, FAULTY_S, RANKS_S = 60.0, 2.0, 12.0, 40.0
_PR_SET_CHILD_SUBREAPER = 36
Expected = Mapping[str, Sequence[Mapping[str, Any]]]  # place → what innocent cells see there


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose parents end, detached ones too.

    Ctrl-C is for the campaign, which lets its sweeps end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass
class Outcome:
    """Outcome of a sweep."""

    sweep: Sweep
    failures: list[Failure] = field(default_factory=list)
    wall_s: float = 0.0
    kept: Path | None = None


@dataclass
class Run:
    """Run of the program: how it ended, and the journal before and after it."""

    status: int | None  # None: it had to be ended
    cut: bool
    before: bytes
    after: bytes
    output: str


class Stage:
    """Sweep in a folder of its own: its command, its processes, its files."""

    def __init__(self, sweep: Sweep, expected: Expected | None) -> None:
        self.sweep, self.expected = sweep, expected
        self.folder = Path(tempfile.mkdtemp(prefix="faults-")).resolve()
        self.out, self.temporary = self.folder / "out", self.folder / "tmp"
        self.work = self.folder / "work"
        self.work.mkdir()
        self.temporary.mkdir()
        self.failures: list[Failure] = []
        self.runs, self.after = 0, ""
        self.damaged = False
        self.cells = list(sweep.cells)
        self.workload = self.folder / "_fault_workload.py"
        self.workload.write_bytes(WORKLOAD)
        self.write_plan()

    # ------------------------------------------------------------------ what is run

    def write_plan(self) -> None:
        (self.folder / "plan.json").write_text(json.dumps({"cells": self.cells}))

    @property
    def repeats(self) -> int:
        return int(self.sweep.options.get("repeats", 1))

    def numbers(self) -> list[str]:
        return [str(cell["cell"]) for cell in self.cells]

    def command(self) -> list[str]:
        options = self.sweep.options
        if self.sweep.face == "ranks":
            driver = [HERE / "_fault_driver.py", self.workload, self.out, options.get("timeout_s", 60)]
            return [sys.executable, *map(str, driver), *self.numbers()]
        words = [sys.executable, "-m", "cs_systems", self.sweep.face, "--workload", f"{self.workload}:factory"]
        words += ["--batch-size", *self.numbers(), "--device", "cpu", "--out", str(self.out)]
        words += ["--with", "kineto"] if self.sweep.face == "profile" else []
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def environment(self) -> dict[str, str]:
        """Return a small environment, because innocent cells record it."""
        own = {"TMPDIR": str(self.temporary), "FAULT_PLAN": str(self.folder / "plan.json")}
        return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | own

    @property
    def deadline_s(self) -> float:
        faults = [CATALOGUE[cell["fault"]] for cell in self.cells if cell.get("fault")]
        hangs_s = sum(fault.needs_timeout for fault in faults) * self.sweep.options.get("timeout_s", 0.0)
        each_s = RANKS_S if self.sweep.face == "ranks" else FAULTY_S
        innocent_s = INNOCENT_S * (len(self.cells) - len(faults))
        return BASE_DEADLINE_S + (each_s * len(faults) + innocent_s + hangs_s) * self.repeats

    @property
    def this_run(self) -> str:
        return f"run {self.runs}{self.after}"

    def journal(self) -> bytes:
        file = self.out / "records.jsonl"
        return file.read_bytes() if file.is_file() else b""

    def fail(self, category: str, where: str, what: str) -> None:
        self.failures.append(Failure(category, where, oracle.shortened(what, 400)))

    # ------------------------------------------------------------------ running

    def run(
        self,
        interfere: Callable[[subprocess.Popen[bytes]], None] | None = None,
        prepare: Callable[[], None] | None = None,
        command: Sequence[str] | None = None,
    ) -> Run:
        """Run the program to its end, or until `interfere` has ended it; then see what is left of it.

        prepare: is called in the program's process before it starts.
        """
        before = self.journal()
        self.runs += 1
        output_file = self.folder / f"said-{self.runs}.txt"

        def begin() -> None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if prepare:
                prepare()

        with output_file.open("wb") as stream:
            process = subprocess.Popen(
                command or self.command(), cwd=self.work, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=stream, stderr=stream, start_new_session=True, preexec_fn=begin,
            )  # fmt: skip
            (self.folder / "parent.pid").write_text(str(process.pid))
            if interfere:
                interfere(process)
            try:
                status: int | None = process.wait(self.deadline_s)
            except subprocess.TimeoutExpired:
                status = None
                self.fail("hung", self.this_run, f"still running after {self.deadline_s:.0f} s: {_last(output_file)}")
                process.kill()
                process.wait()
        self.see_what_is_left(quiet=status is None)
        text = output_file.read_text(errors="replace")
        self.failures += oracle.tracebacks(text, self.this_run)
        after = self.journal()
        self.failures += oracle.changed(before, after, self.damaged)
        return Run(status, interfere is not None or status is None, before, after, text)

    def see_what_is_left(self, quiet: bool) -> None:
        """Report processes and temporary files that outlive a run, and end the processes.

        quiet: the run was ended here after it hung, which is reported.
        """
        deadline = time.monotonic() + GRACE_S
        while (alive := descendants()) and time.monotonic() < deadline:
            reap()
            time.sleep(0.05)
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith(OF_CELLS)]
        if alive and not quiet:
            self.fail("left", self.this_run, f"{len(alive)} processes: " + "; ".join(map(_describe, alive[:3])))
        if files and not quiet:
            self.fail("left", self.this_run, "temporary files: " + ", ".join(sorted(files)[:5]))
        for _ in range(20):
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap()
            if not descendants():
                break
            time.sleep(0.05)
        for name in files:
            path = self.temporary / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ judging

    def judge(self, run: Run, *, lenient: bool = False) -> None:
        """Check the records that a run has added.

        lenient: the run had no room for its files, or its worker was killed from outside: an innocent cell may say so,
            and a faulty one beside the sweep's faults.
        """
        before, held = oracle.lines(run.before), oracle.lines(run.after)
        known = {line.text for line in before}
        new = [line for line in held if line.text not in known]
        numbers = [cell["cell"] for cell in self.cells]
        self.failures += oracle.strangers(new, numbers, self.repeats)
        self.failures += oracle.doubled(before, new)
        plans = {cell["cell"]: cell for cell in self.cells}
        for line in new:
            if line.cell not in plans:
                continue
            plan = plans[line.cell]
            if lenient and (plan.get("fault") is None or plan.get("extra")):
                continue
            if plan.get("fault") is not None:
                self.failures += oracle.wrong(line, plan)
            elif self.expected is not None:
                self.failures += oracle.contaminated(line, plan, self.expected, str(self.folder))
        if not run.cut:
            self.judge_end(run, numbers)

    def judge_end(self, run: Run, numbers: Sequence[int]) -> None:
        """Check that a run that was not interrupted has a record of every cell and a matching exit status."""
        missing = list(oracle.lost(oracle.lines(run.after), numbers, self.repeats))
        last = f"exit status {run.status}: {_last_text(run.output)}"
        if run.status not in (0, 3) and (run.before or not missing):
            self.fail("refused", self.this_run, last)
        elif missing:
            self.failures += [Failure("lost", lost.where, f"{lost.what}; {last}"[:300]) for lost in missing]

    def run_to_the_end(self) -> Run:
        run = self.run()
        self.judge(run)
        return run

    def mend(self) -> None:
        """Run the sweep again without faults: it must measure the failed cells only."""
        self.cells = [{**cell, "fault": None, "place": None} for cell in self.cells]
        self.write_plan()
        run = self.run_to_the_end()
        if "torn" in run.output or "skipped" in run.output:
            self.fail("refused", self.this_run, f"it complains: {_last_text(run.output)}")

    def report(self) -> None:
        command = [sys.executable, "-m", "cs_systems", "report", str(self.out), "--format", self.sweep.format]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=self.work, env=self.environment(), capture_output=True, timeout=90)
            text = (done.stdout + done.stderr).decode(errors="replace")
            self.failures += oracle.tracebacks(text, "report")
            if done.returncode and oracle.lines(self.journal()):
                self.fail("refused", "report", f"exit status {done.returncode}: {_last_text(text)}")
            return
        self.fail("hung", "report", "still running after 90 s")

    # ------------------------------------------------------------------ what is done to a sweep

    def play(self) -> None:
        kind = self.sweep.events[0]["kind"] if self.sweep.events else "none"
        if kind == "damage":
            self.run_to_the_end()
        for event in self.sweep.events:
            {"kill": self.kill, "disk": self.disk, "damage": self.damage}[kind](event)
        complete = True
        if kind != "damage":
            run = self.run_to_the_end()
            complete = run.status in (0, 3)
        if self.sweep.mend or not complete:
            self.mend()
        self.report()

    def kill(self, event: Mapping[str, Any]) -> None:
        """Run the sweep and kill it before its end."""
        how = event["how"]

        def interfere(process: subprocess.Popen[bytes]) -> None:
            if how == "cell":  # a cell does it
                return
            began, contents = len(self.journal()), _contents(self.out)
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if event["after"] == "start" or (event["after"] == "folder" and _contents(self.out) != contents):
                    break
                if event["after"] == "record" and len(self.journal()) > began:
                    break
                time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(event["delay_s"])
            self.send(process, how, getattr(signal, event["signal"]))

        run = self.run(interfere)
        run.cut = how != "worker" or run.status not in (0, 3)
        self.judge(run, lenient=how == "worker")
        ended = {0, 3, None, *(128 + getattr(signal, name) for name in SIGNALS)}
        if run.status not in ended and not (run.status is not None and run.status < 0):
            self.fail("refused", f"{self.this_run} after {how} {event['signal']}", _last_text(run.output))

    def send(self, process: subprocess.Popen[bytes], how: str, number: int) -> None:
        """Signal the program, its group, or the process that measures its cells."""
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if how == "worker":
                os.kill(int((self.folder / "worker.pid").read_text()), number)
            elif how == "group":
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        if how == "twice":
            time.sleep(0.03)
            process.send_signal(number)

    def disk(self, event: Mapping[str, Any]) -> None:
        """Run the sweep on a full disk, then free space."""
        how, size = event["how"], event["size_kib"] << 10
        options = {"full while it runs": f"size={size}", "full at the start": "size=65536",
                   "no more files": "size=64m,nr_inodes=3"}.get(how)  # fmt: skip
        mounted = options is not None and self.mount(options)
        limit = None if mounted else (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        run = self.run(prepare=limit)
        run.cut = True
        self.judge(run, lenient=True)
        if run.status not in (0, 3) and "records.jsonl" not in run.output and str(self.out) not in run.output:
            self.fail("wrong", f"disk: {how}", f"the message names no file: {_last_text(run.output)}")
        if mounted:
            options = "size=512m,nr_inodes=100000"
            subprocess.run(["mount", "-o", f"remount,{options}", str(self.out)], check=True)

    def mount(self, options: str) -> bool:
        """Mount a small disk where the records go; False where this is not allowed."""
        self.out.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.out)], capture_output=True)
        return done.returncode == 0

    def damage(self, event: Mapping[str, Any]) -> None:
        """Damage the journal, or put a user's files beside it, and run the same command again."""
        how, rng = event["how"], Random(event["seed"])
        self.after = f" after: {how}"
        if " of mine" in how:
            self.guest(how)
            return
        if how == "oversized cell":
            words = [sys.executable, "-m", "cs_systems", "time", "--size", "tiny", "--context-length", "999999999999"]
            self.run(
                command=[*words, "--batch-size", "1", "--device", "cpu", "--timeout-s", "20", "--out", str(self.out)]
            )
        else:
            self.damaged = True
            (self.out / "records.jsonl").write_bytes(damage(self.journal(), how, rng))
        self.run_to_the_end()

    def guest(self, how: str) -> None:
        """Check that a user's file, link or pipe with one of the program's names stays unchanged and blocks no run."""
        kind, name = how.split(" of mine: ")
        place, precious = self.out / name, self.folder / "precious"
        had = place.read_bytes() if place.is_file() else None
        place.unlink(missing_ok=True)
        precious.write_bytes(b"precious")
        if kind == "file":
            place.write_bytes(b"precious")
        elif kind == "link":
            place.symlink_to(precious)
        else:
            os.mkfifo(place)
        run = self.run()
        self.judge_guest(how, run, place, precious)
        place.unlink(missing_ok=True)
        if had is not None:
            place.write_bytes(had)

    def judge_guest(self, how: str, run: Run, place: Path, precious: Path) -> None:
        if run.status == 2 and place.name not in run.output:
            self.fail("refused", how, f"the message does not name the file: {_last_text(run.output)}")
        elif run.status not in (0, 2, None):
            self.fail("refused", how, f"exit status {run.status}: {_last_text(run.output)}")
        if precious.read_bytes() != b"precious":
            self.fail("changed", how, "the file that it points to was written to")
        if how.startswith("file") and (not place.exists() or place.read_bytes() != b"precious"):
            self.fail("changed", how, "the file is gone or was written to")

    def close(self) -> None:
        if os.path.ismount(self.out):
            subprocess.run(["umount", "-l", str(self.out)], check=False)


def _contents(out: Path) -> set[tuple[str, int, int]]:
    """Return name, size and time of each file of a folder; they change once a program is past its imports."""
    files = [(path.name, path.lstat()) for path in out.iterdir()] if out.is_dir() else []
    return {(name, found.st_size, found.st_mtime_ns) for name, found in files}


# ---------------------------------------------------------------------------------------------- the journal


def damage(journal: bytes, how: str, rng: Random) -> bytes:
    """Return the journal as a crash, a bad disk or a bad editor leaves it."""
    lines = journal.splitlines(keepends=True) or [b"\n"]
    middle = rng.randrange(len(lines))
    garbage = rng.randbytes(rng.randrange(10, 500)).replace(b"\n", b"!")
    cut = rng.randrange(1, len(lines[0]))
    replaced: dict[str, Callable[[], bytes]] = {
        "first line torn": lambda: lines[0][: len(lines[0]) - cut] + (b"\n" if rng.random() < 0.5 else b"")
        + b"".join(lines[1:]),
        "last line torn": lambda: journal[: -rng.randrange(1, max(2, len(lines[-1]) - 1))],
        "middle line torn": lambda: b"".join([*lines[:middle], lines[middle][:cut] + b"\n", *lines[middle + 1 :]]),
        "line replaced by garbage": lambda: b"".join([*lines[:middle], garbage + b"\n", *lines[middle + 1 :]]),
        "line replaced by null bytes": lambda: b"".join(
            [*lines[:middle], b"\0" * len(lines[middle]), *lines[middle + 1 :]]
        ),
        "null bytes at the end": lambda: journal + b"\0" * rng.randrange(1, 9000),
        "all null bytes": lambda: b"\0" * len(journal),
        "empty": lambda: b"",
        "all garbage": lambda: rng.randbytes(3000),
        "scalar lines": lambda: journal + b'1\nnull\n"text"\n',
        "not UTF-8": lambda: b"\xff\xfe" + journal,
        "deep line": lambda: journal + b"[" * 100_000 + b"\n",
        "long line": lambda: journal + b"x" * 5_000_000 + b"\n",
        "line ends missing": lambda: journal.replace(b"}\n{", b"}{", 1),
        "Windows line ends": lambda: journal.replace(b"\n", b"\r\n"),
        "blank lines": lambda: journal.replace(b"\n", b"\n\n  \n"),
        "no end of line": lambda: journal.rstrip(b"\n"),
    }  # fmt: skip
    return replaced[how]()


# ---------------------------------------------------------------------------------------------- processes


def _processes() -> dict[int, tuple[int, str]]:
    """Return the processes of this machine: pid → (parent, state)."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(words[1]), words[0]
    return found


def descendants() -> list[int]:
    """Return the living descendants of this process, adopted ones included."""
    table = _processes()
    known = {os.getpid()}
    while more := {pid for pid, (parent, _) in table.items() if parent in known} - known:
        known |= more
    return sorted(pid for pid in known - {os.getpid()} if table[pid][1] not in "ZX")


def reap() -> None:
    """Collect the exit status of adopted processes."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {oracle.shortened(Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' '), 100)}"
    return str(pid)


def _last(output_file: Path) -> str:
    return _last_text(output_file.read_text(errors="replace"))


def _last_text(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return oracle.shortened(lines[-1], 300) if lines else "it printed nothing"


# ---------------------------------------------------------------------------------------------- one sweep


INNOCENT = "innocent"


def innocent_sweep(face: str) -> Sweep:
    """Return a sweep whose cells commit no fault."""
    cells = tuple({"fault": None, "cell": n, "samples": 2} for n in (1, 2, 3))
    return Sweep(-1, INNOCENT, cells, (), face, {} if face == "ranks" else {"warmup": 0, "steps": 2})


def calibrate(face: str) -> tuple[Expected, Outcome]:
    """Return the values that innocent cells see without a fault, and the failures even then.

    Raises RuntimeError where the cells do not work.
    """
    began = time.monotonic()
    stage = Stage(innocent_sweep(face), None)
    run = stage.run_to_the_end()
    shutil.rmtree(stage.folder, ignore_errors=True)
    records = [line.record for line in oracle.lines(run.after)]
    if [record["status"] for record in records] != ["ok"] * len(stage.cells):
        what = [record["reason"] for record in records] or run.output
        raise RuntimeError(f"a sweep of innocent cells fails ({face}): {what}")
    of_cells = [oracle.neutral(oracle.what_it_saw(r)[1], str(stage.folder)) for r in records]
    seen = {place: [of[place] for of in of_cells] for place in of_cells[0]}
    return seen, Outcome(stage.sweep, stage.failures, time.monotonic() - began)


def play(sweep: Sweep, expected: Expected, keep: Path | None) -> Outcome:
    """Run one sweep with its faults, and judge it."""
    began = time.monotonic()
    stage = Stage(sweep, expected)
    try:
        stage.play()
    except OSError as error:
        stage.fail("wrong", "the campaign", f"{type(error).__name__}: {error}")
    outcome = Outcome(sweep, stage.failures, time.monotonic() - began)
    if stage.failures and keep is not None:
        outcome.kept = keep / f"sweep-{sweep.number}"
        shutil.rmtree(outcome.kept, ignore_errors=True)
        with contextlib.suppress(shutil.Error):
            shutil.copytree(stage.folder, outcome.kept, symlinks=True, ignore=_pipes)
    stage.close()
    shutil.rmtree(stage.folder, ignore_errors=True)
    return outcome


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (path := Path(folder) / name).is_fifo() or path.is_socket()]
