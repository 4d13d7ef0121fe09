"""Results of a run: each measured cell is one `RunRecord`, stored as one line of JSON.

Data is in base units (seconds, bytes, FLOPs), and the field's name contains the unit; only `report/` converts. An
unknown value is None.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import origin, plugins
from cs_systems.core.caveats import Caveat
from cs_systems.core.display import Displayed, report
from cs_systems.core.fields import LOOP, Subject
from cs_systems.core.formats import GZIP_MAGIC, head, refuse_other
from cs_systems.core.tables import Row as Row
from cs_systems.core.tables import Table, Tables, first_row
from cs_systems.core.validation import shown

SCHEMA_VERSION = 4  # the only readable schema; scripts/migrate_records.py converts earlier records to it
RECORDS_FILE = "records.jsonl"
BEGINS = re.compile(rb'\{"key":"\w*","config":')  # beginning of a line of the records file
DONE = frozenset({"ok", "oom", "unavailable"})  # a resumed sweep does not measure these again
OR_AGAIN = "or measure again into another folder"  # because a sweep refuses a malformed folder
# Caveats for which times are invalid: arithmetic on NaN or inf may take a different time.
NO_TIMING = frozenset({"nan-loss", "inf-loss"})
STEADY = 3  # number of last unprofiled steps before a profile that count as steady; earlier ones compile and allocate
LONGEST_S = 1e9  # upper limit of a step's duration: 30 years
LATEST_UNIX_S = 2e11  # the year 8307; later dates cannot be shown
# Types of a record's fields, checked because a file may come from any program.
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
    "origin": (Mapping | None, "an object or null"),
}


class Ran(TypedDict, total=False):
    """Description of what really ran, in `ran`: one row, with the columns that apply to the workload.

    A user's own workload may add columns of its own.
    """

    tokens: int | None  # tokens in a step of this rank
    samples: int | None  # samples of a user's own batch in a step of this rank
    world_tokens: int | None  # tokens in a step of all ranks
    timed_tokens: int | None  # tokens in all timed steps of all ranks; only if batches differ in size
    timed_samples: int | None
    parameters: int
    loss: float | None  # loss of the last step
    attention: str
    attention_version: str | None
    attention_path: str  # source file of a user's own attention, and its hash
    attention_sha256: str
    workload_path: str
    workload_sha256: str
    inputs_path: str
    inputs_sha256: str
    parts_path: str  # paths of a user's own parts, separated by spaces
    parts_sha256: str
    checkpoint: str
    optimizer: str | None
    levers: str  # levers of a process of `advise -- SCRIPT`, joined by "+"; its folder names them, and not its file
    rounds: int
    resident: bool | None  # whether the workload stayed in memory between rounds; None with one round
    takes_config: bool  # whether the configuration had an effect on a user's own workload
    graph_breaks: int | None  # graph breaks of torch.compile; None if the cell compiled nothing itself
    compiled_graphs: int | None  # graphs that torch.compile made in the process of a loop
    uses: str  # fields of the configuration that a user's own workload read or that applied to it, separated by spaces
    precision: str
    mode: str
    d_head: int
    l2: str
    launches_hidden: bool
    graph: str | None
    # memory of an attention call: inputs, output with its gradient, tensors kept by forward
    before_backward_bytes: int | None
    executed_d_head: int | None
    block_q: int | None
    block_k: int | None
    backend: str  # backend of collectives, with its version
    world_size: int
    calls: int  # collectives in one `transfer`
    sent_bytes: int  # size of a rank's buffer
    received_bytes: int


class DamagedRecord(ConfigError):
    """Error for a record from a file with a field's value that no version of cs_systems writes."""


class OtherSchema(ConfigError):
    """Error for a record of another version, which must not be mixed with records of this version."""


@dataclass(frozen=True)
class Sample:
    """One timed step of a cell.

    `phases_s` are durations on the device's clock, `submit_s` the host's time to submit each phase, and `wall_s` the
    duration of the whole step.

    `held_s` is how long the device was kept busy before the first phase, so that launches were already queued. `wall_s`
    then lasts from the first phase to the last by the device's clock. None: the device was not kept busy, and `wall_s`
    is by the host's clock; for a recorded loop, which does not synchronise its steps, by the device's clock.

    `lag_s` is how far the device was behind the host at the end of each phase. Near 0, the device waited for the host.
    """

    round: int
    warmup: bool
    wall_s: float
    phases_s: dict[str, float]
    submit_s: dict[str, float]
    lag_s: dict[str, float] | None = None  # None if the host is the device
    held_s: float | None = None
    device_mallocs: int | None = None  # cudaMalloc calls during the step
    compile_s: float | None = None  # torch.compile and Triton compilation during the step
    compiles: int | None = None
    sm_clock_hz: float | None = None


