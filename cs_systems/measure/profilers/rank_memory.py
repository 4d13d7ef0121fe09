"""Profiler of each rank's memory after each phase: parameters, gradients, optimizer state, compared with the formula.

It measures the tensors' own storages, on a CPU too, and the bytes in use in the device's allocator. If it records from
the first step on (`warmup=0`), it shows when the optimizer state is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.core.fields import Subject
from cs_systems.formulas.communication import payload
from cs_systems.formulas.cost import PARAMETER_BYTES
from cs_systems.formulas.memory.ranks import state_by_stage
from cs_systems.formulas.memory.tables import RANK_MEMORY, RankMemoryRow, StateReading
from cs_systems.formulas.rank_layout import data_ranks, splits_of
from cs_systems.measure.profilers import Collected, Profiler, rank_file
from cs_systems.measure.profilers._readings import CHECK_SHARED, leave, take
from cs_systems.record import RAN, RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device

# Phase → the stage that ends with it. All gradients exist, averaged, once they are synchronized.
STAGE_OF = {
    "built": "built",
    "forward": "forward",
    "backward": "backward",
    "synchronize": "backward",
    "optimizer": "optimizer",
}


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    from cs_systems.instrument.annotate import listening
    from cs_systems.instrument.memory_readings import StateReadings

    readings = StateReadings(device, model)
    try:
        with listening(readings):
            yield
    finally:
        leave(out, {"phases": readings.rows})


def collect(out: Path, record: RunRecord) -> Collected:
    """Return the table `rank_memory`; without expected bytes for foreign models, which the formula does not cover."""
    config = record.run_config
    trained, sharing = _trained_bytes(record), data_ranks(record.config)
    rows: list[RankMemoryRow] = []
    for rank in range(config.world_size):
        phases: list[StateReading] = take(
            rank_file(out, rank), f"the readings of memory of rank {rank} are not in the output folder", CHECK_SHARED
        )["phases"]
        for stage, read in _last_of_each_stage(phases):
            expected = expected_of(trained, config.strategy, sharing, read["step"] + config.warmup, stage)
            sizes = {
                "parameters": read["parameters_bytes"],
                "gradients": read["gradients_bytes"],
                "optimizer_state": read["optimizer_state_bytes"],
                "allocated": read["allocated_bytes"],
            }
            rows += [
                {
                    "rank": rank,
                    "step": read["step"],
                    "stage": stage,
                    "component": component,
                    "bytes": size,
                    "expected_bytes": expected.get(component),
                }
                for component, size in sizes.items()
            ]
    return Collected(results=RANK_MEMORY.filled(rows))


def expected_of(trained_bytes: int | None, strategy: str, ranks: int, step: int, stage: str) -> dict[str, int]:
    """Return the bytes of each component by formula; empty where Ψ is unknown.

    step: counted from 1 since the model was built.
    trained_bytes: Ψ of one rank, if `ranks` hold different rows.
    """
    splits = splits_of(strategy)
    if trained_bytes is None:
        return {}
    stages = state_by_stage(trained_bytes, splits, ranks)
    found = dict(stages[stage])
    if step > 1:
        found["optimizer_state"] = stages["optimizer"]["optimizer_state"]
    return found


def _trained_bytes(record: RunRecord) -> int | None:
    config, element = record.run_config, PARAMETER_BYTES[record.run_config.precision]
    if config.subject is not Subject.STEP:  # dtypes, frozen parameters and the optimizer's state are unknown
        return None
    if (divided_over := config.world_size // data_ranks(record.config)) > 1:
        return int(payload(config.model, 0, element, 0).on_tensor_rank(divided_over).parameter_bytes)
    count = next((row.get("parameters") for row in RAN.of(record.results)), None)
    return None if count is None else int(count * element)


def _last_of_each_stage(phases: Sequence[StateReading]) -> list[tuple[str, StateReading]]:
    found = {(row["step"], stage): (stage, row) for row in phases if (stage := STAGE_OF.get(row["phase"]))}
    return list(found.values())


PROFILER = Profiler(region=region, collect=collect, measures="memory")
