"""Rows of single made histories of memory: what a table shows at its ends, and the moments of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.analysis.memory import timeline as memory_timeline
from cs_systems.analysis.memory.allocations import BEFORE, Allocation
from cs_systems.analysis.memory.categories import PARAMETERS, Attributed, Attribution, attribute
from cs_systems.analysis.memory.sites import sites
from cs_systems.analysis.memory.tables import (
    AT_END,
    AT_PEAK,
    TABLES,
    at_peak,
    devices,
    file_row,
    fragmentation,
    segments,
    tables_at,
    timeline,
)
from cs_systems.analysis.memory.tensor_names import _explains_most, parameter_shapes
from cs_systems.analysis.memory.timeline import _moments, view
from cs_systems.config import PRESETS
from cs_systems.readers.snapshot import Frame
from tests.analysis.memory.test_limits import BACKWARD, FORWARD, MIB, UNNAMED, A, B, Data, event, replayed, segment


def found_in(folder: Path, events: list[Data], *made: Data) -> Attribution:
    return attribute(replayed(folder, events, made))


def test_row_of_equal_allocations_has_their_line(tmp_path: Path) -> None:
    (row,) = at_peak(found_in(tmp_path, [event("alloc", A, 512)]), UNNAMED)
    assert (row["name"], row["where"], row["described"]) == (None, "train.py:1 main", "train.py:1 main")


def test_phase_that_begins_without_a_change_has_no_earlier_maximum(tmp_path: Path) -> None:
    events = [
        event("alloc", A, 4096, frames=FORWARD), event("free_completed", A, 4096, frames=FORWARD),
        event("segment_alloc", B, MIB, frames=BACKWARD), event("alloc", B, 512, frames=BACKWARD),
    ]  # fmt: skip
    _, backward = timeline(found_in(tmp_path, events), UNNAMED)
    assert (backward["before_bytes"], backward["peak_bytes"], backward["after_bytes"]) == (0, 512, 512)


def test_pool_whose_segments_are_full_has_no_splits(tmp_path: Path) -> None:
    (pool,) = fragmentation(found_in(tmp_path, [], segment(A, 2 * MIB, (A, 2 * MIB))), UNNAMED)
    assert (pool["inactive_splits"], pool["largest_split_bytes"], pool["free_segments_bytes"]) == (0, 0, 0)


def test_larger_of_two_segments_without_splits_comes_first(tmp_path: Path) -> None:
    rows = segments(found_in(tmp_path, [], segment(A, 2 * MIB), segment(B, 4 * MIB)), UNNAMED)
    assert [row["reserved_bytes"] for row in rows] == [4 * MIB, 2 * MIB]


def test_file_whose_peak_is_unknown_has_no_largest_category(tmp_path: Path) -> None:
    row = file_row(found_in(tmp_path, [event("alloc", A, 512)]), "a.pickle")
    assert (row["peak_bytes"], row["category"], row["category_share"]) == (None, None, None)


def test_peak_of_all_devices_is_the_first_of_equal_ones(tmp_path: Path) -> None:
    first = [event("alloc", A, 512, 10), event("free_completed", A, 512, 20), event("alloc", A, 512, 30)]
    second = [event("alloc", B, 512, 5), event("free_completed", B, 512, 40)]
    *_, whole = devices([found_in(tmp_path, events) for events in (first, second)])
    assert (whole["peak_bytes"], whole["peak_time_s"]) == (1024, pytest.approx(5e-6))


def test_peak_of_all_devices_before_the_events_has_no_time(tmp_path: Path) -> None:
    of_each = [[event("free_completed", at, 512, 10), event("alloc", at, 512, 20)] for at in (A, B)]
    *_, whole = devices([found_in(tmp_path, events) for events in of_each])
    assert (whole["peak_bytes"], whole["peak_time_s"]) == (1024, None)


def test_peak_of_devices_without_events_is_unknown(tmp_path: Path) -> None:
    *_, whole = devices([found_in(tmp_path, [], segment(at, MIB)) for at in (A, B)])
    assert (whole["peak_bytes"], whole["peak_time_s"], whole["reserved_bytes"]) == (None, None, 2 * MIB)


def test_captions_tell_the_moment_of_the_tables() -> None:
    assert tables_at(AT_PEAK) == TABLES
    assert tables_at(AT_END)["composition"].caption == "memory at the end, by category"


def test_memory_before_the_first_event_is_at_0_ns_on_the_page(tmp_path: Path) -> None:
    made = view(found_in(tmp_path, [event("free_completed", A, 1000, 10), event("alloc", B, 512, 20)]), UNNAMED)
    assert (made["highest"]["at_ns"], made["highest"]["bytes"]) == (0, 1024)
    assert made["allocations"]["unasked_bytes"] == [24, 0]


def test_thousand_events_of_a_microsecond_are_a_nanosecond_apart(tmp_path: Path) -> None:
    events = [event("alloc", A + 512 * n, 512, 7 if n < 1002 else 8) for n in range(1003)]
    assert [*_moments(replayed(tmp_path, events).snapshot.events)] == [*range(1003)]


def test_blocks_of_the_largest_segments_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_timeline, "MOST_BLOCKS", 2)
    events = [event("alloc", B, MIB, 1, frames=FORWARD)]
    made = view(found_in(tmp_path, events, segment(A, 2 * MIB, (A, MIB)), segment(B, 4 * MIB, (B, MIB))), UNNAMED)
    (shown,) = made["segments"]
    assert (shown["address"], shown["size"], made["hidden_segments"]) == (f"{B:#x}", [MIB, 3 * MIB], 1)
    assert [category if category < 0 else made["categories"][category] for category in shown["category"]] == [
        "activations", -1,
    ]  # fmt: skip


@pytest.mark.parametrize(("others", "explains"), [(1, True), (1.25, False)])
def test_preset_explains_most_if_half_of_the_parameters_have_its_sizes(others: float, explains: bool) -> None:
    (size, *_) = (4 * shape[0] * shape[-1] for shape in parameter_shapes(PRESETS["tiny"]).values())
    sizes = (size, int(size * others / 2) + 8, int(size * others / 2) - 8)
    made = [Attributed(Allocation(BEFORE, 9, A, each, each, 0), PARAMETERS, None, None) for each in sizes]
    found = Attribution(None, tuple(made), (), (), ())  # type: ignore[arg-type]
    assert _explains_most(PRESETS["tiny"], [4], found) is explains


def test_native_frame_of_no_known_library_is_named() -> None:
    assert sites([(Frame("??", 0, "c10::malloc(int)"), Frame("??", 0, "main()"))]) == ["c10::malloc"]
