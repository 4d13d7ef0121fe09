"""View of one step: it has each kernel of the step once, with its time and place, as the tables have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from cs_systems.traces.profile import Profile, profile
from cs_systems.traces.read import read
from cs_systems.traces.tables import TABLES
from cs_systems.traces.timeline import median_step, results, view
from tests.recorded import AUTOGRAD, MAIN


@pytest.fixture(params=["nsys", "kineto"])
def seen(request: pytest.FixtureRequest, nsys_profile: Profile, kineto_profile: Profile) -> Profile:
    return {"nsys": nsys_profile, "kineto": kineto_profile}[request.param]


def test_view_shows_step_of_median_wall_time(seen: Profile) -> None:
    walls = [step.end_s - step.start_s for step in seen.steps]
    assert walls[median_step(seen)] == median(walls)
    assert view(seen)["step"]["wall_ns"] == pytest.approx(median(walls) * 1e9, abs=1)


def test_each_kernel_of_the_step_is_in_one_stream(seen: Profile) -> None:
    made = view(seen)
    number = made["step"]["number"]
    (row,) = [row for row in TABLES["steps"](seen) if row["step"] == number]
    assert made["step"]["kernels"] == sum(len(s["start"]) for s in made["streams"]) == row["kernels"] == 238
    time_ns = sum(sum(stream["duration"]) for stream in made["streams"])
    assert time_ns == pytest.approx(row["kernel_s"] * 1e9, rel=1e-4)
    for stream in made["streams"]:
        assert len({len(column) for column in stream.values() if isinstance(column, list)}) == 1
        assert stream["start"] == sorted(stream["start"])
        assert stream["start"][-1] + stream["duration"][-1] <= made["step"]["end_ns"]


def test_view_times_match_the_tables(nsys_profile: Profile) -> None:
    """The tables are means over three steps, the view has one: each share agrees within a percent of the step."""
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
            assert times[row[column]] / made["step"]["kernel_ns"] == pytest.approx(row["share"], abs=0.01)


def test_view_has_ranges_copies_and_calls_of_the_step_only(nsys_profile: Profile) -> None:
    made = view(nsys_profile)
    (thread,) = made["threads"]
    counts = Counter(made["ranges"]["name"][r] for r in thread["range"])
    assert thread["main"]
    assert counts == {
        **dict.fromkeys(("step", "forward", "backward", "optimizer", *(f"block {i}" for i in range(4))), 1),
        **dict.fromkeys(("attention", "scores", "softmax", "value", "ffn"), 4),
    }
    assert [c["name"] for c in made["calls"]] == [["cudaDeviceSynchronize_v3020"]]
    assert [len(copies["start"]) for copies in made["copies"]] == [8]
    assert {*made["ranges"]["phase"]} == {None, "forward", "backward", "optimizer"}


def test_view_is_small(nsys_profile: Profile) -> None:
    text = json.dumps(view(nsys_profile), separators=(",", ":"), allow_nan=False)
    assert len(text) < 100 * 238  # names and functions included, which 10,000 kernels share


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
