"""Rule for exposed communication: collectives run while nothing is computed."""

from __future__ import annotations

from cs_systems.analysis.attribution.overlap import RANK_OVERLAP
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core import plugins
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.formulas.rank_layout import options_of, overlaps, splits_of

OVERLAP = "overlap it with backward (DistributedDataParallel, FSDP; --strategy ddp_bucketed, or fsdp)"
BUCKETS = "send the gradients in buckets (--strategy ddp_bucketed)"
SIZES = "try other bucket sizes (--bucket-size-mb)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the exposed time of the worst rank or device; without a trace, the communication after backward.

    A profiler lengthens the exposed time as well as the step, so its share of the traced step is applied to the step
    without a profiler; the sentence has both.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.setting("world_size") == 1:
        return None
    rows: list[Row] = list(RANK_OVERLAP.of(evidence.tables))
    if rows:
        worst = max(rows, key=_share)
        share, of = _share(worst), _traced(worst)
    else:
        left_s = evidence.phase_s(Phase.SYNCHRONIZE) or 0.0
        worst, share = {"phase": Phase.SYNCHRONIZE.value, "median_s": left_s}, min(1.0, left_s / step_s)
        of = "step"
    if not share:
        return None
    cause = f"{share:.0%} of the {of} is communication without computation beside it"
    return Diagnosis(cause, _remedy(evidence), step_s, step_s * (1 - share), evidence=(worst,))


def _remedy(evidence: Evidence) -> str:
    """Return a change that the cell's strategy, if known, does not have yet."""
    options = evidence.config.strategy_options if evidence.config is not None else {}
    sends_bf16 = "bf16" in (options.get("comm_dtype"), options.get("compute_dtype"))
    ways = [
        _more_overlap(str(evidence.setting("strategy"))),
        "" if sends_bf16 else "send bf16",
        "use a larger batch for each rank",
    ]
    *others, last = filter(None, ways)
    return f"{', '.join(others)}, or {last}" if others else last


def _more_overlap(strategy: str) -> str:
    """Return an option that lets the strategy overlap more with backward, or "" if there is none."""
    is_known = {*strategy.split("+")} <= {*plugins.names("parallel")}
    if not is_known or not overlaps(strategy):
        return OVERLAP
    if "bucket_size_mb" in options_of(strategy):
        return SIZES
    return "" if "parameters" in splits_of(strategy) else BUCKETS  # parameters are gathered block by block


def _share(row: Row) -> float:
    """Return one rank's or device's exposed communication as a share of the traced step."""
    if row.get("share") is not None:
        return float(row["share"])
    return float(row["exposed_s"] / row["step_s"]) if row.get("step_s") else 0.0


def _traced(row: Row) -> str:
    """Return the name of the step to which `_share` refers, with both times if the row has them."""
    if not row.get("step_s"):
        return "traced step"
    return f"traced step ({human(row['exposed_s'], 's')} of {human(row['step_s'], 's')})"


RULE = Rule(find)
