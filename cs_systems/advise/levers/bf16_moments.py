"""Moments of AdamW in bf16, with master weights: fewer bytes in the update and in memory."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.analysis.diagnosis import Expected
from cs_systems.core.fields import Subject
from cs_systems.core.optimizers import BF16_BYTES, BF16_STATE, MASTER, optimizer
from cs_systems.formulas.cost import parameter_count
from cs_systems.formulas.peaks import peak_bandwidth

# per parameter: both moments are read and written in 2 bytes instead of 4
SAVED_BYTES = optimizer(MASTER).update_bytes(BF16_BYTES) - optimizer(BF16_STATE).update_bytes(BF16_BYTES)


def options(situation: Situation) -> Sequence[Option] | str:
    if situation.config.optimizer != MASTER:
        return "it follows bf16 weights with master weights"
    fields = {"optimizer": BF16_STATE}
    return [Option(fields, situation.forecast(**fields) if situation.goal == "memory" else _expected(situation))]


def _expected(situation: Situation) -> Expected | None:
    """Return the step without the bytes that the update saves, at the memory's peak rate."""
    device_s, peak = situation.device_s, peak_bandwidth(situation.environment.device_name)
    if device_s is None or peak is None or situation.config.subject is not Subject.STEP:
        return None
    saved_s = SAVED_BYTES * parameter_count(situation.config.model) / peak.per_s
    value = max(device_s - saved_s, situation.host_s)
    return Expected(value, value, value, "forecast")


LEVER = Lever(
    "rounds the moments of the optimizer to 8 bits",
    options,
    f'MasterAdamW(model.bfloat16().parameters(), moments=MOMENTS["{BF16_STATE}"])',
    0.03,
    remedies=("optimizer-state",),
)
