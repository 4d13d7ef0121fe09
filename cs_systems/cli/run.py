"""Record the loop of an unedited script: its phases, as a record; on a GPU or with --with, a profile too.

Steps of a training are found by its optimizer, steps of an inference by calls of the model. The script keeps its
arguments, output, results and exit status; the report goes to standard error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from tyro.conf import Positional, arg

from cs_systems.cli._document import PRINTED_FORMATS, leave_elsewhere
from cs_systems.cli._options import MaybePath, MaybeText, Names, RecordHost, flag, one_name, optional
from cs_systems.config import ConfigError, one_of
from cs_systems.core import origin
from cs_systems.core.tracers import TRACERS, tracer
from cs_systems.core.validation import short_name, shown

if TYPE_CHECKING:
    from cs_systems.measure.profilers import Profiler
    from cs_systems.record import RunRecord

AFTERWARDS = ("auto", "none", "kineto", "nsys", "memory")
LAUNCHERS = {  # launchers of ranks, as in docs/commands/run.md
    "torchrun": "torchrun --nproc-per-node 2",
    "srun": "srun python",
    "accelerate": "accelerate launch",
}


@dataclass(frozen=True)
class Run:
    script: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="-- SCRIPT ...",
            help="the script, or -m and a module, with its arguments",
            help_behavior_hint="(required)",
        ),
    ] = ()
    steps: Annotated[str, arg(metavar="FIRST:LAST", help="time the steps after the first number, up to the last")] = (
        "5:25"
    )
    with_: Annotated[
        Names,
        arg(
            name="with",
            help="then record 3 steps with kineto (torch.profiler), nsys or memory (snapshot); auto: kineto on a GPU",
        ),
    ] = ("auto",)
    snapshot: Annotated[bool, flag("the same as memory in --with")] = False
    stop: Annotated[bool, flag("end the script after the last recorded step, with exit status 0")] = False
    name: Annotated[MaybeText, optional("TEXT", "name of the loop in tables", "the script and its arguments")] = None
    out: Annotated[MaybePath, optional("DIR", "folder of the records", "runs/ and the script's name")] = None
    record_host: RecordHost = False
    format: Annotated[
        str,
        one_name("format", PRINTED_FORMATS),
        arg(help="of the report; json: one document, the last line on standard error"),
    ] = "terminal"


ARGS = Run


def run(args: Run) -> int:
    """Replace this process by the script's process; with nsys, wait for it instead."""
    words = list(args.script)
    check_script(words)
    first, last = parse_steps(args.steps)
    script, title = titles(words)
    name = title if args.name is None else short_name("--name", args.name)
    out = args.out or Path("runs") / script
    profile, snapshot = _profilers(args)
    options: dict[str, Any] = {"name": name, "out": str(out), "warmup": first, "steps": last - first}
    options |= {"profile": profile, "snapshot": snapshot, "stop": args.stop}
    options |= {"forward": True, "record_host": args.record_host, "command": origin.command(), "format": args.format}
    from cs_systems.cli._script import is_first_rank
    from cs_systems.measure.runtime.program import script_command

    if is_first_rank():
        from cs_systems.measure.runtime.journal import Journal

        options["made"] = Journal.check(out)
    if not tracer(profile).starts_program or not is_first_rank():
        _become(script_command(options, words))
    leave_elsewhere()  # standard output is the script's
    return _below(profile, options, words)


def check_script(words: Sequence[str], command: str = "run") -> None:
    """Raise ConfigError unless the words name a Python script or module. command: the name of this command."""
    if not words or not words[0] or [*words] == ["-m"]:
        raise ConfigError(f"no script is given; write it after --, as in cs-systems {command} -- train.py --lr 1e-3")
    if reason := _no_module(words[1]) if words[0] == "-m" else _no_script(words, f"cs-systems {command}"):
        raise ConfigError(reason)


def titles(words: Sequence[str]) -> tuple[str, str]:
    """Return (the script's name, the name of its loop).

    Different arguments give different cells, not repeats of one.
    """
    script, *arguments = words[1:] if words[0] == "-m" else [Path(words[0]).stem, *words[1:]]
    return script, "".join(c if c.isprintable() and c != ":" else "_" for c in shlex.join([script, *arguments]))


def _no_script(words: Sequence[str], command: str) -> str | None:
    """Return why the first word is not a script, and what to write instead; None if it may be one."""
    if words[0].startswith("-"):
        return f"{words[0]!r} is an option, not a script; write the script first, as in {command} -- train.py"
    program = Path(words[0]).name
    if program in LAUNCHERS:
        before = LAUNCHERS[program]
        return f"{program!r} is not a script but a launcher of ranks; write {before} -m cs_systems run -- train.py"
    if re.fullmatch(r"python[\d.]*", program):
        script = shlex.join(words[1:]) if words[1:] and re.match("[^-]|-m$", words[1]) else "train.py"
        return f"{program!r} is not a script, and {command} starts Python itself; write {command} -- {script}"
    if not Path(words[0]).exists() and shutil.which(words[0]):
        return f"{program!r} is a program, but a Python script is needed; write {command} -- train.py"
    if not Path(words[0]).is_file():
        what = "is a folder; name a .py file in it" if Path(words[0]).is_dir() else "does not exist; correct the path"
        return f"script {words[0]!r} {what}"
    return None