@dataclass(frozen=True)
class Measurement:
    """All samples of a run in chronological order, warm-up included; summaries are derived from them."""

    clock: str  # "cuda_event" or "monotonic"
    samples: tuple[Sample, ...]
    setup_s: float  # seconds for building the workload
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    @property
    def timed(self) -> tuple[Sample, ...]:
        return tuple(s for s in self.samples if not s.warmup)

    def phase_names(self) -> tuple[str, ...]:
        return tuple(self.samples[0].phases_s) if self.samples else ()

    def durations_s(self, phase: str) -> list[float]:
        """Return the timed samples of one phase; `step` is the wall-clock time of the whole step."""
        return [s.wall_s if phase == "step" else s.phases_s[phase] for s in self.timed]

    def median_s(self, phase: str = "step") -> float | None:
        """Return the median of a phase's timed steps over all rounds, as shown in every output; None if unknown."""
        return _median_s([self], phase)


@dataclass(frozen=True)
class Environment:
    """Hardware and software that produced a number."""

    cs_systems: str
    code_version: str  # a hash of the measuring sources
    git_commit: str | None  # with + if the package had local changes
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
    other_processes: int | None = None  # other processes on the same GPU
    float32_matmul: str | None = None  # "ieee" or "tf32", as read back from torch
    allocator_settings: str | None = None  # PYTORCH_CUDA_ALLOC_CONF, on a GPU
    load_average: float | None = None  # mean number of processes running or waiting for a core, over the last minute
    cpu_cores: int | None = None  # cores of the machine

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        reasons = data.get("throttle_reasons")
        return cls(**{**data, "throttle_reasons": None if reasons is None else tuple(reasons)})


@dataclass(frozen=True)
class Origin:
    """Time at which a cell was recorded, the command that recorded it, and on request the host."""

    recorded_unix_s: float
    command: str | None  # None in an interactive session or a notebook
    host: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """Return the origin of a record from a file. Raises DamagedRecord for a field of the wrong type."""
        at = data.get("recorded_unix_s")
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= LATEST_UNIX_S:
            raise DamagedRecord(f"recorded_unix_s is {shown(at)}, not a time from 0 to {LATEST_UNIX_S:.0e} s")
        for name in ("command", "host"):
            if not isinstance(data.get(name), str | None):
                raise DamagedRecord(f"{name} is {shown(data[name])}, not a text or null")
        return cls(**data)


def _median_s(measurements: Iterable[Measurement], phase: str) -> float | None:
    known = [
        duration
        for measurement in measurements
        if phase == "step" or phase in measurement.phase_names()
        for duration in measurement.durations_s(phase)
        if math.isfinite(duration)
    ]
    if not known:
        return None
    from statistics import median  # imports decimal and fractions

    return median(known)


def declared_by(profiler: str) -> dict[str, Any]:
    """Return the literals that a profiler's file declares; none for an unknown profiler."""
    return plugins.declared("profilers", profiler) if profiler in plugins.names("profilers") else {}


def measured_by(profiler: str) -> str:
    """Return the subject that a profiler's file declares, such as "memory"; "time" for an unknown profiler."""
    return str(declared_by(profiler).get("measures", "time"))


def make_key(config: RunConfig, repeat: int, environment: Environment) -> str:
    """Return the key by which a sweep recognizes a measured cell.

    It hashes the config, the repeat, the device, the version of torch, and the code that measured.
    """
    import hashlib

    named = chain.from_iterable(config.own_code.values())
    foreign = [source["sha256"] for name in named if (source := plugins.provenance(name))]
    hashed = (config.key(), repeat, environment.torch, environment.device_name, environment.code_version, *foreign)
    return hashlib.sha256(repr(hashed).encode()).hexdigest()[:16]


