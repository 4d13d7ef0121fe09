"""What came out: one run is one `RunRecord`, one record is one line of JSON.

Data holds base units (seconds, bytes, FLOPs) and the unit stands in the field's name; only `report/` converts.
Unknown is None.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.caveats import Caveat
from cs_systems.core.file_types import GZIP_MAGIC, refuse_other, shown

SCHEMA_VERSION = 1
RECORDS_FILE = "records.jsonl"
DONE = frozenset({"ok", "oom", "unavailable"})  # not tried again by a resumed sweep
NO_TIMING = frozenset(
    {"nan-loss", "inf-loss"}
)  # codes of caveats: such a step may be faster or slower than one that computes
LONGEST_S = 1e9  # of a step: 30 years
Row = dict[str, Any]
# Fields of a record in a file, whatever wrote it.
_TYPES: dict[str, tuple[Any, str]] = {
    "key": (str, "a text"),
    "config": (Mapping, "an object"),
    "status": (str, "a text"),
    "repeat": (int, "a whole number"),
    "reason": (str | None, "a text or null"),
    "environment": (Mapping | None, "an object or null"),
    "measurement": (Mapping | None, "an object or null"),
    "warnings": (list | tuple, "a list"),
    "results": (Mapping, "an object"),
    "artifacts": (Mapping, "an object"),
}


class NewerSchema(ConfigError):
    """A record that a newer version wrote, which must not be mixed with this version's."""


@dataclass(frozen=True)
class Sample:
    """One step. `phases_s` by the device's clock, `submit_s` the host's to submit each phase, `wall_s` around it all.

    `held_s` is how long the device was kept busy before the first phase, so that launches were queued when it began;
    `wall_s` is then from the first phase to the last by the device's clock. None: not held, by the host's clock.

    `lag_s` is how far the device was behind the host at the end of each phase: near 0, it waited for the host.
    """

    round: int
    warmup: bool
    wall_s: float
    phases_s: dict[str, float]
    submit_s: dict[str, float]
    lag_s: dict[str, float] | None = None  # None: host and device are one
    held_s: float | None = None
    device_mallocs: int | None = None  # cudaMalloc calls during the step
    compile_s: float | None = None  # torch.compile and Triton compilation during the step
    compiles: int | None = None
    sm_clock_hz: float | None = None


@dataclass(frozen=True)
class Measurement:
    """Every sample of a run, warm-up too, in the order in which they were taken. Summaries are derived."""

    clock: str  # "cuda_event" or "monotonic"
    samples: tuple[Sample, ...]
    setup_s: float  # building the workload
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    @property
    def timed(self) -> tuple[Sample, ...]:
        return tuple(s for s in self.samples if not s.warmup)

    def phase_names(self) -> tuple[str, ...]:
        return tuple(self.samples[0].phases_s) if self.samples else ()

    def durations_s(self, phase: str) -> list[float]:
        """The timed samples of one phase; `step` is the wall clock around the whole step."""
        return [s.wall_s if phase == "step" else s.phases_s[phase] for s in self.timed]


@dataclass(frozen=True)
class Environment:
    """The machine and the software that produced a number."""

    cs_systems: str
    code_version: str  # a hash over the sources that measure
    git_commit: str | None  # with + when the package differed from it
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    cudnn: str | None
    platform: str
    cpu: str
    cpu_threads: int
    device: str  # "cpu" or "cuda:0"
    device_name: str
    compute_capability: str | None = None
    driver: str | None = None
    device_memory_bytes: int | None = None
    sm_clock_hz: float | None = None
    sm_clock_max_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    other_processes: int | None = None  # on the same GPU
    float32_matmul: str | None = None  # "ieee" or "tf32", as read back from torch

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        reasons = data.get("throttle_reasons")
        return cls(**{**data, "throttle_reasons": None if reasons is None else tuple(reasons)})


