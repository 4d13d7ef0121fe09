"""Check of how a kept lever changes the numerics: loss curves, or the errors of one step against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from cs_systems.analysis.comparison.loop_findings import OUTCOME
from cs_systems.analysis.comparison.precision import PRECISION_ERROR, TRAINING_CURVE
from cs_systems.core.tables import first_row
from cs_systems.record import RunRecord

TOLERANCE = 4.0  # times the start's own error; two orders of the same sums differ by less
LEAST_ERROR = 1e-6  # error of float32 sums; below it, an error is rounding
TAIL = 0.1  # share of the steps, at the end, over which the mean loss is compared


class Check(NamedTuple):
    """Answer of the check, with its findings as text."""

    passed: bool
    saw: str
    is_comparable: bool = True  # False without a finite loss or errors to compare


UNCHECKED = Check(True, "")


def training(candidates: Sequence[RunRecord], starts: Sequence[RunRecord]) -> Check:
    """Return whether the candidate's losses differ from the start's by no more than losses with other seeds do.

    Compares the mean difference over all steps, and the difference at the end, of the mean curves over the candidate's
    seeds. The limit is the largest such difference between two seeds of the start, for one curve from its first seed;
    for a mean of n curves it is divided by √n. The largest difference of a step would prove nothing: one step in which
    the loss of a seed spikes would allow a candidate that does not learn.

    Args:
        candidates: loss curves of the candidate, with the first seeds of the start.
        starts: loss curves of the start, by seed.
    """
    curves, base = [losses(record) for record in candidates], [losses(record) for record in starts]
    others = [found for found in base[1:] if found]
    if not base[0] or not others or not all(base[: len(curves)]):
        return Check(False, f"not checked: the start has no loss to compare with{_because(starts[0])}", False)
    for curve, record in zip(curves, candidates, strict=True):
        if not curve:
            return Check(False, f"not checked: it has no loss{_because(record)}", False)
        if not all(map(math.isfinite, curve)):
            return Check(False, "its loss is NaN or infinite", False)
    known = [base[0], *others]
    # one curve is compared with the curve of its seed, a mean of several with the mean of as many
    pairs = [(base[0], other) for other in others] if len(curves) == 1 else [*itertools.combinations(known, 2)]
    curve, same, of_mean = _mean(curves), _mean(base[: len(curves)]), math.sqrt(len(curves))
    apart, spread = _apart(curve, same), max(_apart(*pair) for pair in pairs) / of_mean
    at_end = abs(_tail(curve) - _tail(same))
    end_spread = max(abs(_tail(one) - _tail(other)) for one, other in pairs) / of_mean
    what = f"losses of {len(curve)} steps" if TRAINING_CURVE.of(candidates[0].results) else "losses"
    of_seeds = f" over {len(curves)} seeds" if len(curves) > 1 else ""
    of_others = f"means of {len(curves)}" if len(curves) > 1 else f"those of {len(known)} seeds"
    words = f"{what} differ by {apart:.2g} in the mean{of_seeds}, {of_others} by {spread:.2g}"
    if apart <= spread and at_end > max(end_spread, spread):
        words += f"; at the end by {at_end:.2g}, seeds by {end_spread:.2g}"
    return Check(apart <= spread and at_end <= max(end_spread, spread), words)


def strict(candidate: RunRecord, start: RunRecord) -> Check:
    """Return whether loss and gradients are as close to float64 as the start's, within TOLERANCE."""
    found, own = (first_row(record.results, PRECISION_ERROR.name) for record in (candidate, start))
    if not own or not found:
        return Check(False, f"not checked: no errors against float64{_because(candidate if own else start)}", False)
    passed, words = True, []
    for name in ("loss_error", "gradient_error"):
        limit = TOLERANCE * max(own[name] or 0.0, LEAST_ERROR)
        error = found[name]
        passed &= error is not None and error <= limit
        shown = "infinite" if error is None else f"{error:.1e}"
        words.append(f"{name.replace('_', ' ')} {shown} (at most {limit:.1e})")
    return Check(passed, ", ".join(words))


def losses(record: RunRecord) -> list[float]:
    """Return the losses of a training curve; for a loop the first and the last; otherwise the loss of the last step."""
    if rows := TRAINING_CURVE.of(record.results):
        return [row["loss"] for row in rows]
    if outcome := OUTCOME.of(record.results):  # record of a loop
        early, late = outcome[0]["early_loss"], outcome[0]["late_loss"]
        return [early, late] if early is not None and late is not None else []
    ran: Mapping[str, float | None] = first_row(record.results, "ran")
    loss = ran.get("loss")
    return [] if loss is None else [loss]


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return fmean(abs(x - y) for x, y in zip(a, b, strict=False))


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(losses) for losses in zip(*curves, strict=False)]


def _tail(curve: Sequence[float]) -> float:
    last = curve[-max(1, round(TAIL * len(curve))) :]
    return sum(last) / len(last)


def _because(record: RunRecord) -> str:
    return f" ({record.reason})" if record.reason else ""
