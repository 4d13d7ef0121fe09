"""View of the recorded steps: it has each of their kernels once, with its time and place, as the tables have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from cs_systems.analysis.attribution import timeline
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import TABLES
from cs_systems.analysis.attribution.timeline import median_step, results, view
from cs_systems.readers import read
from cs_systems.readers.forms.columns import UNKNOWN, Range
from cs_systems.readers.forms.modules import Modules
from tests.analysis.attribution.made import Made
from tests.recorded import AUTOGRAD, MAIN


@pytest.fixture(params=["nsys", "kineto"])
def seen(request: pytest.FixtureRequest, nsys_profile: Profile, kineto_profile: Profile) -> Profile:
    return {"nsys": nsys_profile, "kineto": kineto_profile}[request.param]


def test_view_shows_step_of_median_wall_time(seen: Profile) -> None:
    walls = [step.end_s - step.start_s for step in seen.steps]
    assert walls[median_step(seen)] == median(walls)
    assert view(seen)["step"]["wall_ns"] == pytest.approx(median(walls) * 1e9, abs=1)


def test_each_kernel_of_the_steps_is_in_one_stream(seen: Profile) -> None:
    made = view(seen)
    rows = TABLES["steps"](seen)
    assert [step["kernels"] for step in made["steps"]] == [row["kernels"] for row in rows] == [238] * 3
    assert sum(len(stream["start"]) for stream in made["streams"]) == 3 * 238
    assert made["step"] in made["steps"]
    time_ns = sum(sum(stream["duration"]) for stream in made["streams"])
    assert time_ns == pytest.approx(sum(row["kernel_s"] for row in rows) * 1e9, rel=1e-4)
    for stream in made["streams"]:
        assert len({len(column) for column in stream.values() if isinstance(column, list)}) == 1
        assert stream["start"] == sorted(stream["start"])
        assert stream["start"][-1] + stream["duration"][-1] <= made["end_ns"]


def test_view_times_match_the_tables(nsys_profile: Profile) -> None:
    """The tables are means over the steps that the view has: each share agrees."""
    made = view(nsys_profile)
    (stream,) = made["streams"]
    names, functions = made["names"], made["functions"]
    families = [made["families"][names["family"][n]] for n in functions["name"]]
    for table, column, names in (
        ("phases", "phase", [made["places"]["phase"][p] for p in stream["place"]]),
        ("layers", "layer", [made["places"]["layer"][p] for p in stream["place"]]),
        ("families", "family", [families[f] for f in stream["function"]]),
    ):
        times: Counter[str] = Counter()
        for name, duration in zip(names, stream["duration"], strict=True):
            times[name] += duration
        rows = [row for row in TABLES[table](nsys_profile) if table != "phases" or row["family"] == "all"]
        assert {row[column] for row in rows} == set(times)
        for row in rows:
            assert times[row[column]] / times.total() == pytest.approx(row["share"], abs=1e-4)


def test_view_has_ranges_copies_and_calls_of_the_steps(nsys_profile: Profile) -> None:
    made = view(nsys_profile)
    (thread,) = made["threads"]
    counts = Counter(made["ranges"]["name"][r] for r in thread["range"])
    assert thread["main"]
    assert counts == {
        **dict.fromkeys(("step", "forward", "backward", "optimizer", *(f"block {i}" for i in range(4))), 3),
        **dict.fromkeys(("attention", "scores", "softmax", "value", "ffn"), 12),
    }
    assert [c["name"] for c in made["calls"]] == [["cudaDeviceSynchronize_v3020"] * 3]
    assert [len(copies["start"]) for copies in made["copies"]] == [24]
    assert {*made["ranges"]["phase"]} == {None, "forward", "backward", "optimizer"}


def test_view_shows_all_operators_or_the_longest_if_too_many(
    kineto_path: Path, kineto_events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = profile(read(kineto_path))
    made = view(seen)
    written = [event for event in kineto_events if event.get("cat") == "cpu_op"]
    drawn = sum(len(lane["start"]) for lane in made["operators"])
    assert 0.95 * len(written) < drawn <= len(written)  # some run before or after the steps
    assert made["hidden_operators"] == 0
    assert {*made["operator_names"]} <= {event["name"] for event in written}
    monkeypatch.setattr(timeline, "MOST_OPERATORS", 100)
    few = view(seen)
    kept = [duration for lane in few["operators"] for duration in lane["duration"]]
    assert len(kept) <= 100
    assert few["hidden_operators"] == drawn - len(kept)
    assert min(kept) >= sorted(duration for lane in made["operators"] for duration in lane["duration"])[-101]


@pytest.mark.parametrize(("most", "drawn"), [(3 * 238, [0, 1, 2]), (2 * 238, None), (100, None)])
def test_steps_next_to_the_median_are_drawn_where_there_are_too_many_kernels(
    nsys_profile: Profile, monkeypatch: pytest.MonkeyPatch, most: int, drawn: list[int] | None
) -> None:
    monkeypatch.setattr(timeline, "MOST_KERNELS", most)
    made = view(nsys_profile)
    numbers = [step["number"] for step in made["steps"]]
    assert made["step"]["number"] in numbers
    assert numbers == drawn if drawn else len(numbers) == max(most // 238, 1)
    assert sum(len(stream["start"]) for stream in made["streams"]) == 238 * len(numbers)
    assert made["steps"][0]["start_ns"] == 0


def test_view_includes_graphs_late_kernels_and_other_threads(export: Callable[..., Path]) -> None:
    """Kernels of a graph share one launch.

    A kernel that ends after its step belongs to the step. An unknown launch stays unknown.
    """
    path = export(
        ranges=[("step", 0, 1000, MAIN), ("backward", 300, 900, MAIN), ("block 1", 400, 600, AUTOGRAD)],
        launches=[(100, 110, MAIN, 1), (450, 460, AUTOGRAD, 2)],
        kernels=[
            *(("gemm", 200 + 100 * n, 300 + 100 * n, 1, 7, 4) for n in range(3)),
            ("late", 900, 1500, 2),
            ("lost", 800, 850, 99),
        ],
    )
    made = view(profile(read(path)))
    (stream,) = made["streams"]
    names = [made["names"]["name"][made["functions"]["name"][f]] for f in stream["function"]]
    assert names == ["gemm", "gemm", "gemm", "lost", "late"]
    assert stream["launch"] == [100, 100, 100, None, 450]
    assert stream["launching"] == [10, 10, 10, None, 10]
    assert stream["thread"] == [0, 0, 0, None, 1]  # the main thread is the first
    assert stream["graph"] == [1, 1, 1, 0, 0]
    assert [made["places"]["layer"][p] for p in stream["place"]][-1] == "block 1"
    step = made["step"]
    assert (step["graph_kernels"], step["graph_launches"], step["end_ns"]) == (3, 1, 1500)
    assert (step["no_phase_ns"], step["no_layer_ns"]) == (350, 350)
    assert [(thread["main"], len(thread["range"])) for thread in made["threads"]] == [(True, 2), (False, 1)]


def test_results_have_every_table_with_notes(nsys_profile: Profile) -> None:
    made = results(nsys_profile)
    assert set(made) == {*TABLES, "notes"}
    assert {"table": "layers", "note": nsys_profile.coverage} in made["notes"]


def test_main_thread_comes_first_and_launches_may_take_no_time() -> None:
    made = Made()
    made.ranges.append(Range("loader", 0.0, 2.0, AUTOGRAD))
    made.range("step", 0.0, 1.0)
    made.range("forward", 0.375, 0.75)
    made.kernel("gemm", 0.5, 0.75, launching_s=0.0, stream=UNKNOWN)
    shown = view(made.profile("step"))
    assert [lane["main"] for lane in shown["threads"]] == [True, False]
    assert [(one["stream"], one["launching"]) for one in shown["streams"]] == [(None, [0])]


def test_range_that_is_no_module_has_the_layer_of_its_name() -> None:
    made = Made()
    for name in ("step", "layers.0", "block 1"):
        made.range(name, 0.0, 1.0)
    made.kernel("gemm", 0.5, 0.75)
    row = {"path": "layers.0", "class": "Block", "range": "layers.0", "layer": "block 0", "part": None}
    shown = view(made.profile("step", modules=Modules([row])))["ranges"]
    layers = dict(zip(shown["name"], shown["layer"], strict=True))
    assert layers == {"step": None, "layers.0": "block 0", "block 1": "block 1"}
