"""Causes of slow first steps, on samples with planted causes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.comparison.warmup import warmup_curve
from cs_systems.cli._sweep import print_warmup
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, RunRecord, Sample


def sample(wall_s: float, warmup: bool = False, **known: Any) -> Sample:
    return Sample(0, warmup, wall_s, {"forward": wall_s}, {"forward": wall_s}, **known)


STEADY = tuple(sample(1.0, sm_clock_hz=1.98e9) for _ in range(5))


def causes(*first: Sample) -> list[str | None]:
    return [row["cause"] for row in warmup_curve(Measurement("cuda_event", (*first, *STEADY), 0.0))]


def test_each_planted_cause_of_a_slow_step_is_named() -> None:
    found = causes(
        sample(9.0, True, compile_s=5.0),
        sample(1.5, True, device_mallocs=4),
        sample(1.2, True, sm_clock_hz=1.4e9),
        sample(1.3, True),
        sample(1.01, True, device_mallocs=1),
    )
    assert found[0] == "compile and autotune 5.00 s; first use: lazy loading of kernels, library handles, threads"
    assert found[1:4] == ["4 cudaMalloc", "clock 1400 of 1980 MHz", "unexplained"]
    assert found[4:] == [None] * 6  # steady steps have no cause, even with a cudaMalloc


def test_first_step_explained_by_compilation_has_no_other_cause() -> None:
    assert causes(sample(9.0, True, compile_s=7.97))[0] == "compile and autotune 7.97 s"


def test_excess_is_relative_to_steady_median() -> None:
    rows = warmup_curve(Measurement("monotonic", (sample(3.0, True), *STEADY), 0.0))
    assert rows[0]["excess_s"] == 2.0
    assert [row["warmup"] for row in rows] == [True] + [False] * 5


def test_printed_steps_show_the_excess_of_slow_ones(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measurement("monotonic", (sample(3.0, True, compile_s=1.97), *STEADY), 0.0)
    print_warmup(RunRecord("", RunConfig().to_dict(), "ok", measurement=measured), Path())
    caption, *lines = capsys.readouterr().out.splitlines()
    assert caption.endswith(": every step, warm-up included")
    assert [line.split() for line in lines[2:4]] == [
        ["0", "yes", "3.00", "s", "2.00", "s", "compile", "and", "autotune", "1.97", "s"],
        ["1", "no", "1.00", "s", "–", "–"],
    ]
