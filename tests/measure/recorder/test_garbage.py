"""Collections of Python's garbage collector, by step."""

from __future__ import annotations

import _thread
import gc
import time

import pytest

from cs_systems.measure.recorder import garbage
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


def test_collection_outside_of_any_function_of_python_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of nothing but a function of C, which collects without a frame, as each thread may do at its end."""
    monkeypatch.setattr(garbage, "COLLECTION_S", 0.0)
    collections = Collections()
    collections.begin()
    try:
        collections.step_begins(0)
        _thread.start_new_thread(gc.collect, ())
        end_s = time.monotonic() + 10
        while (row := collections.row(1, 1.0)) is None and time.monotonic() < end_s:
            time.sleep(0.01)
    finally:
        collections.end()
    assert row is not None
    assert (row["collections"], row["place"]) == (1, None)
