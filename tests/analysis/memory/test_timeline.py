"""Data of the snapshot page: the same bytes as in the tables, also where allocations are merged into bands."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory import timeline as memory_view
from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.analysis.memory.timeline import _moments, view
from cs_systems.readers.snapshot import read
from tests.analysis.memory.caching_allocator import CachingAllocator

UNNAMED = TensorNames({}, {}, "")
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def real(snapshot_path: Path) -> Attribution:
    return attribute(replay(read(snapshot_path)))


def drawn(made: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Return (from ns, to ns, bytes, category) of all that is drawn, bands included."""
    c = made["allocations"]
    starts = list(accumulate(c["later_ns"]))
    one = [
        (start, start + duration, size, category)
        for start, duration, size, category in zip(starts, c["duration_ns"], c["bytes"], c["category"], strict=True)
    ]
    return one + [(start, end, size, category) for category, start, end, size in made["rest"]["bands"]]


def total(boxes: list[tuple[int, int, int, int]], at: int) -> int:
    return sum(size for start, end, size, _ in boxes if start <= at < end)


def test_drawn_allocations_match_the_replay(real: Attribution) -> None:
    made = view(real, UNNAMED)
    boxes = drawn(made)
    assert made["rest"] == {"allocations": 0, "bands": []}
    assert total(boxes, made["peak"]["at_ns"]) == made["peak"]["bytes"] == sum(made["peak"]["by"]) == 213_795_840
    assert max(total(boxes, start) for start, *_ in boxes) == 213_795_840
    moments = _moments(real.replay.snapshot.events)
    for event in range(0, len(moments), 50):
        assert total(boxes, moments[event]) == sum(a.bytes for a in real.replay.alive_at(event))
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize("most", [0, 20, 300])
def test_bands_never_show_less_than_allocated(real: Attribution, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(view(real, UNNAMED))
    monkeypatch.setattr(memory_view, "MOST_ALLOCATIONS", most)
    made = view(real, UNNAMED)
    boxes = drawn(made)
    assert len(made["allocations"]["bytes"]) == most
    assert made["rest"]["allocations"] == len(real.allocations) - most
    for start, *_ in whole[::10]:
        assert total(boxes, start) >= total(whole, start)
        for category in range(len(made["categories"])):
            assert total([b for b in boxes if b[3] == category], start) >= total(
                [b for b in whole if b[3] == category], start
            )
    highest = max(total(boxes, start) for start, *_ in boxes)
    assert highest <= (1.1 if most else 1.25) * 213_795_840


def test_largest_bytes_by_time_are_drawn_one_by_one(real: Attribution, monkeypatch: pytest.MonkeyPatch) -> None:
    def areas() -> list[int]:
        return sorted(((end - start) * size for start, end, size, _ in drawn(view(real, UNNAMED) | {"rest": none})))

    none: dict[str, Any] = {"bands": []}
    whole = areas()
    monkeypatch.setattr(memory_view, "MOST_ALLOCATIONS", 81)
    assert areas() == whole[-81:]


def test_event_times_are_distinct_and_increasing(write_snapshot: Write) -> None:
    times = [10, 10, 10, 9, 11, 11, 40]
    events = [{"action": "alloc", "addr": n * 512, "size": 1, "time_us": t} for n, t in enumerate(times)]
    moments = _moments(read(write_snapshot({"device_traces": [events]})).events)
    assert list(moments) == [0, 250, 500, 750, 1000, 1500, 30_000]
    crowd = [{"action": "alloc", "addr": n * 512, "size": 1, "time_us": 7 + n // 3000} for n in range(6000)]
    moments = _moments(read(write_snapshot({"device_traces": [crowd]})).events)
    assert all(b > a for a, b in pairwise(moments))


def test_without_clock_each_event_takes_one_microsecond(write_snapshot: Write) -> None:
    events = [{"action": "alloc", "addr": n * 512, "size": 1} for n in range(3)]
    found = attribute(replay(read(write_snapshot({"device_traces": [events]}))))
    made = view(found, UNNAMED)
    assert (made["timed"], made["end_ns"], made["allocations"]["later_ns"]) == (False, 3000, [0, 1000, 1000])


def test_segments_have_category_and_name_of_blocks(tmp_path: Path) -> None:
    allocator = CachingAllocator(recording=True)
    native = {"filename": "??", "line": 0, "name": "at::empty"}
    allocator.alloc(1024, (native, {"filename": "m.py", "line": 3, "name": "forward"}))
    waiting = allocator.alloc(512)
    allocator.request_free(waiting)
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    made = view(attribute(replay(read(path))), UNNAMED)
    (segment,) = made["segments"]
    assert segment["size"] == [1024, 512, 2 * 2**20 - 1536]
    assert [made["categories"][c] if c >= 0 else None for c in segment["category"]] == ["activations", None, None]
    assert segment["pending"] == [1]
    assert [made["frames"][f] for f in made["stacks"][segment["stack"][0]]] == ["m.py:3 forward"]
