"""Rule for settings that make a CPU's layers slower: half precision without instructions for it, or no oneDNN."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import SLOW_SETTINGS, SlowSettingRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.units import human

NOTABLE = 0.1  # share of the step
SLOWER = 1.4  # times the layers without the setting
LONGEST = 1.25  # times the phases that hold the layers; what was measured as longer was disturbed
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find layers that take longer with a setting than without it, as both were measured after the timed steps."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    longest_s = LONGEST * evidence.phases_s(*PHASES)
    rows = [row for row in SLOW_SETTINGS.of(evidence.tables) if row["time_s"] > SLOWER * row["usual_s"]]
    rows = [row for row in rows if row["time_s"] <= longest_s]
    row = max(rows, key=lambda each: each["time_s"] - each["usual_s"], default=None)
    if row is None or row["time_s"] - row["usual_s"] < NOTABLE * step_s:
        return None
    what, otherwise, remedy = _words(row)
    cause = (
        f"{what}: computed again, the convolutions and matrix products of a step take {human(row['time_s'], 's')}, "
        f"and {human(row['usual_s'], 's')} {otherwise}"
    )
    return Diagnosis(cause, remedy, step_s, takes=min(step_s, row["time_s"] - row["usual_s"]), evidence=(row,))


def _words(row: SlowSettingRow) -> tuple[str, str, str]:
    """Return what is set, the opposite, and the remedy."""
    setting = row["setting"]
    if setting not in ("bf16", "fp16"):
        return (
            "oneDNN is switched off", "with it",
            "leave torch.backends.mkldnn.enabled True; torch.use_deterministic_algorithms(True) makes results "
            "reproducible",
        )  # fmt: skip
    out = "leave torch.autocast out" if row["is_autocast"] else "model.float(), and inputs in fp32"
    return f"the model computes in {setting}, for which this CPU is slow", "in fp32", f"compute in fp32 here: {out}"


RULE = Rule(find, refines=("small-operators",))
