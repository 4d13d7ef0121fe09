"""Execution of cells in this process, for the worker and for `run(config, in_process=True)`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from cs_systems.analysis.timing_caveats import timing_caveats
from cs_systems.config import FIELDS, MARKED_COMPILE_MODES, ConfigError, RunConfig
from cs_systems.core import caveats, plugins
from cs_systems.core.caveats import GRAPH_BREAKS
from cs_systems.core.experiments import EXPERIMENTS
from cs_systems.core.shapes import AttentionCall
from cs_systems.core.tables import Tables, first_row
from cs_systems.core.units import counted, human
from cs_systems.formulas import peaks
from cs_systems.formulas.cost import COST, AttentionAlgorithm, CostRow, PhaseCost, total
from cs_systems.formulas.energy import ENERGY, EnergyRow, joined
from cs_systems.formulas.memory.tables import MEMORY, MEMORY_FORECAST, MEMORY_UNPREDICTED, MemoryRow
from cs_systems.formulas.peaks import CEILING, CeilingRow
from cs_systems.instrument.annotate import torch_ranges
from cs_systems.instrument.module_costs import MeasuredCost, measured_cost
from cs_systems.instrument.probes import Probes, graph_break_rows, graph_breaks
from cs_systems.machine import device as devices
from cs_systems.machine import process_group
from cs_systems.machine.device import Device, DeviceUnavailable
from cs_systems.machine.energy import Meter
from cs_systems.machine.environment import environment
from cs_systems.measure.runtime.allowance import Allowance
from cs_systems.measure.runtime.channel import CellRecord, Experimenting, Message, Visit
from cs_systems.measure.runtime.experimenting import Step, run_all
from cs_systems.measure.runtime.own_errors import described, print_error
from cs_systems.measure.runtime.plain_rows import DESCRIPTION, check_phases, plain_row, plain_tables
from cs_systems.measure.runtime.process_state import ProcessState, seed_all
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.runtime.warming import TimedProgress, WarmupProgress
from cs_systems.measure.workloads import Cell, Unavailable, Workload, _foreign
from cs_systems.measure.workloads._batches import StepSize, differ, sizes_row
from cs_systems.measure.workloads._foreign_errors import ForeignErrors
from cs_systems.measure.workloads._module import ModuleStep
from cs_systems.measure.workloads._training import Training
from cs_systems.record import STEADY, Environment, Measurement, Ran, RunRecord, Sample, measured_by

Emit = Callable[[Message], object]
# A resident workload on a further visit is compiled and allocated already; one warm-up step restores caches and clocks.
REVISIT_WARMUP = 1
# share of the device memory that residents may fill by prediction; the rest is for allocations that no formula predicts
RESIDENT_SHARE = 0.8
# Ratio of prediction to memory above which a cell cannot fit. No record in profiles/ has less than 1/1.16 of its
# prediction.
CERTAIN = 1.2
_COUNTED_STEPS = 3  # attempts to get a step of the usual size for counting FLOPs


def build(cell: Cell, device: Device) -> Workload:
    """Build the workload of a cell. Raises Unavailable, ConfigError, or whatever the build raises."""
    make: Callable[[Cell, Device], Workload] = cell.workload
    if not cell.is_own:
        return make(cell, device)
    seed_all(cell.config.seed)
    return ForeignErrors(cell, device) if cell.profiler.compares else _foreign.build(cell, device)


def preflight(cell: Cell, device: Device) -> int | None:
    """Return the predicted peak bytes of a cell, or None if nothing predicts it.

    Raises Unavailable if it cannot run here, and ConfigError if its predictor returns no number of bytes.
    """
    predict = getattr(cell.workload, "preflight", None)
    predicted = predict(cell.config if cell.is_own else cell, device) if predict else None
    if predicted is None or (type(predicted) is int and 0 <= predicted < _MOST_BYTES):
        return predicted
    returned = f"preflight() of {cell.config.workload} returned {_shown(predicted)}"
    raise ConfigError(f"{returned}; return the bytes as an int of at least 0, or None")


class TooLarge(MemoryError):
    """Error for a cell that is not run, because its predicted peak exceeds the host's memory."""


