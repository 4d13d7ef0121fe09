"""What the workloads that judge a precision by its numbers share."""

from __future__ import annotations

from cs_systems.config import RunConfig
from cs_systems.record import Row
from cs_systems.workloads.train_step import TrainStep


def run_parts(step: TrainStep) -> None:
    """One whole step, without a clock."""
    step.prepare()
    for _, part in step.step():
        part()


def used(config: RunConfig) -> Row:
    """The fields of the configuration that a step of the language model has an effect of."""
    return {
        "size": config.model.label,
        "context_length": config.model.context_length,
        "seq_len": config.tokens_per_sequence,
        "batch_size": config.batch_size,
        "attention": config.attention,
        "precision": config.precision.value,
    }
