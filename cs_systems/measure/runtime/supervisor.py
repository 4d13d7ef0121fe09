"""Supervisor of the measuring processes: starts a worker or N ranks, watches them, and replaces them.

It is the only error boundary of a sweep: a cell that raises, runs out of memory, hangs, kills its process or disturbs
its channel fails alone. Its record holds the reason, and the next cell gets new processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from cs_systems.config import ConfigError, Phase, RunConfig
from cs_systems.core.tables import Tables
from cs_systems.core.units import human
from cs_systems.formulas.memory.tables import ForecastRow, MemoryRow, PreflightRow
from cs_systems.measure.runtime import allowance, channel, fork_client, profiled, scheduler
from cs_systems.measure.runtime.channel import (
    BUG,
    OPTIMIZER_MODULES,
    CellRecord,
    ChannelError,
    Experimenting,
    Message,
    Ready,
    Timing,
    Visit,
    Warming,
    run_request,
)
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.lifetime import torchrun_rank
from cs_systems.measure.runtime.processes import (
    ANSWER_TIMEOUT_S,
    Worker,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
)
from cs_systems.measure.runtime.ranks import Kind, NotStarted, Ranks
from cs_systems.measure.workloads import Cell
from cs_systems.record import Environment, RunRecord, in_words

Progressed = Visit | Warming | Timing | Experimenting
OnVisit = Callable[[RunConfig, Progressed], None]
ONE_WORKER = Kind()


class Processes(Protocol):
    """Worker, ranks started here, or ranks of a job that torchrun started."""

    @property
    def hello(self) -> Ready: ...

    @property
    def alive(self) -> bool: ...

    def request(self, request: Message, timeout_s: float | None = None) -> Iterator[Message]: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Supervisor:
    """Owner of the current measuring processes, and of the known facts about the machine."""

    def __init__(
        self,
        journal: Journal | None = None,
        timeout_s: float | None = None,
        experiments: allowance.Allowance | None = None,
    ) -> None:
        self._journal, self._timeout_s = journal, timeout_s
        self._experiments = experiments or allowance.Allowance(0.0)
        self._processes: Processes | None = None
        self._kind = ONE_WORKER
        self._is_fresh = False  # whether it is a single worker that has run no cell and no foreign code
        self._asked: tuple[RunConfig, int] | None = None
        self._refusals: dict[Kind, str | None] = {}
        self._first_hello: Ready | None = None
        self._environments: dict[str, Environment] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def kind_of(self, config: RunConfig) -> Kind:
        return Kind.of(config, self._timeout_s)

    def _ready(self, kind: Kind, stays_fresh: bool = False) -> Processes:
        """Return processes of that kind, after ending other kinds, which would hold memory and disturb.

        A fresh worker can be used for any code. `stays_fresh`: the next request runs no cell and no foreign code.
        """
        if self._is_fresh and not kind.is_distributed:
            self._kind = kind
        if self._processes is not None and (kind != self._kind or not self._processes.alive):
            self._dismiss()
        if self._processes is None:
            self._processes, self._kind = self._started(kind), kind
            self._is_fresh = not kind.is_distributed
            self._first_hello = self._first_hello or self._processes.hello
            same_device(self._first_hello, self._processes.hello)
        self._is_fresh = self._is_fresh and stays_fresh
        return self._processes

    def _started(self, kind: Kind) -> Processes:
        if not kind.is_distributed:
            return Worker(self._log)
        if torchrun_rank() is None or kind.world_size == 1:
            return Ranks(kind, self._log)
        from cs_systems.measure.runtime.torchrun import job  # rank 0 measures in this process, which has torch

        return job().of_kind(kind, self._lost)

    def _dismiss(self) -> None:
        self._is_fresh = False
        if self._processes is not None:
            self._processes.finish()
            self._processes = None

    @property
    def _log(self) -> Path | None:
        return None if self._journal is None else self._journal.log

    def _lost(self, status: str, reason: str) -> None:
        """Write the record of the cell that is being measured, while this process still can."""
        if self._journal is not None and self._asked is not None:
            self._journal.append(self._record(*self._asked, status, reason))
            self._journal.unmark_running()

    def _mark(self, config: RunConfig, repeat: int) -> None:
        self._asked = config, repeat
        if self._journal is not None and torchrun_rank() is not None:
            self._journal.mark_running(config, repeat)

    def _unmark(self) -> None:
        if self._journal is not None and torchrun_rank() is not None:
            self._journal.unmark_running()

    def record_lost(self, configs: Sequence[RunConfig]) -> None:
        """Record the cell in which an earlier job of torchrun was killed."""
        assert self._journal is not None
        if found := self._journal.found_running(configs):
            reason = "the job was killed while it measured this cell"
            self._journal.append(self._record(*found, "killed", reason))
        self._journal.unmark_running()

    def _ask(self, request: Message) -> Message:
        """Send a worker a request that measures nothing, and return its single reply.

        In a job of torchrun, this rank answers.
        """
        if torchrun_rank() is not None:
            from cs_systems.measure.runtime import worker  # this process has torch already

            replies: list[Message] = []
            worker.answer(request, replies.append)
            return replies[0]
        kind = self._kind if self._processes is not None and not self._kind.is_distributed else ONE_WORKER
        try:
            [answer] = self._ready(kind, stays_fresh=True).request(request, ANSWER_TIMEOUT_S)
        except (WorkerDied, WorkerTimeout, ChannelError) as error:
            self.close()
            raise RuntimeError(
                f"the worker process failed while it examined this machine: {error}; try again, and if it recurs, run "
                "cs-systems doctor"
            ) from error
        return answer

    def environment(self, device: str) -> Environment:
        if device not in self._environments:
            answer = self._ask(channel.Describe(device))
            assert isinstance(answer, channel.Described)
            self._environments[device] = Environment.from_dict(answer.environment)
        return self._environments[device]

    def on_cuda(self, config: RunConfig) -> bool:
        return config.device != "cpu" and self.environment(config.device).device != "cpu"

    def _refusal(self, kind: Kind) -> str | None:
        """Return why ranks of that kind cannot run here, checked before they are started; None if they can."""
        if kind.device == "cpu" and torchrun_rank() is None:  # a CPU is always available
            return None
        if kind not in self._refusals:
            self.environment(kind.device)  # read now, before the ranks are lost
            counted = self._ask(channel.CountDevices(kind.device, kind.world_size))
            assert isinstance(counted, channel.Counted)
            self._refusals[kind] = _of_another_job(kind) or counted.reason
        return self._refusals[kind]

    def preflight(self, configs: Sequence[RunConfig]) -> list[PreflightRow]:
        """Return a row for each config; one that kills or hangs the worker gets a reason and fails alone."""
        rows: list[PreflightRow] = []
        sources = {source for config in configs for source in config.sources}
        while len(rows) < len(configs):
            kind = Kind(sources=tuple(sorted(sources)))
            request = channel.Preflight([c.to_dict() for c in configs[len(rows) :]])
            try:
                for reply in self._ready(kind).request(request, self._timeout_s or ANSWER_TIMEOUT_S):
                    assert isinstance(reply, channel.Predicted)
                    rows.append(cast(PreflightRow, reply.row))
                continue
            except WorkerTimeout as error:
                lost = f"the memory prediction hung: {error}{error.remedy}"
            except (WorkerDied, ChannelError) as error:
                lost = f"the memory prediction killed the worker: {error}"
            self.close()
            if len(rows) < len(configs):  # otherwise the worker died after its last prediction
                rows.append({"reason": lost, "predicted_peak_bytes": None, "device_memory_bytes": None})
        if sources:
            self._dismiss()  # changes made by the prediction must not affect a measurement
        return rows

    def forecast(self, config: RunConfig) -> ForecastRow:
        """Return the prediction for a cell of a user's own model by fake tensors. Raises ConfigError if it is lost."""
        request = channel.Forecast([config.to_dict()])
        try:
            [reply] = self._ready(Kind(sources=config.sources)).request(request, self._timeout_s or ANSWER_TIMEOUT_S)
        except (WorkerTimeout, WorkerDied, ChannelError) as error:
            self.close()
            correct = "; correct the step, or measure its memory without a prediction"
            remedy = error.remedy if isinstance(error, WorkerTimeout) else correct
            message = f"the memory prediction of {config.workload} failed: {error}{remedy}"
            raise ConfigError(message, "timeout_s") from error
        assert isinstance(reply, channel.Forecasted)
        return cast(ForecastRow, reply.row)

    def measure(
        self, configs: Sequence[RunConfig], repeat: int, interleave: bool, skip_oom: bool, on_visit: OnVisit
    ) -> Iterator[RunRecord]:
        """Measure the cells and yield each record as soon as it is done."""
        fork_client.preload(run_request(configs, repeat).modules)  # otherwise a first worker would import them as well
        if skip_oom and configs:
            rows = self.preflight(configs)
            yield from (
                replace(
                    self._record(c, repeat, "oom", _too_large(row), {"memory": [cast(MemoryRow, row)]}), predicted=True
                )
                for c, row in zip(configs, rows, strict=True)
                if _does_not_fit(row)
            )
            configs = [c for c, row in zip(configs, rows, strict=True) if not _does_not_fit(row)]
        for kind in dict.fromkeys(map(self.kind_of, configs)):
            if kind.is_distributed:
                self._refusal(kind)  # checked first, because ranks will replace the worker
        for batch in scheduler.batches(configs, self.kind_of, interleave):
            if batch.is_profiled:
                yield self._profile(batch, repeat, on_visit)
            else:
                yield from self._measure(batch, repeat, on_visit)

    def _profile(self, batch: scheduler.Batch, repeat: int, on_visit: OnVisit) -> RunRecord:
        """Measure one cell in separate processes, and add the profiler's tables when these have ended."""
        (config,) = batch.configs
        with self._artifacts() as folder:
            out = profiled.prefix(Path(folder), config, repeat)
            cell = Cell(config)
            launch = profiled.launcher(cell, out, on_cuda=self.on_cuda(config))
            if not self._is_fresh or launch is not None:
                self._dismiss()  # an idle worker would be another process on the GPU
            if launch is not None:
                self._processes, self._kind = Worker(self._log, launch), batch.kind
            [record] = self._measure(batch, repeat, on_visit, out)
            self._dismiss()
            if self._journal is None:
                return profiled.with_profile(record, cell.profiler, out, keep=False)
            return profiled.with_profile(self._journal.stamped(record), cell.profiler, out, keep=True)

    def _artifacts(self) -> AbstractContextManager[str | Path]:
        """Return the folder of the records, or a temporary one that is deleted once the tables are made."""
        return nullcontext(self._journal.folder) if self._journal is not None else tempfile.TemporaryDirectory()

    def _measure(
        self, batch: scheduler.Batch, repeat: int, on_visit: OnVisit, out: Path | None = None
    ) -> Iterator[RunRecord]:
        waiting, kind = list(batch.configs), batch.kind
        if kind.is_distributed and (reason := self._refusal(kind)):
            yield from (self._record(config, repeat, "unavailable", reason) for config in waiting)
            return
        while waiting:
            asked, current = list(waiting), waiting[0]
            request = run_request(asked, repeat, out, self._experiments.of(asked))
            fork_client.preload(request.modules)
            self._mark(current, repeat)
            try:
                for reply in self._ready(kind).request(request, self._timeout_s):
                    assert isinstance(reply, (Progressed, CellRecord))
                    current = asked[reply.cell]
                    if isinstance(reply, Progressed):
                        on_visit(current, reply)
                    else:
                        record = _checked(reply)
                        self._experiments.spend(record)
                        if record.measurement and Phase.OPTIMIZER in record.measurement.phase_names():
                            fork_client.preload(OPTIMIZER_MODULES)  # the next worker starts with them
                        waiting.remove(current)
                        self._unmark()
                        yield record
            except (WorkerDied, WorkerTimeout, NotStarted, ChannelError) as error:
                self.close()
                if current in waiting:  # otherwise the worker died after it had sent the cell's record
                    waiting.remove(current)
                    yield self._lost_record(current, repeat, error)

    def _lost_record(self, config: RunConfig, repeat: int, error: Exception) -> RunRecord:
        """Return the record of a cell that lost its processes."""
        if isinstance(error, WorkerTimeout):
            return self._record(config, repeat, "timeout", f"{error}{error.remedy}")
        if isinstance(error, (NotStarted, ChannelError)):
            return self._record(config, repeat, "error", str(error))
        status = "oom" if isinstance(error, WorkerOutOfMemory) else "killed"
        lost = str(error) if config.is_distributed else f"the worker was lost: {error}"
        return self._record(config, repeat, status, lost)

    def _record(
        self, config: RunConfig, repeat: int, status: str, reason: str, results: Tables | None = None
    ) -> RunRecord:
        environment = self.environment(config.device)
        return RunRecord.of(config, repeat, environment, status, reason=reason, results=results or {})


