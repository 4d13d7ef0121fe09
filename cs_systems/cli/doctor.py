"""Check what works on this machine, and show the command that fixes what does not.

The last sentence names what can be done here, and what to install first.

The exit status is 0 if naive attention, which every machine should run, works, and 3 if not.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill

from cs_systems.cli._document import PrintedFormat, add
from cs_systems.cli._output import print_table, terminal_width
from cs_systems.core.diagnostic import DIAGNOSTICS, NEEDS_GPU, Diagnostic, diagnostic
from cs_systems.core.printable import visible
from cs_systems.core.version import __version__

LITTLE_SPACE_BYTES = 1 << 30
FOR_A_GPU = ("triton", "nvtx", "nsys")  # they work without a GPU but add little there: kineto profiles a CPU too


@dataclass(frozen=True)
class Doctor:
    format: PrintedFormat = "terminal"


ARGS = Doctor


def run(args: Doctor) -> int:
    from cs_systems.cli._sweep import EXIT_NOTHING
    from cs_systems.measure.profilers import _nsys, ncu
    from cs_systems.report.tables import document
    from cs_systems.report.tables.formats import text_width

    found_nsys = _nsys.check()
    rows = [_python(), *_diagnostics_of_worker(), _nvtx(found_nsys), found_nsys]
    rows += [_ncu(ncu.check(), has_gpu=any(map(_is_gpu, rows))), _folder(Path("runs"))]
    if not add(document.table(DIAGNOSTICS, rows)):
        _show(rows)
    print(f"{fill(visible(conclusion(rows)), text_width(terminal_width()), break_on_hyphens=False)}")
    works = {row["check"] for row in rows if row["state"] == "ok"}
    return 0 if "attention naive" in works else EXIT_NOTHING


def _show(rows: list[Diagnostic]) -> None:
    shown = [{**row, "found": " → ".join(filter(None, (row["found"], row["remedy"])))} for row in rows]
    print_table(DIAGNOSTICS, shown)


def conclusion(rows: Sequence[Diagnostic]) -> str:
    """Return one sentence: what can be done on this machine, and what to fix or install first."""
    works = {row["check"] for row in rows if row["state"] == "ok"}
    gpus = sum(map(_is_gpu, rows))
    lacking = [row for row in rows if row["state"] == "problem"]
    lacking += [row for row in rows if row["state"] == "missing" and "install" in (row["remedy"] or "")]
    optional = [] if gpus else [row for row in lacking if row["check"] in FOR_A_GPU]
    first = next((row for row in lacking if row not in optional), None)
    if first is not None:
        verb = "fix" if first["state"] == "problem" else "install"
        then = f"first {verb} {first['check']}: {(first['remedy'] or '').removeprefix('install it with ')}"
    else:
        then = "nothing is left to install"
        if optional:
            names, verb = " and ".join(row["check"] for row in optional), "is" if len(optional) == 1 else "are"
            then += f" but {names}, which {verb} seldom useful without a GPU"
    if "attention naive" not in works:
        return f"Nothing can be measured here; {then}."
    backends = [row["check"] for row in rows if row["check"].startswith("attention ")]
    profilers = ["kineto", *(tool for tool in ("nsys", "ncu") if tool in works)]
    device = "the CPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    lacks = "" if gpus else "; kernel times and GPU memory need a GPU"
    return (
        f"Here you can time training steps on {device} and profile them with {' and '.join(profilers)}, with "
        f"{len(works & {*backends})} of {len(backends)} attention backends{lacks}; {then}."
    )


def _is_gpu(row: Diagnostic) -> bool:
    return row["check"].startswith("GPU ") and row["state"] == "ok"


def _ncu(found: Diagnostic, *, has_gpu: bool) -> Diagnostic:
    """Return the diagnostic of ncu, which needs a GPU: without one, it is not worth installing."""
    if has_gpu or found["state"] == "ok":
        return found
    return diagnostic("ncu", "hardware counters of kernels, with Nsight Compute", NEEDS_GPU)


def _python() -> Diagnostic:
    return diagnostic("python", f"{platform.python_version()}, cs-systems {__version__}")


def _diagnostics_of_worker() -> Iterator[Diagnostic]:
    """Yield the diagnostics of the worker process, which has torch; if it cannot run, nothing can be measured."""
    from cs_systems.measure.runtime.channel import Diagnose, Diagnosed
    from cs_systems.measure.runtime.processes import ANSWER_TIMEOUT_S, Worker, WorkerTimeout

    try:
        worker = Worker()
    except RuntimeError as error:
        found = f"the worker process did not start: {error.__cause__ or error}"
        yield diagnostic("worker", found, "problem", "pip install --force-reinstall 'torch>=2.11'")
        return
    try:
        [answer] = worker.request(Diagnose(), ANSWER_TIMEOUT_S)
        assert isinstance(answer, Diagnosed)
        yield from answer.rows
    except WorkerTimeout as error:
        yield diagnostic("worker", str(error), "problem", "run cs-systems doctor again while the machine is less busy")
    except RuntimeError as error:
        yield diagnostic("worker", str(error), "problem", "reinstall the package that the error names")
    finally:
        worker.close()


def _nvtx(found_nsys: Diagnostic) -> Diagnostic:
    """Check that nsys records NVTX ranges; some versions of the nvtx package do not work with some versions of nsys."""
    from cs_systems.measure.profilers import _nsys

    remedy = "pip install nvtx==0.2.11"
    try:
        found = version("nvtx")
    except PackageNotFoundError:
        return diagnostic("nvtx", "not installed: without a GPU, ranges have no names", "missing", remedy)
    if found_nsys["state"] != "ok":
        return diagnostic("nvtx", found)
    if reason := _nsys.loses_ranges():
        return diagnostic("nvtx", f"{found} does not work with nsys {found_nsys['found']}: {reason}", "problem", remedy)
    return diagnostic("nvtx", f"{found}, works with nsys")


def _folder(folder: Path) -> Diagnostic:
    """Check the default folder of records: the nearest folder that exists must be writable."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return diagnostic(
            f"{folder}/", f"{there} is not writable", "problem", "cd to another folder, or give --out DIR"
        )
    free = shutil.disk_usage(there).free
    found = f"writable, {free / 2**30:.1f} GiB free"
    if free < LITTLE_SPACE_BYTES:
        return diagnostic(f"{folder}/", found, "problem", "free some space: a trace takes hundreds of MiB")
    return diagnostic(f"{folder}/", found)
