"""Measurement of one cell under a profiler: the command around its worker, and the tables in its record."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from cs_systems.config import RunConfig, describe
from cs_systems.core.caveats import Caveat
from cs_systems.core.display import report
from cs_systems.measure.profilers import ProfileLost, Profiler
from cs_systems.measure.runtime.channel import run_request, to_json
from cs_systems.measure.runtime.processes import worker_command
from cs_systems.measure.workloads import Cell
from cs_systems.record import RunRecord

LONGEST_NAME = 48  # characters of a description in a file's name
KEY = 8  # characters of a key in it


def prefix(folder: Path, config: RunConfig, repeat: int) -> Path:
    """Return the path prefix of the cell's files: its description, and enough of its key to be its own.

    It never begins with a dot, as in `../mine.py:f`: hidden files are not read.
    """
    name = "-".join(re.findall(r"[\w.]+", describe(config, without={"profiler"}), re.ASCII)).lstrip(".-")
    words = shorten(name.replace("-", " "), LONGEST_NAME, placeholder="").replace(" ", "-")
    return folder / "-".join(filter(None, [words, config.key()[:KEY], str(repeat)]))


def launcher(cell: Cell, out: Path, *, on_cuda: bool) -> Callable[[list[str]], list[str]] | None:
    """Return a function that wraps the worker's command in the profiler's; None for profilers inside the worker."""
    if not cell.profiler.is_launcher:
        return None
    return lambda argv: cell.profiler.launch(argv, out, cell.config.profiler_args, on_cuda)


def command(cell: Cell, out: Path, *, on_cuda: bool) -> list[str]:
    """Return a shell command that runs the cell under its profiler, with the request as an argument."""
    request = to_json(run_request([cell.config], 0, out))
    launch = launcher(cell, out, on_cuda=on_cuda) or list
    return launch(worker_command(request))


def with_profile(record: RunRecord, profiler: Profiler, out: Path, *, keep: bool) -> RunRecord:
    """Return the record with the profiler's tables and, if `keep`, its files and a page of its trace.

    The status becomes `error` if the profiler left no tables, and `unavailable` if the profiler was refused.
    """
    if reason := profiler.refused(out):
        return replace(record, status="unavailable", reason=reason, measurement=None)
    if record.status != "ok" and not (record.status == "oom" and profiler.sees_oom):
        return record
    try:
        found = profiler.collect(out, record)
    except ProfileLost as error:
        if record.status != "ok":  # the cell ran out of memory before the profiler began
            return record
        return replace(record, status="error", reason=str(error) if keep else _reason_without_files(str(error), out))
    artifacts = {what: file.name for what, file in found.artifacts.items()} if keep else {}
    if keep and found.profile is not None:
        page = Path(f"{out}.html")
        page.write_text(report("pages.profile").of_record(record, *found.profile), encoding="utf-8")
        artifacts["page"] = page.name
    if found.contradiction:
        record = replace(record, status="error", reason=found.contradiction, measurement=None)
    return replace(
        record,
        results={**record.results, **found.results},
        artifacts=artifacts,
        warnings=record.warnings + (found.warnings if keep else tuple(_without_file(w, out) for w in found.warnings)),
    )


def _reason_without_files(reason: str, out: Path) -> str:
    """Return the reason without the names of files that are deleted, because the call has no folder for them."""
    file = re.compile(rf"{_own_file(out)}|worker\.log")
    problem, _, remedy = reason.rpartition("; ")
    if file.search(remedy):
        remedy = "measure again with out=FOLDER, which keeps the files and messages"
    return "; ".join(filter(None, (file.sub("its report", problem), remedy)))


def _without_file(caveat: Caveat, out: Path) -> Caveat:
    """Return the caveat without the name of a file that is deleted, because the call has no folder for it."""
    file = re.compile(_own_file(out))
    return replace(
        caveat,
        message=file.sub("the trace", caveat.message),
        remedy=file.sub("TRACE (give out= to keep it)", caveat.remedy),
    )


def _own_file(out: Path) -> str:
    """Return a pattern of the names of the cell's files."""
    return rf"\S*{re.escape(out.name)}[\w.-]*"
