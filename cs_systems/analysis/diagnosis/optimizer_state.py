"""Rule for optimizer state: the moments of every parameter, unused until the update, fill much of the peak."""

from __future__ import annotations

from dataclasses import replace

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_category
from cs_systems.analysis.diagnosis._memory_use import OPTIMIZER_STATE
from cs_systems.core.optimizers import BF16_STATE

DOMINANT = 0.3  # share of the peak; AdamW's moments are half of parameters, gradients and moments together
KEEP = f"keep it in bf16 (--optimizer {BF16_STATE})"
REMEDY = f"shard it over ranks (ZeroRedundancyOptimizer, FSDP; --strategy zero1, fsdp), or {KEEP}"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find optimizer state that fills much of the peak; at best, sharded over many ranks, almost none is left."""
    found = of_category(evidence, OPTIMIZER_STATE, "optimizer state takes", REMEDY, DOMINANT, optimizer=BF16_STATE)
    return replace(found, remedy=KEEP) if found and found.expected else found  # the forecast is for bf16


RULE = Rule(find)
