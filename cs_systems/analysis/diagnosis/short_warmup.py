"""Rule for a short warm-up: the first timed steps are slower than the later ones."""

from __future__ import annotations

from itertools import takewhile
from statistics import mean, median

from cs_systems.analysis.comparison.warmup import STEADY
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.step_kinds import step_kinds
from cs_systems.core.tables import Row

FEWEST = 6  # least number of samples; half of them count as steady
REMEDY = "warm up for more steps (--warmup)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find slow steps at the beginning of the timed steps, which raise the mean; compiling steps have another rule."""
    samples = evidence.measurement.timed if evidence.measurement else ()
    durations = [sample.wall_s for sample in samples]
    if len(durations) < FEWEST or samples[0].round != samples[-1].round:
        return None
    if any(kind.every and kind.positions[0] == 0 for kind in step_kinds(durations)):
        return None  # the first step is of a kind that does more work
    steady_s = median(durations[len(durations) // 2 :])
    slow = [*takewhile(lambda s: s.wall_s > (1 + STEADY) * steady_s and not s.compile_s, samples)]
    if not slow or not steady_s:
        return None
    excess_s = sum(sample.wall_s - steady_s for sample in slow) / len(durations)
    number = "first timed step is" if len(slow) == 1 else f"first {len(slow)} timed steps are"
    times = mean(sample.wall_s for sample in slow) / steady_s
    cause = f"the {number} {times:.1f} times as slow as the later ones: the warm-up was too short"
    row: Row = {"slow_steps": len(slow), "steady_s": steady_s, "mean_s": mean(durations)}
    return Diagnosis(cause, REMEDY, mean(durations), mean(durations) - excess_s, evidence=(row,))


RULE = Rule(find)
