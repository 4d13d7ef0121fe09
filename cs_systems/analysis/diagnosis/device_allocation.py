"""Rule for device allocation: the GPU is idle while the host calls cudaMalloc or cudaFree in the step."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import MALLOC
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence

PLAIN = "allocate once and reuse the memory, or take it from a pool (cudaMallocAsync)"
REMEDY = (
    "do not call torch.cuda.empty_cache() in the loop, keep shapes constant, and set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which the host was allocating device memory."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(MALLOC)
    if step_s is None or not idle_s or evidence.pinned_share >= MOSTLY:  # `pinned_allocation` reports this time
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU is idle while the host allocates device memory"
    remedy = REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - idle_s, evidence=evidence.gaps_by(MALLOC))


RULE = Rule(find, refines=("host-synchronisation",))
