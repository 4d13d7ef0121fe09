"""Tests of a trace's common form: open intervals over time, and distinct rows of columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.readers.forms.columns import Timeline, distinct, timelines

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=12)


def timeline(spans: list[tuple[int, int]]) -> Timeline[int]:
    start, end = np.array(spans, float).reshape(-1, 2).T
    return Timeline(start, end, range(len(spans)))


@given(SPANS, st.integers(-1, 41))
def test_timeline_gives_open_intervals(spans: list[tuple[int, int]], time: int) -> None:
    """Intervals need not nest; a time belongs to an interval that begins at it, not to one that ends at it."""
    is_open = timeline(spans).at(time)
    assert set(is_open) == {n for n, (start, end) in enumerate(spans) if start <= time < end}
    assert [spans[n][0] for n in is_open] == sorted(spans[n][0] for n in is_open)


def test_enclosing_interval_comes_first() -> None:
    line = timeline([(0, 4), (0, 10), (1, 3), (4, 10)])
    assert line.at(2) == (1, 0, 2)
    assert line.at(4) == (1, 3)


def test_equal_values_can_be_open_twice() -> None:
    """The end of one of two equal values closes that one only."""
    line = Timeline(np.array([0.0, 1.0, 2.0]), np.array([10.0, 9.0, 3.0]), ["a", "b", "a"])
    assert [line.at(time) for time in (2.5, 3.5)] == [("a", "b", "a"), ("a", "b")]


def test_each_thread_has_its_own_timeline() -> None:
    lines = timelines(np.array([1, 2]), np.array([0.0, 0.0]), np.array([10.0, 10.0]), ["a", "b"])
    assert {thread: line.at(5) for thread, line in lines.items()} == {1: ("a",), 2: ("b",)}


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-(2**62), 2**62)), min_size=1, max_size=30))
def test_distinct_gives_first_index_and_codes(rows: list[tuple[int, int]]) -> None:
    first, codes = distinct(*np.array(rows, np.int64).T)
    assert [rows[i] for i in first[codes]] == rows
    assert len(first) == len(set(rows))
    assert all(rows.index(rows[i]) == i for i in first.tolist())


def test_distinct_handles_hash_collisions() -> None:
    a, b = (int(w) for w in np.random.default_rng(0).integers(1, 2**62, 2, dtype=np.int64) * 2 + 1)
    first, codes = distinct(np.array([0, b]), np.array([0, -a]))  # 0 × a + 0 × b = b × a − a × b
    assert (len(first), len(set(codes.tolist()))) == (2, 2)
