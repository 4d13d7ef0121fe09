"""Device memory by range: events of nsys, attributed to the ranges of the threads that allocated."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.memory_ranges import memory_ranges
from cs_systems.config import ConfigError
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Allocations
from tests.analysis.attribution.made import MAIN as MADE
from tests.analysis.attribution.made import Made
from tests.recorded import AUTOGRAD, MAIN

Export = Callable[..., Path]
# As `nsys export --lazy=false` makes it (2022.4 to 2024.2), without the columns that are not read.
TABLE = """CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS
    (start INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
     address INTEGER NOT NULL, pc INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER NOT NULL,
     memoryOperationType INTEGER NOT NULL, name TEXT, correlationId INTEGER)"""
TOOK, FREED = 0, 1
DEVICE, PINNED = 2, 1
RANGES = [
    ("step", 100, 900, MAIN),
    ("forward", 110, 300, MAIN),
    ("block 0", 120, 200, MAIN),
    ("block 1", 200, 290, MAIN),
    ("backward", 400, 600, MAIN),
    ("block 1", 410, 500, AUTOGRAD),
    ("block 0", 500, 590, AUTOGRAD),
]


def with_events(path: Path, events: Iterable[Sequence[Any]], pid: int = 7) -> Path:
    """Write rows (time, thread, address, bytes, operation, kind) into the table, each with the call that made it."""
    database = sqlite3.connect(path)
    database.execute(TABLE)
    for i, (time, thread, address, size, operation, kind) in enumerate(events):
        row = (time, pid << 24, 0, 1, address, 0, size, kind, operation, None, 1000 + i)
        database.execute("INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        call = (time - 2, time + 2, thread, 1000 + i, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
    database.commit()
    database.close()
    return path


def test_memory_calls_belong_to_ranges_of_their_thread(export: Export) -> None:
    events = [
        (50, MAIN, 1, 1000, TOOK, DEVICE),  # before the step
        (130, MAIN, 2, 64, TOOK, DEVICE),
        (140, MAIN, 3, 36, TOOK, DEVICE),
        (150, MAIN, 3, 36, FREED, DEVICE),
        (160, MAIN, 9, 5000, TOOK, PINNED),  # host memory
        (210, MAIN, 4, 128, TOOK, DEVICE),
        (420, AUTOGRAD, 5, 32, TOOK, DEVICE),
        (430, AUTOGRAD, 4, 0, FREED, DEVICE),  # only the allocation has the size
        (510, AUTOGRAD, 2, 64, FREED, DEVICE),
        (950, MAIN, 5, 32, FREED, DEVICE),  # after the step
    ]
    rows = memory_ranges(read(with_events(export(ranges=RANGES), reversed(events))))
    assert [(row["phase"], row["layer"], row["change_bytes"], row["most_bytes"]) for row in rows] == [
        ("forward", "block 0", 64, 100),
        ("forward", "block 1", 128, 192),
        ("backward", "block 1", 32 - 128, 224),
        ("backward", "block 0", -64, 32),
    ]
    assert (rows[0]["allocations"], rows[0]["allocated_bytes"], rows[0]["freed_bytes"]) == (2, 100, 36)


def test_two_steps_give_mean_bytes_and_the_maximum(export: Export) -> None:
    ranges = [
        ("step", 100, 200, MAIN),
        ("forward", 110, 190, MAIN),
        ("step", 300, 400, MAIN),
        ("forward", 310, 390, MAIN),
    ]
    events = [(120, MAIN, 1, 64, TOOK, DEVICE), (320, MAIN, 2, 128, TOOK, DEVICE)]
    (row,) = memory_ranges(read(with_events(export(ranges=ranges), events)))
    assert (row["allocations"], row["allocated_bytes"], row["most_bytes"]) == (1, 96, 128)


def test_calls_of_another_process_or_outside_steps_give_no_row(export: Export) -> None:
    path = with_events(export(ranges=RANGES), [(130, MAIN, 2, 64, TOOK, DEVICE)], pid=8)
    assert memory_ranges(read(path)) == []


def test_trace_without_memory_events_names_the_option(export: Export) -> None:
    with pytest.raises(ConfigError, match=r"has no memory events; record with nsys and --cuda-memory-usage=true"):
        memory_ranges(read(export()))


def test_single_bytes_are_counted_and_requests_for_none_are_not() -> None:
    made = Made()
    made.range("step", 1.0, 2.0)
    changes = Allocations(np.array([1.25, 1.5, 1.75]), np.full(3, MADE), np.array([1, 0, -1]))
    (row,) = memory_ranges(made.trace(allocations=changes))
    assert (row["allocations"], row["allocated_bytes"], row["freed_bytes"], row["change_bytes"]) == (1, 1, 1, 0)
