"""Public entry points: run(config) → RunRecord; sweep(configs) → RunRecords as they are measured. Without torch.

Worker processes use torch. Records are appended and forced to disk one by one, so an interrupted sweep loses nothing,
and the same call measures the missing cells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_systems import parallel
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.rows import ForecastRow, PreflightRow
from cs_systems.profilers import Profiler
from cs_systems.record import DONE, Environment, RunRecord, make_key
from cs_systems.runtime import profiled, scheduler
from cs_systems.runtime.channel import CellRecord, Message
from cs_systems.runtime.journal import Journal
from cs_systems.runtime.lifetime import torchrun_rank
from cs_systems.runtime.supervisor import Supervisor

_YEAR_S = 365 * 86400  # the largest timeout that the system's wait accepts


@dataclass(frozen=True)
class Progress:
    """Progress update, sent between measurements and never during one."""

    done: int
    total: int
    config: RunConfig | None = None  # the cell that is measured now
    record: RunRecord | None = None  # the record that has just finished
    note: str | None = None


OnProgress = Callable[[Progress], None]


def check(configs: Sequence[RunConfig], repeats: int = 1, timeout_s: float | None = None) -> None:
    """Raise ConfigError for an invalid sweep before anything runs.

    That is a name that no plug-in has, strategies that cannot be combined, a profiler that cannot work here, or invalid
    options of the sweep itself.
    """
    for name in {c.profiler for c in configs}:
        profiler: Profiler = plugins.get("profilers", name)
        if reason := profiler.problem():
            raise ConfigError(reason)
        if profiler.launch is not Profiler.launch and any(c.is_distributed for c in configs if c.profiler == name):
            raise ConfigError(f"profiler {name} supports one process, not several ranks; use kineto")
    for name in {c.workload for c in configs}:
        plugins.check("workloads", name)
    for name in {c.attention for c in configs}:
        plugins.check("attention", name)
    for config in configs:
        if config.strategy != "single" or config.strategy_options:
            parallel.check_config(config)
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; it must be at least 1")
    if timeout_s is not None and not 0 < timeout_s <= _YEAR_S:
        raise ConfigError(f"the timeout is {timeout_s:g} s; it must be more than 0 s and at most a year")


def run(config: RunConfig, *, in_process: bool = False, timeout_s: float | None = None) -> RunRecord:
    """Measure one config in a worker process, or in this process for a debugger with `in_process=True`."""
    if not in_process:
        return next(iter(sweep([config], timeout_s=timeout_s)))
    if config.profiler != "none":
        raise ConfigError(f"profiler {config.profiler} needs its own process; drop in_process=True")
    if config.is_distributed:
        raise ConfigError("a distributed cell needs its own processes; drop in_process=True")
    check([config])
    from cs_systems.runtime.execute import run_cells
    from cs_systems.runtime.process_state import ProcessState

    messages: list[Message] = []
    before = ProcessState()
    run_cells([config], emit=messages.append)
    before.restore()
    return next(RunRecord.from_dict(message.record) for message in messages if isinstance(message, CellRecord))


def preflight(configs: Sequence[RunConfig], *, timeout_s: float | None = None) -> list[PreflightRow]:
    """Return one row per config: the predicted memory, and why it cannot run here.

    timeout_s: for each config; two minutes by default.
    """
    check(configs, timeout_s=timeout_s)
    with Supervisor(timeout_s=timeout_s) as supervisor:
        return supervisor.preflight(configs)


@contextmanager
def forecasting(timeout_s: float | None = None) -> Iterator[Callable[[RunConfig], ForecastRow]]:
    """Yield a function that predicts the memory of a cell of a user's own model by fake tensors.

    timeout_s: for each prediction; two minutes by default.
    """
    with Supervisor(timeout_s=timeout_s) as supervisor:
        yield supervisor.forecast


def profiler_commands(configs: Sequence[RunConfig], folder: Path) -> list[list[str]]:
    """Return for each cell a command that measures it under its profiler as a sweep would.

    The `folder` must exist when the commands run.
    """
    check(configs)
    with Supervisor() as supervisor:
        prefixes = [profiled.prefix(folder.absolute(), c, 0) for c in configs]
        return [
            profiled.command(c, out, on_cuda=supervisor.on_cuda(c)) for c, out in zip(configs, prefixes, strict=True)
        ]


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

    out: folder of records.jsonl; cells that it already holds as ok, oom or unavailable are skipped.
    repeats: each repeat has a process of its own, so that the variance between processes shows.
    timeout_s: for one visit to a cell (building, warm-up and the steps of one round).
    fresh: put the folder's records aside and start over.
    skip_oom: a cell whose predicted peak exceeds the device's memory becomes an oom record without being run; the
        same sweep without it runs the cell.
    interleave: visit all cells in turn, `rounds` times, instead of finishing one after the other.
    shuffle_seed: shuffle the order of the cells, anew in each repeat.

    In a job that torchrun started, rank 0 measures here and the others end with it: see `torchrun`.

    Raises ConfigError for malformed input, and OSError for a folder that cannot be written, before the first cell runs.
    """
    _follow_in_job()
    configs = list(dict.fromkeys(configs))
    check(configs, repeats, timeout_s)
    journal = None if out is None else Journal.prepare(out, fresh=fresh)
    done, total = 0, len(configs) * repeats

    def report(**news: Any) -> None:
        on_progress(Progress(done, total, **news))

    with journal.locked() if journal else nullcontext():
        for repeat in range(repeats):
            with Supervisor(journal, timeout_s) as supervisor:
                missing = configs
                if journal is not None:
                    supervisor.record_lost(configs)
                    missing = _missing(journal, supervisor, configs, repeat, skip_oom, lambda note: report(note=note))
                recorded = len(configs) - len(missing)
                done += recorded
                if shuffle_seed is not None:
                    missing = scheduler.shuffled(missing, shuffle_seed + repeat)
                if recorded:
                    report(note=f"{recorded} {'cell is' if recorded == 1 else 'cells are'} already recorded")
                for record in supervisor.measure(missing, repeat, interleave, skip_oom, lambda c: report(config=c)):
                    if journal is not None:
                        journal.append(record)
                    done += 1
                    report(record=record)
                    yield record


