"""Rule for an earlier pass: the tensors of the forward pass before the recording are alive in the recorded one."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = (
    "delete the outputs of a pass before the next one, or, if no backward follows, run forward under torch.no_grad()"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find memory from before the recording that has the number and sizes of the recorded pass's tensors."""
    memory = evidence.memory
    if memory is None or not (size := memory.earlier_pass_bytes):
        return None
    cause = (
        f"{human(size, 'bytes')} of an earlier forward pass are still allocated, {size / memory.peak_bytes:.0%} of the "
        "peak (as many tensors of the same sizes as the recorded pass makes)"
    )
    return Diagnosis(cause, REMEDY, memory.peak_bytes, memory.peak_bytes - size, "bytes", memory.rows)


RULE = Rule(find, precedes=("kept-activations", "weight-copies"))
