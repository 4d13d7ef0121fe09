"""The best bucket size: the closed form against the schedule that it stands for, and its optimum against a search."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import PRESETS
from cs_systems.formulas.bucket_size import (
    Link,
    best_count,
    best_size_bytes,
    buckets_of,
    exposed_of_equal_s,
    exposed_s,
    parameter_sizes,
)
from cs_systems.formulas.cost import parameter_count

starts = st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
links = st.builds(Link, st.floats(1e-6, 1e-3), st.floats(1e9, 1e12), starts)
gradients = st.floats(1e6, 1e11)
backwards = st.floats(1e-3, 1.0)


@given(st.integers(1, 60), gradients, backwards, links)
def test_the_closed_form_is_the_schedule_of_equal_buckets(
    count: int, size: float, backward_s: float, link: Link
) -> None:
    schedule = exposed_s([size / count] * count, backward_s, link)
    assert exposed_of_equal_s(count, size, backward_s, link) == pytest.approx(schedule, rel=1e-6, abs=1e-9)


@given(gradients, backwards, links, st.floats(1, 1e5))
def test_no_other_number_of_buckets_exposes_less(size: float, backward_s: float, link: Link, other: float) -> None:
    best = exposed_of_equal_s(best_count(size, backward_s, link), size, backward_s, link)
    assert best <= exposed_of_equal_s(other, size, backward_s, link) + 1e-9


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), backwards, links)
def test_something_is_always_exposed(buckets: list[int], backward_s: float, link: Link) -> None:
    """At least the last bucket, at most everything."""
    exposed = exposed_s(buckets, backward_s, link)
    assert link.time_s(buckets[-1]) <= exposed * (1 + 1e-6) + 1e-9
    started_s = len(buckets) * link.start_s
    assert exposed <= (sum(map(link.time_s, buckets)) + started_s) * (1 + 1e-6) + 1e-9


def test_a_link_that_keeps_up_takes_as_many_buckets_as_it_has_time_for() -> None:
    """10 GB in 100 ms of backward, of which 40 ms are transfer: 60 ms of rest are 2,000 latencies of 30 µs."""
    link = Link(30e-6, 250e9)
    assert best_count(10e9, 0.1, link) == pytest.approx(2000)
    assert best_size_bytes(10e9, 0.1, link) == pytest.approx(5e6)


def test_a_link_that_does_not_keep_up_balances_latency_against_the_first_bucket() -> None:
    link = Link(1e-4, 10e9)
    assert best_count(10e9, 0.01, link) == pytest.approx(math.sqrt(0.01 / 1e-4))


def test_a_host_that_binds_balances_the_last_bucket_against_starting_one_more() -> None:
    """1.7 GB over 293 GB/s and 50 µs for each start, as on two H200s at medium: 11 buckets, not thousands."""
    link = Link(12e-6, 293e9, 50e-6)
    assert best_count(1.7e9, 0.055, link) == pytest.approx(math.sqrt(1.7e9 / 293e9 / 50e-6))
    assert best_count(1.7e9, 0.055, Link(12e-6, 293e9)) > 4000


@pytest.mark.parametrize("size", ["tiny", "medium", "2.7B"])
def test_the_parameters_are_those_of_the_model(size: str) -> None:
    assert sum(parameter_sizes(PRESETS[size])) == 4 * parameter_count(PRESETS[size])


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(1, 5000))
def test_buckets_hold_all_and_only_the_last_is_below_the_size(sizes: list[int], limit: float) -> None:
    buckets = buckets_of(sizes, limit)
    assert sum(buckets) == sum(sizes)
    assert all(bucket >= limit for bucket in buckets[:-1])


def test_buckets_are_those_of_the_strategy() -> None:
    torch = pytest.importorskip("torch")
    from cs_systems.model import BasicTransformerLM
    from cs_systems.parallel._data_parallel import by_size

    with torch.device("meta"):
        model = BasicTransformerLM(PRESETS["tiny"])
    assert parameter_sizes(PRESETS["tiny"]) == [p.nbytes for p in model.parameters()]
    for limit in (1, 20_000, 1e9):
        real = [sum(p.nbytes for p in bucket) for bucket in by_size(list(model.parameters()), limit)]
        assert buckets_of(parameter_sizes(PRESETS["tiny"]), limit) == real
