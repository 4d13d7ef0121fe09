"""Rule for device allocation: the GPU is idle while the host calls cudaMalloc or cudaFree in the step."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import MALLOC
from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.own_python import empties_cache

PLAIN = "allocate once and reuse the memory, or take it from a pool (cudaMallocAsync)"
REMEDY = (
    "do not call torch.cuda.empty_cache() in the loop, keep shapes constant, and set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which the host was allocating device memory, and a loop's own lines that empty the cache."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(MALLOC)
    if step_s is None or not idle_s or evidence.pinned_share >= MOSTLY:  # `pinned_allocation` reports this time
        return None
    empties = [row for row in OWN_PYTHON.of(evidence.tables) if empties_cache(row)]
    lasted_s = min(step_s, max(idle_s, sum(row["time_s"] for row in empties)))  # freeing is a part of both
    cause = f"{lasted_s / step_s:.0%} of the step the GPU is idle while the host allocates device memory"
    if empties:
        cause += f" and gives it back ({empties[0]['calls']} at {empties[0]['place']})"
    remedy = REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - lasted_s, evidence=evidence.gaps_by(MALLOC))


# A graph holds no allocation by CUDA, so that it comes later.
RULE = Rule(find, refines=("host-synchronisation", "own-python"), precedes=("launch-bound",))
