"""Profiler of the tensors that forward keeps for backward in the first recorded step, by module, operation and block.

It also records the memory that each block's backward allocates and frees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.core.fields import Subject
from cs_systems.core.tables import Row
from cs_systems.formulas.memory.tables import BACKWARD_BLOCKS, RESIDUAL_BLOCKS, RESIDUAL_STREAM
from cs_systems.measure.profilers import Collected, Profiler
from cs_systems.measure.profilers._blocks import (
    gradients_of_a_block,
    kept_by_eager_block,
    kept_by_formula,
    residual_stream_bytes,
)
from cs_systems.measure.profilers._readings import leave, take
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    from cs_systems.instrument.memory_readings import backward_of_blocks
    from cs_systems.instrument.saved_tensors import by_block, saved_tensors, summed

    with (
        backward_of_blocks(model, lambda: device.memory()["allocated_bytes"]) as backward,
        saved_tensors(model) as found,
    ):
        yield
    tables = {"residuals": summed(found.rows), "residual_blocks": by_block(found.rows), "backward_blocks": backward}
    leave(out, tables)


def again(out: Path, device: Device, workload: Any) -> None:
    """List the tensors of one more step of a compiled model, whose modules got no hooks, by its parameters and blocks.

    A block that is compiled by itself is one function of the graph.
    """
    from cs_systems.instrument.saved_tensors import by_block, saved_tensors, summed

    config = getattr(workload, "config", None)  # a user's own workload has none; its compiled code names its modules
    if config is None or config.compile == "none":
        return
    with saved_tensors(workload.model, compiled=True) as found:
        workload.prepare()
        for _, run in workload.step():
            run()
    tables: dict[str, Sequence[Row]] = take(out, "the list of saved tensors was not written")
    leave(out, {**tables, "residuals": summed(found.rows), "residual_blocks": by_block(found.rows)})


def collect(out: Path, record: RunRecord) -> Collected:
    results: dict[str, Sequence[Row]] = take(out, "the list of saved tensors was not written")
    if record.subject is Subject.STEP:
        results |= RESIDUAL_STREAM.filled([{"bytes": residual_stream_bytes(record.run_config)}])
    by_formula = kept_by_formula(record)
    for row in RESIDUAL_BLOCKS.of(results):
        row["blocks"], row["predicted_bytes"] = by_formula.get(row["block"], (1, None))
    kept = kept_by_eager_block(record)
    for change in BACKWARD_BLOCKS.of(results):
        gradients = gradients_of_a_block(record.run_config)
        change["gradient_bytes"] = None if kept is None else gradients
        change["predicted_bytes"] = None if kept is None else gradients - kept
    return Collected({}, results)


PROFILER = Profiler(region=region, again=again, collect=collect, measures="memory")
