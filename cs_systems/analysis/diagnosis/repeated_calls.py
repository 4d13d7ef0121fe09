"""Rule for a model, or a part of one, that is called again with the same input in a step, where one call would do."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REPEATED_CALLS, REPEATED_MODULES, RepeatedCallsRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.units import counted

FEWEST = 2  # steps: one alone may compare two results on purpose
NOTABLE = 0.5  # share of the steps
UNUSED = "take metrics from the output that the loss uses (output.detach()), or call the model under torch.no_grad()"
EVALUATED = "call it under torch.no_grad() there, and in fewer steps"  # the mode, such as dropout, changes its metrics
KEEP = "run them once, and keep the results that are needed again"
CACHED = "run the forward pass inside `with torch.nn.utils.parametrize.cached():`, which computes it once"
METHODS = {  # of torch.nn.utils.parametrizations.orthogonal
    "matrix_exp": " by a matrix exponential",
    "cayley": " by solving a linear system",
    "householder": " by Householder reflections",
}
SAME = "call it once, and use its output in both places"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find calls with a result that backward does not use, or that repeat another call's result.

    Calls that differ because of dropout do not count.
    """
    return _of_models(evidence) or _of_modules(evidence)


def _of_models(evidence: Evidence) -> Diagnosis | None:
    """Find repeated calls of whole models."""
    step_s = evidence.step_s
    rows = [row for row in REPEATED_CALLS.of(evidence.tables) if row["steps"] >= FEWEST]
    rows = [row for row in rows if row["steps"] >= NOTABLE * row["of_steps"]]
    if not rows or step_s is None:
        return None
    row = max(rows, key=_share)
    is_used = row["used"] == row["calls"]
    what = "with the same result" if is_used else "and backward uses only one of the results"
    cause, remedy = f"{row['model']} is called twice with the same input in a step, {what}", SAME if is_used else UNUSED
    if row.get("evaluated", 0) == row["calls"]:
        where = f"in {row['steps']} of {row['of_steps']} observed steps"
        cause = f"{row['model']} runs again on the same input in evaluation mode {where}, and backward does not use it"
        remedy = EVALUATED
    phases = (Phase.FORWARD, Phase.BACKWARD) if is_used else (Phase.FORWARD,)
    takes = _share(row) * evidence.phases_s(*phases)
    return Diagnosis(cause, remedy, step_s, takes=min(step_s, takes), evidence=(row,))


def _of_modules(evidence: Evidence) -> Diagnosis | None:
    """Find repeated calls of any modules, such as the first layers of a network that runs anew for each depth."""
    step_s, row = evidence.step_s, REPEATED_MODULES.first(evidence.tables)
    if row is None or step_s is None or row["steps"] < FEWEST or row["steps"] < row["of_steps"]:
        return None
    forward_s = min(row["time_s"], row["share"] * evidence.phases_s(Phase.FORWARD, Phase.LOSS))
    takes = min(step_s, forward_s + row["recorded_share"] * evidence.phases_s(Phase.BACKWARD))
    weight = row.get("parametrized")
    of = row["module"] if row["calls"] == 1 or weight else f"modules such as {row['module']}"
    calls = f"{counted(row['calls'], 'repeated call')} of {of}"
    place = f", most of it at {row['place']}" if row["place"] else ""
    cause = f"{takes / step_s:.0%} of the step is {calls}, with the same input and result{place}"
    if weight:
        how = METHODS.get(row.get("method") or "", "")
        cause += f"; they compute {weight}{how} anew at each use, and their backward may take longer than is counted"
    return Diagnosis(cause, CACHED if weight else KEEP, step_s, takes=takes, evidence=(row,))


def _share(row: RepeatedCallsRow) -> float:
    return row["calls"] / row["of_calls"]


RULE = Rule(find)
