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


STARTS = [curve(each) for each in (LEARNS, *SEEDS)]


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
    check = training([curve(losses)], STARTS)
    assert check.passed is passes, check.saw


def test_check_says_what_it_saw() -> None:
    saw = training([curve([loss + 0.01 for loss in LEARNS])], STARTS).saw
    assert saw == "losses of 40 steps differ by 0.01 in the mean, those of 3 seeds by 0.25"


def test_curves_of_several_seeds_are_compared_in_the_mean() -> None:
    """One seed may be apart by chance, as here the first; the mean of all three is not."""
    by_chance = [[loss + 0.5 for loss in LEARNS], [loss - 0.2 for loss in LEARNS], [loss - 0.1 for loss in SEEDS[1]]]
    assert not training([curve(by_chance[0])], STARTS).passed
    check = training([curve(each) for each in by_chance], STARTS)
    assert check.passed
    assert "in the mean over 3 seeds, means of 3 by 0.14" in check.saw
    worse = [curve([loss + 0.5 for loss in each]) for each in (LEARNS, *SEEDS)]
    assert not training(worse, STARTS).passed


def test_loss_that_is_missing_or_not_finite_is_not_comparable() -> None:
    assert not training([curve([])], STARTS).is_comparable
    assert not training([curve([float("inf")])], STARTS).is_comparable
    assert training([curve([9.0 for _ in STEPS])], STARTS).is_comparable
