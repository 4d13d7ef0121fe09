"""Two traces compared in words: the sentence on a mean step, the families in it, and the doubts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.comparison.profiles import difference_of_records, doubts, opening
from tests.analysis.attribution.made import ADD, FLASH, PRODUCT, Made
from tests.analysis.comparison.test_limits import profiled

SOFTMAX, NORM = "softmax_warp_forward<float>", "vectorized_layer_norm_kernel"
FAMILIES = {"matmul": PRODUCT, "elementwise": ADD, "attention": FLASH, "softmax": SOFTMAX, "norm": NORM}


def side(wall_s: float, *, of: Made | None = None, layer_s: float = 0.0, known: Any = None, **times: float) -> Profile:
    """Return a trace with one step, and in it a kernel for each family; a layer's range has the first seconds."""
    made, now = of or Made(), 0.0
    made.range("step", 0.0, wall_s)
    if layer_s:
        made.range("layers.0", 0.0, layer_s)
    for family, time_s in times.items():
        made.kernel(FAMILIES[family], now, now + time_s)
        now += time_s
    return made.profile(**(known or {}))


def test_opening_has_wall_idle_and_busy_time_and_three_families() -> None:
    a = side(4.0, matmul=1.0, elementwise=1.0, attention=0.5, softmax=0.25, norm=0.125)
    b = side(6.0, matmul=2.0, elementwise=0.5, attention=0.75, softmax=0.375, norm=0.125)
    assert opening(a, b) == (
        "a step of the candidate takes 6.00 s instead of 4.00 s (+50%), both with the overhead of the profiler: +1.12 "
        "s without a kernel on the GPU, +875 ms with one (matmul +1.00 s, elementwise −500 ms, attention +250 ms)"
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"matmul": 10.0, "elementwise": 1.0}, "(matmul +10.0 s)"),
        ({"matmul": 10.0, "elementwise": 1.125}, "(matmul +10.0 s, elementwise +1.12 s)"),
        ({"matmul": 0.03125, "elementwise": 0.0}, "(matmul +31.2 ms)"),
        ({"matmul": 0.0, "elementwise": 0.0}, "with one"),
    ],
)
def test_family_is_named_from_a_tenth_of_the_largest_change_on(changed: dict[str, float], named: str) -> None:
    a = side(64.0, matmul=1.0, elementwise=1.0)
    assert opening(a, side(64.0, **{name: 1.0 + more_s for name, more_s in changed.items()})).endswith(named)


def test_opening_of_two_profilers_says_so() -> None:
    a, b = side(2.0, matmul=1.0), side(1.0, matmul=0.5, known={"profiler": "nsys"})
    assert "(-50%), with the different overheads of two profilers: −500 ms without" in opening(a, b)


def test_opening_needs_a_step_on_both_sides() -> None:
    some, none = side(2.0, matmul=1.0), side(2.0)
    assert (opening(none, some), opening(some, none)) == ("", "")


@pytest.mark.parametrize("lacks", [(True, False), (False, True), (True, True)])
def test_opening_without_idle_times_has_the_wall_time_alone(lacks: tuple[bool, bool]) -> None:
    a, b = (
        replace(one, trace=replace(one.trace, lacks_kernels=lacking))
        for one, lacking in zip((side(2.0, matmul=1.0), side(4.0, matmul=1.0)), lacks, strict=True)
    )
    assert opening(a, b).endswith("4.00 s instead of 2.00 s (+100%), both with the overhead of the profiler")


# differences


def test_family_without_a_kernel_on_one_side_took_no_time_there() -> None:
    rows = difference_of_records(profiled("fp32", {"matmul": 2.0}), profiled("bf16", {"norm": 1.0}), "family")
    assert [(row["family"], row["a_s"], row["b_s"]) for row in rows] == [
        ("matmul", 2.0, 0.0), ("norm", 0.0, 1.0), ("all", 2.0, 1.0),
    ]  # fmt: skip


def test_rows_with_equal_differences_keep_the_order_of_their_first_appearance() -> None:
    times = {"norm": 1.0, "matmul": 2.0, "softmax": 4.0}
    rows = difference_of_records(profiled("fp32", times), profiled("bf16", {"copy": 0.0, **times}), "family")
    assert [row["family"] for row in rows] == ["norm", "matmul", "softmax", "copy", "all"]


def test_order_of_equal_rows_does_not_depend_on_the_hash_seed() -> None:
    run = str(Path(__file__).parents[3] / "profiles" / "softmax_and_matmul")
    compare = [sys.executable, "-m", "cs_systems", "compare", run, run]
    printed = {
        subprocess.run(compare, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    }
    assert len(printed) == 1


@pytest.mark.parametrize(("others", "time_s"), [(("block 1",), 0.0), (("loss", "optimizer", "unattributed"), None)])
def test_layer_is_unknown_on_a_side_whose_layers_are(others: tuple[str, ...], time_s: float | None) -> None:
    a = profiled("fp32", {}, layers=[{"layer": "block 0", "time_s": 2.0}])
    b = profiled("bf16", {}, layers=[{"layer": name, "time_s": 1.0} for name in others])
    rows = {row["layer"]: row for row in difference_of_records(a, b, "layer")}
    assert (rows["block 0"]["b_s"], rows["block 0"]["difference_s"]) == (time_s, None if time_s is None else -2.0)


def test_difference_needs_the_table_of_both_records() -> None:
    some, none = profiled("fp32", {"matmul": 2.0}), profiled("bf16", {})
    assert difference_of_records(some, none, "family") == []
    assert difference_of_records(none, some, "family") == []


# doubts

LAYERS = (
    "the layer is known for {} of the baseline's kernel time and {} of the candidate's: part of the difference by "
    "layer is a difference in ranges"
)


@pytest.mark.parametrize(
    ("a_s", "b_s", "said"),
    [
        (0.0, 1.0, None),  # a twentieth of the kernel time
        (0.0, 1.25, LAYERS.format("0%", "6%")),
        (10.0, 20.0, LAYERS.format("50%", "100%")),
        (10.0, 10.0, None),
    ],
)
def test_layers_of_more_kernel_time_on_one_side_are_a_doubt(a_s: float, b_s: float, said: str | None) -> None:
    def known(layer_s: float) -> Profile:
        times = {name: s for name, s in (("matmul", layer_s), ("elementwise", 20.0 - layer_s)) if s}
        return side(20.0, layer_s=layer_s, **times)

    found = doubts(known(a_s), known(b_s))
    assert [one for one in found if one.startswith("the layer")] == ([] if said is None else [said])


def test_other_device_or_profiler_is_a_doubt() -> None:
    a, b = side(2.0, matmul=1.0), side(2.0, of=Made("NVIDIA T4"), matmul=1.0, known={"profiler": "nsys"})
    found = [one for one in doubts(a, b) if "differs" in one]
    assert found == [
        "device differs: NVIDIA H100 80GB HBM3 in the baseline, NVIDIA T4 in the candidate",
        "profiler differs: kineto in the baseline, nsys in the candidate, with different overheads",
    ]
    assert not [one for one in doubts(a, a) if "differs" in one]


def test_notes_of_both_sides_are_doubts_but_not_what_makes_one_incomplete() -> None:
    a = side(2.0, matmul=1.0)
    b = replace(a, incomplete="the end is missing", notes=("the end is missing", "events are missing"))
    found = doubts(a, b)
    assert "candidate: events are missing" in found
    assert "candidate: the end is missing" not in found
