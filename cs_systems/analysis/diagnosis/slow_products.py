"""Rule for slow matrix products: they reach a small share of the device's peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Precision
from cs_systems.core.tables import Row

# cuBLAS's largest products reach about this share of a data sheet's dense peak; no remedy reaches the peak itself.
ATTAINABLE = 0.8
REMEDY = "use a larger batch or context, and sizes that are multiples of 128"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the excess time over the same products at the attainable share of the peak, if compute limits them."""
    step_s = evidence.step_s
    if step_s is None or evidence.setting("precision") == Precision.FP32:  # `unused_tensor_cores` reports these
        return None
    rows: list[Row] = [row for row in evidence.rows_of("matmul") if row.get("ceiling") == "compute"]
    lasted_s = sum(row["time_s"] for row in rows)
    if not lasted_s:
        return None
    at_peak_s = sum(row["time_s"] * (row.get("ceiling_share") or 0.0) for row in rows)
    gain_s = max(0.0, lasted_s - at_peak_s / ATTAINABLE)
    cause = (
        f"matrix products take {lasted_s / step_s:.0%} of the step at {at_peak_s / lasted_s:.0%} of the device's peak"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - gain_s, evidence=tuple(rows))


RULE = Rule(find, shortens_kernels=True)
