"""Rule for layout conversions: kernels that turn NCHW into NHWC and back around each convolution."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

KERNEL = re.compile(r"nchw_?to_?nhwc|nhwc_?to_?nchw", re.IGNORECASE)
NOTABLE = 0.1  # share of the step
REMEDY = "keep one layout: model.to(memory_format=torch.channels_last), and the same for its input"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of conversions between layouts; at best none is left."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    rows, time_s = evidence.kernels_named(KERNEL)
    if time_s < NOTABLE * step_s:
        return None
    cause = f"{time_s / step_s:.0%} of the step is conversions between NCHW and NHWC"
    return Diagnosis(cause, REMEDY, step_s, step_s - time_s, evidence=rows, takes=time_s)


RULE = Rule(find, shortens_kernels=True, refines=("unfused-elementwise",))
