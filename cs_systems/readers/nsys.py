"""Format of Nsight Systems: reports, which only nsys can export, and their exports to SQLite."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs_systems.config import ConfigError
from cs_systems.core.formats import SQLITE_MAGIC, Format, head
from cs_systems.core.printable import command_line

if TYPE_CHECKING:
    from cs_systems.readers.forms.trace import Trace

REPORT = ".nsys-rep"
REPORTS = (REPORT, ".qdrep")  # until 2021.3 nsys wrote .qdrep
EXPORT = ("nsys", "export", "-t", "sqlite", "--lazy=false", "--force-overwrite=true")


def read(path: Path, process: int | None = None) -> Trace:
    from cs_systems.readers import _nsys
    from cs_systems.readers.forms.modules import read_beside

    if path.suffix not in REPORTS or head(path).startswith(SQLITE_MAGIC):
        return replace(_nsys.read(path, process), modules=read_beside(path))
    with exported(path) as database:
        try:
            trace = _nsys.read(database, process)
        except ConfigError as error:  # the temporary export no longer exists when the message is read
            raise ConfigError(str(error).replace(str(database), str(path))) from None
        return replace(trace, source=str(path), modules=read_beside(path))


def processes(path: Path) -> list[int]:
    """Return the pids of the processes that ran kernels; raise ConfigError for a report, which lacks them."""
    from cs_systems.readers import _nsys

    if path.suffix in REPORTS and not head(path).startswith(SQLITE_MAGIC):
        raise ConfigError(
            f"--ranks cannot find several ranks inside the report {path}; run `{command_line(*EXPORT, path.name)}` in "
            "its folder and give the .sqlite, or give the reports of the other ranks too"
        )
    return _nsys.processes(path)


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """Export a .nsys-rep or .qdrep to SQLite and yield its path, in a folder that is removed afterwards.

    Raises ConfigError if nsys is not on the PATH or the export fails.
    """
    import subprocess
    import tempfile

    if shutil.which(EXPORT[0]) is None:
        beside = report.with_suffix(".sqlite")
        raise ConfigError(
            f"nsys must export {report}, and nsys is not on the PATH; "
            + (f"analyze {beside}, the export next to it, " if beside.is_file() else "add it to the PATH, ")
            + f"or run `{command_line(*EXPORT, report.name)}` on a machine with nsys, and analyze the .sqlite"
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "export.sqlite"
        done = subprocess.run([*EXPORT, "-o", target, report.resolve()], capture_output=True, text=True)
        if done.returncode or not target.is_file():
            output = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1].rstrip(".")
            raise ConfigError(
                f"nsys cannot export {report}: {output}; use an nsys at least as new as the one that recorded it, "
                "or record again if the report is truncated"
            )
        yield target


FORMAT = Format(
    title="a report of nsys or its SQLite export",
    matches=lambda head, path: head.startswith(SQLITE_MAGIC) or path.suffix in REPORTS,
    is_general=True,
    suffixes=(".sqlite", *REPORTS),
    read=read,
    processes=processes,
    record="`nsys profile --trace=cuda,nvtx --cuda-graph-trace=node python train.py`",
    lacks="operators, unless `torch.autograd.profiler.emit_nvtx()` is on; phases and layers without NVTX ranges",
)