def _missing(
    journal: Journal,
    supervisor: Supervisor,
    configs: list[RunConfig],
    repeat: int,
    skip_oom: bool,
    on_note: Callable[[str], None],
) -> list[RunConfig]:
    """Return the cells that the journal does not hold yet; those that failed before come last.

    Raises ConfigError if the folder was measured elsewhere or by other code.
    """
    records, complaints = journal.read()
    for complaint in complaints:
        on_note(complaint)
    if not records:
        return configs
    for record in records:
        if record.environment is not None:
            _same_origin(record.environment, supervisor.environment(record.run_config.device), journal.folder)
    status = {record.key: record.status for record in records if skip_oom or not record.predicted}
    found = {c: status.get(make_key(c, repeat, supervisor.environment(c.device))) for c in configs}
    unavailable = [c for c in configs if found[c] == "unavailable"]
    rows = supervisor.preflight(unavailable) if unavailable else []
    remedied = {c for c, row in zip(unavailable, rows, strict=True) if row["reason"] is None}
    missing = [c for c in configs if found[c] not in DONE or c in remedied]
    return sorted(missing, key=lambda c: found[c] is not None)


def _same_origin(recorded: Environment, now: Environment, folder: Path) -> None:
    """Raise ConfigError if a folder's records come from another torch, device or version of this code."""
    for what, name in (("torch", "torch"), ("device", "device_name"), ("cs_systems code", "code_version")):
        before, after = getattr(recorded, name), getattr(now, name)
        if before != after:
            raise ConfigError(
                f"{folder} has records of {what} {before}, which are not comparable with {after}; "
                "choose another --out, or start over with --fresh"
            )


def _follow_in_job() -> None:
    """Answer rank 0 and end with it, as every other rank of a job of torchrun does."""
    if torchrun_rank():
        from cs_systems.runtime.torchrun import follow

        sys.exit(follow())
