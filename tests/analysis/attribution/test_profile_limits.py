"""Steps of a profile at limits, and what the profile says of recordings that lack kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.config import ConfigError
from tests.analysis.attribution.made import PRODUCT, Made


def recorded(*kernels: tuple[float, float], steps: Sequence[tuple[float, float]] = ((1.0, 4.0),)) -> Made:
    """Return a recording of steps and of kernels that run as soon as they are launched."""
    made = Made()
    for begin, end in steps:
        made.range("step", begin, end)
    for start, end in kernels:
        made.kernel(PRODUCT, start, end)
    return made


@pytest.mark.parametrize(
    ("lost_s", "is_cut"),
    [([2.5], True), ([2.5, 2.75], False), ([2.0], False), ([1.5], False)],
    ids=["after the last kernel", "as many as recorded", "with the last kernel", "between kernels"],
)
def test_only_step_ends_with_its_last_kernel_if_later_ones_are_missing(lost_s: list[float], is_cut: bool) -> None:
    made = recorded((1.0, 1.5), (2.0, 2.25)).profile(lost_launches=np.array(lost_s))
    assert [step.end_s for step in made.steps] == [2.25 if is_cut else 4.0]
    assert made.incomplete is not None
    assert ("the last 1 of 3 launched kernels (33.3%) are missing; the time" in made.incomplete) is is_cut
    assert made.trace.lacks_kernels is not is_cut


def test_recording_without_kernels_has_no_share_of_any_place() -> None:
    made = recorded().profile()
    assert (made.time_s, made.phase_coverage, made.layer_coverage, made.fused_share) == (0, 0.0, 0.0, 0.0)
    assert [(step.start_s, step.end_s) for step in made.steps] == [(1.0, 4.0)]


def test_refusal_of_a_time_counts_from_the_start_of_the_recording() -> None:
    made = recorded((8.25, 8.5), steps=[(8.0, 9.0)])
    said = "launched between 0.5 and 0.75 s; choose other times: the launches are from 0.25 to 0.25 s"
    with pytest.raises(ConfigError, match=said):
        profile(made.trace(), between=(0.5, 0.75))


def test_kernels_that_take_no_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="made is damaged: its kernels take no time; record again"):
        recorded((1.0, 1.0), (2.0, 2.0)).profile()


@pytest.mark.parametrize("within", [(0.5, 0.5), (2.0, 3.0)], ids=["of no time, before it", "inside"])
def test_range_of_no_time_or_inside_a_step_is_no_step(within: tuple[float, float]) -> None:
    made = recorded((2.25, 2.5), steps=[(1.0, 4.0), within]).profile()
    assert [(step.start_s, step.end_s) for step in made.steps] == [(1.0, 4.0)]
    assert not any("launched no kernel" in note for note in made.notes)


@pytest.mark.parametrize(("until_s", "ends_s"), [(2.0, 4.0), (2.25, 3.0)])
def test_step_lasts_until_its_kernels_end_if_those_before_have_ended_by_its_start(
    until_s: float, ends_s: float
) -> None:
    made = recorded((0.5, until_s), (2.5, 4.0), steps=[(0.0, 1.0), (2.0, 3.0)]).profile()
    assert made.steps[1].end_s == ends_s
