"""Tests of the best bucket size: the closed form against the simulated schedule and against other bucket counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import PRESETS
from cs_systems.formulas.cost import parameter_count
from scripts.studies._bucket_size import (
    Link,
    best_count,
    best_size_bytes,
    buckets_of,
    exposed_of_equal_s,
    exposed_s,
    parameter_sizes,
)

starts = st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
links = st.builds(Link, st.floats(1e-6, 1e-3), st.floats(1e9, 1e12), starts)
gradients = st.floats(1e6, 1e11)
backwards = st.floats(1e-3, 1.0)


@given(st.integers(1, 60), gradients, backwards, links)
def test_closed_form_matches_schedule_of_equal_buckets(count: int, size: float, backward_s: float, link: Link) -> None:
    schedule = exposed_s([size / count] * count, backward_s, link)
    assert exposed_of_equal_s(count, size, backward_s, link) == pytest.approx(schedule, rel=1e-6, abs=1e-9)


@given(gradients, backwards, links, st.floats(1, 1e5))
def test_best_bucket_count_has_least_exposed_time(size: float, backward_s: float, link: Link, other: float) -> None:
    best = exposed_of_equal_s(best_count(size, backward_s, link), size, backward_s, link)
    assert best <= exposed_of_equal_s(other, size, backward_s, link) + 1e-9


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), backwards, links)
def test_exposed_time_is_between_last_bucket_and_all_buckets(buckets: list[int], backward_s: float, link: Link) -> None:
    exposed = exposed_s(buckets, backward_s, link)
    assert link.time_s(buckets[-1]) <= exposed * (1 + 1e-6) + 1e-9
    started_s = len(buckets) * link.start_s
    assert exposed <= (sum(map(link.time_s, buckets)) + started_s) * (1 + 1e-6) + 1e-9


def test_best_count_of_fast_link_fills_backward_with_latencies() -> None:
    """10 GB take 40 ms of a backward of 100 ms; the other 60 ms hold 2,000 latencies of 30 µs."""
    link = Link(30e-6, 250e9)
    assert best_count(10e9, 0.1, link) == pytest.approx(2000)
    assert best_size_bytes(10e9, 0.1, link) == pytest.approx(5e6)


def test_best_count_of_slow_link_balances_latency_and_first_bucket() -> None:
    link = Link(1e-4, 10e9)
    assert best_count(10e9, 0.01, link) == pytest.approx(math.sqrt(0.01 / 1e-4))


def test_best_count_with_host_launch_cost_balances_starts_and_last_bucket() -> None:
    """Use 1.7 GB, 293 GB/s and 50 µs a start, as on two H200s at medium: 11 buckets are best, not thousands."""
    link = Link(12e-6, 293e9, 50e-6)
    assert best_count(1.7e9, 0.055, link) == pytest.approx(math.sqrt(1.7e9 / 293e9 / 50e-6))
    assert best_count(1.7e9, 0.055, Link(12e-6, 293e9)) > 4000


@pytest.mark.parametrize("size", ["tiny", "medium", "2.7B"])
def test_parameter_sizes_sum_to_model_parameters(size: str) -> None:
    assert sum(parameter_sizes(PRESETS[size])) == 4 * parameter_count(PRESETS[size])


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(1, 5000))
def test_buckets_hold_every_parameter_and_reach_limit_except_last(sizes: list[int], limit: float) -> None:
    buckets = buckets_of(sizes, limit)
    assert sum(buckets) == sum(sizes)
    assert all(bucket >= limit for bucket in buckets[:-1])


def test_buckets_match_ddp_bucketed() -> None:
    torch = pytest.importorskip("torch")
    from cs_systems.model import BasicTransformerLM
    from cs_systems.model.parallel._data_parallel import by_size

    with torch.device("meta"):
        model = BasicTransformerLM(PRESETS["tiny"])
    assert parameter_sizes(PRESETS["tiny"]) == [p.nbytes for p in model.parameters()]
    for limit in (1, 20_000, 1e9):
        real = [sum(p.nbytes for p in bucket) for bucket in by_size(list(model.parameters()), limit)]
        assert buckets_of(parameter_sizes(PRESETS["tiny"]), limit) == real