def _no_module(name: str) -> str | None:
    """Return why a name is not a module, and what to write instead; None if its package is found."""
    if "/" in name or name.endswith(".py"):
        return f"-m takes the name of a module, not the path {name!r}; leave out -m"
    if PathFinder.find_spec(package := name.partition(".")[0], ["", *sys.path]) is None:
        remedy = "correct its name, or run the command in the folder that holds it"
        return f"no module is named {package or name!r}; {remedy}"
    return None


def _profilers(args: Run) -> tuple[str, bool]:
    """Return the profiler of the trace, and whether to record a snapshot. Raises ConfigError."""
    for word in args.with_:
        one_of("--with", word, AFTERWARDS)
    found = {*args.with_} - {"none"} | ({"memory"} if args.snapshot else set())
    if len(both := [name for name in TRACERS if name in found]) > 1:
        raise ConfigError(
            f"--with {' and '.join(both)} cannot trace the same process; give one of them, or run the script twice"
        )
    return next(iter(found - {"memory"}), "none"), "memory" in found


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)


def _below(name: str, options: dict[str, Any], words: list[str]) -> int:
    """Run the script's process under nsys, add the tables of the report to its record, and return its exit status.

    name: the profiler, with a command that starts the process.
    """
    from cs_systems.cli._script import Form, conclude, why_nothing
    from cs_systems.core import plugins
    from cs_systems.core.printable import encodable
    from cs_systems.measure.profilers import ProfilerUnusable
    from cs_systems.measure.profilers._nsys import last_line
    from cs_systems.measure.runtime.journal import remove_empty
    from cs_systems.measure.runtime.program import script_command
    from cs_systems.record import read_records
    from cs_systems.report.tables import document

    nsys, out = plugins.get("profilers", name), Path(options["out"])
    format = options["format"]
    if reason := nsys.problem():
        raise ProfilerUnusable(reason, nsys.instead)
    probe = "import gc; gc.disable(); import torch; raise SystemExit(not torch.cuda.is_available())"
    on_cuda = subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode == 0
    sys.stdout.flush()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nsys-", dir=out.absolute()) as folder:  # the script may leave this one
        report, left, messages = (Path(folder) / name for name in ("report", "records.jsonl", "messages.txt"))
        streams = [os.dup(1), os.dup(2)]  # nsys prints to standard output, which belongs to the script
        command = script_command(options | {"streams": streams, "handover": str(left)}, words)
        with messages.open("w") as stream:
            child = subprocess.Popen(
                nsys.launch(command, report, (), on_cuda), stdout=stream, stderr=stream, pass_fds=streams
            )
            signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends Ctrl-C to the script too
            signal.signal(signal.SIGTERM, lambda *_: child.terminate())
            ended = child.wait()
            status = ended if ended >= 0 else 128 - ended
        for each in streams:
            os.close(each)
        if not left.exists():
            text = last_line(messages.read_text())
            why = f"nothing was recorded, and nsys ended with {text!r}; try it without --with nsys"
            shown = document.error(why, status) if format == "json" else f"cs-systems: {why}\n"
            print(encodable(shown, sys.stderr), end="", file=sys.stderr)
        else:
            records = read_records(left)[0] if left.stat().st_size else []
            read = [_with_report(record, nsys, out, report) for record in records]
            conclude(read, str(out), why_nothing(status), words, Form(format, status))
    remove_empty(options["made"])
    return status


def _with_report(record: RunRecord, nsys: Profiler, out: Path, report: Path) -> RunRecord:
    """Return the record; if nsys profiled it, with the tables of the report, and also appended to the folder."""
    if record.status != "ok" or not tracer(record.config["profiler"]).starts_program:
        return record
    from cs_systems.measure.runtime.profiled import prefix, with_profile
    from cs_systems.readers.nsys import REPORT
    from cs_systems.record import append_record

    path = prefix(out, record.run_config, record.repeat)
    if (written := report.with_suffix(REPORT)).is_file():
        written.rename(f"{path}{REPORT}")
    record = with_profile(record, nsys, path, keep=True)
    append_record(out, record)
    return record


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last number of --steps. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not found or not 1 <= int(found[1]) < int(found[2]):
        raise ConfigError(
            f"--steps is {shown(text)}; write FIRST:LAST, such as 5:25, with FIRST at least 1 and below LAST, and at "
            "most 9 digits each"
        )
    return int(found[1]), int(found[2])
