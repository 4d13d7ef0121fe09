"""Traces without kernels, such as a CPU's: the host's time in its ranges, and no time of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution import tables
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.comparison.profiles import difference
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import read
from tests.recorded import AUTOGRAD, MAIN

Export = Callable[..., Path]
RANGES = [
    ("step", 0, 1000, MAIN), ("forward", 0, 400, MAIN), ("block 0", 100, 300, MAIN), ("norm", 100, 150, MAIN),
    ("norm", 250, 290, MAIN), ("backward", 400, 900, MAIN), ("block 0", 500, 800, AUTOGRAD),
    ("step", 1000, 2000, MAIN), ("forward", 1100, 1200, MAIN), ("evaluation", 5000, 6000, MAIN),
    ("epoch", -100, 7000, MAIN),
]  # fmt: skip


def host_only(export: Export, ranges: Sequence[Sequence[Any]] = RANGES) -> Path:
    return export(ranges=ranges, launches=(), kernels=())


def ns(made: Profile, column: str) -> dict[tuple[str | None, str], int]:
    """Return (phase, range) → the column of all steps in ns."""
    return {(r["phase"], r["range"]): round(r[column] * len(made.steps) * 1e9) for r in tables.ranges(made)}


def test_ranges_have_total_and_self_time(export: Export) -> None:
    made = profile(read(host_only(export)))
    assert ns(made, "total_s") == {
        (None, "step"): 2000, ("forward", "forward"): 500, ("backward", "backward"): 500, ("forward", "block 0"): 200,
        ("backward", "block 0"): 300, ("forward", "norm"): 90,
    }  # fmt: skip
    own = ns(made, "self_s")
    assert (own[None, "step"], own["forward", "forward"], own["forward", "block 0"]) == (1000, 300, 110)
    rows = {(row["phase"], row["range"]): row for row in tables.ranges(made)}
    assert (rows[None, "step"]["calls_per_step"], rows[None, "step"]["share"]) == (1, 1)
    assert (rows["forward", "norm"]["calls_per_step"], rows["forward", "forward"]["share"]) == (1, 0.25)


def test_step_that_begins_in_a_hook_of_the_optimizer_has_no_phase(export: Export) -> None:
    """The Recorder's steps begin and end before the range of the optimizer that stepped has ended."""
    hooked = [
        ("step", 0, 960, MAIN), ("optimizer", 700, 1000, MAIN), ("step", 970, 1960, MAIN),
        ("forward", 1000, 1500, MAIN),
    ]  # fmt: skip
    rows = {(row["phase"], row["range"]): row for row in tables.ranges(profile(read(host_only(export, hooked))))}
    assert [key for key in rows if key[1] == "step"] == [(None, "step")]
    assert (rows[None, "step"]["calls_per_step"], rows[None, "step"]["share"]) == (1, 1)


def test_nested_ranges_of_one_name_count_once(export: Export) -> None:
    nested = [("step", 0, 1000, MAIN), ("work", 100, 600, MAIN), ("work", 200, 300, MAIN)]
    made = profile(read(host_only(export, nested)))
    assert ns(made, "total_s")[None, "work"] == ns(made, "self_s")[None, "work"] == 500


def test_tables_without_kernels_are_empty_with_a_note(export: Export) -> None:
    made = profile(read(host_only(export)))
    assert made.notes == ("no kernels: the times are those of the ranges on the host, not of the device",)
    (wall,) = tables.ratio(made)
    assert (wall["measure"], wall["backward_to_forward"]) == ("wall time", pytest.approx(1.25))  # of the first step
    empty = [table(made, tables.NO_COSTS) for name, table in tables.TABLES.items() if name not in ("ranges", "ratio")]
    assert empty == [[]] * len(empty)
    with pytest.raises(ConfigError, match="contains no kernels; compare traces of a GPU"):
        difference(made, made, "phase")


def test_analyze_prints_host_times_without_kernels(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    path = host_only(export)
    assert main(["analyze", str(path)]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "nothing was judged: the trace has no kernels; record on a machine with a GPU"
    assert lines[0] == f"{path} · nsys · 2 steps"
    assert "no kernels: the times are those of the ranges on the host, not of the device" in lines
    assert "ranges by CPU time, per step" in lines
    assert "kernels by time, per step" not in lines
    assert main(["analyze", str(path), str(path)]) == 2
    assert "contains no kernels; compare traces of a GPU" in capsys.readouterr().err
    assert main(["analyze", str(path), "--format", "html"]) == 0
    assert "Ranges by CPU time, per step" in capsys.readouterr().out


def test_kineto_cpu_trace_has_host_times(kineto_events: list[dict[str, Any]], write_trace: Callable[..., Path]) -> None:
    of_host = [e for e in kineto_events if e.get("cat") in ("cpu_op", "user_annotation")]
    made = profile(read(write_trace(of_host)))
    assert ns(made, "total_s").keys() >= {("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")}
    assert "no kernels" in made.notes[-1]


def test_launches_without_kernels_are_refused(
    kineto_events: list[dict[str, Any]], write_trace: Callable[..., Path]
) -> None:
    without = [e for e in kineto_events if e.get("cat") not in ("kernel", "cpu_op")]
    for events in (without, [e for e in without if e.get("cat") != "user_annotation"]):
        with pytest.raises(ConfigError, match=r"holds no kernel, although some were launched, so the GPU"):
            read(write_trace(events))


def test_operators_are_read_although_kernels_are_lacking(
    kineto_events: list[dict[str, Any]], write_trace: Callable[..., Path]
) -> None:
    made = profile(read(write_trace([e for e in kineto_events if e.get("cat") != "kernel"])))
    assert made.notes[0].startswith("it holds no kernel, although some were launched, so the GPU")
    assert made.trace.operators is not None


def test_cpu_trace_of_two_processes_shows_the_one_with_most_ranges(export: Export) -> None:
    path = host_only(export, [*RANGES, ("step", 0, 100, (9 << 24) + 1)])
    assert (
        read(path)
        .limitations[0]
        .startswith("the file holds several processes: 7 (11 ranges), 9 (1 range); process 7 is read")
    )
    assert ns(profile(read(path, 9)), "total_s") == {(None, "step"): 100}


def test_self_times_add_up_to_steps(nsys_profile: Profile) -> None:
    """This holds where one thread opened the ranges."""
    rows = tables.ranges(nsys_profile)
    wall_s = sum(step.end_s - step.start_s for step in nsys_profile.steps) / len(nsys_profile.steps)
    assert sum(row["self_s"] for row in rows) == pytest.approx(wall_s)
    assert sum(row["calls_per_step"] for row in rows) == len(nsys_profile.trace.ranges) / 3
