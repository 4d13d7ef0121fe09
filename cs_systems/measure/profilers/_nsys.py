"""Command, ranges and export of Nsight Systems, for the profilers that use its tools.

On CUDA the CUDA profiler's API begins and ends the trace. On a CPU, where a build of torch has none, an NVTX range
does. The report is exported to SQLite, from which the tables are made. Options: the user guide of Nsight Systems.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.core.diagnostic import Diagnostic, diagnostic
from cs_systems.measure.profilers import ProfileLost, Unavailable
from cs_systems.readers._nsys import PUSH_POP
from cs_systems.readers.forms.modules import modules_file
from cs_systems.readers.nsys import EXPORT, REPORT

if TYPE_CHECKING:
    from cs_systems.machine.device import Device

OLDEST = (2022, 4)  # the oldest release that can record cells; older exports can still be read
CAPTURE = "timed steps"  # name of the range that begins and ends the trace on a CPU
ALWAYS = (
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range-end=stop",  # the default would also stop the worker, before it has sent its result
    "--force-overwrite=true",
)
ON_CUDA = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--capture-range=cudaProfilerApi")
ON_CPU = (
    "--trace=nvtx,osrt",
    "--capture-range=nvtx",
    f"--nvtx-capture={CAPTURE}",
    "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",  # without it, only a registered string can begin a trace
)
NOT_ON_PATH = "not on the PATH"
PAIR_TIMEOUT_S = 30
_REMEDY = "install it with apt install nsight-systems-cli (NVIDIA's CUDA repository)"
_NEWER = _REMEDY.replace("install it", "install a newer one")


def check() -> Diagnostic:
    """Return the `doctor` row for nsys: whether it can record, import and export here."""
    path = shutil.which("nsys")
    if path is None:
        return diagnostic("nsys", NOT_ON_PATH, "missing", _REMEDY)
    found = version_of(path)
    release = re.match(r"(\d+)\.(\d+)", found)
    if release and (int(release[1]), int(release[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return diagnostic(
            "nsys",
            f"{found} is older than {oldest}, the oldest release that cs-systems records with",
            "problem",
            _NEWER,
        )
    folder = Path(path).resolve().parent.parent
    if not any(folder.glob("host-linux-*/QdstrmImporter")):
        remedy = f"find the folder host-linux-x64 of the same nsys, and run ln -s FOLDER {folder}/host-linux-x64"
        return diagnostic("nsys", f"{found} lacks its importer and cannot write a .nsys-rep", "problem", remedy)
    return diagnostic("nsys", found)


def version_of(program: str) -> str:
    """Return the version that a tool of NVIDIA's prints: 2024.2.3."""
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"version unknown ({error})"
    number = re.search(r"\d{4}\.\d+(\.\d+)*", output)
    return number[0] if number else "version unknown"


def loses_ranges() -> str | None:
    """Return why this nsys does not record a range of the package nvtx, or None if it does.

    It records a range to find out, which takes seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, database, output = (Path(folder) / name for name in ("pair.nsys-rep", "pair.sqlite", "output.txt"))
        emit = [sys.executable, "-c", "import nvtx; nvtx.push_range('doctor'); nvtx.pop_range()"]
        record = ["nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}", *emit]
        for argv in (record, [*EXPORT, "-o", str(database), str(report)]):
            try:
                with output.open("w") as stream:  # run() would wait for the pipe while any process holds it
                    subprocess.run(argv, stdout=stream, stderr=stream, timeout=PAIR_TIMEOUT_S, check=True)
            except subprocess.TimeoutExpired:
                return f"{argv[0]} {argv[1]} did not end within {PAIR_TIMEOUT_S} s"
            except subprocess.CalledProcessError:
                return f"{argv[0]} {argv[1]} failed: {last_line(output.read_text())}"
        with closing(sqlite3.connect(database)) as opened:
            count = f"SELECT count(*) FROM NVTX_EVENTS WHERE eventType = {PUSH_POP}"
            try:
                found = opened.execute(count).fetchone()[0]
            except sqlite3.Error as error:
                return f"its export cannot be read: {error}"
    return None if found else "the emitted range is not in the trace"


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no message"])[-1].rstrip(".")


def problem() -> str | None:
    row = check()
    return None if row["state"] == "ok" else reason(row)


def reason(row: Diagnostic) -> str:
    """Return a sentence with the reason why a tool cannot work, and the remedy."""
    verb = "is " if row["found"] == NOT_ON_PATH else ""
    return f"{row['check']} {verb}{row['found']}; {row['remedy']}"


def launch(argv: Sequence[str], out: Path, options: Sequence[str], on_cuda: bool) -> list[str]:
    """Return the command that runs the worker under `nsys profile`.

    The user's options come last, so that they take precedence.
    """
    where = ON_CUDA if on_cuda else ON_CPU
    return ["nsys", "profile", *where, *ALWAYS, f"--output={out.absolute()}", *options, *argv]


def started_this_process() -> bool:
    """Return whether `nsys profile` or `nsys launch` started this process; the latter sets no session at first."""
    injected = (os.environ.get(name, "") for name in ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"))
    return "NSYS_PROFILING_SESSION_ID" in os.environ or any("libToolsInjection" in value for value in injected)


def not_started(on_cuda: bool) -> str:
    """Return an error message that nsys did not start this process, with the right command."""
    command = shlex.join(["nsys", "profile", *(ON_CUDA if on_cuda else ON_CPU), "--capture-range-end=stop"])
    return f"nsys did not start this process; start it by {command} python train.py, or pass profile='kineto'"


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    import torch

    from cs_systems.instrument.annotate import NvtxRanges
    from cs_systems.instrument.hooks import annotated
    from cs_systems.instrument.structure import as_table, rows

    try:
        ranges = NvtxRanges()
    except ImportError:
        raise Unavailable(
            "nsys requires the package nvtx, because this PyTorch is built without CUDA; run pip install nvtx==0.2.11"
        ) from None
    if model is not None:
        modules_file(Path(f"{out}.sqlite")).write_text(json.dumps(as_table(rows(model))), encoding="utf-8")
    torch.cuda.profiler.start() if device.is_cuda else ranges.push(CAPTURE)
    try:
        with annotated(ranges, model):
            yield
    finally:
        torch.cuda.profiler.stop() if device.is_cuda else ranges.pop()


def export(out: Path) -> tuple[Path, Path]:
    """Export the report to SQLite and return (the report, its export). Raises ProfileLost."""
    report, database = Path(f"{out}{REPORT}"), Path(f"{out}.sqlite")
    if not report.is_file():
        raise ProfileLost("nsys left no report; read its messages in worker.log, next to the records")
    done = subprocess.run([*EXPORT, "-o", database, report], capture_output=True, text=True)
    if done.returncode or not database.is_file():
        why = last_line(done.stdout + done.stderr)
        raise ProfileLost(f"nsys cannot export {report}: {why}; see all its messages with {' '.join(EXPORT)} {report}")
    return report, database
