"""Remedies for a rank that the others wait for, by the kind of work in which it takes longer."""

from typing import TypeGuard

SAME_WORK = "give each rank the same work"
SAME_TOKENS = "give each rank as many tokens: batches of equal size, sequences of equal length, balanced experts"
SAME_LOAD = "give each rank as many tokens, and compare the hosts' load"
SAME_DATA = "look for what makes its data slow: its files, its workers, its share of the data"
SAME_HOST = "let all ranks do this work, or none in the step"
UNEVEN = 1.2  # times the mean tokens of all ranks; routers balance experts to about this
EXPLAINS = 0.5  # share of the lost time that one kind of work must take to be its cause


def is_uneven(times: float | None) -> TypeGuard[float]:
    """Return whether a rank has so much more than the mean that it is not noise; False if that is unknown."""
    return times is not None and times >= UNEVEN


def received(times: float) -> str:
    """Return a phrase on the tokens that a rank's experts receive, as a multiple of the mean."""
    return f"receives {times:.2g} times the mean of all ranks in all-to-all"
