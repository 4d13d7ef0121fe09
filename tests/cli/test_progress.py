"""Progress of a sweep: elapsed time, time left and the step of a warm-up, with a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.analysis.comparison.durations import ON_CPU
from cs_systems.cli import _sweep
from cs_systems.cli._output import Interrupted
from cs_systems.cli._progress import Pace, current, duration, progress_lines
from cs_systems.config import RunConfig, preset
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import Measurement, RunRecord, Sample
from tests.test_record import ENVIRONMENT

CELL = RunConfig(model=preset("tiny"), device="cpu", warmup=5, steps=5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(config: RunConfig, step_s: float = 1.0) -> RunRecord:
    sample = Sample(0, False, step_s, {}, {})
    return RunRecord("key", config.to_dict(), "ok", 0, None, ENVIRONMENT, Measurement("monotonic", (sample,) * 3, 0.0))


@pytest.mark.parametrize(("seconds", "text"), [(12.3, "12 s"), (89, "89 s"), (90, "2 min"), (7200, "2.0 h")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_is_that_of_equal_cells() -> None:
    clock = Clock()
    cells = [replace(CELL, seed=seed) for seed in range(4)]
    pace = Pace(cells, clock)
    clock.now = 5.0
    assert pace.text(Progress(0, 4, config=cells[0])) == "5 s"
    clock.now = 20.0
    assert pace.text(Progress(1, 4, record=record(cells[0]))) == "20 s, 60 s left"
    clock.now = 60.0
    assert pace.text(Progress(4, 4, record=record(cells[1]))) == "60 s"


def test_time_left_weighs_cells_by_their_flops() -> None:
    clock = Clock()
    larger = replace(CELL, batch_size=8 * CELL.batch_size)
    pace = Pace([CELL, larger], clock)
    clock.now = 12.0  # ten steps of a second, and what a cell costs besides
    left_s = 12 * (80 + ON_CPU.cell_s) / (10 + ON_CPU.cell_s)
    assert pace.text(Progress(1, 2, record=record(CELL))) == f"12 s, {duration(left_s)} left"


def test_time_left_does_not_start_ranks_again() -> None:
    clock = Clock()
    cells = [replace(CELL, strategy="ddp_flat", world_size=2, seed=seed) for seed in range(2)]
    pace = Pace(cells, clock)
    clock.now = 20.0  # ten seconds for the ranks, ten steps of a second
    assert pace.text(Progress(1, 2, record=record(cells[0]))) == "20 s, 10 s left"


def test_piped_progress_is_one_line_a_cell_with_its_times() -> None:
    (line,) = progress_lines(Progress(1, 4, record=record(CELL)), pace="20 s, 60 s left")
    assert line.startswith("[1/4] tiny ctx ")
    assert line.endswith(": 1.00 s per step (20 s, 60 s left)\n")
    assert [*progress_lines(Progress(1, 4, config=CELL, warmup=(2, 5)))] == []


def test_current_cell_names_its_round_and_warmup_step() -> None:
    in_rounds = replace(CELL, rounds=5)
    assert current(Progress(0, 1, config=in_rounds, round=1)).endswith(", round 2/5")
    assert current(Progress(0, 1, config=CELL, warmup=(2, 5))).endswith(", warm-up step 2/5, then 5 timed")
    assert current(Progress(0, 1)) == ""


def test_bar_is_drawn_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = Clock(), list[float]()
    bar = _sweep._Bar([CELL], clock)
    monkeypatch.setattr(bar._bar, "update", lambda *_, refresh, **__: drawn.append(clock.now) if refresh else None)
    for hundredth in range(200):
        clock.now = hundredth / 100
        bar.update(Progress(0, 1, config=CELL, warmup=(hundredth, 200)))
    assert drawn == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("time --size tiny", "cs-systems time --size tiny --out runs/x"),
        ("time --out runs/y --fresh --size tiny", "cs-systems time --size tiny --out runs/x"),
        ("memory --out=runs/y", "cs-systems memory --out runs/x"),
    ],
)
def test_command_that_goes_on_keeps_all_but_the_folder(words: str, command: str) -> None:
    assert Interrupted(Path("runs/x")).command(words.split()) == command
