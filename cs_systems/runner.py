"""run(config) → RunRecord; sweep(configs) → RunRecords as they come. Without torch: worker processes hold that.

The one error boundary. A cell that raises, runs out of memory, hangs, or kills its process costs that cell only: its
record says so and the next cells get a new worker. Records are appended and forced to disk one by one, so a cut sweep
loses nothing and the same call goes on with what is missing.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs_systems import plugins
from cs_systems.config import ConfigError, RunConfig
from cs_systems.process import Event, Worker, WorkerDied, WorkerTimeout, worker_command
from cs_systems.profilers import ProfileLost, Profiler
from cs_systems.record import DONE, Environment, Row, RunRecord, append_record, make_key, read_records, records_path

_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Progress:
    """Told between the visits to cells, never while something is timed."""

    done: int
    total: int
    config: RunConfig | None = None  # what is measured now
    record: RunRecord | None = None  # what has just finished
    note: str | None = None


OnProgress = Callable[[Progress], None]


def check(configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError for a name that no plug-in has, or a profiler that cannot work here, before anything runs."""
    for name in {c.profiler for c in configs}:
        profiler: Profiler = plugins.get("profilers", name)
        if reason := profiler.problem():
            raise ConfigError(reason)
    for name in {c.workload for c in configs}:
        plugins.check("workloads", name)
    for name in {c.attention for c in configs}:
        plugins.check("attention", name)


def run(config: RunConfig, *, in_process: bool = False, timeout_s: float | None = None) -> RunRecord:
    """Measure one config in a worker process, or right here for a debugger with `in_process=True`."""
    if not in_process:
        return next(iter(sweep([config], timeout_s=timeout_s)))
    if config.profiler != "none":
        raise ConfigError(f"{config.profiler} needs a process of its own: leave in_process=True out")
    check([config])
    from cs_systems.execute import run_cells

    events: list[Event] = []
    run_cells([config], emit=events.append)
    return RunRecord.from_dict(events[-1]["record"])


def preflight(configs: Sequence[RunConfig]) -> list[Row]:
    """A row for each config: why it cannot run here (`reason`), `predicted_peak_bytes`, `device_memory_bytes`."""
    check(configs)
    with _Crew() as crew:
        return crew.preflight(configs)


