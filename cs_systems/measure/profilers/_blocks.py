"""Memory of one block of the built-in model by formula, for the memory profilers."""

from __future__ import annotations

from cs_systems.config import RunConfig
from cs_systems.core.checkpoint_plan import items, segments
from cs_systems.formulas.cost import PARAMETER_BYTES, block_parameter_count
from cs_systems.formulas.memory.fit import known_by_formula
from cs_systems.formulas.memory.model import kept_by_a_block
from cs_systems.record import RunRecord


def residual_stream_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensor passed between blocks: batch × sequence × d_model, in the parameters' dtype."""
    tokens = config.batch_size * config.tokens_per_sequence
    return tokens * config.model.d_model * PARAMETER_BYTES[config.precision]


def gradients_of_a_block(config: RunConfig) -> int:
    """Return the bytes of the gradients that a block's backward emits.

    These are the gradients of its weights and norms, and of its input. Backward makes the input's gradient while the
    received gradient of the output is still alive.
    """
    return block_parameter_count(config.model) * PARAMETER_BYTES[config.precision] + residual_stream_bytes(config)


def kept_by_formula(record: RunRecord) -> dict[str, tuple[int, int]]:
    """Return a map from block to (number of blocks from it on that are kept together, the bytes they keep).

    A group is a single block, or all blocks under one checkpoint. Valid for this package's eager code; empty for
    anything else.
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
