"""Distribution of a program over ranks, from the names in a trace made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.analysis.attribution.distribution import DDP, FSDP, SEARCH, Distribution, distribution
from cs_systems.readers.forms.jobs import Job
from tests.analysis.attribution.made import PRODUCT, Made

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
BEGINS = (1.0, 11.0)
FUNCTIONS = "/usr/lib/python3/site-packages/torch/nn/parallel/distributed.py"


def ranked(*ranges: tuple[str, float, float], reduces: bool = True, world_size: int = 2, **known: Any) -> Any:
    """Return the distribution of two steps of 10 s with these ranges, functions and operators in each."""
    made = Made()
    for begin in BEGINS:
        made.range("step", begin, begin + 10)
        made.kernel(PRODUCT, begin + 1, begin + 4)
        if reduces:
            made.kernel(REDUCE, begin + 3, begin + 5, stream=20)
        for kind, of_kind in (("range", ranges), ("function", known.get("functions", ())),
                              ("operator", known.get("operators", ()))):  # fmt: skip
            for name, start, end in of_kind:
                getattr(made, kind)(name, begin + start, begin + end)
    return distribution(made.profile("step", job=Job(world_size=world_size)))


def test_program_on_one_rank_or_without_collectives_is_not_distributed() -> None:
    assert ranked(world_size=1) is None
    assert ranked(reduces=False) is None
    found: Distribution = ranked()
    assert (found.world_size, found.wrapper, found.has_backward, found.steps) == (2, "", False, 2)
    assert (found.searches, found.search_s, found.passes, found.updates, found.early) == (0, 0.0, 0, 0, ())
    assert [call.name for call in found.calls] == ["all_reduce"] * 2
    assert found.exposed_s(found.calls) == 1.0
    assert found.exposed_s(()) == 0.0


@pytest.mark.parametrize(
    ("known", "wrapper", "has_backward"),
    [
        ({"ranges": [("backward", 5.0, 6.0)]}, "", True),
        ({"operators": [("autograd::engine::evaluate_function: MulBackward0", 5.0, 6.0)]}, "", True),
        ({"operators": [("aten::mm", 1.0, 2.0), ("MmBackward0", 3.0, 3.5)]}, "", True),
        ({"operators": [("aten::mm", 1.0, 2.0)]}, "", False),
        ({"ranges": [("DistributedDataParallel.forward", 1.0, 2.0)]}, DDP, False),
        ({"operators": [("FSDP::all_gather", 1.0, 2.0)]}, FSDP, False),
    ],
)
def test_wrapper_and_backward_are_found_by_names(known: dict[str, Any], wrapper: str, has_backward: bool) -> None:
    found = ranked(*known.pop("ranges", ()), **known)
    assert (found.wrapper, found.has_backward) == (wrapper, has_backward)


def test_searches_for_unused_parameters_are_operators_of_the_steps_or_functions() -> None:
    by_operator = ranked(operators=[(SEARCH, 5.0, 5.5), ("aten::mm", 6.0, 7.0)])
    assert (by_operator.searches, by_operator.search_s) == (2, 0.5)
    functions = [(f"{FUNCTIONS}(9): _find_tensors", 5.0, 5.5), (f"{FUNCTIONS}(5): other", 6.0, 7.0)]
    functions += [("<built-in method prepare_for_backward of Reducer>", 5.5, 5.75), ("a: _find_tensors", 12.0, 13.0)]
    by_function = ranked(functions=functions)
    assert (by_function.searches, by_function.search_s) == (2 + 1, (2 * 0.75 + 1.0) / 2)
    assert ranked(functions=functions[2:3]).search_s == 0, "without a search it only prepares"


def test_passes_and_updates_are_counted_and_early_reductions_found() -> None:
    forward, update = ("DistributedDataParallel.forward", 0.5, 1.0), ("Optimizer.step#SGD.step", 8.0, 9.0)
    again = ("DistributedDataParallel.forward", 6.0, 7.0)
    found = ranked(forward, again, update)
    assert (found.passes, found.updates) == (4, 2)
    assert [call.launched_s for call in found.early] == [4.0, 14.0]
    assert ranked(forward, again).early == ()
    assert ranked(forward, update).early == ()
