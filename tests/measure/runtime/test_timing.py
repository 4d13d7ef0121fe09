"""Order of set-up, synchronisation and clock readings, on a simulated clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from cs_systems.instrument.annotate import annotate, listening
from cs_systems.measure.runtime.channel import Timing, Warming
from cs_systems.measure.runtime.timing import FIRST_HOLD_S, HOLD_MARGIN, LONGEST_HOLD_S, measure
from cs_systems.measure.runtime.warming import PAUSE_S, TimedProgress, WarmupProgress


class Machine:
    """Simulated device that lags behind its host, with a clock, a workload and a journal of the calls."""

    def __init__(self, is_cuda: bool, host_s: float, device_s: float) -> None:
        self.is_cuda, self.host_s, self.device_s = is_cuda, host_s, device_s
        self.hides_launches = False
        self.now = self.device_done = 0.0
        self.journal: list[str] = []
        self.collecting: list[bool] = []

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.journal.append("sync")
        self.now = max(self.now, self.device_done)

    def mark(self) -> float:
        """Return the time at which the device has finished all submitted work."""
        self.device_done = max(self.device_done, self.now)
        return self.device_done

    def between_s(self, start: float, end: float) -> float:
        return end - start

    def occupy(self, seconds: float) -> None:
        self.journal.append("occupy")
        self.device_done = max(self.device_done, self.now) + seconds

    def prepare(self) -> None:
        self.journal.append("prepare")
        self.now += 100.0

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for phase in ("forward", "backward"):
            yield phase, lambda phase=phase: self.submit(phase)

    def submit(self, phase: str) -> None:
        self.journal.append(phase)
        self.collecting.append(gc.isenabled())
        begin = max(self.now, self.device_done)
        self.now += self.host_s
        self.device_done = begin + self.device_s


class NoProbes:
    def read(self) -> None:
        return None

    def since(self, before: None) -> dict[str, Any]:
        return {}


def run(machine: Machine, **options: Any) -> list[Any]:
    return list(measure(machine, machine, clock=machine.clock, probes=NoProbes(), **options))  # type: ignore[arg-type]


def test_step_synchronises_only_at_its_ends() -> None:
    machine = Machine(is_cuda=True, host_s=1.0, device_s=5.0)
    run(machine, warmup=1, steps=1)
    assert machine.journal == ["prepare", "sync", "forward", "backward", "sync"] * 2


def test_slow_device_lags_behind_its_host() -> None:
    machine = Machine(is_cuda=True, host_s=1.0, device_s=5.0)
    (sample,) = run(machine, warmup=0, steps=1)
    assert sample.phases_s == {"forward": 5.0, "backward": 5.0}
    assert sample.submit_s == {"forward": 1.0, "backward": 1.0}
    assert sample.lag_s == {"forward": 4.0, "backward": 8.0}
    assert sample.wall_s == 10.0  # preparation is not timed


def test_device_that_waits_for_its_host_has_no_lag() -> None:
    machine = Machine(is_cuda=True, host_s=3.0, device_s=1.0)
    (sample,) = run(machine, warmup=0, steps=1)
    assert sample.wall_s == 6.0
    assert sample.lag_s == {"forward": 0.0, "backward": 0.0}


def test_cpu_has_no_lag() -> None:
    machine = Machine(is_cuda=False, host_s=2.0, device_s=0.0)
    (sample,) = run(machine, warmup=0, steps=1)
    assert sample.lag_s is None
    assert sample.phases_s == sample.submit_s == {"forward": 2.0, "backward": 2.0}


def test_hidden_launches_are_queued_before_the_device_begins() -> None:
    machine = Machine(is_cuda=True, host_s=3e-3, device_s=1e-3)
    machine.hides_launches = True
    warmup, sample = run(machine, warmup=1, steps=1)
    assert machine.journal[:6] == ["prepare", "sync", "occupy", "forward", "backward", "sync"]
    assert warmup.held_s == pytest.approx(FIRST_HOLD_S)
    assert warmup.phases_s["forward"] == pytest.approx(2e-3)  # a hold of 1 ms does not cover the host's 3 ms
    assert sample.held_s == pytest.approx(HOLD_MARGIN * 6e-3)  # twice the submission time of the warm-up step
    assert sample.phases_s == pytest.approx({"forward": 1e-3, "backward": 1e-3})
    assert sample.wall_s == pytest.approx(2e-3)  # without the hold
    assert sample.lag_s == pytest.approx({"forward": 10e-3, "backward": 8e-3})  # not launch-bound


def test_hold_after_a_compiling_step_is_limited() -> None:
    machine = Machine(is_cuda=True, host_s=60.0, device_s=1e-3)
    machine.hides_launches = True
    assert run(machine, warmup=1, steps=1)[1].held_s == pytest.approx(LONGEST_HOLD_S)


def test_cpu_has_no_launches_to_hide() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)
    machine.hides_launches = True
    (sample,) = run(machine, warmup=0, steps=1)
    assert "occupy" not in machine.journal
    assert (sample.held_s, sample.wall_s) == (None, 2.0)


def test_warm_up_lasts_given_steps_and_seconds() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)
    samples = run(machine, warmup=2, steps=3, round=7)
    assert [s.warmup for s in samples] == [True] * 2 + [False] * 3
    assert {s.round for s in samples} == {7}
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)  # a step with its preparation takes 102 s
    samples = run(machine, warmup=2, warmup_s=1000.0, steps=1)
    assert [s.warmup for s in samples] == [True] * 10 + [False]


def test_timed_steps_fill_their_time_and_are_at_least_their_number() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)  # a step with its preparation takes 102 s
    assert [s.warmup for s in run(machine, warmup=1, steps=2, steps_s=1000.0)] == [True] + [False] * 10
    assert [s.warmup for s in run(machine, warmup=1, steps=2, steps_s=1.0)] == [True] + [False] * 2


def test_no_garbage_is_collected_within_a_step() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)
    assert gc.isenabled()
    run(machine, warmup=0, steps=2)
    assert machine.collecting == [False] * 4
    assert gc.isenabled()


def test_step_that_raises_leaves_the_collector_on() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)
    machine.submit = lambda phase: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        run(machine, warmup=0, steps=1)
    assert gc.isenabled()


def test_phases_are_annotated_for_a_listener() -> None:
    entries: list[str] = []

    class Journal:
        def push(self, name: str) -> None:
            entries.append(name)

        def pop(self) -> None:
            entries.append("end")

    assert annotate("before listening") is annotate("also before")
    with listening(Journal()):
        run(Machine(is_cuda=False, host_s=1.0, device_s=0.0), warmup=0, steps=1)
    assert entries == ["step", "forward", "end", "backward", "end", "end"]
    assert annotate("after listening") is annotate("also after")


def test_profiler_region_has_only_timed_steps() -> None:
    machine = Machine(is_cuda=False, host_s=1.0, device_s=0.0)

    @contextmanager
    def region() -> Iterator[None]:
        machine.journal.append("begin")
        yield
        machine.journal.append("end")

    run(machine, warmup=1, steps=2, region=region)
    step = ["prepare", "sync", "forward", "backward", "sync"]
    assert machine.journal == [*step, "begin", *step, *step, "end"]


def test_warmup_progress_is_reported_only_before_warmup_steps() -> None:
    machine = Machine(is_cuda=True, host_s=1.0, device_s=5.0)
    run(machine, warmup=2, steps=3, on_warmup=lambda done: machine.journal.append(f"warmed {done}"))
    step = ["prepare", "sync", "forward", "backward", "sync"]
    assert machine.journal == ["warmed 0", *step, "warmed 1", *step, *step * 3]


def test_timed_progress_is_called_between_timed_steps_alone() -> None:
    machine = Machine(is_cuda=True, host_s=1.0, device_s=5.0)
    run(machine, warmup=1, steps=3, on_timed=lambda done: machine.journal.append(f"timed {done}"))
    step = ["prepare", "sync", "forward", "backward", "sync"]
    assert machine.journal == [*step, *step, "timed 1", *step, "timed 2", *step]


@pytest.mark.parametrize(("step_s", "steps", "sent"), [(0.01, 300, []), (0.5, 30, [8, 16, 24]), (6.0, 3, [1, 2])])
def test_timed_messages_come_every_few_seconds_and_are_shown_before_the_next_step(
    step_s: float, steps: int, sent: list[int]
) -> None:
    shown, now = list[tuple[int, float]](), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def send(message: Timing) -> None:
        shown.append((message.step, now[0]))

    progress = TimedProgress(send, 0, steps, lambda: now[0], sleep)  # type: ignore[arg-type]
    for done in range(1, steps):
        now[0] += step_s
        progress(done)
    assert [step for step, _ in shown] == sent
    gaps = [later - at for (_, at), (_, later) in pairwise([(0, 0.0), *shown])]
    assert all(4 <= gap <= max(5, step_s + PAUSE_S + 1e-9) for gap in gaps)


@pytest.mark.parametrize(
    ("step_s", "warmup", "warmup_s", "sent"),
    [
        (0.2, 10, 0.0, [3, 6, 9]),  # at most twice a second
        (0.01, 10, 0.0, []),  # the timed steps begin before the message is shown
        (0.01, 100, 0.0, [50]),  # not with the last 0.1 s of the warm-up
        (2.0, 3, 0.0, [1, 2]),
        (0.5, 1, 2.0, [1, 2, 3]),  # by its least duration
    ],
)
def test_warmup_messages_keep_their_distance(step_s: float, warmup: int, warmup_s: float, sent: list[int]) -> None:
    messages: list[Warming] = []
    now = [0.0]
    progress = WarmupProgress(messages.append, 0, warmup, warmup_s, lambda: now[0])  # type: ignore[arg-type]
    done = 0
    while done < warmup or now[0] < warmup_s - 1e-9:
        progress(done)
        now[0] += step_s
        done += 1
    assert [message.step for message in messages] == sent
    assert all(now[0] - message.step * step_s >= 0.1 - 1e-9 for message in messages)
