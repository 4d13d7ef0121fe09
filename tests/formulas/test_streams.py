"""The simulation of streams: what any order of tasks must obey."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.formulas.streams import Timeline

seconds = st.floats(0, 1e3)


@st.composite
def timelines(draw: Any) -> Timeline:
    line = Timeline()
    for number in range(draw(st.integers(0, 25))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        line.add(draw(st.sampled_from("abc")), str(number), draw(seconds), *after)
    return line


@given(timelines())
def test_the_makespan_lies_between_the_busiest_stream_and_all_work_in_a_row(line: Timeline) -> None:
    busiest = max(map(line.busy_s, line.streams), default=0.0)
    in_a_row = sum(task.seconds for task in line.tasks)
    assert busiest * (1 - 1e-12) <= line.makespan_s <= in_a_row * (1 + 1e-12)


@given(timelines())
def test_a_stream_does_one_thing_at_a_time_in_order_and_what_is_awaited_has_ended(line: Timeline) -> None:
    ends: dict[str, float] = {}
    for number, task in enumerate(line.tasks):
        assert line.starts_s[number] >= max([ends.get(task.stream, 0.0), *(line.ends_s[i] for i in task.after)])
        assert line.ends_s[number] == line.starts_s[number] + task.seconds
        ends[task.stream] = line.ends_s[number]


@given(timelines(), seconds)
def test_no_task_begins_later_than_it_must(line: Timeline, more: float) -> None:
    """Each starts at 0 or as something ends on which it waits."""
    for number, task in enumerate(line.tasks):
        before = [line.ends_s[i] for i in range(number) if line.tasks[i].stream == task.stream or i in task.after]
        assert line.starts_s[number] == max(before, default=0.0)


@pytest.mark.parametrize("call", [("a", "late", -1.0), ("a", "late", float("nan")), ("a", "late", 1.0, 1)])
def test_a_task_that_cannot_be_is_refused(call: tuple[Any, ...]) -> None:
    line = Timeline()
    line.add("a", "first", 1.0)
    with pytest.raises(ValueError, match=r"task late must take 0 s or more, got .*, after earlier tasks, got "):
        line.add(*call)
