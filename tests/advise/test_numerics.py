"""Check of the losses of a candidate against those of the start under several seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cs_systems.advise.numerics import training
from cs_systems.config import RunConfig
from cs_systems.record import RunRecord

STEPS = range(40)
LEARNS = [9.0 * 0.9**n for n in STEPS]
SEEDS = [[loss + 0.1 for loss in LEARNS], [loss + (8.0 if n == 3 else 0.05) for n, loss in enumerate(LEARNS)]]


def curve(losses: Sequence[float]) -> RunRecord:
    rows = [{"step": n, "loss": loss} for n, loss in enumerate(losses)]
    return RunRecord("", RunConfig().to_dict(), "ok", results={"training_curve": rows})


@pytest.mark.parametrize(
    ("losses", "passes"),
    [
        ([loss * 1.001 for loss in LEARNS], True),
        ([9.0 for _ in STEPS], False),  # it does not learn; a spike of one seed must not allow that
        ([loss + max(0, n - 34) for n, loss in enumerate(LEARNS)], False),  # it ends apart
        ([*LEARNS[:-1], float("nan")], False),
    ],
    ids=["rounding", "no learning", "apart at the end", "nan"],
)
def test_losses_may_differ_by_what_seeds_differ_by_in_the_mean_and_at_the_end(
    losses: list[float], passes: bool
) -> None:
    check = training(curve(losses), curve(LEARNS), [curve(each) for each in SEEDS])
    assert check.passed is passes, check.saw


def test_check_says_what_it_saw() -> None:
    saw = training(curve([loss + 0.01 for loss in LEARNS]), curve(LEARNS), [curve(each) for each in SEEDS]).saw
    assert saw == "losses of 40 steps differ by 0.01 in the mean, those of 3 seeds by 0.25"
