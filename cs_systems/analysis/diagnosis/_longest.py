"""Line of a recorded loop with the most time, which an answer without a cause ends with."""

from __future__ import annotations

from collections import Counter

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, InnerLineRow
from cs_systems.analysis.diagnosis._evidence import Evidence

NOTABLE = 0.2  # share of the step
FEWEST = 5  # samples of the stack
WHOLE = ("backward", "step")  # calls of a whole phase, which has a column of its own


def longest_line(evidence: Evidence) -> str:
    """Return where an own line of the model or the loss takes a notable share of the step; "" if none does."""
    rows = [row for row in INNER_LINES.of(evidence.tables) if row["method"] and row["method"] not in WHOLE]
    times_s, samples, shown = Counter[str](), Counter[str](), dict[str, InnerLineRow]()
    for row in rows:
        times_s[row["place"]] += row["time_s"]  # type: ignore[assignment]
        samples[row["place"]] += row["samples"]
        shown[row["place"]] = row
    place, step_s = max(times_s, key=times_s.__getitem__, default=None), evidence.step_s
    if place is None or not step_s or times_s[place] < NOTABLE * step_s or samples[place] < FEWEST:
        return ""
    row = shown[place]
    where = f"{row['function']}() at {place}" if row["function"] else place
    return f"{times_s[place] / step_s:.0%} of the step is {where}, {row['method']}()"
