"""Work of one rank from a made trace: its kernels, its waits for a batch, and the Python of its host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.comparison.rank_work import INPUT, KERNELS, PYTHON, Work, _named, _waits, _without, works
from cs_systems.readers.forms.columns import Range
from cs_systems.readers.forms.operators import Operators
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import MAIN, PRODUCT, Made


def traced(*operators: tuple[float, float], waits: str = "", thread: int = MAIN) -> dict[tuple[str, str], Work]:
    """Return the work in a step of 4 s with a kernel, operators of one thread, and a wait for a batch in its second."""
    made = Made()
    made.kernel(PRODUCT, 0.0, 0.25, launching_s=0.25, grid=None)
    for start_s, end_s in operators:
        made.operator("aten::add", start_s, end_s)
    if waits:
        made.range(waits, 1.0, 2.0)
    profile = replace(made.profile(), steps=(Step("step", 0.0, 4.0),))
    if (found := profile.trace.operators) is not None:
        of_thread = Operators(found.signature, found.start_s, found.end_s, np.full(len(found), thread))
        profile = replace(profile, trace=replace(profile.trace, operators=of_thread))
    return dict(works(profile)[0])


def test_kernel_of_unknown_grid_has_no_known_size() -> None:
    assert traced()[KERNELS, "matmul"] == Work(0.25, 1.0, 0.0)


@pytest.mark.parametrize("waits", ["input", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"])
def test_waits_for_a_batch_are_no_python(waits: str) -> None:
    found = traced(waits=waits)
    assert (found[INPUT, ""], found[PYTHON, ""]) == ((1.0, 1.0, 0.0), (2.75, 0.0, 0.0))


@pytest.mark.parametrize(("thread", "python_s"), [(MAIN, 2.75), (2, 3.75)])
def test_operators_of_the_launching_thread_are_no_python(thread: int, python_s: float) -> None:
    assert traced((2.0, 3.0), thread=thread)[PYTHON, ""] == Work(python_s)


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ("cudaDeviceSynchronize", True),
        ("cudaMemcpyAsync", True),
        ("cudaMalloc", False),
        ("cudaLaunchKernel", False),
    ],
)
def test_synchronisations_and_copies_may_wait_for_the_device(call: str, waits: bool) -> None:
    assert _waits(call) is waits


def test_intervals_without_holes_are_what_is_left() -> None:
    left = _without(union(np.array([0.0, 4.0]), np.array([2.0, 6.0])), union(np.array([1.0]), np.array([5.0])))
    assert (left.start_s.tolist(), left.end_s.tolist()) == ([0.0, 5.0], [1.0, 6.0])


@pytest.mark.parametrize(("thread", "name"), [(MAIN, "main"), (2, "helper"), (9, "helper")])
def test_python_is_named_by_the_range_in_its_middle_of_its_or_the_busiest_thread(thread: int, name: str) -> None:
    made = Made()
    made.range("main", 0.0, 4.0)
    made.ranges += [Range(each, start_s, 4.0, 2) for each, start_s in (("outer", 0.0), ("helper", 2.5))]
    found = list(_named(made.trace(), thread, union(np.array([2.0]), np.array([3.5]))))
    assert found == [(name, 1.5)]