def make_key(config: RunConfig, repeat: int, environment: Environment) -> str:
    """Under which a sweep knows that a cell is done: what was asked, and where and by which code it was measured."""
    foreign = [source["sha256"] for name in (config.attention, config.workload) if (source := plugins.provenance(name))]
    parts = (config.key(), repeat, environment.torch, environment.device_name, environment.code_version, *foreign)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunRecord:
    """`results`: small plain tables, name → rows with fixed columns. `artifacts`: paths from the record's folder.

    `predicted`: the status is a prediction, and nothing ran (`--skip-oom`).
    """

    key: str
    config: dict[str, Any]
    status: str
    repeat: int = 0
    reason: str | None = None
    environment: Environment | None = None
    measurement: Measurement | None = None
    warnings: tuple[Caveat, ...] = ()
    results: dict[str, list[Row]] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    predicted: bool = False
    schema_version: int = SCHEMA_VERSION

    @property
    def is_timing(self) -> bool:
        """Whether its times may be quoted: it was measured, and its step computed numbers."""
        return self.measurement is not None and all(w.code not in NO_TIMING for w in self.warnings)

    @property
    def run_config(self) -> RunConfig:
        return RunConfig.from_dict(self.config)

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        if data["measurement"] is not None:
            data["measurement"]["samples"] = _columns(data["measurement"]["samples"])
        return json.dumps(data, separators=(",", ":"), allow_nan=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunRecord:
        if not isinstance(data, Mapping):
            raise ConfigError("not a record of cs_systems: it is no JSON object")
        version = data.get("schema_version")
        if not isinstance(version, int):
            raise ConfigError("not a record of cs_systems: it has no schema_version")
        if version > SCHEMA_VERSION:
            raise NewerSchema(
                f"the record has schema {version}, newer than {SCHEMA_VERSION}, "
                "which this version reads: upgrade cs-systems"
            )
        _refuse_other_types(data)
        fields = dict(data)
        if measurement := data.get("measurement"):
            rows = measurement["samples"]
            samples = tuple(Sample(**s) for s in (_rows(rows) if isinstance(rows, Mapping) else rows))
            for sample in samples:
                _refuse_other_times(sample)
            fields["measurement"] = Measurement(**{**measurement, "samples": samples})
        if environment := data.get("environment"):
            fields["environment"] = Environment.from_dict(environment)
        fields["warnings"] = tuple(Caveat(**w) for w in data.get("warnings", ()))
        return cls(**fields)

    def frame(self) -> Any:
        """This record as a pandas DataFrame, one row a phase."""
        import cs_systems

        return cs_systems.frame([self])


def _refuse_other_types(data: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of a record from a file that is not of its type."""
    for name, (kind, what) in _TYPES.items():
        value = data.get(name)
        if name in data and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ConfigError(f"{name} is {shown(value)}: it must be {what}")
    if not 0 <= data.get("repeat", 0) < 1 << 63:
        raise ConfigError(f"repeat is {shown(data['repeat'])}: it must be a number from 0 on, below 2^63")
    for name, rows in data.get("results", {}).items():
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ConfigError(f"results {shown(name)} is {shown(rows)}: it must be a list of rows")


def _refuse_other_times(sample: Sample) -> None:
    """Raise ConfigError for a time of a sample that no step takes: sums of such numbers are no number."""
    times = {"wall_s": sample.wall_s, **{f"phases_s {name}": time for name, time in sample.phases_s.items()}}
    times |= {f"submit_s {name}": time for name, time in sample.submit_s.items()}
    for name, time in times.items():
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= LONGEST_S:
            raise ConfigError(f"{name} of a sample is {shown(time)}: it must be a time from 0 to {LONGEST_S:.0e} s")


def _columns(rows: Sequence[Row]) -> Row:
    """Rows of equal keys as columns, nested ones too: a record of many samples is then a third as long."""
    columns: Row = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        first = values[0]  # an empty mapping stays as it is: as columns it would not say how many rows there are
        alike = isinstance(first, Mapping) and first and all(v is not None and v.keys() == first.keys() for v in values)
        columns[name] = _columns(values) if alike else values
    return columns


def _rows(columns: Mapping[str, Any]) -> list[Row]:
    """What `_columns` made columns of."""
    values = [_rows(c) if isinstance(c, Mapping) else c for c in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def records_path(path: str | os.PathLike[str]) -> Path:
    """The records file that `path` means: itself, or the one in that folder."""
    path = Path(path)
    return path / RECORDS_FILE if path.is_dir() or not path.suffix else path


def read_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """All records under `path` (a file, or a folder with records.jsonl), and complaints about lines that were skipped.

    A torn line (the process died while writing it) costs that line only. Raises FileNotFoundError, or ConfigError where
    no line is a record or a record is of a newer schema.
    """
    file = records_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there are no records at {file}: give the folder that a run printed as 'records:'")
    refuse_other(file, "report")
    with file.open("rb") as stream:
        if stream.read(2).startswith(GZIP_MAGIC):
            raise ConfigError(f"{file} is compressed: gunzip it first")
    records, complaints = readable_records(file, strict=True)
    if complaints and not records:
        raise ConfigError(
            f"{file} holds no record that can be read: it was cut while the first was written, or is no records.jsonl"
        )
    return records, complaints


def readable_records(file: Path, *, strict: bool = False) -> tuple[list[RunRecord], list[str]]:
    """Return every record of a file that can be read, and a complaint about each line that cannot.

    Raises ConfigError where a record is of a newer schema; with `strict` also where a line is whole, but no record.
    """
    records: list[RunRecord] = []
    complaints = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(RunRecord.from_dict(json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError):
            complaints.append(f"{file}:{number} is torn (the run was cut while writing it): skipped")
        except NewerSchema as error:
            raise ConfigError(f"{file}:{number}: {error}") from error
        except (ConfigError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            if strict and isinstance(error, ConfigError):
                raise ConfigError(f"{file}:{number}: {error}") from error
            told = f"{file}:{number} is no record as this version writes it ({error}): "
            if strict:
                remedy = "read it with the cs-systems that wrote it, or take the line out"
                raise ConfigError(told + remedy) from error
            complaints.append(f"{told}skipped")
    return records, complaints


def some_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """As `read_records`, of at least one record. Raises ConfigError where there is none yet."""
    records, complaints = read_records(path)
    if not records:
        raise ConfigError(f"{path} holds no record yet: run the sweep again to go on with it")
    return records, complaints


def append_record(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Write one line and force it to the disk, so that a killed sweep loses nothing that was measured.

    Raises OSError, which names the file, where it cannot be written; the file is then as it was.
    """
    file = records_path(path)
    with file.open("ab+", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        torn = b"\n" if before and not _ends_with_newline(stream) else b""  # a torn line stays apart from this one
        line = memoryview(torn + record.to_json().encode() + b"\n")
        try:
            while line:
                line = line[stream.write(line) :]
            os.fsync(stream.fileno())
        except OSError as error:
            with suppress(OSError):
                stream.truncate(before)
            raise OSError(error.errno, f"cannot write the record: {error.strerror}", str(file)) from error


def _ends_with_newline(stream: Any) -> bool:
    stream.seek(-1, os.SEEK_END)
    return bool(stream.read(1) == b"\n")
