"""Rule for recompilation: torch.compile or Triton compiles during timed steps."""

from __future__ import annotations

from statistics import mean

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the compile time of the timed steps, as a share of their mean."""
    samples = evidence.measurement.timed if evidence.measurement else ()
    count, share = sum(s.compiles or 0 for s in samples), evidence.compiling_share
    if not count or not share:
        return None
    whole_s = mean(sample.wall_s for sample in samples)
    times = "once" if count == 1 else f"{count} times"
    cause = f"{share:.0%} of the timed steps' mean is compiling: code was compiled {times} while timed"
    row: Row = {"compiles": count, "compile_s": share * whole_s * len(samples), "steps": len(samples)}
    return Diagnosis(cause, evidence.remedy("recompiled"), whole_s, (1 - share) * whole_s, evidence=(row,))


RULE = Rule(find, judges_loop=True)
