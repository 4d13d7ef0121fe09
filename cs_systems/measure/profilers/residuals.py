"""Tensors that forward keeps for backward in the first recorded step, by module and operation, and by block.

Also the memory that each block's backward allocates and frees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import RunConfig
from cs_systems.core.checkpoint_plan import items, segments
from cs_systems.core.rows import Results
from cs_systems.formulas.cost import PARAMETER_BYTES, block_parameter_count
from cs_systems.formulas.memory.fit import known_by_formula
from cs_systems.formulas.memory.model import kept_by_a_block
from cs_systems.measure.profilers import Collected, Profiler
from cs_systems.measure.profilers._readings import leave, take
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


def residual_stream_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensor passed between blocks: batch × sequence × d_model, in the parameters' dtype."""
    tokens = config.batch_size * config.tokens_per_sequence
    return tokens * config.model.d_model * PARAMETER_BYTES[config.precision]


def gradients_of_a_block(config: RunConfig) -> int:
    """Return the bytes of the gradients that a block's backward emits.

    These are the gradients of its weights and norms, and the residual stream's. It passes the latter on while the one
    that it received is still alive.
    """
    return block_parameter_count(config.model) * PARAMETER_BYTES[config.precision] + residual_stream_bytes(config)


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


def collect(out: Path, record: RunRecord) -> Collected:
    results: Results = take(out, "the list of saved tensors was not written")
    if record.config["workload"] == "train_step":
        results["residual_stream"] = [{"bytes": residual_stream_bytes(record.run_config)}]
    by_formula = kept_by_formula(record)
    for row in results["residual_blocks"]:
        row["blocks"], row["predicted_bytes"] = by_formula.get(row["block"], (1, None))
    kept = kept_by_eager_block(record)
    for change in results["backward_blocks"]:
        gradients = gradients_of_a_block(record.run_config)
        change["gradient_bytes"] = None if kept is None else gradients
        change["predicted_bytes"] = None if kept is None else gradients - kept
    return Collected({}, results)


def kept_by_formula(record: RunRecord) -> dict[str, tuple[int, int]]:
    """Return block → (how many blocks from it on count as one, the bytes they keep).

    One is a block alone, or all blocks under one checkpoint. Holds for this package's eager code; empty for anything
    else.
    """
    if (known := known_by_formula(record)) is None:
        return {}
    layers = known[0].model.num_layers
    found = {}
    for item in items(0, layers, segments(known[0].checkpoint, layers)):
        if isinstance(item, int):
            found[f"block {item}"] = 1, kept_by_a_block(*known)
        else:
            found[f"block {item.first}"] = item.blocks, kept_by_a_block(*known, item)
    return found


def kept_by_eager_block(record: RunRecord) -> int | None:
    """Return a block's kept bytes, by the closed form of eager code without checkpoints; None for anything else."""
    known = known_by_formula(record)
    return None if known is None or record.run_config.checkpoint != "none" else kept_by_a_block(*known)


PROFILER = Profiler(region=region, collect=collect)
