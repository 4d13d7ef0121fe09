"""Rule for an unfused optimizer: a kernel per operation or parameter, instead of one for the whole update."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.tables import Row

FUSED = re.compile(r"fused_?(optimizer|adam|sgd|lamb)|^triton_for_|^adamw_kernel", re.IGNORECASE)
# AdamW reads parameter, gradient and both moments, and writes all but the gradient. torch's foreach AdamW moves these
# and its temporaries in eight operations: decay 2, first moment 3, second moment 2 + 3, root 2, division 2, epsilon 2,
# update 4.
FUSED_PASSES, FOREACH_PASSES = 7, 20
OPTIONS = {"optimizer": ("adamw_fused", "adamw_triton")}
REMEDY = "use a fused optimizer (torch.optim.AdamW(…, fused=True); --optimizer adamw_fused)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of the optimizer, unless its kernels or its name show that it is fused.

    At best the update takes the time of its least bytes, if known, else the fused share of its passes.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.device_name is None or _is_fused(evidence):
        return None
    rows: list[Row] = evidence.rows_of("all", phases=(Phase.OPTIMIZER,))
    if not rows and (time_s := evidence.phase_s(Phase.OPTIMIZER)):
        rows = [{"phase": Phase.OPTIMIZER.value, "time_s": time_s}]
    lasted_s = sum(row["time_s"] for row in rows)
    if not lasted_s:
        return None
    floor_s = evidence.floor_s(Phase.OPTIMIZER)
    least_s = lasted_s * FUSED_PASSES / FOREACH_PASSES if floor_s is None else min(floor_s, lasted_s)
    cause = f"the optimizer takes {lasted_s / step_s:.0%} of the step, and its kernels are not fused"
    return Diagnosis(cause, REMEDY, step_s, step_s - lasted_s + least_s, evidence=tuple(rows), options=OPTIONS)


def _is_fused(evidence: Evidence) -> bool:
    """Return whether the optimizer is fused; True if unknown."""
    if evidence.kernels():
        return any(FUSED.search(row["kernel"]) for row in evidence.kernels())
    name = evidence.setting("optimizer")
    return name not in ("adamw", "adamw_foreach")


RULE = Rule(find)
