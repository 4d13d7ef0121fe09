"""Rule for kept activations: the tensors that forward keeps for backward dominate the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import expected
from cs_systems.analysis.diagnosis._memory_use import (
    ACTIVATIONS,
    EACH_BLOCK,
    IN_BLOCKS,
    LOGITS,
    SCORES,
    WEIGHT_COPIES,
    MemoryUse,
)
from cs_systems.config import Phase

DOMINANT = 0.4  # share of the peak; below it another category is as large
REMEDY = f"checkpoint each block (torch.utils.checkpoint; --checkpoint {EACH_BLOCK}), which backward computes again"

NO_GRAPH = "or, if no backward follows, run forward under torch.no_grad()"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find activations that fill much of the peak.

    The peak after the remedy is known by formula; without one, at best only the activations disappear.
    """
    memory = evidence.memory
    if memory is None or evidence.setting("checkpoint") not in (None, "none"):
        return None
    kept = memory.of(ACTIVATIONS, SCORES)
    if kept < DOMINANT * memory.peak_bytes:
        return None
    at_best = memory.at_best(IN_BLOCKS) if memory.without else memory.peak_bytes - kept
    cause = f"activations{_others(memory)} take {kept / memory.peak_bytes:.0%} of the memory at the peak"
    then = expected(memory, checkpoint=EACH_BLOCK)
    is_forward_alone = memory.phases and Phase.BACKWARD not in memory.phases
    remedy = f"{REMEDY}; {NO_GRAPH}" if is_forward_alone else REMEDY
    return Diagnosis(cause, remedy, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then)


def _others(memory: MemoryUse) -> str:
    """Return which activations of a snapshot's table have rules of their own, and are not counted here."""
    if memory.without is None:
        return ""
    named = {LOGITS: "logits and loss", WEIGHT_COPIES: "autocast's copies of weights"}
    found = [words for category, words in named.items() if memory.of(category)]
    return f" other than {' and '.join(found)}" if found else ""


RULE = Rule(find)
