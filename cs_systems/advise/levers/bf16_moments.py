"""Moments of AdamW in bf16, with master weights: fewer bytes in the update and in memory."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.analysis.diagnosis import Expected
from cs_systems.core.fields import Subject
from cs_systems.formulas.cost import parameter_count
from cs_systems.formulas.peaks import peak_bandwidth

SAVED_BYTES = 8  # per parameter: both moments are read and written in 2 bytes instead of 4


def options(situation: Situation) -> Sequence[Option] | str:
    if situation.config.optimizer != "adamw_master":
        return "it follows bf16 weights with master weights"
    fields = {"optimizer": "adamw_bf16_state"}
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
    'MasterAdamW(model.bfloat16().parameters(), moments=MOMENTS["adamw_bf16_state"])',
    0.03,
    remedies=("optimizer-state",),
)
