"""Who measures: the worker of the moment, replaced when it dies. The one error boundary, without torch.

A cell that raises, runs out of memory, hangs, or kills its process costs that cell only: its record says so and the
next cells get a new worker.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cs_systems import profiled
from cs_systems.config import ConfigError, RunConfig
from cs_systems.lifeline import rank_in_job
from cs_systems.process import ANSWER_TIMEOUT_S, Event, Worker, WorkerDied, WorkerTimeout, run_request
from cs_systems.ranks import Kind, NotStarted, Ranks
from cs_systems.record import DONE, Environment, Row, RunRecord, append_record, make_key, read_records, records_path


class Measuring(Protocol):
    """A worker, ranks that were started here, or those of a job that torchrun started."""

    @property
    def hello(self) -> Event: ...

    @property
    def alive(self) -> bool: ...

    def request(self, timeout_s: float | None = None, **request: Any) -> Iterator[Event]: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Crew:
    """The worker of the moment, replaced when it dies, and what has been learnt of the machine."""

    def __init__(self, folder: Path | None = None, timeout_s: float | None = None) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._worker: Measuring | None = None
        self._asked: tuple[RunConfig, int] | None = None
        self._kind: Kind | None = None  # of ranks; None: one worker
        self._refusals: dict[Kind, str | None] = {}
        self._first_hello: Event | None = None
        self._environments: dict[str, Environment] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _ready(self, kind: Kind | None = None) -> Measuring:
        """The worker, or ranks of that kind. One or the other: idle processes would hold memory and be in the way."""
        if self._worker is not None and (kind != self._kind or not self._worker.alive):
            self._dismiss()
            self._worker = None
        if self._worker is None:
            self._worker, self._kind = self._started(kind), kind
            self._first_hello = self._first_hello or self._worker.hello
            same_device(self._first_hello, self._worker.hello)
        return self._worker

    def _started(self, kind: Kind | None) -> Measuring:
        if kind is None:
            return Worker(self._log)
        if rank_in_job() is None or kind.world_size == 1:
            return Ranks(kind, self._log)
        from cs_systems.job import job  # here this process measures: it has torch

        return job().of_kind(kind, self._lost)

    def _lost(self, status: str, reason: str) -> None:
        """Write what became of the cell that is measured, while this process can."""
        if self._folder is not None and self._asked is not None:
            append_record(self._folder, self._record(*self._asked, status, reason))
            self._marker.unlink(missing_ok=True)

    @property
    def _marker(self) -> Path:
        """Says, while ranks of a job measure, which cell: what kills rank 0 leaves it behind."""
        assert self._folder is not None
        return self._folder / ".running"

    def _mark(self, config: RunConfig, repeat: int) -> None:
        self._asked = config, repeat
        if self._folder is not None and rank_in_job() is not None:
            self._marker.write_text(f"{config.key()} {repeat}")

    def _unmark(self) -> None:
        if self._folder is not None:
            self._marker.unlink(missing_ok=True)

    def _find_lost(self, configs: list[RunConfig]) -> None:
        """Record the cell in which the last job was killed."""
        if not self._marker.exists():
            return
        told = self._marker.read_text().split()
        for config in configs if len(told) == 2 else ():  # else it was killed before it had begun to measure
            if config.key() == told[0]:
                reason = "the job was killed while it measured this cell"
                append_record(self._marker.parent, self._record(config, int(told[1]), "killed", reason))
        self._unmark()

    def _kind_of(self, config: RunConfig) -> Kind | None:
        return Kind.of(config, self._timeout_s)

    def _refusal(self, kind: Kind) -> str | None:
        """Why ranks of that kind cannot run here, asked before they are started."""
        if kind.device == "cpu" and rank_in_job() is None:  # which is always there, also once they are lost
            return None
        if kind not in self._refusals:
            self.environment(kind.device)  # known when they are lost
            fits = self._ask(op="fits", device=kind.device, world_size=kind.world_size)["reason"]
            self._refusals[kind] = _of_another_job(kind) or fits
        return self._refusals[kind]

    @property
    def _log(self) -> Path | None:
        return None if self._folder is None else self._folder / "worker.log"

    def _ask(self, **request: Any) -> Event:
        try:
            [answer] = self._ready().request(ANSWER_TIMEOUT_S, **request)
        except (WorkerDied, WorkerTimeout) as error:
            self.close()
            raise RuntimeError(f"the worker cannot tell its {request['op']}: {error}") from error
        return answer

    def environment(self, device: str) -> Environment:
        if device not in self._environments:
            answer = self._ask(op="environment", device=device)["environment"]
            self._environments[device] = Environment.from_dict(answer)
        return self._environments[device]

    def on_cuda(self, config: RunConfig) -> bool:
        return config.device != "cpu" and self.environment(config.device).device != "cpu"

    def preflight(self, configs: Sequence[RunConfig]) -> list[Row]:
        """A row for each config; one whose prediction kills or hangs the worker says so and costs no other."""
        rows: list[Row] = []
        while len(rows) < len(configs):
            rest = [c.to_dict() for c in configs[len(rows) :]]
            try:
                for event in self._ready().request(self._timeout_s or ANSWER_TIMEOUT_S, op="preflight", cells=rest):
                    rows.append(event["row"])
                continue
            except WorkerTimeout as error:
                lost = f"its prediction hung: {error}: raise --timeout-s"
            except WorkerDied as error:
                lost = f"its prediction killed the worker: {error}"
            self.close()
            if len(rows) < len(configs):  # else it died of what it had told already
                rows.append({"reason": lost, "predicted_peak_bytes": None, "device_memory_bytes": None})
        return rows

    def missing(
        self, configs: list[RunConfig], repeat: int, skip_oom: bool, on_note: Callable[[str], None]
    ) -> list[RunConfig]:
        """What the folder does not hold yet. Raises ConfigError if it was measured elsewhere or by other code.

        What has failed before comes last: it may end a job again. Without `skip_oom`, a cell that was only predicted
        to run out of memory is missing.
        """
        assert self._folder is not None
        self._find_lost(configs)
        if not records_path(self._folder).exists():
            return configs
        records, complaints = read_records(self._folder)
        for complaint in complaints:
            on_note(complaint)
        for record in records:
            if record.environment is not None:
                same_origin(record.environment, self.environment(record.config["device"]), self._folder)
        status = {record.key: record.status for record in records if skip_oom or not record.predicted}
        found = {c: status.get(make_key(c, repeat, self.environment(c.device))) for c in configs}
        unavailable = [c for c in configs if found[c] == "unavailable"]
        rows = self.preflight(unavailable) if unavailable else []
        remedied = {c for c, row in zip(unavailable, rows, strict=True) if row["reason"] is None}
        missing = [c for c in configs if found[c] not in DONE or c in remedied]
        return sorted(missing, key=lambda c: found[c] is not None)

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
                replace(self._record(c, repeat, "oom", _too_large(row), memory=[row]), predicted=True)
                for c, row in zip(configs, rows, strict=True)
                if _does_not_fit(row)
            )
            configs = [c for c, row in zip(configs, rows, strict=True) if not _does_not_fit(row)]
        for kind in dict.fromkeys(map(self._kind_of, configs)):
            if kind:
                self._refusal(kind)  # while there is one worker to ask: ranks take its place
        together = [c for c in configs if interleave and c.profiler == "none"]
        for kind in dict.fromkeys(map(self._kind_of, together)):
            yield from self._measure_group([c for c in together if self._kind_of(c) == kind], repeat, on_visit)
        for config in configs:
            if config.profiler != "none":
                yield self._profile(config, repeat, on_visit)
            elif not interleave:
                yield from self._measure_group([config], repeat, on_visit)

    def _profile(self, config: RunConfig, repeat: int, on_visit: Callable[[RunConfig], None]) -> RunRecord:
        """One cell in a worker of its own, with what the profiler left once that has ended."""
        with self._artifacts() as folder:
            out = profiled.prefix(Path(folder), config, repeat)
            launch = profiled.launcher(config, out, on_cuda=self.on_cuda(config))
            self._dismiss()  # it would be another process on the GPU
            if not config.is_distributed:
                self._worker, self._kind = Worker(self._log, launch), None
            [record] = self._measure_group([config], repeat, on_visit, out)
            self._dismiss()
            return profiled.with_profile(record, out, keep=self._folder is not None)

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
        """Cells of one kind."""
        waiting, kind = list(configs), self._kind_of(configs[0])
        if kind and (reason := self._refusal(kind)):
            yield from (self._record(config, repeat, "unavailable", reason) for config in configs)
            return
        while waiting:
            asked, current = list(waiting), waiting[0]
            self._mark(current, repeat)
            try:
                for event in self._ready(kind).request(self._timeout_s, **run_request(asked, repeat, out)):
                    current = asked[event["cell"]]
                    if event["event"] == "visit":
                        on_visit(current)
                    else:
                        waiting.remove(current)
                        self._unmark()
                        yield RunRecord.from_dict(event["record"])
            except (WorkerDied, WorkerTimeout, NotStarted) as error:
                self.close()
                if current in waiting:  # else it died of what it had told already
                    waiting.remove(current)
                    yield self._casualty(current, repeat, error)

    def _casualty(self, config: RunConfig, repeat: int, error: Exception) -> RunRecord:
        if isinstance(error, WorkerTimeout):
            return self._record(config, repeat, "timeout", f"{error}: raise --timeout-s")
        if isinstance(error, NotStarted):
            return self._record(config, repeat, "error", str(error))
        lost = error if config.is_distributed else f"the worker was lost: {error}"
        return self._record(config, repeat, "killed", str(lost))

    def _record(self, config: RunConfig, repeat: int, status: str, reason: str, **results: list[Row]) -> RunRecord:
        environment = self.environment(config.device)
        key = make_key(config, repeat, environment)
        return RunRecord(key, config.to_dict(), status, repeat, reason, environment, results=results)


def _of_another_job(kind: Kind) -> str | None:
    """Why the ranks of the job that this process belongs to are not these."""
    if rank_in_job() is None or kind.world_size in (1, size := int(os.environ["WORLD_SIZE"])):
        return None
    return f"this job has {size} ranks, the cell {kind.world_size}: start torchrun with as many"


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
