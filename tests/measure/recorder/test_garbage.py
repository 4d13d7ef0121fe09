"""Collections of Python's garbage collector, by step."""

from __future__ import annotations

import gc

import pytest

from cs_systems.measure.recorder.garbage import Collections


def test_collections_after_the_last_whole_step_and_outside_of_steps_do_not_count() -> None:
    kept = [[number] for number in range(300_000)]  # they take a collection longer than those that have no place
    collections = Collections()
    collections.begin()
    try:
        for step in (0, 0, 1, None, 2):
            collections.step_begins(step)
            gc.collect()
    finally:
        collections.end()
    assert kept
    row = collections.row(2, 1.0)
    assert row is not None
    assert row["collections"] == 3
    assert row["in_steps"] == 2
    assert row["longest_s"] <= row["time_s"] < collections.total()
    assert row["is_called"]
    assert str(row["place"]).startswith("test_garbage.py:")
    assert collections.row(0, 1.0) is None
    later = collections.row(3, 1.0)
    assert later is not None
    assert later["time_s"] == pytest.approx(collections.total())
    assert Collections().row(3, 1.0) is None