def _refuse_too_large(predicted_bytes: int | None, device: Device) -> None:
    """Raise TooLarge for a cell that would fill the host's memory.

    A GPU refuses an allocation that is too large. A host allows it, and slows down until the kernel kills a process.
    """
    host_bytes = devices.host_memory_bytes()
    if device.is_cuda or predicted_bytes is None or host_bytes is None or predicted_bytes <= CERTAIN * host_bytes:
        return
    predicted, host = human(predicted_bytes, "bytes"), human(host_bytes, "bytes")
    raise TooLarge(
        f"predicted peak {predicted} exceeds the host's {host}, so the cell was not run; use a smaller batch, context "
        "or model"
    )


_MOST_BYTES = 1 << 200  # larger than any formula's result, smaller than the largest float


def _shown(value: Any) -> str:
    """Format a value for a message: short numbers and texts unchanged, anything else as its type."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < _MOST_BYTES):
        return f"{value!r:.60}"
    return f"an object of type {type(value).__name__}" if not isinstance(value, int) else "a number that is too large"


@dataclass
class _Cell:
    """State of one cell between its start and its record."""

    index: int
    resolved: Cell
    workload: Workload | None = None
    predicted_peak_bytes: int | None = None
    samples: list[Sample] = field(default_factory=list)
    setup_s: float = 0.0
    peaks: list[tuple[int | None, int | None]] = field(default_factory=list)
    graph_breaks: list[Any] = field(default_factory=list)  # as torch.compile recorded them
    sizes: list[StepSize] = field(default_factory=list)  # one per sample, if batches differ in size
    held_bytes: int = 0  # device memory in bytes, between its visits
    others_bytes: int = 0  # device memory that other cells hold during this visit
    energy: list[EnergyRow] = field(default_factory=list)  # one row per visit, if the device has an energy counter
    before: Environment | None = None
    state: ProcessState | None = None  # state of the process when the cell's last visit ended

    @property
    def config(self) -> RunConfig:
        return self.resolved.config


@torch_ranges()
def run_cells(
    configs: Sequence[RunConfig],
    *,
    repeat: int = 0,
    out: Path | None = None,
    emit: Emit,
    experiments_s: float = 0.0,
) -> bool:
    """Measure the cells, in rounds if there are several. Returns False if the process must be replaced.

    out: the path prefix of a profiler's files; a cell with a profiler comes alone. experiments_s: the time for
    experiments of all cells together, each after the last step of its cell.

    Each cell ends in one `CellRecord`. A failed cell does not affect the others, and each starts in the process state
    from before the first. If that state cannot be restored, the process must be replaced.
    """
    cells = [_Cell(i, Cell(c)) for i, c in enumerate(configs)]
    allowed = Allowance(experiments_s)
    _load_sources(cells, emit)
    seed_all()
    clean = ProcessState()
    resident = _all_fit(cells, emit)
    alive = list(cells)
    for round in range(max(c.rounds for c in configs)):
        for cell in list(alive):
            if round >= cell.config.rounds:
                continue
            emit(Visit(cell.index, round))
            if cell.state is not None:
                cell.state.restore()
            reply, usable = _turn(cell, round, repeat, out, resident, len(cells) > 1, emit, allowed)
            if usable and (reply is not None or not resident):
                _drop(cell)  # deleted before the check, which thereby includes the effects of the deletion
            if reply is None and len(cells) > 1:
                cell.state = ProcessState()
            disturbed = _disturbances(cell, clean) if usable and (reply or len(cells) > 1) else []
            if disturbed and reply is None:
                reply = CellRecord(cell.index, dataclasses.asdict(_disturber(cell, repeat, disturbed)))
            if reply is not None:
                alive.remove(cell)
                emit(reply)
            if disturbed:
                with suppress(OSError, ValueError, AttributeError):  # standard error may be among the changes
                    print(f"replacing the worker: a cell left {', '.join(disturbed)}", file=sys.stderr)  # noqa: T201
            if disturbed or not usable:
                return False  # without a working CUDA context, not even memory can be freed
    return True


def _turn(
    cell: _Cell,
    round: int,
    repeat: int,
    out: Path | None,
    resident: bool,
    shared: bool,
    emit: Emit,
    allowed: Allowance,
) -> tuple[CellRecord | None, bool]:
    """Visit a cell.

    Returns its record if it failed or this was its last round, else None; and whether CUDA is still usable.
    """
    try:
        _visit(cell, round, out, emit, shared=resident and shared)
        if round + 1 < cell.config.rounds:
            return None, True
        done, usable = _with_experiments(_success(cell, repeat, resident and shared), cell, allowed, emit)
        return CellRecord(cell.index, dataclasses.asdict(done)), usable
    except Exception as raised:  # error boundary of a cell: any exception becomes its record
        error = _readable(raised)
        record = dataclasses.asdict(_failure(cell, repeat, error))
        return CellRecord(cell.index, record, process_group.is_of_peers(error)), not devices.is_poisoned(error)


def _load_sources(cells: list[_Cell], emit: Emit) -> None:
    """Import code from outside the package early, so that its changes to the process apply to all cells that use it."""
    for cell in cells:
        if not cell.config.sources:
            continue
        emit(Visit(cell.index))  # identifies the cell if the import kills or hangs the process
        for role, names in cell.config.own_code.items():
            for name in names:
                with suppress(Exception):  # raised again and recorded when the cell is built
                    plugins.get(FIELDS[role].field.plugin, name)


def _disturbances(cell: _Cell, clean: ProcessState) -> list[str]:
    """Undo what the cell changed in the process; return what cannot be undone."""
    left = [f"{name} changed" for name in clean.restore()]
    return left + (clean.left_running() if cell.config.sources else [])


def _disturber(cell: _Cell, repeat: int, disturbed: list[str]) -> RunRecord:
    error = ConfigError(
        f"the cell left {', '.join(disturbed)}, which would disturb the cells that are interleaved with it; "
        "measure it without interleave"
    )
    return _failure(cell, repeat, error)


def _all_fit(cells: list[_Cell], emit: Emit) -> bool:
    """Return whether all workloads may stay in memory between their visits, by prediction."""
    if len(cells) == 1:
        return True
    total = 0
    try:
        for cell in cells:
            emit(Visit(cell.index))  # identifies the cell if the prediction kills or hangs the process
            device = devices.resolve(cell.config.device)
            limit = cell.config.memory_limit_bytes or device.total_memory_bytes() or devices.host_memory_bytes()
            try:
                predicted = preflight(cell.resolved, device)
            except Unavailable:  # it needs no memory, because it is not run
                continue
            if predicted is None or limit is None:
                return False
            total += predicted
            if total > RESIDENT_SHARE * limit:
                return False
    except Exception:  # the visit to such a cell records the reason
        return False
    return True


def _visit(cell: _Cell, round: int, out: Path | None, emit: Emit, *, shared: bool) -> None:
    """Visit a cell once: build its workload if needed, and measure the steps of one round.

    shared: other cells' workloads stay in memory meanwhile. Their memory is excluded from this cell's peak; the
    allocator's cache cannot be attributed to a cell. cuBLAS's workspaces count for the cell that made cuBLAS allocate
    them.
    """
    config = cell.config
    device = devices.resolve(config.device)
    cell.others_bytes = device.allocated_bytes() - cell.held_bytes if shared else 0
    device.reset_peaks()  # reset the previous cell's peak, in case building this one fails
    devices.set_float32_matmul(config.precision)
    device.limit_memory(config.memory_limit_bytes)
    device.set_allocator(config.allocator)
    warmup, warmup_s = config.warmup, config.warmup_s
    meter = Meter(device, alone=not config.is_distributed)  # before the device has any work
    if cell.workload is None:
        started = time.perf_counter()
        cell.predicted_peak_bytes = preflight(cell.resolved, device)
        if not cell.resolved.is_own:
            _refuse_too_large(cell.predicted_peak_bytes, device)
        cell.workload = build(cell.resolved, device)
        device.synchronize()
        cell.setup_s += time.perf_counter() - started
    else:
        warmup, warmup_s = min(warmup, REVISIT_WARMUP), 0.0
    if config.is_profiled and measured_by(config.profiler) == "time":
        warmup = max(warmup, STEADY)  # steps without the profiler, from which its overhead is computed
    if cell.before is None:
        cell.before = environment(device)
    steps = config.steps // config.rounds + (round < config.steps % config.rounds)
    probes = Probes(device)
    device.reset_peaks()
    region, before = _metered(meter, _region(cell, device, out)), len(cell.samples)
    with _compiling(config):
        known = len(graph_breaks())
        samples = partial(
            measure,
            device=device,
            warmup=warmup,
            warmup_s=warmup_s,
            steps=steps,
            steps_s=config.steps_s / config.rounds,
            round=round,
            probes=probes,
        )
        if not config.is_distributed:  # ranks report no progress, because their supervisor would have to merge it
            samples = partial(samples, on_warmup=WarmupProgress(emit, cell.index, warmup, warmup_s))
            if not config.is_profiled:  # a pause would be seen between the recorded steps
                samples = partial(samples, on_timed=TimedProgress(emit, cell.index, steps))
        try:
            cell.samples += samples(cell.workload, region=region)
        except _foreign.FactoryFound as found:
            cell.workload = _foreign.from_result(found.result, cell.resolved, device, set())
            cell.samples += samples(cell.workload, region=_metered(meter, _region(cell, device, out)))
        if not config.is_profiled:
            cell.energy += meter.end(sum(not sample.warmup for sample in cell.samples[before:]))
        if out is not None:
            cell.resolved.profiler.again(out, device, cell.workload)
        cell.sizes += _sizes(cell.workload)
        cell.graph_breaks += graph_breaks()[known:]
    cell.peaks.append((_own_peak_bytes(cell, device), None if shared else device.peak_reserved_bytes()))
    if shared:
        cell.held_bytes = device.allocated_bytes() - cell.others_bytes


def _sizes(workload: Workload | None) -> list[StepSize]:
    """Return the step sizes of a user's own model since the last call, if its batches differ in size."""
    inner = getattr(workload, "inner", None)
    return inner.take_sizes() if isinstance(inner, ModuleStep) else []