@dataclass(frozen=True, repr=False)
class RunRecord(Displayed):
    """Result of one cell.

    `results` holds small plain tables. `artifacts` holds paths relative to the record's folder. With `predicted`, the
    status is a prediction and nothing ran (`--skip-oom`, or a cell larger than the host).
    """

    key: str
    config: dict[str, Any]
    status: str
    repeat: int = 0
    reason: str | None = None
    environment: Environment | None = None
    measurement: Measurement | None = None
    warnings: tuple[Caveat, ...] = ()
    results: Tables = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    predicted: bool = False
    origin: Origin | None = None  # None before it is written
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, config: RunConfig, repeat: int, environment: Environment, status: str, **others: Any) -> RunRecord:
        """Return the record of a cell with its key; `others` are the other fields."""
        key = make_key(config, repeat, environment)
        return cls(key, config.to_dict(), status, repeat, environment=environment, **others)

    @property
    def is_timing(self) -> bool:
        """Flag for valid times: the cell was measured, and its loss was finite."""
        return self.measurement is not None and all(w.code not in NO_TIMING for w in self.warnings)

    @property
    def is_profiled(self) -> bool:
        return bool(self.config.get("profiler", RunConfig.profiler) != RunConfig.profiler)

    @property
    def subject(self) -> Subject:
        """Thing that the cell measured."""
        return Subject.of(self.config["workload"])

    @property
    def clean(self) -> Measurement | None:
        """Measurement of the steps without a profiler: the timed ones, or under a profiler the last warm-up steps."""
        if not self.is_timing or self.measurement is None:
            return None
        if not self.is_profiled:
            steps = self.measurement.timed
        else:
            warm = [sample for sample in self.measurement.samples if sample.warmup][-STEADY:]
            steps = tuple(replace(sample, warmup=False) for sample in warm) if len(warm) == STEADY else ()
        return replace(self.measurement, samples=steps) if steps else None

    @property
    def is_loop(self) -> bool:
        """Flag of a user's own loop, which a Recorder measured."""
        return self.subject is Subject.LOOP

    @cached_property
    def run_config(self) -> RunConfig:
        try:
            return RunConfig.from_dict(self.config)
        except ConfigError as error:
            what, _, _ = str(error).partition("; ")  # leave out its remedy, which is for a config that the user wrote
            number = f", {self.environment.cs_systems}" if self.environment else ""
            raise ConfigError(
                f"the record with key {self.key} has a config that this version of cs-systems cannot read ({what}); "
                f"use the version that wrote it{number}, or delete its line of records.jsonl"
            ) from None

    def stamped(self, *, record_host: bool = False) -> RunRecord:
        """Return the record with its origin (current time, this process's command), unless it has one already."""
        if self.origin is not None:
            return self
        import socket

        host = socket.gethostname() if record_host else None
        return replace(self, origin=Origin(time.time(), origin.command(), host))

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        if data["measurement"] is not None:
            data["measurement"]["samples"] = _columns(data["measurement"]["samples"])
        return json.dumps(data, separators=(",", ":"), allow_nan=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunRecord:
        version = data.get("schema_version")
        if not isinstance(version, int):
            found = "it has no schema_version" if version is None else f"its schema_version is {shown(version)}"
            raise ConfigError(
                f"the JSON object is not a record of cs-systems, because {found}; delete it, or give the records.jsonl "
                "of a run"
            )
        if version != SCHEMA_VERSION:
            older = "migrate it by scripts/migrate_records.py of the source code, or measure again"
            remedy = "upgrade cs-systems" if version > SCHEMA_VERSION else older
            raise OtherSchema(
                f"the record has schema {version}, but this version of cs-systems reads schema {SCHEMA_VERSION}; "
                f"{remedy}"
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
        if data.get("origin"):
            fields["origin"] = Origin.from_dict(data["origin"])
        fields["warnings"] = tuple(Caveat(**w) for w in data.get("warnings", ()))
        return cls(**fields)

    def _displayed(self) -> tuple[str, list[RunRecord]]:
        return "", [self]

    def frame(self) -> Any:
        """Return this record as a pandas DataFrame, one row per phase."""
        return report("frame").frame([self])


def _refuse_other_types(data: Mapping[str, Any]) -> None:
    """Raise DamagedRecord if a field of a record from a file has the wrong type."""
    for name, (kind, what) in _TYPES.items():
        value = data.get(name)
        if name in data and (not isinstance(value, kind) or isinstance(value, bool)):
            raise DamagedRecord(f"{name} is {shown(value)}, not {what}")
    if not 0 <= data.get("repeat", 0) < 1 << 63:
        raise DamagedRecord(f"repeat is {shown(data['repeat'])}, not a whole number from 0 to 2^63 - 1")
    for name, rows in data.get("results", {}).items():
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise DamagedRecord(f"results {shown(name)} is {shown(rows)}, not a list of rows")


def _refuse_other_times(sample: Sample) -> None:
    """Raise DamagedRecord if a time of a sample is impossible for a step.

    Sums of such values would overflow or be NaN.
    """
    times = {"wall_s": sample.wall_s, **{f"phases_s {name}": seconds for name, seconds in sample.phases_s.items()}}
    times |= {f"submit_s {name}": seconds for name, seconds in sample.submit_s.items()}
    for name, seconds in times.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_S:
            raise DamagedRecord(f"{name} of a sample is {shown(seconds)}, not a time from 0 to {LONGEST_S:.0e} s")


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Convert rows with equal keys to columns, recursively; a record of many samples shrinks to a third."""
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        first = values[0]  # keep an empty mapping, because columns would lose the number of rows
        alike = isinstance(first, Mapping) and first and all(v is not None and v.keys() == first.keys() for v in values)
        columns[name] = _columns(values) if alike else values
    return columns


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the columns of `_columns` back to rows."""
    values = [_rows(c) if isinstance(c, Mapping) else c for c in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def records_path(path: str | os.PathLike[str]) -> Path:
    """Return the records file of `path`, which is that file or its folder. Raises ConfigError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path is {shown(path)}; give the folder of a run, or its file records.jsonl")
    path = Path(path)
    return path / RECORDS_FILE if path.is_dir() or not path.suffix else path


def read_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Read all records under `path`, a file or a folder with records.jsonl.

    A line that is truncated (the process died while writing it) or not a JSON object is skipped.

    Returns:
        The records, and messages about the lines that were skipped.

    Raises:
        FileNotFoundError: the records file is missing.
        ConfigError: no line is a record, a JSON object is not a record, or a record has another schema.
    """
    file = records_path(path)
    if not file.is_file():
        lack = f"contains no {RECORDS_FILE}" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(f"{Path(path)} {lack}; give the folder of a run, or its file {RECORDS_FILE}")
    if not BEGINS.match(head(file)):
        refuse_other(file, "report")
    with file.open("rb") as stream:
        if stream.read(2).startswith(GZIP_MAGIC):
            raise ConfigError(f"{file} is compressed; gunzip it first")
    records, complaints = readable_records(file, strict=True)
    if complaints and not records:
        raise ConfigError(
            f"{file} has no readable record, because {of_line(complaints[0], file)}; give the records.jsonl of another "
            "run, or repeat the run that wrote it"
        )
    return records, complaints


def of_line(complaint: str, file: Path) -> str:
    """Return a message about a line without the file's name: `line 7 is damaged at column 1`."""
    return "line " + complaint.removeprefix(f"{file}:").removesuffix("; skipped")


def readable_records(file: Path, *, strict: bool = False) -> tuple[list[RunRecord], list[str]]:
    """Return every readable record of a file, and a message about each unreadable line.

    Raises:
        ConfigError: a record has another schema; with `strict`, also if a JSON object is not a record.
    """
    records: list[RunRecord] = []
    complaints = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                complaints.append(f"{file}:{number} is not a record of cs_systems (no JSON object); skipped")
                continue
            records.append(RunRecord.from_dict(data))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            cause = "incomplete (the run was interrupted while writing it)" if _is_torn(line) else f"damaged{where}"
            complaints.append(f"{file}:{number} is {cause}; skipped")
        except RecursionError:
            complaints.append(f"{file}:{number} is not a record of cs_systems (nested too deeply); skipped")
        except OtherSchema as error:
            raise ConfigError(f"{file}:{number}: {error}") from error
        except (ConfigError, TypeError, KeyError, AttributeError, ValueError) as error:
            if strict and isinstance(error, DamagedRecord):
                raise ConfigError(f"{file}:{number} is malformed: {error}; delete the line, {OR_AGAIN}") from error
            if strict and isinstance(error, ConfigError):
                raise ConfigError(f"{file}:{number}: {error}") from error
            problem = f"{file}:{number} is not a record of this version ({in_words(error)}); "
            if strict:
                remedy = "read it with the cs-systems version that wrote it, or remove the line"
                raise ConfigError(problem + remedy) from error
            complaints.append(f"{problem}skipped")
    return _latest(records), complaints


def _latest(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records, with only the latest record of each loop.

    A loop is written after its timing, and again at its end.
    """
    latest: dict[Any, RunRecord] = {}
    for number, record in enumerate(records):
        is_loop = str(record.config.get("workload")).startswith(LOOP)
        latest[(record.key, record.repeat, record.origin) if is_loop and record.origin else number] = record
    return [*latest.values()]


def are_of_one_version(a: RunRecord, b: RunRecord) -> bool:
    """Return whether two records of a cell measured the same code, as far as their hashes tell."""
    a_ran, b_ran = (first_row(record.results, "ran") for record in (a, b))
    hashes = [name for name in a_ran if name.endswith("_sha256") and a_ran[name] and b_ran.get(name)]
    return all(a_ran[name] == b_ran[name] for name in hashes)


def in_words(error: Exception) -> str:
    """Reword Python's error about missing or unknown arguments of a class, as an error about fields of a record."""
    text = str(error)
    if lacking := re.search(r"missing \d+ required positional arguments?: (.+)", text):
        return f"it lacks {lacking[1]}"
    if unknown := re.search(r"unexpected keyword argument ('.+')", text):
        return f"it has an unknown field {unknown[1]}"
    if isinstance(error, KeyError):
        return f"it lacks {text}"
    return "the columns of its samples differ in length" if text.startswith("zip() argument") else text


def as_records(records: RunRecord | Iterable[RunRecord]) -> list[RunRecord]:
    """Return one record or several as a list. Raises ConfigError for anything else."""
    found = [records] if isinstance(records, RunRecord) or not isinstance(records, Iterable) else [*records]
    if isinstance(records, str | os.PathLike):
        raise ConfigError(f"records is the path {shown(os.fspath(records))}; give the result of read_records(path)[0]")
    if wrong := [each for each in found if not isinstance(each, RunRecord)]:
        held = f" that contains {shown(wrong[0])}" if isinstance(records, Iterable) else ""
        remedy = "give RunRecords, such as read_records(path)[0] or list(sweep(configs))"
        raise ConfigError(f"records is {shown(records)}{held}; {remedy}")
    return found


def _is_torn(line: bytes) -> bool:
    """Return whether a line with invalid JSON is the beginning of a record, as left by a killed process.

    A file system may have filled its end with NUL characters.
    """
    text = line.rstrip(b"\0 \r")
    if not text:
        return True
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        breaks_off = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        return text.startswith(b"{") and (breaks_off or not text.endswith(b"}"))
    except UnicodeDecodeError:
        return text.startswith(b"{") and not text.endswith(b"}")
    return True


def recorded_files(folder: Path) -> dict[str, RunRecord]:
    """Return a map from the name of each file that this folder's records name to its record."""
    try:
        records, _ = read_records(folder)
    except (FileNotFoundError, ConfigError):  # the file can be read without its records
        return {}
    return {name: record for record in records for name in record.artifacts.values()}


def some_records(path: str | os.PathLike[str]) -> tuple[list[RunRecord], list[str]]:
    """Return the result of `read_records`, which must contain at least one record.

    Raises:
        ConfigError: no record exists yet, or `read_records` raised it.
    """
    records, complaints = read_records(path)
    if not records:
        raise ConfigError(f"{path} has no record yet; repeat the measurement that writes to it")
    return records, complaints


def computation(record: RunRecord) -> tuple[RunConfig, str | None]:
    """Return the computation and its device, which the timed and the profiled record of one cell share.

    `auto` and `cuda` may mean the same device.
    """
    device = record.environment.device if record.environment else None
    return replace(record.run_config.of_any_measurement, device="auto"), device


def median_s(records: Iterable[RunRecord], phase: str = "step") -> float | None:
    """Return the `Measurement.median_s` of all steps of these repeats of a cell; None if unknown."""
    return _median_s((record.measurement for record in records if record.measurement), phase)


def append_record(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Append one line and flush it to disk, so that a killed sweep loses no finished measurement.

    Raises:
        OSError: the file cannot be written; the error names it, and the file is unchanged.
    """
    file = records_path(path)
    with file.open("ab+", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        torn = b"\n" if before and not _ends_with_newline(stream) else b""  # start a new line after a truncated one
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


RAN = Table("ran", Ran, "description of what ran")
