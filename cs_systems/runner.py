"""run(config) → RunRecord; sweep(configs) → RunRecords as they come. Without torch: worker processes hold that.

Records are appended and forced to disk one by one, so a cut sweep loses nothing and the same call goes on with what is
missing.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_systems import parallel, plugins, profiled
from cs_systems.config import ConfigError, RunConfig
from cs_systems.crew import Crew
from cs_systems.lifeline import rank_in_job
from cs_systems.process import Event
from cs_systems.profilers import Profiler
from cs_systems.record import Row, RunRecord, append_record, records_path

_PROBE_BYTES = 1 << 20
_YEAR_S = 365 * 86400  # the system cannot wait for any number of seconds


@dataclass(frozen=True)
class Progress:
    """Told between the visits to cells, never while something is timed."""

    done: int
    total: int
    config: RunConfig | None = None  # what is measured now
    record: RunRecord | None = None  # what has just finished
    note: str | None = None


OnProgress = Callable[[Progress], None]


def check(configs: Sequence[RunConfig], repeats: int = 1, timeout_s: float | None = None) -> None:
    """Raise ConfigError for a name that no plug-in has, strategies that do not go together, a profiler that cannot
    work here, or a sweep that is none, before anything runs."""
    for name in {c.profiler for c in configs}:
        profiler: Profiler = plugins.get("profilers", name)
        if reason := profiler.problem():
            raise ConfigError(reason)
        if profiler.launch is not Profiler.launch and any(c.is_distributed for c in configs if c.profiler == name):
            raise ConfigError(f"{name} watches one process, not the ranks of a world: use kineto")
    for name in {c.workload for c in configs}:
        plugins.check("workloads", name)
    for name in {c.attention for c in configs}:
        plugins.check("attention", name)
    for config in configs:
        if config.strategy != "single" or config.strategy_options:
            parallel.check_config(config)
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: it must be at least 1")
    if timeout_s is not None and not 0 < timeout_s <= _YEAR_S:
        raise ConfigError(f"the timeout is {timeout_s:g} s: it must be more than 0 and at most a year, or left out")


def run(config: RunConfig, *, in_process: bool = False, timeout_s: float | None = None) -> RunRecord:
    """Measure one config in a worker process, or right here for a debugger with `in_process=True`."""
    if not in_process:
        return next(iter(sweep([config], timeout_s=timeout_s)))
    if config.profiler != "none":
        raise ConfigError(f"{config.profiler} needs a process of its own: leave in_process=True out")
    if config.is_distributed:
        raise ConfigError("ranks are processes of their own: leave in_process=True out")
    check([config])
    from cs_systems.execute import run_cells

    events: list[Event] = []
    run_cells([config], emit=events.append)
    return RunRecord.from_dict(events[-1]["record"])


def preflight(configs: Sequence[RunConfig], *, timeout_s: float | None = None) -> list[Row]:
    """A row for each config: why it cannot run here (`reason`), `predicted_peak_bytes`, `device_memory_bytes`.

    timeout_s: for each config; without it, two minutes.
    """
    check(configs, timeout_s=timeout_s)
    with Crew(timeout_s=timeout_s) as crew:
        return crew.preflight(configs)


def profiler_commands(configs: Sequence[RunConfig], folder: Path) -> list[list[str]]:
    """For each cell a command that measures it under its profiler as a sweep would; `folder` must exist by then."""
    check(configs)
    with Crew() as crew:
        return [profiled.command(c, profiled.prefix(folder.absolute(), c, 0), on_cuda=crew.on_cuda(c)) for c in configs]


def sweep(
    configs: Sequence[RunConfig],
    *,
    out: str | Path | None = None,
    repeats: int = 1,
    timeout_s: float | None = None,
    fresh: bool = False,
    skip_oom: bool = False,
    interleave: bool = False,
    shuffle_seed: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Iterator[RunRecord]:
    """Measure every config, yielding each record as soon as it is on disk.

    out: folder of records.jsonl; cells that it holds as ok, oom or unavailable already are not measured again.
    repeats: each repeat has a process of its own, so that the variance between processes shows.
    timeout_s: for one visit to a cell (building, warm-up and the steps of one round).
    fresh: put the folder's records aside and start over.
    skip_oom: a cell whose predicted peak exceeds the device's memory becomes an oom record without being run; the
        same sweep without it runs the cell.
    interleave: visit all cells in turn, `rounds` times, instead of finishing one after the other.
    shuffle_seed: shuffle the order of the cells, in each repeat anew.

    Of a job that torchrun started, rank 0 measures here and the others end with it: see `job`.

    Raises ConfigError for malformed input, and OSError for a folder that cannot be written, before the first cell runs.
    """
    _follow_in_job()
    configs = list(dict.fromkeys(configs))
    check(configs, repeats, timeout_s)
    folder = None if out is None else prepare_folder(out, fresh=fresh)
    done, total = 0, len(configs) * repeats

    def report(**news: Any) -> None:
        on_progress(Progress(done, total, **news))

    with _only_writer(folder):
        for repeat in range(repeats):
            with Crew(folder, timeout_s) as crew:
                missing = configs
                if folder is not None:
                    missing = crew.missing(configs, repeat, skip_oom, on_note=lambda note: report(note=note))
                recorded = len(configs) - len(missing)
                done += recorded
                if shuffle_seed is not None:
                    missing = random.Random(shuffle_seed + repeat).sample(missing, len(missing))
                if recorded:
                    report(note=f"{recorded} {'cell is' if recorded == 1 else 'cells are'} recorded already")
                for record in crew.measure(missing, repeat, interleave, skip_oom, on_visit=lambda c: report(config=c)):
                    if folder is not None:
                        append_record(folder, record)
                    done += 1
                    report(record=record)
                    yield record


def _follow_in_job() -> None:
    """Of the ranks of torchrun's all but 0 only answer it, and end with it."""
    if rank_in_job():
        from cs_systems.job import follow

        sys.exit(follow())


@contextmanager
def _only_writer(folder: Path | None) -> Iterator[None]:
    """Hold the folder for this sweep: two at once would measure each other. Raises ConfigError where it is held."""
    if folder is None:
        yield
        return
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another sweep is writing to {folder}: wait for it, or choose another --out") from None
        yield


def prepare_folder(out: str | Path, *, fresh: bool) -> Path:
    """Make the folder and prove that it can be written, before hours are spent on what could not be kept.

    fresh: put its records aside. Raises OSError where it cannot be written, ConfigError while a sweep writes what is to
    be put aside.
    """
    folder = Path(out)
    if folder.is_file():
        raise OSError(f"cannot write to {folder}: it is a file; choose another --out, a folder of records")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        try:
            with probe.open("wb") as stream:
                stream.write(b"\0" * _PROBE_BYTES)
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            probe.unlink(missing_ok=True)
        file = records_path(folder)
        if file.exists():
            file.open("ab").close()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error
    if fresh and file.exists():
        with _only_writer(folder):
            file.rename(_aside(file))
    return folder


def _aside(file: Path) -> Path:
    """What no file is called yet: --fresh may be given twice within a second."""
    until = f"records-until-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([until], (f"{until}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := file.with_name(f"{name}.jsonl")).exists())
