"""The plain form of a recording: what is open when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cs_systems.analysis.trace import Range, Timeline, timelines

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (min(s), max(s))), max_size=12)


def ranges(spans: list[tuple[int, int]]) -> list[Range]:
    return [Range(f"r{number}", start, end, 1, 7) for number, (start, end) in enumerate(spans)]


@given(SPANS, st.integers(-1, 41))
def test_a_timeline_says_what_is_open(spans: list[tuple[int, int]], time: int) -> None:
    """Whether the intervals nest or not; a time belongs to what begins at it, not to what ends."""
    made = ranges(spans)
    assert set(Timeline(made).at(time)) == {r for r in made if r.start_s <= time < r.end_s}


def test_what_encloses_comes_first() -> None:
    made = ranges([(0, 4), (0, 10), (1, 3), (4, 10)])
    assert [r.name for r in Timeline(made).at(2)] == ["r1", "r0", "r2"]
    assert [r.name for r in Timeline(made).at(4)] == ["r1", "r3"]


def test_threads_have_timelines_of_their_own() -> None:
    made = [Range("a", 0, 10, 1, 7), Range("b", 0, 10, 2, 7)]
    assert {thread: [r.name for r in line.at(5)] for thread, line in timelines(made).items()} == {1: ["a"], 2: ["b"]}
