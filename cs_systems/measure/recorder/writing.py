"""Writer of the records of a recording; rank 0 writes the records of all ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

from cs_systems.config import RunConfig
from cs_systems.core import caveats, origin
from cs_systems.core.caveats import Caveat
from cs_systems.core.tables import Tables, first_row
from cs_systems.core.tracers import tracer
from cs_systems.machine.environment import environment
from cs_systems.measure.profilers import rank_file
from cs_systems.measure.recorder import _ranks
from cs_systems.measure.recorder.stages import Stage
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.profiled import prefix, with_profile
from cs_systems.record import Ran, RunRecord, append_record, are_of_one_version


class Writer:
    """Writer of a loop's records into a folder.

    waits_for_nsys: keep the record of an nsys profile only in `records`, because its report does not exist yet.

    Attributes:
        records: the records that this process has written.
        meeting: the exchange with other ranks, if there are any.
        before: the environment at the start.
    """

    def __init__(self, out: Path, subject: Subject, *, record_host: bool, waits_for_nsys: bool) -> None:
        self.out, self._subject = out, subject
        self._record_host, self._waits_for_nsys = record_host, waits_for_nsys
        self.records: list[RunRecord] = []

    def begin(self) -> None:
        self.meeting = _ranks.Meeting() if self._subject.world_size > 1 else None
        self._rank = _ranks.rank()
        self.is_first_rank = self._rank == 0
        if self.is_first_rank:
            Journal.check(self.out)
        self.before = environment(self._subject.device)

    def config(self, stage: Stage) -> RunConfig:
        return self._subject.config(warmup=stage.warmup, steps=stage.steps, profiler=stage.name)

    def times_done(self, stage: Stage) -> int:
        return Journal(self.out).times_done(self.config(stage))

    def path(self, stage: Stage) -> Path:
        return rank_file(prefix(self.out, self.config(stage), self.times_done(stage)), self._rank)

    def files(self, stage: Stage) -> list[Path]:
        """Return the files that a profiler wrote in this process."""
        path = self.path(stage)
        return sorted(path.parent.glob(f"{path.name}.*"))

    def remove_files(self, stage: Stage) -> None:
        for file in self.files(stage):
            file.unlink()

    def failure(self, stage: Stage, status: str, reason: str) -> RunRecord:
        """Return the record of a stage without a timed step."""
        return RunRecord.of(self.config(stage), self.times_done(stage), self.before, status, reason=reason)

    def publish(self, record: RunRecord, stage: Stage, patience_s: float) -> None:
        """Write the record of one process, or on rank 0 of all ranks; a profile's record includes the ranks' traces."""
        if not self.is_first_rank and self.meeting is not None:
            files = [file.name for file in self.files(stage)]
            self.meeting.leave(stage.name, record.to_json() if stage.is_timed else json.dumps(files))
            return
        record = record.stamped(record_host=self._record_host)
        if not stage.is_timed:
            record = self._profiled(record, stage)
        if self.meeting is not None and stage.is_timed:
            record = _ranks.with_others(record, self.meeting.collect(stage.name, patience_s))
        elif self.meeting is not None and record.status == "ok" and stage.profiler.on_each_rank:
            left = self.meeting.collect(stage.name, patience_s)
            traces = {f"trace_rank{rank}": name for rank, names in left.items() for name in json.loads(names)}
            here = {what: name for what, name in traces.items() if (self.out / name).is_file()}
            record = replace(record, artifacts=record.artifacts | here)
        if not self.is_first_rank:
            return
        record = self._with_code(record)
        if not self.is_left_to_parent(record):
            self.append(record)
        self.records.append(record)

    def _with_code(self, record: RunRecord) -> RunRecord:
        """Return the record with the hash of the script, and the caveat that the folder has records of another one."""
        ran = first_row(record.results, "ran")
        if not ran or not (code := origin.code()):
            return record
        record = replace(record, results={**record.results, "ran": [cast(Ran, {**ran, **code})]})
        others = [r for r in Journal(self.out).done(record.run_config) if not are_of_one_version(r, record)]
        return with_caveat(record, caveats.edited_script(len(others))) if others else record

    def is_left_to_parent(self, record: RunRecord) -> bool:
        """Return whether the parent process writes this record, with the tables of nsys's report."""
        is_of_nsys = tracer(record.config["profiler"]).starts_program
        return self._waits_for_nsys and record.status == "ok" and is_of_nsys

    def append(self, record: RunRecord) -> None:
        """Write a record into the folder, which the first record makes."""
        self.out.mkdir(parents=True, exist_ok=True)
        append_record(self.out, record)

    def _profiled(self, record: RunRecord, stage: Stage) -> RunRecord:
        if record.status != "ok":
            return record
        if not stage.profiler.is_launcher:
            return with_profile(record, stage.profiler, self.path(stage), keep=True)
        if self._waits_for_nsys:
            return record
        what, remedy = "nsys writes its report when the process has ended", "cs-systems analyze REPORT.nsys-rep"
        return with_caveat(record, Caveat("no-tables", what, remedy))

    def add(self, tables: Tables) -> None:
        """Write the record of the timing again, with more tables; only on rank 0."""
        number = next((n for n, r in enumerate(self.records) if not r.is_profiled), None)
        if number is None:
            return
        record = self.records[number]
        self.records[number] = replace(record, results={**record.results, **tables})
        self.append(self.records[number])


def with_caveat(record: RunRecord, caveat: Caveat) -> RunRecord:
    return replace(record, warnings=(*record.warnings, caveat))
