"""Rule for autotuning: each step tries several kernels for the same product or convolution, and times them."""

from __future__ import annotations

from cs_systems.analysis.attribution.kernel_trials import kernel_trials
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row

NOTABLE = 0.05  # share of the step
REMEDY = (
    "keep shapes constant (pad to a few sizes), because each new shape is tried anew, or set "
    "torch.backends.cudnn.benchmark = False"
)
PLAIN = "keep shapes constant, and try kernels once per shape"  # for a program without PyTorch


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time in which usual steps try kernels; at best each call runs its chosen kernel alone."""
    step_s = evidence.step_s
    found = kernel_trials(evidence.usual.profile) if evidence.usual and step_s else None
    if step_s is None or found is None or found.time_s < NOTABLE * step_s:
        return None
    takes = min(step_s, found.time_s)
    of = f" of {found.operator}" if found.operator else ""
    cause = (
        f"{takes / step_s:.0%} of the step tries kernels: {found.kernels:.0f} in each of {found.groups:.0f} calls{of}, "
        "with a wait after each"
    )
    row: Row = {"operator": found.operator, "calls_per_step": found.groups, "time_s": found.time_s}
    remedy = REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - takes, evidence=(row,), takes=takes)


RULE = Rule(find, refines=("device-allocation", "host-synchronisation", "launch-bound", "host-time"))