def profiler_commands(configs: Sequence[RunConfig], folder: Path) -> list[list[str]]:
    """The command under which each profiled cell's worker would run; REQUESTS and REPLIES stand for its two pipes."""
    check(configs)
    with _Crew() as crew:
        worker = worker_command("REQUESTS", "REPLIES")
        return [crew.launcher(c, _prefix(folder, c, 0))(worker) for c in configs]


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
    skip_oom: a cell whose predicted peak exceeds the device's memory becomes an oom record without being run.
    interleave: visit all cells in turn, `rounds` times, instead of finishing one after the other.
    shuffle_seed: shuffle the order of the cells, in each repeat anew.

    Raises ConfigError for malformed input, and OSError for a folder that cannot be written, before the first cell runs.
    """
    configs = list(dict.fromkeys(configs))
    check(configs)
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: it must be at least 1")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigError(f"the timeout is {timeout_s:g} s: it must be more than 0, or left out")
    folder = None if out is None else prepare_folder(out, fresh=fresh)
    done, total = 0, len(configs) * repeats

    def report(**news: Any) -> None:
        on_progress(Progress(done, total, **news))

    with _only_writer(folder):
        for repeat in range(repeats):
            with _Crew(folder, timeout_s) as crew:
                missing = configs
                if folder is not None:
                    missing = crew.missing(configs, repeat, on_note=lambda note: report(note=note))
                done += len(configs) - len(missing)
                if shuffle_seed is not None:
                    missing = random.Random(shuffle_seed + repeat).sample(missing, len(missing))
                if len(missing) < len(configs):
                    report(note=f"{len(configs) - len(missing)} cells are recorded already")
                for record in crew.measure(missing, repeat, interleave, skip_oom, on_visit=lambda c: report(config=c)):
                    if folder is not None:
                        append_record(folder, record)
                    done += 1
                    report(record=record)
                    yield record


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
    """Make the folder and prove that it can be written, before hours are spent on what could not be kept."""
    folder = Path(out)
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
        file.rename(file.with_name(f"records-until-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
    return folder


class _Crew:
    """The worker of the moment, replaced when it dies, and what has been learnt of the machine."""

    def __init__(self, folder: Path | None = None, timeout_s: float | None = None) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._worker: Worker | None = None
        self._first_hello: Event | None = None
        self._environments: dict[str, Environment] = {}

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _ready(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = Worker(self._log)
            self._first_hello = self._first_hello or self._worker.hello
            same_device(self._first_hello, self._worker.hello)
        return self._worker

    @property
    def _log(self) -> Path | None:
        return None if self._folder is None else self._folder / "worker.log"

    def _ask(self, **request: Any) -> Event:
        [answer] = self._ready().request(**request)
        return answer

    def environment(self, device: str) -> Environment:
        if device not in self._environments:
            answer = self._ask(op="environment", device=device)["environment"]
            self._environments[device] = Environment.from_dict(answer)
        return self._environments[device]

    def preflight(self, configs: Sequence[RunConfig]) -> list[Row]:
        try:
            rows: list[Row] = self._ask(op="preflight", cells=[c.to_dict() for c in configs])["rows"]
            return rows
        except WorkerDied as error:
            self.close()
            if len(configs) == 1:
                lost = f"its prediction killed the worker: {error}"
                return [{"reason": lost, "predicted_peak_bytes": None, "device_memory_bytes": None}]
            return [row for c in configs for row in self.preflight([c])]

    def missing(self, configs: list[RunConfig], repeat: int, on_note: Callable[[str], None]) -> list[RunConfig]:
        """What the folder does not hold yet. Raises ConfigError if it was measured elsewhere or by other code."""
        assert self._folder is not None
        if not records_path(self._folder).exists():
            return configs
        records, complaints = read_records(self._folder)
        for complaint in complaints:
            on_note(complaint)
        for record in records:
            if record.environment is not None:
                same_origin(record.environment, self.environment(record.config["device"]), self._folder)
        status = {record.key: record.status for record in records}
        found = {c: status.get(make_key(c, repeat, self.environment(c.device))) for c in configs}
        unavailable = [c for c in configs if found[c] == "unavailable"]
        rows = self.preflight(unavailable) if unavailable else []
        remedied = {c for c, row in zip(unavailable, rows, strict=True) if row["reason"] is None}
        return [c for c in configs if found[c] not in DONE or c in remedied]

    def measure(
        self,
        configs: list[RunConfig],
        repeat: int,
        interleave: bool,
        skip_oom: bool,
        on_visit: Callable[[RunConfig], None],
    ) -> Iterator[RunRecord]:
        if skip_oom and configs:
            rows = self.preflight(configs)
            yield from (
                self._record(c, repeat, "oom", _too_large(row), memory=[row])
                for c, row in zip(configs, rows, strict=True)
                if _does_not_fit(row)
            )
            configs = [c for c, row in zip(configs, rows, strict=True) if not _does_not_fit(row)]
        together = [c for c in configs if interleave and c.profiler == "none"]
        if together:
            yield from self._measure_group(together, repeat, on_visit)
        for config in configs:
            if config.profiler != "none":
                yield self._profile(config, repeat, on_visit)
            elif not interleave:
                yield from self._measure_group([config], repeat, on_visit)

    def _profile(self, config: RunConfig, repeat: int, on_visit: Callable[[RunConfig], None]) -> RunRecord:
        """One cell in a worker of its own, with what the profiler left once that has ended."""
        profiler: Profiler = plugins.get("profilers", config.profiler)
        with self._artifacts() as folder:
            out = _prefix(Path(folder), config, repeat)
            launch = self.launcher(config, out)
            self._dismiss()  # it would be another process on the GPU
            self._worker = Worker(self._log, launch)
            [record] = self._measure_group([config], repeat, on_visit, out)
            self._dismiss()
            return _with_profile(record, profiler, out, keep=self._folder is not None)

    def launcher(self, config: RunConfig, out: Path) -> Callable[[list[str]], list[str]]:
        """What makes the profiler's command of the worker's."""
        profiler: Profiler = plugins.get("profilers", config.profiler)
        on_cuda = self.environment(config.device).device != "cpu"
        return lambda argv: profiler.launch(argv, out, config.profiler_args, on_cuda)

    def _artifacts(self) -> AbstractContextManager[str | Path]:
        """The folder of the records; without one, one that is gone once the tables are made."""
        return nullcontext(self._folder) if self._folder is not None else tempfile.TemporaryDirectory()

    def _dismiss(self) -> None:
        if self._worker is not None:
            self._worker.finish()

    def _measure_group(
        self,
        configs: list[RunConfig],
        repeat: int,
        on_visit: Callable[[RunConfig], None],
        out: Path | None = None,
    ) -> Iterator[RunRecord]:
        waiting = list(configs)
        while waiting:
            asked, current = list(waiting), waiting[0]
            request = {"cells": [c.to_dict() for c in asked], "repeat": repeat, "out": out and str(out)}
            try:
                for event in self._ready().request(self._timeout_s, op="run", **request):
                    current = asked[event["cell"]]
                    if event["event"] == "visit":
                        on_visit(current)
                    else:
                        waiting.remove(current)
                        yield RunRecord.from_dict(event["record"])
            except (WorkerDied, WorkerTimeout) as error:
                self.close()
                if current in waiting:  # else it died of what it had told already
                    waiting.remove(current)
                    yield self._casualty(current, repeat, error)

    def _casualty(self, config: RunConfig, repeat: int, error: Exception) -> RunRecord:
        if isinstance(error, WorkerTimeout):
            return self._record(config, repeat, "timeout", f"no answer within {self._timeout_s:g} s: raise --timeout-s")
        return self._record(config, repeat, "killed", f"the worker was lost: {error}")

    def _record(self, config: RunConfig, repeat: int, status: str, reason: str, **results: list[Row]) -> RunRecord:
        environment = self.environment(config.device)
        key = make_key(config, repeat, environment)
        return RunRecord(key, config.to_dict(), status, repeat, reason, environment, results=results)


def _prefix(folder: Path, config: RunConfig, repeat: int) -> Path:
    """What the names of a profiled cell's files begin with."""
    return folder / f"{config.key()}-{repeat}"


