"""Progress of a sweep: elapsed time and the step of a warm-up, with a simulated clock."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.cli import _sweep
from cs_systems.cli._output import Interrupted
from cs_systems.cli._progress import clock as elapsed
from cs_systems.cli._progress import current, duration, progress_lines
from cs_systems.config import RunConfig, preset, same_fields
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import RunRecord

CELL = RunConfig(model=preset("tiny"), device="cpu", warmup=5, steps=5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "text"), [(12.3, "12 s"), (89, "89 s"), (90, "2 min"), (7200, "2.0 h")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(12.3, "12 s"), (89, "1:29"), (245, "4:05"), (3845.9, "1:04:05")])
def test_elapsed_time_moves_every_second(seconds: float, text: str) -> None:
    assert elapsed(seconds) == text


def test_cell_of_a_sweep_is_named_by_what_differs() -> None:
    cells = [replace(CELL, strategy=name, world_size=2, warmup=5) for name in ("ddp_naive", "ddp_bucketed")]
    assert current(Progress(0, 2, config=cells[1], warmup=(2, 5)), same_fields(cells)) == (
        "ddp_bucketed, warm-up step 2/5, then 5 timed"
    )
    assert current(Progress(0, 1, config=CELL), same_fields([CELL])) == current(Progress(0, 1, config=CELL))


def test_piped_progress_is_one_line_a_cell_with_the_elapsed_time() -> None:
    failed = RunRecord("key", CELL.to_dict(), "error", reason="the step failed")
    (line,) = progress_lines(Progress(1, 4, record=failed), elapsed="20 s")
    assert line.startswith("[1/4] tiny ctx ")
    assert line.endswith(": error: the step failed (20 s)\n")
    assert [*progress_lines(Progress(1, 4, config=CELL, warmup=(2, 5)))] == []


def test_current_cell_names_its_round_and_warmup_step() -> None:
    in_rounds = replace(CELL, rounds=5)
    assert current(Progress(0, 1, config=in_rounds, round=1)).endswith(", round 2/5")
    assert current(Progress(0, 1, config=CELL, warmup=(2, 5))).endswith(", warm-up step 2/5, then 5 timed")
    assert current(Progress(0, 1, config=CELL, timed=(2, 5))).endswith(", timed step 3/5")
    assert current(Progress(0, 1)) == ""


def test_bar_is_drawn_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = Clock(), list[float]()
    bar = _sweep._Bar(now=clock)
    monkeypatch.setattr(bar._bar, "update", lambda *_, refresh, **__: drawn.append(clock.now) if refresh else None)
    for hundredth in range(200):
        clock.now = hundredth / 100
        bar.update(Progress(0, 1, config=CELL, warmup=(hundredth, 200)))
    assert drawn == [0.0, 0.5, 1.0, 1.5]


def test_bar_moves_by_itself_only_until_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sweep, "HEARTBEAT_S", 0.001)
    beats, enough = list[str](), threading.Event()

    def update(_: object, *, description: str, **__: object) -> None:
        beats.append(description)
        if len(beats) == 3:
            enough.set()

    bar = _sweep._Bar(now=Clock())
    monkeypatch.setattr(bar._bar, "update", update)
    with bar:
        assert enough.wait(20)
        bar.update(Progress(0, 1, config=CELL))
        assert not bar._starting.is_alive()
    assert {*beats[:-1]} == {"0 s · starting"}
    assert beats[-1].startswith("0 s · tiny ctx")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("time --size tiny", "cs-systems time --size tiny --out runs/x"),
        ("time --out runs/y --fresh --size tiny", "cs-systems time --size tiny --out runs/x"),
        ("memory --out=runs/y", "cs-systems memory --out runs/x"),
    ],
)
def test_command_to_resume_keeps_every_option_except_the_folder(words: str, command: str) -> None:
    assert Interrupted(Path("runs/x")).command(words.split()) == command
