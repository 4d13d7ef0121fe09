"""Columns of a record in the frame: its configuration, its environment, and the results of the whole cell."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypedDict

from cs_systems.config import LEAVES, ModelConfig
from cs_systems.core.fields import Declared, Subject
from cs_systems.core.tables import Column
from cs_systems.formulas.memory.tables import MEMORY
from cs_systems.formulas.peaks import CEILING
from cs_systems.record import NO_TIMING, RAN, RunRecord
from cs_systems.report import collectives, origins
from cs_systems.report.series import FLAG, INTEGER, REAL, TEXT, CellColumn, cell_columns, kind_of

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
}  # path of a field → path of the field that gives its value when it is None
FIELD_COLUMNS = _ordered()
_OF_FIELDS = {
    name: CellColumn(each.field.heading, meaning=each.field.meaning, kind=kind_of(each.kind))
    for name, each in FIELD_COLUMNS.items()
}
# Fields that describe a step, not its measurement; workloads from outside the package may ignore them.
_STEP_FIELDS = {
    name: _OF_FIELDS[name].kind
    for name, each in FIELD_COLUMNS.items()
    if Subject.OWN in each.subjects and not each.always
}


class Identity(TypedDict):
    """First columns of a record."""

    record: int  # its position among the given records
    key: str
    repeat: int


class CellResults(TypedDict):
    """Columns of a record after its fields: its environment, and the results of the whole cell."""

    status: Annotated[str, Column(meaning="ok, oom, unavailable, timeout, killed or error")]
    reason: Annotated[str | None, Column(meaning="why there is no number")]
    warnings: Annotated[str | None, Column(meaning="caveats of the cell")]
    device_name: Annotated[str | None, Column("device")]
    torch: str | None
    code_version: Annotated[str | None, Column("code")]
    date: str | None
    command: str | None
    host: str | None
    attention_version: str | None
    levers: Annotated[str | None, Column(meaning="levers of a process of advise, applied to a script")]
    ran_optimizer: Annotated[str | None, Column("optimizer")]
    executed_d_head: Annotated[int | None, Column("padded d_head")]
    block_q: int | None
    block_k: int | None
    resident: bool | None
    tokens: int | None
    held: bool | None
    setup_s: float | None
    compile_s: float | None
    before_backward_bytes: Annotated[
        int | None,
        CellColumn(
            "before bwd",
            "before bwd: memory of a call before backward: inputs, output, its gradient, and what forward keeps",
            command="attention",
        ),
    ]
    peak_allocated_bytes: Annotated[
        int | None, CellColumn("peak", meaning="peak of the allocated memory", command="memory")
    ]
    peak_reserved_bytes: Annotated[
        int | None, CellColumn("reserved", meaning="peak of the memory reserved by the allocator", command="memory")
    ]
    predicted_peak_bytes: Annotated[int | None, Column("predicted", meaning="predicted peak of the allocated memory")]
    ceiling_flops_per_s: Annotated[float | None, Column("ceiling")]
    ceiling_source: str | None


# Columns of a record, equal in each of its rows.
CELL_COLUMNS = {
    **cell_columns(Identity),
    **_OF_FIELDS,
    **cell_columns(CellResults, collectives.CellColumns),
}


class Cell:
    """Columns of one record; fields that its workload does not use are absent or null.

    is_foreign: whether its workload may ignore fields; then, `reported` are the fields that the workload reports,
    `uses` the columns of those that it used, None if it did not run, and `ceiling_precision` is the ceiling's.
    """

    def __init__(self, index: int, record: RunRecord) -> None:
        self.identity: Identity = {"record": index, "key": record.key, "repeat": record.repeat}
        self.fields = _configured(record.config)
        self.results = _results(record)
        self.collective = collectives.cell(record)
        self.is_foreign = Subject.of(record.config["workload"]) in (Subject.OWN, Subject.LOOP)
        if self.is_foreign:  # the workload's own report takes precedence over the configuration
            ran = RAN.first_or_empty(record.results)
            fitting = {name: _FITTING[kind] for name, kind in _STEP_FIELDS.items()}
            self.reported = {n: v for n, v in ran.items() if n in fitting and isinstance(v, fitting[n])}
            self.fields |= self.reported
            uses = ran.get("uses")
            self.uses = None if uses is None else _columns(uses)
            self.ceiling_precision = CEILING.first_or_empty(record.results).get("precision")

    def row(self) -> dict[str, Any]:
        """Return the CELL_COLUMNS of the record."""
        return {**self.identity, **self.fields, **self.results, **(self.collective or {})}


def _results(record: RunRecord) -> CellResults:
    results, environment, measurement, origin = record.results, record.environment, record.measurement, record.origin
    ran, memory, ceiling = RAN.first_or_empty(results), MEMORY.first_or_empty(results), CEILING.first_or_empty(results)
    allocated = measurement.peak_allocated_bytes if measurement else None
    reserved = measurement.peak_reserved_bytes if measurement else None
    return {
        "status": record.status,
        "reason": record.reason or _left_out(record),
        "warnings": "; ".join(dict.fromkeys(w.code for w in record.warnings)) or None,
        "device_name": environment.device_name if environment else None,
        "torch": environment.torch if environment else None,
        "code_version": environment.code_version if environment else None,
        "date": origins.date(origin) if origin else None,
        "command": origin.command if origin else None,
        "host": origin.host if origin else None,
        "attention_version": ran.get("attention_version"),
        "levers": ran.get("levers"),
        "ran_optimizer": ran.get("optimizer"),
        "executed_d_head": ran.get("executed_d_head"),
        "block_q": ran.get("block_q"),
        "block_k": ran.get("block_k"),
        "resident": ran.get("resident"),
        "tokens": ran.get("tokens"),
        "held": all(s.held_s is not None for s in measurement.timed) if measurement else None,
        "setup_s": measurement.setup_s if measurement else None,
        "compile_s": _total(s.compile_s for s in measurement.samples) if measurement else None,
        "before_backward_bytes": ran.get("before_backward_bytes"),
        "peak_allocated_bytes": memory.get("peak_allocated_bytes") if allocated is None else allocated,
        "peak_reserved_bytes": memory.get("peak_reserved_bytes") if reserved is None else reserved,
        "predicted_peak_bytes": memory.get("predicted_peak_bytes"),
        "ceiling_flops_per_s": ceiling.get("peak_flops_per_s"),
        "ceiling_source": ceiling.get("source"),
    }


def _left_out(record: RunRecord) -> str | None:
    """Return why a measured record has no times, and what to do; None if it has."""
    return next((f"{w.message}; {w.remedy}" for w in record.warnings if w.code in NO_TIMING), None)


def clear_unused_fields(cells: Sequence[Cell]) -> None:
    """Set to null the fields that a workload from outside the package is not known to use.

    A field is known to be used if the workload reports it, or if it applied or was read. For a cell that did not run,
    the fields of the workload's other cells count.
    """
    foreign = [cell for cell in cells if cell.is_foreign]
    used: dict[str, frozenset[str]] = {}
    for cell in foreign:
        if cell.uses is not None:
            used[cell.fields["workload"]] = used.get(cell.fields["workload"], frozenset()) | cell.uses
    for cell in foreign:
        uses = used.get(cell.fields["workload"], frozenset()) if cell.uses is None else cell.uses
        cell.fields |= dict.fromkeys(_STEP_FIELDS.keys() - cell.reported.keys() - uses)
        if cell.fields["precision"] != cell.ceiling_precision:
            cell.results["ceiling_flops_per_s"] = cell.results["ceiling_source"] = None


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