def _checked(reply: CellRecord) -> RunRecord:
    try:
        return RunRecord.from_dict(reply.record)
    except (ConfigError, TypeError, KeyError, AttributeError, ValueError) as error:
        cause, _, _ = in_words(error).partition("; ")  # the remedy is meant for a config that the user wrote
        raise ChannelError(f"a worker process sent a record that this process cannot read ({cause}); {BUG}") from error


def _of_another_job(kind: Kind) -> str | None:
    """Return why the ranks of this process's job do not fit the kind, or None if they do."""
    if torchrun_rank() is None or kind.world_size in (1, size := int(os.environ["WORLD_SIZE"])):
        return None
    return (
        f"the cell needs {kind.world_size} ranks, but this job has {size}; start torchrun with {kind.world_size} ranks"
    )


def _does_not_fit(row: PreflightRow) -> bool:
    predicted, memory = row["predicted_peak_bytes"], row["device_memory_bytes"]
    return predicted is not None and memory is not None and predicted > memory


def _too_large(row: PreflightRow) -> str:
    sizes = row["predicted_peak_bytes"], row["device_memory_bytes"]
    predicted, memory = (human(size, "bytes") for size in sizes if size is not None)
    return f"predicted peak {predicted} exceeds the available {memory}; not run because of skip_oom"


def same_device(first: Ready, now: Ready) -> None:
    """Raise RuntimeError if a new worker finds another device than the one that the sweep began on."""
    if first.device != now.device:
        raise RuntimeError(
            f"the device changed: the first worker process found {first.device}, a new one finds {now.device}; check "
            f"with cs-systems doctor that {first.device} works, and measure again, which keeps the records of a folder"
        )
