"""Columns of a record in the frame: its configuration, its environment, and the results of the whole cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cs_systems.config import CONFIGURED, ModelConfig
from cs_systems.core.rows import first_row
from cs_systems.record import NO_TIMING, RunRecord
from cs_systems.report import collectives, origins
from cs_systems.report.series import FLAG, INTEGER, REAL, TEXT

_FITTING: dict[str, type | tuple[type, ...]] = {TEXT: str, INTEGER: int, REAL: (int, float), FLAG: bool}
_RUN_FIELDS = {
    "attention": TEXT,
    "precision": TEXT,
    "mode": TEXT,
    "compile": TEXT,
    "compile_scope": TEXT,
    "graph": TEXT,
    "parts": TEXT,
    "checkpoint": TEXT,
    "keep_graph": FLAG,
    "device": TEXT,
    "warmup": INTEGER,
    "warmup_s": REAL,
    "steps": INTEGER,
    "rounds": INTEGER,
    "l2": TEXT,
    "memory_limit_bytes": INTEGER,
    "allocator": TEXT,
    "seed": INTEGER,
    "strategy": TEXT,
    "bucket_size_mb": REAL,
    "tp_degree": INTEGER,
    "world_size": INTEGER,
    "profiler": TEXT,
}
_MODEL_FIELDS = {
    "size": TEXT,
    "d_model": INTEGER,
    "d_ff": INTEGER,
    "num_layers": INTEGER,
    "num_heads": INTEGER,
    "vocab_size": INTEGER,
    "rope_theta": REAL,
    "context_length": INTEGER,
    "seq_len": INTEGER,
    "batch_size": INTEGER,
    "optimizer": TEXT,
}
_SHAPE_FIELDS = {
    "batch": INTEGER,
    "heads": INTEGER,
    "heads_kv": INTEGER,
    "seq": INTEGER,
    "seq_k": INTEGER,
    "d_head": INTEGER,
    "causal": FLAG,
    "align": TEXT,
    "window": INTEGER,
}
# Fields of a configuration that describe a step, not its measurement; foreign workloads may ignore them.
_STEP_FIELDS = {
    **_MODEL_FIELDS,
    **_SHAPE_FIELDS,
    **{
        name: _RUN_FIELDS[name]
        for name in (
            *("attention", "precision", "mode", "compile", "compile_scope", "graph", "parts"),
            *("checkpoint", "keep_graph", "l2"),
        )
    },
}
# Fields that no loop of a user's own reads; the rest of its step's fields are cleared as for any foreign workload.
_NOT_OF_LOOPS = (
    "attention",
    "mode",
    "compile",
    "compile_scope",
    "graph",
    "parts",
    "checkpoint",
    "keep_graph",
    "l2",
    "allocator",
    "seed",
    "rounds",
    "warmup_s",
    "strategy",
)
_RAN = ("attention_version", "tokens", "executed_d_head", "block_q", "block_k", "resident")
# Columns of a record, equal in each of its rows; `record` is its position among the given records.
CELL_COLUMNS: dict[str, str] = {
    "record": INTEGER,
    "key": TEXT,
    "repeat": INTEGER,
    "workload": TEXT,
    "workload_args": TEXT,
    **_MODEL_FIELDS,
    **_SHAPE_FIELDS,
    **_RUN_FIELDS,
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
        "workload": config["workload"],
        "workload_args": " ".join(config.get("workload_args", ())) or None,
        **{name: config.get(name) for name in _RUN_FIELDS},
        "compile_scope": None if config.get("compile") == "none" else config.get("compile_scope", "model"),
        "graph": config.get("graph", "none"),
        "allocator": config.get("allocator", "default"),
        "parts": "+".join(config.get("parts", ())) or "none",
        "checkpoint": config.get("checkpoint", "none"),  # older records have none, as they have no strategy
        "strategy": ":".join([config.get("strategy", "single"), *config.get("strategy_args", ())]),
        "world_size": config.get("world_size", 1),
        **(_shape(config["shape"]) if config.get("shape") else {}),
        **(_model(config) if config["workload"] != "attention" else {}),
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
    if config["workload"] not in CONFIGURED:  # its own report takes precedence over the configuration
        fitting = {name: _FITTING[kind] for name, kind in _STEP_FIELDS.items()}
        cell["reported"] = {n: v for n, v in ran.items() if n in fitting and isinstance(v, fitting[n])}
        uses = ran.get("uses")  # absent in records before version 0.2
        cell |= {
            **cell["reported"],
            "takes_config": ran.get("takes_config", True),
            "uses": None if uses is None else _columns(uses),
        }
    if record.is_loop:
        cell |= {"takes_config": False, **dict.fromkeys(_NOT_OF_LOOPS)}
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
    """Set to null the fields that a workload outside CONFIGURED is not known to use.

    A field is known to be used if the workload reports it, or if it applied or was read. A cell that did not run uses
    what the workload's other cells use. Of older records that is not known: there, a field counts as used if the
    records differ in it and the workload takes a configuration.
    """
    foreign = [cell for cell in cells if cell["workload"] not in CONFIGURED]
    varied: dict[tuple[str, str], set[Any]] = {}
    for cell in foreign:
        for name in _STEP_FIELDS:
            varied.setdefault((cell["workload"], name), set()).add(cell.get(name))
    used: dict[str, frozenset[str]] = {}
    for cell in foreign:
        if cell["uses"] is not None:
            used[cell["workload"]] = used.get(cell["workload"], frozenset()) | cell["uses"]
    for cell in foreign:
        for name in _STEP_FIELDS.keys() - cell["reported"].keys():
            if (uses := used.get(cell["workload"]) if cell["uses"] is None else cell["uses"]) is not None:
                is_used = name in uses
            else:
                is_used = len(varied[cell["workload"], name]) > 1 and cell["takes_config"]
            if not is_used:
                cell[name] = None
        if cell["precision"] != cell["ceiling_precision"]:
            cell["ceiling_flops_per_s"] = cell["ceiling_source"] = None


def _columns(uses: str) -> frozenset[str]:
    """Return the columns of the fields that a workload used, which its record lists with spaces between them."""
    names = set(uses.split())
    if names & {"name", "d_model", "d_ff", "num_layers", "num_heads"}:
        names.add("size")
    if names & {"seq_len", "context_length"}:
        names |= {"seq_len", "context_length"}
    if {"d_model", "num_heads"} <= names:
        names.add("d_head")
    return frozenset(names)


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    model = config["model"]
    return {
        **model,
        "size": _label(tuple(model.items())),
        "seq_len": _first_known(config.get("seq_len"), model["context_length"]),
        "batch_size": config.get("batch_size"),
        "optimizer": config.get("optimizer"),
        "d_head": model["d_model"] // model["num_heads"],
    }


def _shape(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's shape with heads_kv and seq_k, also where the configuration leaves them to heads and seq."""
    return {
        **shape,
        "heads_kv": _first_known(shape.get("heads_kv"), shape["heads"]),
        "seq_k": _first_known(shape.get("seq_k"), shape["seq"]),
    }


@lru_cache(maxsize=1024)
def _label(model: tuple[tuple[str, Any], ...]) -> str:
    return ModelConfig(**dict(model)).label


def _total(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _first_known(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)
