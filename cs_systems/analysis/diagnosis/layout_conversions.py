"""Rule for layout conversions: kernels that turn NCHW into NHWC and back around each convolution."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_kernels

KERNEL = re.compile(r"nchw_?to_?nhwc|nhwc_?to_?nchw", re.IGNORECASE)
NOTABLE = 0.1  # share of the step
REMEDY = "keep one layout: model.to(memory_format=torch.channels_last), and the same for its input"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of conversions between layouts; at best none is left."""
    return of_kernels(evidence, KERNEL, "conversions between NCHW and NHWC", REMEDY, NOTABLE, is_known=True)


RULE = Rule(find, shortens_kernels=True, refines=("unfused-elementwise",))
