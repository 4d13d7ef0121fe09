"""Rule for exposed communication: collectives run while nothing is computed.

A rank that waits for another one runs its collective meanwhile. Only the traces of all ranks tell this waiting from the
transfer; remedies of the transfer do not shorten it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.analysis.attribution.distribution import DDP, FSDP
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
ASK = "analyze the traces of all ranks together: one rank's trace does not tell waiting from transfer"
COMMAND = "cs-systems analyze RANK0 RANK1 … --ranks"
BATCH = "use a larger batch for each rank"
# What wraps the program → changes that it does not have yet, of a foreign trace.
OF_WRAPPER = {
    DDP: ("send the gradients in bf16 (bf16_compress_hook)", "try other bucket sizes (bucket_cap_mb)"),
    FSDP: ("gather and reduce in bf16 (MixedPrecisionPolicy)", "prefetch more blocks ahead"),
}
OF_INFERENCE = ("keep the ranks that divide a layer in one host", "send bf16")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the exposed time of the worst rank or device; without a trace, the communication after backward.

    A profiler lengthens the exposed time as well as the step, so its share of the traced step is applied to the step
    without a profiler; the sentence has both. Where the transfer is known, no more than it counts: the rest is waiting.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.setting("world_size") == 1:
        return None
    rows: list[Row] = list(RANK_OVERLAP.of(evidence.tables))
    waits = any(row.get("transfer_s") is None for row in rows)
    if rows:
        worst = max(rows, key=_share)
        share, of = _share(worst), _traced(worst)
    else:
        left_s = evidence.phase_s(Phase.SYNCHRONIZE) or 0.0
        worst, share = {"phase": Phase.SYNCHRONIZE.value, "median_s": left_s}, min(1.0, left_s / step_s)
        of = "step"
    if not share:
        return None
    waited = ", waiting for other ranks included" if waits else ", waiting for other ranks left out" if rows else ""
    cause = f"{share:.0%} of the {of} is communication without computation beside it{waited}"
    asks = waits and evidence.config is None
    return Diagnosis(
        cause,
        ASK if asks else _remedy(evidence),
        step_s,
        step_s * (1 - share),
        evidence=(worst,),
        try_it=COMMAND if asks else "",
    )


def _remedy(evidence: Evidence) -> str:
    """Return changes that the program, as far as it is known, does not have yet."""
    found = evidence.distribution
    if evidence.config is None and found is not None and (found.wrapper or not found.has_backward):
        return _joined([*OF_WRAPPER.get(found.wrapper, OF_INFERENCE), BATCH])
    options = evidence.config.strategy_options if evidence.config is not None else {}
    sends_bf16 = "bf16" in (options.get("comm_dtype"), options.get("compute_dtype"))
    ways = [_more_overlap(str(evidence.setting("strategy"))), "" if sends_bf16 else "send bf16", BATCH]
    return _joined([way for way in ways if way])


def _joined(ways: Sequence[str]) -> str:
    *others, last = ways
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
    """Return one rank's or device's exposed communication, at most its transfer, as a share of the traced step."""
    if not row.get("step_s"):
        return float(row.get("share") or 0.0)
    transfer_s = row.get("transfer_s")
    exposed_s = float(row["exposed_s"] if transfer_s is None else min(row["exposed_s"], transfer_s))
    return exposed_s / float(row["step_s"])


def _traced(row: Row) -> str:
    """Return the name of the step to which `_share` refers, with both times if the row has them."""
    if not row.get("step_s"):
        return "traced step"
    return f"traced step ({human(_share(row) * row['step_s'], 's')} of {human(row['step_s'], 's')})"


RULE = Rule(find)
