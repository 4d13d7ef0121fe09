"""Other Python threads of a recorded loop: their lines, and the time for which the loop waits for them."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import PYTHON_THREADS
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder import other_threads
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.other_threads import OtherThreads
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.unedited import ScriptRecorder

STEPS = 40


def batches_of_a_thread(prepare: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a step that takes its batch from a thread, and spends a few milliseconds in each of its products."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ready: queue.Queue[Tensor] = queue.Queue(2)

    def fill() -> None:
        for _ in range(2 * STEPS):
            try:
                ready.put(prepare(), timeout=5)
            except queue.Full:  # the loop has ended
                return

    threading.Thread(target=fill, daemon=True).start()

    def step() -> None:
        optimizer.zero_grad()
        model(ready.get()).square().mean().backward()
        optimizer.step()

    return step


def in_python() -> Tensor:
    total = 0
    for number in range(600_000):
        total += number % 7
    return torch.full((512, 512), total / 1e7)


def by_operators() -> Tensor:
    return torch.randn(512, 512).sort().values


def recorded(step: Callable[[], None], out: Path) -> ScriptRecorder:
    recorder = ScriptRecorder("script", out=out, warmup=5, steps=12, profile="none")
    try:
        for _ in range(STEPS):
            step()
    finally:
        recorder.close()
    assert all(each.failure is None for each in recorder._observers._every)
    return recorder


def test_thread_that_prepares_batches_in_python_is_recorded_with_its_line(tmp_path: Path) -> None:
    (row,) = recorded(batches_of_a_thread(in_python), tmp_path).records[0].results["python_threads"]
    assert row["function"].endswith("fill")
    assert row["place"].startswith("test_other_threads.py:")
    assert (row["calls"], row["puts"]) == ("prepare", True)
    assert 0 < row["busy_share"] < 1.2
    assert 0 <= row["waited_share"] < 1
    assert 0 <= row["held_share"] <= 1


@pytest.mark.parametrize("prepare", [by_operators, lambda: torch.ones(512, 512)])
def test_loop_does_not_wait_for_a_thread_that_hardly_runs_in_python(
    prepare: Callable[[], Tensor], tmp_path: Path
) -> None:
    recorder = recorded(batches_of_a_thread(prepare), tmp_path)
    assert "python-threads" not in {each.code for each in diagnose(recorder.records).diagnoses}


def work(look: Callable[[], None], ready: Any) -> None:
    look()
    ready.put(1)


def work_and_sleep(look: Callable[[], None], ready: Any) -> None:
    time = SimpleNamespace(sleep=look)
    time.sleep()
    time.sleep()
    look()


def shares(
    monkeypatch: pytest.MonkeyPatch,
    later: dict[int, tuple[float, float]],
    ranks: int = 1,
    looks: Period = Period.SAMPLED,
    run: Callable[..., None] = work,
) -> list[Any]:
    """Return the rows for 10 s in which each thread ran and queued for these times."""
    subject = Subject("loop", resolve("cpu"), [], [], None, ranks)
    observer, now, frames = OtherThreads(subject), iter((100.0, 110.0)), dict[int, Any]()
    here, other = SimpleNamespace(name="main", ident=1, native_id=10), SimpleNamespace(name="a", ident=2, native_id=20)
    names = {
        "time": SimpleNamespace(perf_counter=lambda: next(now)),
        "threading": SimpleNamespace(get_ident=lambda: 1, get_native_id=lambda: 10, enumerate=lambda: [here, other]),
        "sys": SimpleNamespace(_current_frames=lambda: frames),
    }
    for name, value in names.items():
        monkeypatch.setattr(other_threads, name, value)
    spent = {task: other_threads._Spent(5.0, 1.0) for task in later}
    monkeypatch.setattr(OtherThreads, "_all_spent", staticmethod(lambda: spent))
    observer.begins(Period.TIMED)
    observer.begins(looks)

    def look() -> None:
        frames[2] = sys._getframe(1)
        if observer.is_looking:
            observer.look_after_backward()

    thread = threading.Thread(target=run, args=(look, queue.Queue()))
    thread.start()
    thread.join()
    spent = {task: other_threads._Spent(5.0 + ran_s, 1.0 + queued_s) for task, (ran_s, queued_s) in later.items()}
    observer.timing_ended([])
    observer.end()
    return [*PYTHON_THREADS.of(observer.kept)]


def test_time_in_which_the_loop_neither_ran_nor_waited_for_a_core_is_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = shares(monkeypatch, {10: (3.0, 1.0), 20: (7.0, 0.5), 30: (2.0, 0.25)})
    assert (row["function"], row["calls"], row["puts"], row["tries"]) == ("work", "look", True, 0)
    assert (row["busy_share"], row["waited_share"], row["pool_queued_share"]) == pytest.approx((0.75, 0.6, 0.025))
    assert (row["ran_share"], row["queued_share"]) == pytest.approx((0.7, 0.1))


@pytest.mark.parametrize(("ran_s", "tries"), [(0.4e-3, 0), (0.6e-3, 1)])
def test_lock_is_tried_only_next_to_a_thread_that_runs(
    ran_s: float, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((1.0, 1.0 + ran_s))
    monkeypatch.setattr(other_threads, "_ran_s", lambda task: next(clock))
    monkeypatch.setattr(OtherThreads, "_is_held_up", staticmethod(lambda here: True))
    (row,) = shares(monkeypatch, {10: (3.0, 1.0), 20: (7.0, 0.5)}, looks=Period.WARMUP)
    assert (row["tries"], row["held_share"]) == (tries, tries)


def test_cpu_time_of_a_thread_is_known_until_it_ends() -> None:
    assert other_threads._ran_s(threading.get_native_id()) > 0
    assert other_threads._ran_s(2**22) == 0.0  # larger than the number of any thread


def test_thread_is_named_by_a_line_at_which_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = shares(monkeypatch, {10: (3.0, 1.0), 20: (7.0, 0.5)}, run=work_and_sleep)
    assert row["calls"] == "look"


def test_ranks_which_wait_for_each_other_keep_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(monkeypatch, {10: (3.0, 1.0), 20: (7.0, 0.5)}, ranks=2) == []


@pytest.mark.parametrize("later", [{10: (3.0, 1.0), 20: (0.4, 0.0)}, {10: (3.0, 1.0)}, {}])
def test_thread_that_hardly_ran_or_has_ended_is_not_kept(
    later: dict[int, tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares(monkeypatch, later) == []
