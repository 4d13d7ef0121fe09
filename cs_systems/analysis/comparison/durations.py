"""Estimated duration of cells before they are measured: by earlier records of the same cells, else by FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cs_systems.analysis.comparison.precision_causes import computation
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.units import counted
from cs_systems.formulas.cost import AttentionAlgorithm, attention_cost, step_cost
from cs_systems.formulas.memory.fit import algorithm_of
from cs_systems.formulas.peaks import peak_flops
from cs_systems.record import RunRecord


@dataclass(frozen=True)
class Overheads:
    """Time besides the steps, in s.

    Attributes:
        start_s: of a worker process, which imports torch.
        cell_s: building the model, checking the process afterwards.
        compile_s: compiling the model.
        ranks_s: starting the ranks and their process group, which serve all cells of that number of ranks.
        profiled_s: recording and reading a trace.
        launched_s: the same with a profiler that starts a process of its own.
    """

    start_s: float
    cell_s: float
    compile_s: float
    ranks_s: float
    profiled_s: float
    launched_s: float


# Rounded from runs on one H200 and on two CPU cores.
ON_GPU = Overheads(start_s=4.0, cell_s=1.5, compile_s=40.0, ranks_s=10.0, profiled_s=15.0, launched_s=15.0)
ON_CPU = Overheads(start_s=3.0, cell_s=0.1, compile_s=15.0, ranks_s=10.0, profiled_s=0.5, launched_s=4.0)
_LAUNCHED = ("nsys", "nsys_memory", "ncu")
# Rates that are assumed where no record tells the device's.
SHARE_OF_PEAK = 0.3
FLOPS_PER_S_OF_A_THREAD = 1e10
COMPARABLE = (
    30  # ratio of FLOPs up to which two steps run at similar rates; a tiny step's time is not that of its FLOPs
)

RECORD, RATE, ASSUMED, UNKNOWN = "record", "rate", "assumed", "unknown"
_BASES = {
    RECORD: "by earlier records",
    RATE: "by FLOPs, at the rate of an earlier record",
    ASSUMED: f"by FLOPs, at an assumed {SHARE_OF_PEAK:.0%} of the peak",
}
_ASSUMED_ON_CPU = f"by FLOPs, at an assumed {FLOPS_PER_S_OF_A_THREAD / 1e9:.0f} GFLOP/s a thread"


@dataclass(frozen=True)
class Machine:
    """Device that the cells will run on."""

    device_name: str
    is_gpu: bool
    cpu_threads: int

    @property
    def overheads(self) -> Overheads:
        return ON_GPU if self.is_gpu else ON_CPU


@dataclass(frozen=True)
class Durations:
    """Estimate of several cells: its sum, and how many cells were estimated in which way."""

    cells_s: float  # without the start of the process
    bases: Counter[str]
    machine: Machine

    @property
    def unknown(self) -> int:
        return self.bases[UNKNOWN]

    @property
    def total_s(self) -> float:
        return self.machine.overheads.start_s + self.cells_s

    @property
    def how(self) -> str:
        """Return how the cells were estimated, in words."""
        bases = _BASES if self.machine.is_gpu else _BASES | {ASSUMED: _ASSUMED_ON_CPU}
        said = [f"{counted(self.bases[basis], 'cell')} {words}" for basis, words in bases.items() if self.bases[basis]]
        if self.unknown:
            said.append(f"{counted(self.unknown, 'cell')} of unknown duration left out")
        return "; ".join(said)


def estimate(
    cells: Sequence[RunConfig], records: Iterable[RunRecord], machine: Machine, started: Iterable[RunConfig] = ()
) -> Durations:
    """Return the estimated duration of the cells on a machine.

    started: cells whose ranks run already.
    records: of earlier runs; those of other devices are ignored, and a profiled one counts only without another.
    """
    steps_s: dict[object, float] = {}
    known: list[tuple[int, float]] = []
    for record in sorted(records, key=lambda record: record.config.get("profiler", "none") == "none"):
        if record.environment is None or record.environment.device_name != machine.device_name:
            continue
        if (step_s := _step_s(record)) is None:
            continue
        steps_s[computation(record)[0]] = step_s
        if flops := step_flops(record.run_config):
            known.append((flops, step_s))
    overheads = machine.overheads
    cells_s = overheads.ranks_s * len(_ranks(cells) - _ranks(started))
    bases = Counter[str]()
    for cell in cells:
        step_s, basis = steps_s.get(_computation(cell)), RECORD
        if step_s is None:
            step_s, basis = _by_flops(cell, known, machine)
        bases[basis] += 1
        if step_s is not None:
            cells_s += _beside_steps_s(cell, overheads) + max(cell.warmup * step_s, cell.warmup_s) + cell.steps * step_s
    return Durations(cells_s, bases, machine)


def _ranks(cells: Iterable[RunConfig]) -> set[int]:
    """Return the numbers of ranks that the cells need, where they need several."""
    return {cell.world_size for cell in cells if cell.is_distributed}


def step_flops(config: RunConfig) -> int | None:
    """Return the FLOPs that a step executes, or None if no formula gives them."""
    algorithm = AttentionAlgorithm()
    with suppress(ConfigError):  # a user's own attention is not declared, but has the products of the others
        algorithm = algorithm_of(config)
    if config.workload == "train_step":
        length = config.tokens_per_sequence
        costs = step_cost(
            config.model, config.batch_size, length, config.mode, algorithm, config.precision, config.checkpoint
        )
    elif config.workload == "attention" and config.shape is not None:
        costs = attention_cost(config.shape, config.mode, algorithm, 2)
    else:
        return None
    return sum(cost.hardware_flops or 0 for cost in costs.values())


def _by_flops(cell: RunConfig, known: Sequence[tuple[int, float]], machine: Machine) -> tuple[float | None, str]:
    """Return the duration of a step and its basis: the recorded step with the nearest FLOPs, if it is comparable."""
    flops = step_flops(cell)
    if flops is None:
        return None, UNKNOWN
    nearest = min(known, key=lambda one: abs(math.log(one[0] / flops)), default=None) if flops else None
    if nearest and 1 / COMPARABLE <= flops / nearest[0] <= COMPARABLE:
        return nearest[1] * flops / nearest[0], RATE
    if not machine.is_gpu:
        return flops / (FLOPS_PER_S_OF_A_THREAD * machine.cpu_threads), ASSUMED
    peak = peak_flops(machine.device_name, cell.precision)
    return (None, UNKNOWN) if peak is None else (flops / (SHARE_OF_PEAK * peak.per_s), ASSUMED)


def _beside_steps_s(cell: RunConfig, overheads: Overheads) -> float:
    compile_s = overheads.compile_s if cell.compile != "none" else 0.0
    profiler_s = overheads.launched_s if cell.profiler in _LAUNCHED else overheads.profiled_s
    return overheads.cell_s + compile_s + (profiler_s if cell.profiler != "none" else 0.0)


def _step_s(record: RunRecord) -> float | None:
    return record.measurement.median_s() if record.measurement else None


def _computation(cell: RunConfig) -> RunConfig:
    return computation(RunRecord("", cell.to_dict(), "ok"))[0]