def _with_profile(record: RunRecord, profiler: Profiler, out: Path, *, keep: bool) -> RunRecord:
    """The record with the profiler's tables and, where they are kept, files; an error where it left none."""
    if record.status != "ok":
        return record
    try:
        found = profiler.collect(out, record)
    except ProfileLost as error:
        return replace(record, status="error", reason=str(error))
    return replace(
        record,
        results=record.results | found.results,
        artifacts={what: file.name for what, file in found.artifacts.items()} if keep else {},
        warnings=record.warnings + found.warnings,
    )


def _does_not_fit(row: Row) -> bool:
    predicted, memory = row["predicted_peak_bytes"], row["device_memory_bytes"]
    return predicted is not None and memory is not None and predicted > memory


def _too_large(row: Row) -> str:
    predicted, memory = row["predicted_peak_bytes"] / 2**30, row["device_memory_bytes"] / 2**30
    return f"predicted peak {predicted:.1f} GiB of {memory:.1f} GiB: not run (--skip-oom)"


def same_device(first: Event, now: Event) -> None:
    """Raise RuntimeError when the device that a sweep began on is not what a new worker finds."""
    if first["device"] != now["device"]:
        raise RuntimeError(
            f"the device disappeared: the sweep began on {first['device']}, a new worker finds {now['device']}; "
            "what was measured is kept: bring the device back and run the same command again"
        )


def same_origin(recorded: Environment, now: Environment, folder: Path) -> None:
    """Raise ConfigError when a folder's records come from another torch, device or version of this code."""
    for what, name in (("torch", "torch"), ("device", "device_name"), ("cs_systems code", "code_version")):
        before, after = getattr(recorded, name), getattr(now, name)
        if before != after:
            raise ConfigError(
                f"{folder} holds records of {what} {before}, this is {after}: they would not be comparable; "
                "choose another --out, or start over with --fresh"
            )
