"""Tests of the stream simulation: invariants for any order of tasks."""

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
def test_makespan_is_between_busiest_stream_and_sum_of_tasks(line: Timeline) -> None:
    busiest = max(map(line.busy_s, line.streams), default=0.0)
    in_a_row = sum(task.seconds for task in line.tasks)
    assert busiest * (1 - 1e-12) <= line.makespan_s <= in_a_row * (1 + 1e-12)


@given(timelines())
def test_stream_runs_tasks_in_order_after_their_dependencies(line: Timeline) -> None:
    ends: dict[str, float] = {}
    for number, task in enumerate(line.tasks):
        assert line.starts_s[number] >= max([ends.get(task.stream, 0.0), *(line.ends_s[i] for i in task.after)])
        assert line.ends_s[number] == line.starts_s[number] + task.seconds
        ends[task.stream] = line.ends_s[number]


@given(timelines(), seconds)
def test_task_starts_as_soon_as_it_can(line: Timeline, more: float) -> None:
    """Each task starts at 0 or when the last task that it waits for ends."""
    for number, task in enumerate(line.tasks):
        before = [line.ends_s[i] for i in range(number) if line.tasks[i].stream == task.stream or i in task.after]
        assert line.starts_s[number] == max(before, default=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("a", "late", -1.0), "task late takes -1.0 s; give a duration of at least 0"),
        (("a", "late", float("nan")), "task late takes nan s; give a duration of at least 0"),
        (("a", "late", 1.0, 1), "task late waits for task 1, which does not exist; give the number that add returned"),
    ],
)
def test_invalid_task_is_rejected(call: tuple[Any, ...], message: str) -> None:
    line = Timeline()
    line.add("a", "first", 1.0)
    with pytest.raises(ValueError, match=message):
        line.add(*call)
