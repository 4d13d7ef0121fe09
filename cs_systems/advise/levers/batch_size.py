"""Larger batch: more tokens per launch, in memory that is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.analysis.diagnosis import Expected
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.formulas.memory.fit import largest, needed_bytes

MOST_TIMES = 64  # times the present batch


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if situation.goal == "memory":
        return "a larger batch takes more memory"
    if not situation.changes_batch:
        return "another batch is another training; allow it with --change-batch"
    if config.subject is not Subject.STEP:
        return "no formula tells which batch of your own model fits; see cs-systems memory --fits"
    most = _most(config, situation.memory_bytes) if situation.memory_bytes else 4 * config.batch_size
    times = [k for k in (2, 4, 16, MOST_TIMES) if k * config.batch_size <= most]
    if not times:
        return "no larger batch fits into memory"
    return [Option({"batch_size": k * config.batch_size}, _expected(situation, k)) for k in times]


def _most(config: RunConfig, memory_bytes: int) -> int:
    """Return the largest batch that fits by formula for the plain step; parts and graphs need about the same memory."""
    try:
        plain = replace(config, parts=(), graph="none", compile="none", compile_scope="model")
        return largest(lambda n: needed_bytes(replace(plain, batch_size=n)), memory_bytes, config.batch_size)
    except ConfigError:
        return 0


def _expected(situation: Situation, times: int) -> Expected | None:
    """Return the step with a batch `times` as large, if its device time grows in proportion to the batch."""
    if situation.device_s is None:
        return None
    value = max(times * situation.device_s, situation.host_s)
    return Expected(value, value, value, "forecast")


LEVER = Lever("another batch: other gradients, and perhaps another learning rate", options, "batch_size=…", 0.1)
