"""Tables, gaps and differences: real traces compared with SQL, and made ones with known results."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution import tables
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.comparison.profiles import difference, doubts
from cs_systems.config import ConfigError
from cs_systems.formulas.cost import PhaseCost
from cs_systems.readers import read
from cs_systems.readers.forms.columns import NO_RANGES
from tests.recorded import AUTOGRAD, MAIN

Export = Callable[..., Path]


def test_tables_add_up_to_kernel_time(nsys_profile: Profile, nsys_path: Path) -> None:
    database = sqlite3.connect(nsys_path)
    (total,) = database.execute("SELECT sum(end - start) * 1e-9 / 3 FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    database.close()
    for name in ("kernels", "families", "layers"):
        rows = tables.TABLES[name](nsys_profile, tables.NO_COSTS)
        assert sum(row["time_s"] for row in rows) == pytest.approx(total)
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert sum(row["calls_per_step"] for row in rows) == pytest.approx(238)
    rows = tables.phases(nsys_profile)
    for wanted in (True, False):
        assert sum(row["time_s"] for row in rows if (row["family"] == "all") is wanted) == pytest.approx(total)


def test_kernels_table_matches_the_export(nsys_profile: Profile, nsys_path: Path) -> None:
    database = sqlite3.connect(nsys_path)
    expected = database.execute(
        "SELECT value, count(*) / 3.0, sum(end - start) * 1e-9 / 3 AS time FROM CUPTI_ACTIVITY_KIND_KERNEL "
        "JOIN StringIds ON id = demangledName GROUP BY demangledName ORDER BY time DESC LIMIT 10"
    ).fetchall()
    database.close()
    rows = tables.kernels(nsys_profile)
    assert [row["kernel"] for row in rows[:10]] == [name for name, _, _ in expected]
    assert [row["time_s"] for row in rows[:10]] == pytest.approx([time for *_, time in expected])
    assert [row["calls_per_step"] for row in rows[:10]] == pytest.approx([calls for _, calls, _ in expected])
    assert (rows[0]["block"], rows[0]["registers"], rows[0]["shapes"]) == ("128×1×1", 128, 3)


def test_column_names_are_fixed(nsys_profile: Profile) -> None:
    for name, table in tables.TABLES.items():
        columns = {tuple(row) for row in table(nsys_profile, tables.NO_COSTS)}
        assert len(columns) == (name not in ("host_gaps", "cpu_updates")), name  # there are none


def test_unsplit_time_is_none_and_not_zero(nsys_profile: Profile) -> None:
    """In backward the export has only the phase's range, so a block's backward time is unknown."""
    rows = {row["layer"]: row for row in tables.layers(nsys_profile)}
    assert list(rows) == ["block 0", "block 1", "block 2", "block 3", "optimizer", "unattributed"]
    assert rows["block 0"]["backward_s"] is None
    assert rows["block 0"]["forward_s"] == pytest.approx(rows["block 0"]["time_s"])
    notes = tables.notes("layers", nsys_profile, rows.values())
    assert notes[0] == "100.0% of the kernel time belongs to a phase, and 39.2% to a layer or named module"
    assert "backward is not split by layer" in notes[1]


@pytest.mark.parametrize("name", ["phases", "layers", "parts", "attention"])
def test_attributed_tables_note_their_coverage(nsys_profile: Profile, name: str) -> None:
    rows = tables.TABLES[name](nsys_profile, tables.NO_COSTS)
    assert nsys_profile.coverage in tables.notes(name, nsys_profile, rows)


def test_attention_notes_softmax_to_matmul_ratio(nsys_profile: Profile) -> None:
    rows = tables.attention(nsys_profile)
    parts = {row["part"] for row in rows}
    assert parts == {"attention", "attention.scores", "attention.softmax", "attention.value"}
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    softmax, *_ = (row for row in rows if row["part"] == "attention.softmax")
    assert (softmax["family"], softmax["calls_per_step"]) == ("softmax", 4)
    note = (
        "forward: within attention, softmax takes 0.25 times as long as the products of scores and value; with the "
        "projections, 0.10 times"
    )
    assert note in tables.notes("attention", nsys_profile, rows)


def test_fused_attention_notes_missing_split(export: Export) -> None:
    path = export(
        ranges=[("step", 0, 1000, MAIN), ("forward", 10, 900, MAIN), ("attention", 20, 800, MAIN)],
        kernels=[("flash_fwd_kernel", 200, 300, 1)],
    )
    made = profile(read(path))
    rows = tables.attention(made)
    assert [(row["part"], row["family"]) for row in rows] == [("attention", "attention")]
    assert "a fused kernel computes scores, softmax and value together" in tables.notes("attention", made, rows)[-1]


def test_ratio_by_kernel_time_and_wall_time(nsys_profile: Profile) -> None:
    kernel, wall = tables.ratio(nsys_profile)
    assert (kernel["measure"], wall["measure"]) == ("kernel time", "wall time")
    assert kernel["backward_to_forward"] == pytest.approx(1.836, abs=0.001)
    assert wall["forward_s"] > 3 * kernel["forward_s"]  # the recorded model is launch-bound


def test_rates_are_none_without_a_cost(nsys_profile: Profile) -> None:
    unknown = tables.phases(nsys_profile)[0]
    assert [unknown[c] for c in ("flops", "achieved_flops_per_s", "achieved_bytes_per_s", "ceiling")] == [None] * 4
    cost = PhaseCost(model_flops=10**9, hardware_flops=2 * 10**9, bytes=10**6)
    costs = tables.Costs({("forward", "all"): cost}, tables.Ceilings(flops_per_s=67e12, bytes_per_s=4.8e12))
    forward, *rest = tables.phases(nsys_profile, costs)
    assert forward["achieved_flops_per_s"] == pytest.approx(2e9 / forward["time_s"])
    assert forward["achieved_bytes_per_s"] == pytest.approx(1e6 / forward["time_s"])
    assert (forward["ceiling"], forward["ceiling_share"]) == ("compute", pytest.approx(2e9 / 67e12 / forward["time_s"]))
    assert all(row["flops"] is None for row in rest)
    slow = tables.Costs({("forward", "all"): cost}, tables.Ceilings(flops_per_s=67e12, bytes_per_s=1e9))
    assert tables.phases(nsys_profile, slow)[0]["ceiling"] == "memory"


def test_family_has_no_rate_beyond_the_ceiling(nsys_profile: Profile) -> None:
    """Kernels that no rule of the families knows computed a part of these FLOPs."""

    def matmul(flops: int) -> tables.PhaseRow:
        costs = tables.Costs({("forward", "matmul"): PhaseCost(flops, flops, 10**6)}, tables.Ceilings(67e12, 4.8e12))
        rows = tables.phases(nsys_profile, costs)
        return next(row for row in rows if (row["phase"], row["family"]) == ("forward", "matmul"))

    at_ceiling = int(67e12 * matmul(1)["time_s"])
    assert matmul(at_ceiling)["flops"] == at_ceiling
    assert matmul(2 * at_ceiling)["flops"] is None


def test_different_step_times_give_a_warning(export: Export) -> None:
    path = export(
        ranges=[("step", 0, 1000, MAIN), ("step", 2000, 3000, MAIN)],
        launches=[(10, 20, MAIN, 1), (30, 40, MAIN, 2), (2000, 2010, MAIN, 3)],
        kernels=[("gemm", 20, 520, 1), ("gemm", 420, 995, 2), ("gemm", 2800, 3100, 3)],
    )
    made = profile(read(path))
    first, second = tables.steps(made, tables.Costs(event_s=1.5e-6))
    ns = {column: round(first[column] * 1e9) for column in ("wall_s", "gpu_span_s", "kernel_s", "residual_s")}
    assert ns == {"wall_s": 1000, "gpu_span_s": 975, "kernel_s": 1075, "residual_s": 25}
    assert first["busy_share"] == pytest.approx(0.975)  # kernels that overlap count once
    assert second["busy_share"] == pytest.approx(3 / 11)  # it lasts until its kernel ends
    notes = tables.notes("steps", made, [first, second])
    assert "differ by over 3% in 1 of 2 steps, most in step 1 (+72.7%)" in notes[0]
    assert "step 0 takes 0.0015 ms by events and 0.001 ms by the wall clock" in notes[1]


def test_step_of_two_devices_is_counted_once_in_warnings(change: Callable[..., Path]) -> None:
    made = profile(read(change("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = correlationId % 2")))
    rows = tables.steps(made, tables.Costs(event_s=1.0))
    assert len(rows) == 6
    disagree, *events = tables.notes("steps", made, rows)
    assert " of 3 steps, most in step 0 " in disagree
    assert [message.partition(" takes ")[0] for message in events] == [f"warning: step {n}" for n in range(3)]


GAPS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("nothing was launched", {}, {"launch-bound": 900}),
    ("the next was launched in time", {"launches": [(0, 10, 1), (20, 30, 2)]},
     {"launch-bound": 600, "device latency": 300}),
    ("the launch itself took long", {"launches": [(0, 10, 1), (20, 390, 2)]}, {"launch-bound": 900}),
    ("waiting with nothing pending", {"calls": [("cudaStreamSynchronize", 50, 250)]},
     {"synchronisation": 150, "launch-bound": 750}),
    ("an allocation", {"calls": [("cudaMalloc_v3020", 150, 250)]}, {"cudaMalloc": 100, "launch-bound": 800}),
    ("a blocking copy", {"calls": [("cudaMemcpy_v3020", 150, 250)], "copies": [(200, 220)]},
     {"synchronisation": 80, "copy": 20, "launch-bound": 800}),
    ("an allocation while another thread waits",
     {"calls": [("cudaDeviceSynchronize", 100, 400), ("cudaFree", 200, 300, AUTOGRAD)]},
     {"cudaMalloc": 100, "synchronisation": 200, "launch-bound": 600}),
    ("a driver's call inside a wait", {"calls": [("cudaDeviceSynchronize", 100, 400), ("cuMemFree_v2", 200, 300)]},
     {"synchronisation": 300, "launch-bound": 600}),
    ("an asynchronous copy's call is no wait", {"calls": [("cudaMemcpyAsync", 150, 250)]}, {"launch-bound": 900}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [g[1:] for g in GAPS], ids=[g[0] for g in GAPS])
def test_gaps_table_has_each_cause(export: Export, made: dict[str, Any], expected: dict[str, float]) -> None:
    """Kernels run from 50 to 100 ns and from 400 to 450 ns of a step of 1000 ns."""
    launches = made.get("launches", [(0, 10, 1), (380, 390, 2)])
    path = export(
        ranges=[("step", 0, 1000, MAIN)],
        launches=[(start, end, MAIN, n) for start, end, n in launches],
        kernels=[("gemm", 50, 100, 1), ("gemm", 400, 450, 2)],
        calls=[(*call, MAIN)[:4] for call in made.get("calls", ())],
        copies=made.get("copies", ()),
    )
    rows = tables.gaps(profile(read(path)))
    assert {row["cause"]: pytest.approx(row["time_s"] * 1e9) for row in rows} == expected
    assert sum(row["share"] for row in rows) == pytest.approx(0.9)


def test_gaps_and_busy_time_add_up_to_steps(nsys_profile: Profile, kineto_profile: Profile) -> None:
    for made in (nsys_profile, kineto_profile):
        wall = sum(step.end_s - step.start_s for step in made.steps)
        busy = sum(row["busy_share"] * row["wall_s"] for row in tables.steps(made))
        idle = sum(row["time_s"] for row in tables.gaps(made)) * len(made.steps)
        assert busy + idle == pytest.approx(wall)
        assert tables.gaps(made)[0]["cause"] == "launch-bound"


def test_glob_selects_steps(nsys_profile: Profile) -> None:
    forward = profile(nsys_profile.trace, "forw*")
    assert [step.calls for step in forward.by_step.values()] == [88] * 3
    assert {row["phase"] for row in tables.phases(forward)} == {"forward"}
    assert "450 kernels (3.3 ms) between or after the steps are left out" in forward.notes
    anything = profile(nsys_profile.trace, "*")  # a match nested in a step is not a step
    assert [step.name for step in anything.steps] == ["step"] * 3
    with pytest.raises(ConfigError, match=r"no range is named 'iteration'; choose among 'attention' \(12×\)"):
        profile(nsys_profile.trace, "iteration")
    bare = replace(nsys_profile.trace, ranges=NO_RANGES)
    with pytest.raises(
        ConfigError, match=r"has no range, so none is named 'iteration'; leave out the range, and the whole"
    ):
        profile(bare, "iteration")


def test_kernels_before_the_first_step_are_noted(export: Export) -> None:
    made = profile(
        read(
            export(
                ranges=[("step", 500, 1000, MAIN)],
                launches=[(100, 110, MAIN, 1), (600, 610, MAIN, 2)],
                kernels=[("gemm", 200, 300, 1), ("gemm", 700, 800, 2)],
            )
        )
    )
    assert sum(total.calls for total in made.groups.values()) == 1
    assert made.notes == ("1 kernels (0.0001 ms) before the first step are left out",)


def test_order_of_addition_does_not_count_as_a_difference(export: Export) -> None:
    sides = []
    for lengths in ((100, 200, 300), (300, 200, 100)):
        kernels = [("gemm", 1000 * n, 1000 * n + length, n) for n, length in enumerate(lengths, 1)]
        launches = [(100 * n, 100 * n + 10, MAIN, n) for n in (1, 2, 3)]
        sides.append(profile(read(export([("step", 0, 5000, MAIN)], launches, kernels, name=f"{len(sides)}.sqlite"))))
    assert [(row["difference_s"], row["change_share"], row["share"]) for row in difference(*sides, "family")] == [
        (0, 0, 0),
        (0, 0, 0),
    ]


def test_difference_of_two_profiles_adds_up(nsys_profile: Profile, kineto_profile: Profile) -> None:
    for by in ("phase", "family"):
        *rows, whole = difference(nsys_profile, kineto_profile, by)
        assert whole[by] == "all"
        assert sum(row["difference_s"] for row in rows) == pytest.approx(whole["difference_s"], abs=1e-12)
        assert sum(row["share"] for row in rows) == pytest.approx(whole["share"])
        assert whole["change_share"] == whole["share"]
        for row in rows:
            expected = None if not row["a_s"] else pytest.approx(row["b_s"] / row["a_s"] - 1, abs=1e-11)
            assert row["change_share"] == expected
    assert abs(whole["share"]) < 0.01
    found = doubts(nsys_profile, kineto_profile)
    assert "profiler differs: nsys in the baseline, kineto in the candidate, with different overheads" in found
    assert any(
        "the layer is known for 39% of the baseline's kernel time and 90% of the candidate's" in doubt
        for doubt in found
    )


def test_difference_of_unmarked_layer_is_none(nsys_profile: Profile, export: Export) -> None:
    unmarked = profile(read(export(launches=[(11, 12, MAIN, 1)], kernels=[("gemm", 100, 200, 1)])))
    rows = {row["layer"]: row for row in difference(nsys_profile, unmarked, "layer")}
    assert (rows["block 0"]["b_s"], rows["block 0"]["difference_s"]) == (None, None)
    assert rows["unattributed"]["difference_s"] is not None


def test_planted_difference_is_found(export: Export) -> None:
    """B's softmax takes 50 ns longer, and its copy is missing."""

    def made(kernels: Sequence[Sequence[Any]], name: str) -> Profile:
        launches = [(10 + n, 11 + n, MAIN, n) for n in (1, 2, 3)]
        return profile(read(export(launches=launches, kernels=kernels, name=name)))

    a = made([("gemm", 100, 200, 1), ("softmax", 200, 300, 2), ("CatArrayBatchedCopy", 300, 320, 3)], "a.sqlite")
    b = made([("gemm", 100, 200, 1), ("softmax", 200, 350, 2)], "b.sqlite")
    found = [(row["family"], round(row["difference_s"] * 1e9)) for row in difference(a, b, "family")]
    assert found == [("softmax", 50), ("copy", -20), ("matmul", 0), ("all", 30)]
