"""Line of a recorded loop with the most time, or its optimizer, which an answer without a cause ends with."""

from __future__ import annotations

from collections import Counter

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

NOTABLE = 0.2  # share of the step
FEWEST = 5  # samples of the stack
WHOLE = ("backward", "step")  # calls of a whole phase, which has a column of its own
NEARLY_ALL = 0.9  # share of the line's time


def longest_line(evidence: Evidence) -> str:
    """Return which own line of the model or the loss, or else the optimizer, takes a notable share of the step.

    "" if neither does.
    """
    rows = [row for row in INNER_LINES.of(evidence.tables) if row["method"] and row["method"] not in WHOLE]
    times_s, samples, of_methods = Counter[str](), Counter[str](), dict[str, Counter[str]]()
    for row in rows:
        times_s[row["place"]] += row["time_s"]  # type: ignore[assignment]
        samples[row["place"]] += row["samples"]
        of_methods.setdefault(row["place"], Counter())[str(row["method"])] += row["time_s"]  # type: ignore[assignment]
    place, step_s = max(times_s, key=times_s.__getitem__, default=None), evidence.step_s
    update_s = evidence.phases_s(Phase.OPTIMIZER) if evidence.is_loop else 0.0
    if step_s and update_s >= NOTABLE * step_s and (place is None or update_s > times_s[place]):
        return f"{update_s / step_s:.0%} of the step is the optimizer"
    if place is None or not step_s or times_s[place] < NOTABLE * step_s or samples[place] < FEWEST:
        return ""
    function = next(row["function"] for row in rows if row["place"] == place)
    where = f"{function}() at {place}" if function else place
    method, time_s = of_methods[place].most_common(1)[0]
    most = "" if time_s >= NEARLY_ALL * times_s[place] else "most of it "
    return f"{times_s[place] / step_s:.0%} of the step is {where}, {most}{method}()"
