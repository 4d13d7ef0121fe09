"""One run of a user's program, unchanged or with its script's loop recorded; everything that it started is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cs_systems.core.tables import first_row
from cs_systems.formulas.energy import ENERGY, step_j
from cs_systems.measure.runtime.guardian import PR_SET_PDEATHSIG, descendants, prctl
from cs_systems.measure.runtime.processes import Log, describe_exit
from cs_systems.record import RunRecord, read_records

NO_LOOP = "no backward pass of torch was seen"


@dataclass(frozen=True)
class Program:
    """Program to run.

    title: its name for people. words: its arguments. python: the interpreter for a script, so that its loop can be
    recorded; None for another program, named by the first of `words`. folder, environment: where it runs, and with
    which variables.
    """

    title: str
    words: tuple[str, ...]
    python: str | None
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        return [*([self.python] if self.python else []), *self.words]


class Trial(NamedTuple):
    """Result of one process: the compared value, such as the duration of a step, or the reason why there is none."""

    value: float | None
    reason: str | None = None
    loss: float | None = None  # loss of the last step
    has_failed: bool = False  # whether the program ended with an error
    step_j: float | None = None


class Ended(NamedTuple):
    """End of a run: its duration by the wall clock, and the reason if it failed."""

    wall_s: float
    reason: str | None


def timed(program: Program, timeout_s: float | None = None) -> Trial:
    """Run the program unchanged; the value of the result is its wall time."""
    ended = run_program(program.argv, folder=program.folder, environment=program.environment, timeout_s=timeout_s)
    return Trial(None if ended.reason else ended.wall_s, ended.reason, has_failed=ended.reason is not None)


def recorded(
    program: Program, out: Path, *, name: str, warmup: int, steps: int, timeout_s: float | None = None
) -> tuple[Trial, RunRecord | None]:
    """Run a script up to its last recorded step; the value is the median of the timed steps in the returned record.

    Args:
        program: a script with an interpreter.
        out: folder of the records, outside of what is measured.
        name: the name of the loop in tables.
        warmup: steps before the timed ones.
        steps: timed steps.
        timeout_s: time after which the program is ended.
    """
    assert program.python is not None
    with tempfile.TemporaryDirectory(prefix="cs-systems-") as scratch:
        left = Path(scratch) / "records.jsonl"
        timing = {"warmup": warmup, "steps": steps}
        options = {"name": name, "out": str(out.absolute()), **timing, "profile": "none", "stop": True}
        options["handover"] = str(left)
        environment = dict(program.environment)
        if program.python != sys.executable or program.folder != Path.cwd():
            environment["PYTHONPATH"] = _with_this_package(Path(scratch), environment)
        argv = script_command(options, program.words, program.python)
        ended = run_program(argv, folder=program.folder, environment=environment, timeout_s=timeout_s)
        records = read_records(left)[0] if left.exists() and left.stat().st_size else []
    record = records[-1] if records else None
    if ended.reason:
        return Trial(None, ended.reason, has_failed=True), record
    if record is None or record.measurement is None:
        return Trial(None, NO_LOOP if record is None else record.reason), record
    energy = [step_j(row) for row in ENERGY.of(record.results)]
    loss = first_row(record.results, "outcome").get("loss")
    return Trial(record.measurement.median_s(), loss=loss, step_j=energy[0] if energy else None), record


def _with_this_package(scratch: Path, environment: Mapping[str, str]) -> str:
    """Return a PYTHONPATH by which another interpreter or folder finds this package, and nothing else from here."""
    (scratch / "cs_systems").symlink_to(Path(__file__).parents[2], target_is_directory=True)
    theirs = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    return os.pathsep.join(filter(None, [str(scratch), theirs]))


def script_command(options: Mapping[str, Any], words: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs a script, or -m and a module, with its loop recorded: see `cli._script`."""
    return [python, "-m", "cs_systems.cli._script", json.dumps(options), *words]


def run_program(
    argv: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Ended:
    """Run a program without input, capture its output, and end what it leaves running, also on an interrupt.

    environment: variables in addition to this process's own.
    """
    log = Log(None)
    began_s = time.perf_counter()
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log.stream,
            stderr=log.stream,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the program
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        return Ended(0.0, f"{argv[0]} cannot be started: {error.strerror}")
    try:
        status = process.wait(timeout_s)
        wall_s = time.perf_counter() - began_s
        return Ended(wall_s, f"{describe_exit(status)}{log.last_output()}" if status else None)
    except subprocess.TimeoutExpired:
        return Ended(time.perf_counter() - began_s, f"took longer than {timeout_s:g} s{log.last_output()}")
    finally:
        end(process)
        log.stream.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program, if it still runs, and all processes of its session and below it."""
    end_tree(process.pid, is_running=process.poll() is None)
    process.wait()


def end_tree(first: int, *, is_running: bool = True) -> None:
    """Kill all processes of a session and, if its first process still runs, those below it."""
    below = descendants(first) if is_running else set()
    with suppress(OSError):
        os.killpg(first, signal.SIGKILL)
    for pid in below:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
