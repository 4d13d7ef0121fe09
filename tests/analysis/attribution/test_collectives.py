"""Collectives of one rank's steps, and what it computed meanwhile, in traces made by hand."""

from __future__ import annotations

import pytest

from cs_systems.analysis.attribution.collectives import COPIES, collectives, computing, computing_by_phase
from tests.analysis.attribution.made import ADD, PRODUCT, Made

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def two_steps(name: str = "step") -> Made:
    """Return steps of 10 s: forward and backward compute a product and a sum each, and an all-reduce runs from 5 on."""
    made = Made()
    for number, begin in enumerate((10.0, 20.0)):
        made.range(name.format(number), begin, begin + 10)
        for phase, start in (("forward", begin), ("backward", begin + 4)):
            made.range(phase, start, start + 4)
            made.kernel(PRODUCT, start, start + 1.5)
            made.kernel(ADD, start + 1.75, start + 2.0)
        made.kernel(REDUCE, begin + 5, begin + 7.5, begin + 4.5, stream=20)
        made.copy("DtoH pageable", begin + 7.25, begin + 9)
        made.kernel(PRODUCT, begin + 8.5, begin + 9.5)  # of no phase
    return made


NAMED = "ProfilerStep#{}"


@pytest.mark.parametrize(("name", "steps"), [("step", [0, 1]), (NAMED, ["ProfilerStep#0", "ProfilerStep#1"])])
def test_collectives_have_their_step_and_what_ran_beside_them(name: str, steps: list[str | int]) -> None:
    found = list(collectives(two_steps(name).profile(None if name == NAMED else name)))
    assert [one.step for one in found] == steps
    for one, begin in zip(found, (10.0, 20.0), strict=True):
        assert (one.name, one.group, one.ranks, one.sequence, one.size_bytes) == ("all_reduce", "", None, None, None)
        assert (one.start_s, one.end_s, one.launched_s) == (begin + 5, begin + 7.5, begin + 4.5)
        assert one.hidden_s == 0.5 + 0.25 + 0.25
        assert one.beside_s == {"backward matmul": 0.5, "backward elementwise": 0.25}


def test_collective_beside_unmarked_work_names_its_family_alone() -> None:
    made = Made()
    made.range("step", 0.0, 4.0)
    made.kernel(PRODUCT, 0.0, 2.0)
    made.kernel(REDUCE, 1.0, 3.0, stream=20)
    (one,) = collectives(made.profile("step"))
    assert one.beside_s == {"matmul": 1.0}


def test_time_of_computation_is_divided_by_phase_and_copies() -> None:
    profile = two_steps().profile("step")
    found = computing_by_phase(profile)
    assert {phase: intervals.length_s for phase, intervals in found.items()} == {
        "forward": 3.5, "backward": 3.5, "unattributed": 2.0, COPIES: 3.5,
    }  # fmt: skip
    assert found["backward"].start_s.tolist() == [14.0, 15.75, 24.0, 25.75]
    assert computing(profile).length_s == 2 * (1.75 + 1.75 + 2.25)
