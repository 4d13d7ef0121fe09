"""Columns of a record in the frame: its configuration, its environment, and the results of the whole cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cs_systems.config import LEAVES, ModelConfig
from cs_systems.core.fields import Declared, Subject
from cs_systems.core.tables import first_row
from cs_systems.record import NO_TIMING, RunRecord
from cs_systems.report import collectives, origins
from cs_systems.report.series import FLAG, INTEGER, REAL, TEXT

_KINDS = {int: INTEGER, float: REAL, bool: FLAG}
_FITTING: dict[str, type | tuple[type, ...]] = {TEXT: str, INTEGER: int, REAL: (int, float), FLAG: bool}
SIZE = "size"  # name of the column for the model's name, with the fields that differ from the preset


def _ordered() -> dict[str, Declared]:
    """Return the fields that have a column, by column name; fields that mirror another one stand next to it."""
    found: dict[str, list[Declared]] = {}
    for path, each in LEAVES.items():
        if each.field.column or each.field.short:
            found.setdefault(LIKE.get(path, path), []).append(each)
    return {SIZE if each.path == "model.name" else each.name: each for of_one in found.values() for each in of_one}


LIKE = {
    path: ".".join([*path.split(".")[:-1], each.field.like]) for path, each in LEAVES.items() if each.field.like
}  # path of a field → path of the field whose value it takes when it is None
FIELD_COLUMNS = _ordered()
_FIELD_KINDS = {name: _KINDS.get(each.kind, TEXT) for name, each in FIELD_COLUMNS.items()}
# Fields that describe a step, not its measurement; workloads from outside the package may ignore them.
_STEP_FIELDS = {
    name: _FIELD_KINDS[name] for name, each in FIELD_COLUMNS.items() if Subject.OWN in each.subjects and not each.always
}
_RAN = ("attention_version", "tokens", "executed_d_head", "block_q", "block_k", "resident", "before_backward_bytes")
# Columns of a record, equal in each of its rows; `record` is its position among the given records.
CELL_COLUMNS: dict[str, str] = {
    "record": INTEGER,
    "key": TEXT,
    "repeat": INTEGER,
    **_FIELD_KINDS,
    "status": TEXT,
    "reason": TEXT,
    "warnings": TEXT,
    "device_name": TEXT,
    "torch": TEXT,
    "code_version": TEXT,
    "date": TEXT,
    "command": TEXT,
    "host": TEXT,
    "attention_version": TEXT,
    "ran_optimizer": TEXT,
    "executed_d_head": INTEGER,
    "block_q": INTEGER,
    "block_k": INTEGER,
    "resident": FLAG,
    "tokens": INTEGER,
    "held": FLAG,
    "setup_s": REAL,
    "compile_s": REAL,
    "before_backward_bytes": INTEGER,
    "peak_allocated_bytes": INTEGER,
    "peak_reserved_bytes": INTEGER,
    "predicted_peak_bytes": INTEGER,
    "ceiling_flops_per_s": REAL,
    "ceiling_source": TEXT,
    **collectives.CELL_COLUMNS,
}


def cell_row(index: int, record: RunRecord) -> dict[str, Any]:
    """Return the CELL_COLUMNS of one record; fields that its workload does not use stay null."""
    config, results, environment, measurement = record.config, record.results, record.environment, record.measurement
    origin = record.origin
    ran, memory, ceiling = (first_row(results, table) for table in ("ran", "memory", "ceiling"))
    cell: dict[str, Any] = {
        "record": index,
        "key": record.key,
        "repeat": record.repeat,
        **_configured(config),
        "status": record.status,
        "reason": record.reason or _left_out(record),
        "warnings": "; ".join(dict.fromkeys(w.code for w in record.warnings)) or None,
        "device_name": environment and environment.device_name,
        "torch": environment and environment.torch,
        "code_version": environment and environment.code_version,
        "date": origin and origins.date(origin),
        "command": origin and origin.command,
        "host": origin and origin.host,
        **{name: ran.get(name) for name in _RAN},
        "ran_optimizer": ran.get("optimizer"),
        "predicted_peak_bytes": memory.get("predicted_peak_bytes"),
        "peak_allocated_bytes": memory.get("peak_allocated_bytes"),
        "peak_reserved_bytes": memory.get("peak_reserved_bytes"),
        "ceiling_flops_per_s": ceiling.get("peak_flops_per_s"),
        "ceiling_source": ceiling.get("source"),
        "ceiling_precision": ceiling.get("precision"),
        **collectives.cell(record),
    }
    if Subject.of(config["workload"]) in _UNKNOWN:  # the workload's own report takes precedence over the configuration
        fitting = {name: _FITTING[kind] for name, kind in _STEP_FIELDS.items()}
        cell["reported"] = {n: v for n, v in ran.items() if n in fitting and isinstance(v, fitting[n])}
        uses = ran.get("uses")  # None for a cell that did not run
        cell |= {
            **cell["reported"],
            "uses": None if uses is None else _columns(uses),
        }
    if measurement:
        cell["held"] = all(s.held_s is not None for s in measurement.timed)
        cell["setup_s"] = measurement.setup_s
        cell["compile_s"] = _total(s.compile_s for s in measurement.samples)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            cell[name] = _first_known(getattr(measurement, name), cell[name])
    return cell


def _left_out(record: RunRecord) -> str | None:
    """Return why a measured record has no times, and what to do; None if it has."""
    return next((f"{w.message}; {w.remedy}" for w in record.warnings if w.code in NO_TIMING), None)


def clear_unused_fields(cells: Sequence[dict[str, Any]]) -> None:
    """Set to null the fields that a workload from outside the package is not known to use.

    A field is known to be used if the workload reports it, or if it applied or was read. For a cell that did not run,
    the fields of the workload's other cells count.
    """
    foreign = [cell for cell in cells if Subject.of(cell["workload"]) in _UNKNOWN]
    used: dict[str, frozenset[str]] = {}
    for cell in foreign:
        if cell["uses"] is not None:
            used[cell["workload"]] = used.get(cell["workload"], frozenset()) | cell["uses"]
    for cell in foreign:
        uses = used.get(cell["workload"], frozenset()) if cell["uses"] is None else cell["uses"]
        cell |= dict.fromkeys(_STEP_FIELDS.keys() - cell["reported"].keys() - uses)
        if cell["precision"] != cell["ceiling_precision"]:
            cell["ceiling_flops_per_s"] = cell["ceiling_source"] = None


def _columns(uses: str) -> frozenset[str]:
    """Return the columns of the fields that a workload used; its record lists them separated by spaces."""
    names = set(uses.split())
    if names & {LEAVES[path].name for path in _MODEL}:
        names.add(SIZE)
    for path, other in LIKE.items():
        pair = {LEAVES[path].name, LEAVES[other].name}
        names |= pair if path == "seq_len" and names & pair else set()
    if {"d_model", "num_heads"} <= names:
        names.add("d_head")
    return frozenset(names)


_UNKNOWN = (Subject.OWN, Subject.LOOP)
_MODEL = tuple(path for path, each in LEAVES.items() if each.field.short)  # fields that are part of the name of a size


def _configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the fields that apply to a configuration's subject."""
    subject, cell = Subject.of(config["workload"]), dict[str, Any]()
    for name, each in FIELD_COLUMNS.items():
        if subject not in each.subjects:
            continue
        value = each.of(config)
        if value is None and each.path in LIKE:
            value = LEAVES[LIKE[each.path]].of(config)
        owner = LEAVES.get(each.field.part_of)
        is_moot = owner is not None and owner.of(config) == owner.default
        cell[name] = None if is_moot else each.text(value)
    model = config["model"]
    if subject in LEAVES["model.name"].subjects:
        cell[SIZE] = _label(tuple(model.items()))
        if cell.get("d_head") is None:
            cell["d_head"] = model["d_model"] // model["num_heads"]
    if "strategy" in cell:
        cell["strategy"] = ":".join([cell["strategy"], *config.get("strategy_args", ())])
    return cell


@lru_cache(maxsize=1024)
def _label(model: tuple[tuple[str, Any], ...]) -> str:
    return ModelConfig(**dict(model)).label


def _total(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _first_known(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)
