"""Limits of what is found in a trace, tried on both sides by times that floats hold exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cs_systems.analysis.attribution.distribution import _early
from cs_systems.analysis.attribution.gaps import SILENT_S, silences
from cs_systems.analysis.attribution.host_gaps import host_gap_rows
from cs_systems.analysis.attribution.inferred_phases import inferred
from cs_systems.analysis.attribution.kernel_families import scores_of_attention
from cs_systems.analysis.attribution.phase_gaps import launch_waits_s
from cs_systems.analysis.attribution.tables import Ceilings, Costs, _unsplit_backward, _whole_phases, phases
from cs_systems.analysis.attribution.timeline import _longest
from cs_systems.analysis.attribution.usual_steps import usual_steps
from cs_systems.config import Phase
from cs_systems.core.range_names import COMMUNICATION
from cs_systems.formulas.cost import PhaseCost
from cs_systems.readers.forms.columns import Range
from tests.analysis.attribution.made import ADD, PRODUCT, Made

TICK_S = 2.0**-10
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.mark.parametrize(("ticks", "accesses"), [(1, False), (2, True), (3, True)])
def test_kernel_of_a_quarter_of_the_softmax_accesses_its_scores(ticks: int, accesses: bool) -> None:
    made, at_s = Made(), 0.0
    for name, lasts in ((PRODUCT, 4), (ADD, ticks), ("softmax_warp_forward", 8), (PRODUCT, 4)):
        made.kernel(name, at_s, at_s + lasts * TICK_S)
        at_s += lasts * TICK_S
    assert scores_of_attention(made.trace().kernels).tolist() == [False, accesses, True, False]


def test_softmax_before_all_products_is_of_no_attention() -> None:
    made = Made()
    for number, name in enumerate(("softmax_warp_forward", PRODUCT, PRODUCT)):
        made.kernel(name, number, number + 0.5)
    assert not scores_of_attention(made.trace().kernels).any()


@pytest.mark.parametrize(("launched_s", "silent_s"), [(SILENT_S, []), (2 * SILENT_S, [2 * SILENT_S])])
def test_host_is_silent_if_it_makes_no_call_for_over_a_millisecond(launched_s: float, silent_s: list[float]) -> None:
    made = Made()
    made.kernel(ADD, 2 * SILENT_S, 3 * SILENT_S, launched_s)
    assert [end - start for start, end in silences(made.trace(), 0.0, launched_s)] == silent_s


@pytest.mark.parametrize(
    ("launched_s", "updates", "is_early"),
    [(0.5, [], False), (1.5, [], True), (2.5, [], False), (1.5, [1.75], False), (1.5, [0.5, 2.5], True)],
)
def test_all_reduce_is_early_between_two_passes_without_an_update(
    launched_s: float, updates: list[float], is_early: bool
) -> None:
    calls: Any = [SimpleNamespace(name=name, launched_s=launched_s) for name in ("all_reduce", "all_gather")]
    assert _early(calls, [1.0, 2.0], updates) == calls[:is_early]


def test_host_gap_has_the_outermost_operator_and_ends_without_the_profilers_time() -> None:
    made = Made()
    made.kernel(ADD, 0.0, 0.125)
    made.kernel(ADD, 0.75, 1.0)
    for name in ("aten::outer", "aten::middle", "aten::inner"):
        made.operator(name, 0.125, 0.75)
    (row,) = host_gap_rows((found := made.profile(overheads=[(0.25, 0.5)])).trace, found.gaps[0], found.steps)
    assert (row["host"], row["stretches_per_step"]) == ("aten::outer", 1)
    assert row["time_s"] == pytest.approx(0.375)


@pytest.mark.parametrize(("count", "lost_s"), [(1, 0.25), (2, 0.0)])
def test_single_step_has_a_start_up_and_two_that_end_at_once_have_none(count: int, lost_s: float) -> None:
    """The work of the second step ends before that of the first."""
    made = Made()
    made.call("cudaMalloc", 0.25, 0.5)
    for number, (start_s, end_s) in enumerate([(2.5, 3.0), (2.25, 2.5)][:count]):
        made.range("step", number, number + 1)
        made.kernel(ADD, start_s, end_s, number, stream=number)
    usual = usual_steps(made.profile())
    assert (usual.start_up_s, usual.is_once, usual.is_cold) == (lost_s, count == 1, False)


@pytest.mark.parametrize(("ticks", "is_told"), [(7, False), (8, True)])
def test_backward_of_which_half_is_in_no_layer_is_not_split(ticks: int, is_told: bool) -> None:
    made = Made()
    made.range("step", 0.0, 1.0)
    made.range("backward", 0.0, 1.0)
    made.range("layers.0", 0.0, 0.25)
    made.kernel(PRODUCT, 0.125, 0.125 + 8 * TICK_S)
    made.kernel(ADD, 0.5, 0.5 + ticks * TICK_S)
    assert bool(_unsplit_backward(made.profile())) is is_told


@pytest.mark.parametrize(("most", "drawn"), [(4, [1, 3, 2, 2]), (3, [3, 2, 2]), (2, [3]), (1, [3]), (0, [])])
def test_longest_ranges_are_drawn_none_of_several_that_last_as_long(most: int, drawn: list[int]) -> None:
    ranges = [Range("a", 1.0, 1.0 + lasts, 1) for lasts in (1, 3, 2, 2)]
    assert [one.end_s - one.start_s for one in _longest(ranges, most)] == drawn


@pytest.mark.parametrize(("name", "phase"), [(PRODUCT, Phase.FORWARD), (ADD, Phase.FORWARD), (REDUCE, COMMUNICATION)])
def test_collective_after_a_forward_kernel_is_of_forward(name: str, phase: str) -> None:
    made = Made()
    for number, kernel in enumerate((name, REDUCE, PRODUCT)):
        made.kernel(kernel, number, number + 0.5)
    made.operator("aten::mm", 0.0, 0.25)
    made.operator("MmBackward0", 2.0, 2.25)
    found = inferred(made.trace(), None)
    assert [next(of for of, own in found.items() if own[k]) for k in (1, 2)] == [phase, Phase.BACKWARD]


def test_device_waits_for_the_launches_of_a_phase_in_the_gaps_before_its_kernels() -> None:
    made = Made()
    for phase, begin in (("forward", 0.0), ("backward", 1.0005)):
        made.range(phase, begin, begin + 1)
        made.kernel(ADD, begin, begin + 1)
    made.call("cudaEventQuery", 0.9998, 0.9999)
    found = made.profile()
    waits = [launch_waits_s(found, phase) for phase in ("forward", "backward", "optimizer")]
    assert waits == [0.0, pytest.approx(0.0005), 0.0]
    made = Made()
    made.kernel(ADD, 0.0, 1.0)
    assert launch_waits_s(made.profile(), "forward") == 0.0


@pytest.mark.parametrize(("flops", "share"), [(2.0**20, 1.0), (2.0**20 + 1, None)])
def test_family_reaches_its_ceiling_and_does_not_exceed_it(flops: int, share: float | None) -> None:
    made = Made()
    made.range("forward", 0.0, 1.0)
    made.kernel(PRODUCT, 0.25, 0.5)
    cost = PhaseCost(int(flops), int(flops), 0)
    costs = Costs({("forward", "matmul"): cost}, Ceilings(2.0**22, 2.0**40))
    assert [row["ceiling_share"] for row in phases(made.profile(), costs)] == [None, share]


@pytest.mark.parametrize(("families", "brief"), [(["all", "matmul"], []), (["all", "matmul", "all"], ["all", "all"])])
def test_brief_table_of_phases_has_whole_phases_if_there_are_several(families: list[str], brief: list[str]) -> None:
    rows: Any = [{"family": family} for family in families]
    assert [row["family"] for row in _whole_phases(rows)] == brief