def _own_peak_bytes(cell: _Cell, device: Device) -> int | None:
    """Return the cell's own peak since the peaks were reset in its last visit."""
    peak_bytes = device.peak_allocated_bytes()
    return None if peak_bytes is None else peak_bytes - cell.others_bytes


def _region(cell: _Cell, device: Device, out: Path | None) -> Callable[[], AbstractContextManager[object]]:
    """Return the factory of the profiler's context for the timed steps.

    Hooks are installed on an uncompiled model, and on a user's own compiled model, as its code then names its modules.
    """
    if not cell.config.is_profiled:
        return nullcontext
    assert out is not None
    model = getattr(cell.workload, "model" if cell.config.compile == "none" else "compiled_model", None)
    return partial(cell.resolved.profiler.region, out, device, model)


def _metered(meter: Meter, region: Callable[[], AbstractContextManager[object]]) -> Callable[[], Any]:
    """Return the factory of the context for the timed steps, which begins a window of the energy counter."""

    def begin() -> AbstractContextManager[object]:
        meter.begin()
        return region()

    return begin


def _compiling(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context for the steps, the first of which compiles.

    Under a profiler, compiled code is marked by layer.
    """
    if not config.is_profiled or config.compile not in MARKED_COMPILE_MODES:
        return nullcontext()
    from cs_systems.instrument.compiled_ranges import marked_code  # loads the compiler

    return marked_code()


def _drop(cell: _Cell) -> None:
    cell.workload = None
    devices.resolve_or_cpu(cell.config.device).release_memory()


def _success(cell: _Cell, repeat: int, resident: bool) -> RunRecord:
    assert cell.workload is not None
    assert cell.before is not None
    device = devices.resolve(cell.config.device)
    peaks = [max((p for p in column if p is not None), default=None) for column in zip(*cell.peaks, strict=True)]
    measurement = Measurement(device.clock, tuple(cell.samples), cell.setup_s, *peaks)
    check_phases(measurement.phase_names())
    after = environment(device)
    description = plain_row(DESCRIPTION, cell.workload.describe(), cell.resolved.is_own)
    if isinstance(cell.workload, _foreign.ForeignWorkload):
        description |= {"uses": cell.workload.uses}
    sizes = [size for size, sample in zip(cell.sizes, cell.samples, strict=False) if not sample.warmup]
    if sizes:
        description |= sizes_row(sizes)
    breaks = graph_break_rows(cell.graph_breaks)
    warnings = timing_caveats(
        measurement,
        cell.before,
        after,
        profiler=cell.config.profiler,
        loss=description.get("loss"),
        phase=getattr(cell.workload, "judged_phase", None),
        graph_breaks=breaks,
    )
    if differ(sizes):
        what = "rates are for all of them, and FLOPs were not counted"
        warnings = (*warnings, caveats.mixed_batches(what))
    if cell.graph_breaks or (cell.config.compile != "none" and any(s.compiles for s in cell.samples)):
        description |= {"graph_breaks": len(cell.graph_breaks)}
    measured = None if differ(sizes) else _measured_cost(cell.workload, sizes[:1])
    if measured and measured.unknown_masks:
        calls = counted(measured.unknown_masks, "call")
        warnings = (*warnings, caveats.full_attention(f"the masks of {calls} cannot be read"))
    rounds = {"rounds": cell.config.rounds, "resident": resident if cell.config.rounds > 1 else None}
    broken = GRAPH_BREAKS.filled(breaks) if breaks else {}
    ran = cast(Ran, description | rounds | _provenance(cell.config))
    results = {"ran": [ran], **broken, **_energy_table(cell), **_tables(cell, device, measured)}
    return RunRecord.of(cell.config, repeat, after, "ok", measurement=measurement, warnings=warnings, results=results)


def _with_experiments(record: RunRecord, cell: _Cell, allowed: Allowance, emit: Emit) -> tuple[RunRecord, bool]:
    """Return the record with the experiments that its numbers call for, and whether CUDA is still usable.

    A workload is deleted after its record, and a live model is restored completely.
    """
    limit_s, workload = allowed.of([cell.config]), cell.workload
    if not limit_s or record.clean is None or workload is None:
        return record, True
    inner = getattr(workload, "inner", workload)
    compiles = any(sample.compiles for sample in cell.samples)
    step = Step(
        devices.resolve(cell.config.device),
        record.clean,
        inner.step,
        inner.prepare,
        is_eager=cell.config.compile == "none" and cell.config.graph == "none" and not compiles,
        precision=_precision(record),
    )
    rows, usable = run_all(step, limit_s, lambda count, cost_s: emit(Experimenting(cell.index, count, cost_s)))
    record = replace(record, results={**record.results, **EXPERIMENTS.filled(rows)}) if rows else record
    allowed.spend(record)
    return record, usable


def _precision(record: RunRecord) -> str | None:
    """Return the precision of the step; None if code from outside the package does not state it."""
    ran = first_row(record.results, "ran").get("precision")
    return ran or (None if plugins.is_foreign(record.config["workload"]) else str(record.config["precision"]))


def _provenance(config: RunConfig) -> dict[str, str]:
    """Return the origin of foreign code, which is needed to repeat a measurement."""
    row: dict[str, str] = {}
    for role, names in config.own_code.items():
        sources = [source for name in names if (source := plugins.provenance(name))]
        if sources:
            row |= {f"{role}_{what}": " ".join(source[what] for source in sources) for what in ("path", "sha256")}
    return row


def _tables(cell: _Cell, device: Device, measured: MeasuredCost | None) -> Tables:
    """Return the tables of the record other than its samples: memory, cost, and the workload's own tables."""
    made: Any = getattr(cell.workload, "tables", dict)()
    is_ours = isinstance(getattr(cell.workload, "inner", cell.workload), (Training, ForeignErrors))
    own = made if is_ours or not cell.resolved.is_own else plain_tables(made)
    tables = {**own, **_forecast(cell, device), **_cost_tables(cell, device, measured.phases if measured else None)}
    return {**tables, "modules": measured.modules} if measured else tables


def _forecast(cell: _Cell, device: Device) -> Tables:
    """Return the prediction for a user's own model by fake tensors, if the cell measures memory."""
    if not cell.resolved.profiler.forecasts or not isinstance(cell.workload, _foreign.ForeignWorkload):
        return {}
    from cs_systems.measure.runtime.forecast import forecast

    row = forecast(replace(cell.config, device="cuda" if device.is_cuda else "cpu"))
    cell.predicted_peak_bytes = row["peak_bytes"]
    if row["reason"] is not None:
        return MEMORY_UNPREDICTED.filled([{"reason": row["reason"]}])
    return MEMORY_FORECAST.filled(
        [
            {
                "step": phase["step"],
                "phase": phase["phase"],
                "component": name,
                "bytes": phase["components"].get(name, 0),
                "peak_bytes": phase["peak_components"].get(name, 0),
            }
            for phase in row["phases"]
            for name in dict.fromkeys([*phase["components"], *phase["peak_components"]])
        ]
    )


def _measured_cost(workload: Workload | None, sizes: Sequence[StepSize]) -> MeasuredCost | None:
    """Run one more step of a user's own model and count its FLOPs; None if that is not possible.

    sizes: the sizes of the timed steps, if batches differ; a step of another size, such as the last of an epoch, is not
    counted.
    """
    inner = getattr(workload, "inner", None)
    if not isinstance(inner, ModuleStep) or inner.config.is_distributed:
        return None
    try:
        for _ in range(_COUNTED_STEPS):
            inner.prepare()
            cost = measured_cost(inner.model, inner.step(), algorithm=_algorithm)
            if inner.take_sizes() == [*sizes]:
                return cost
        print("no FLOPs were counted: the batches after the timed steps have other sizes", file=sys.stderr)  # noqa: T201
    except Exception as error:  # the measurement itself succeeded
        print(f"no FLOPs were counted: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    return None


def _algorithm(backend: str, call: AttentionCall) -> AttentionAlgorithm:
    algorithm: AttentionAlgorithm = plugins.get("attention", backend).algorithm(call)
    return algorithm


def _cost_tables(cell: _Cell, device: Device, measured: Mapping[str, PhaseCost] | None = None) -> Tables:
    assert cell.workload is not None
    memory: MemoryRow = {
        "predicted_peak_bytes": cell.predicted_peak_bytes,
        "peak_allocated_bytes": max((p for p, _ in cell.peaks if p is not None), default=None),
        "memory_limit_bytes": cell.config.memory_limit_bytes,
    }
    tables = MEMORY.filled([memory])
    if costs := cell.workload.cost() or measured:
        tables |= COST.filled([_cost_row(phase, c) for phase, c in {**costs, "step": total(costs.values())}.items()])
    computes_in = getattr(getattr(cell.workload, "inner", cell.workload), "computes_in", cell.config.computes_in)
    if peak := peaks.peak_flops(device.name, computes_in):
        bandwidth = peaks.peak_bandwidth(device.name)
        ceiling: CeilingRow = {
            "precision": str(computes_in),
            "peak_flops_per_s": peak.per_s,
            "peak_bytes_per_s": bandwidth.per_s if bandwidth else None,
            "source": peak.source,
        }
        tables |= CEILING.filled([ceiling])
    return tables


def _cost_row(phase: str, cost: PhaseCost) -> CostRow:
    return {
        "phase": phase,
        "model_flops": cost.model_flops,
        "hardware_flops": cost.hardware_flops,
        "bytes": cost.bytes,
        "score_flops": cost.score_flops,
        "score_bytes": cost.score_bytes,
    }


def _energy_table(cell: _Cell) -> Tables:
    return ENERGY.filled(joined(cell.energy, at_once=False)) if cell.energy else {}


def _failure(cell: _Cell, repeat: int, error: Exception) -> RunRecord:
    status, reason = _classify(error, cell.config)
    if status == "error":
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed
            print_error(error)
    lost = status == "error" and devices.is_poisoned(error)  # the device may not respond after that
    device = devices.resolve_or_cpu("cpu" if lost else cell.config.device)
    surroundings = cell.before or environment(device)
    memory: MemoryRow = {
        "predicted_peak_bytes": cell.predicted_peak_bytes,
        "peak_allocated_bytes": _own_peak_bytes(cell, device),
        "memory_limit_bytes": cell.config.memory_limit_bytes,
        "failed_allocation_bytes": devices.failed_allocation_bytes(error),
    }
    results: Tables = {"memory": [memory]} if status == "oom" else {}
    predicted = isinstance(error, TooLarge)
    return RunRecord.of(cell.config, repeat, surroundings, status, reason=reason, results=results, predicted=predicted)


def _classify(error: Exception, config: RunConfig) -> tuple[str, str]:
    """Return the record's status and reason for an exception of a cell."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, (Unavailable, DeviceUnavailable)):
        return "unavailable", text
    if devices.is_out_of_memory(error):
        return "oom", text.split(". GPU ")[0].splitlines()[0]
    return "error", described(error, config)


def _readable(error: Exception) -> Exception:
    """Return the error, or a stand-in that names its type if its text cannot be formatted."""
    try:
        str(error).encode()
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}, whose message cannot be read")
