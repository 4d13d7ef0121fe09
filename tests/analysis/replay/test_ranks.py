"""Joint replay of ranks: what a job would take without its straggler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.replay import Expected, FamilyScaled, Refusal, SyncRemoved, replayed
from cs_systems.analysis.replay.ranks import Together, together
from cs_systems.readers.forms.columns import UNKNOWN
from tests.analysis.replay.simulated import MS, US, Collective, Copied, Host, Launch, Record, Sync, Wait, ranks


def step(kernel_s: float = 30 * US, host_s: float = 40 * US) -> tuple[object, ...]:
    """Return a step in which the second half of kernels hides the all-reduce of the first."""
    return (
        Host(host_s),
        *(Launch(kernel_s) for _ in range(15)),
        Record("first", 7),
        Wait(30, "first"),
        Collective(200 * US),
        *(Launch(kernel_s) for _ in range(15)),
        Record("second", 7),
        Wait(30, "second"),
        Collective(100 * US),
        Record("reduced", 30),
        Wait(7, "reduced"),
        *(Launch(5 * US, name="softmax") for _ in range(4)),
        Sync(),
    )


def joint(steps: list[tuple[object, ...]]) -> tuple[Together, float]:
    recorded, truth = ranks(steps)
    found = together([replayed(trace, of) for trace, of in recorded])
    assert isinstance(found, Together), found
    return found, truth


def test_ranks_wait_for_the_last_at_each_collective() -> None:
    found, truth = joint([step(), step(45 * US), step()])
    assert found.step_s == pytest.approx(truth)
    assert found.replayed_s == pytest.approx(truth)
    assert found.straggler == 1
    assert found.transfer_s.tolist() == pytest.approx([200 * US, 100 * US] * 3)


@pytest.mark.parametrize("late", [step(60 * US), step(host_s=2 * MS)], ids=["slow kernels", "slow host"])
def test_straggler_as_fast_as_the_median_rank_speeds_up_the_job(late: tuple[object, ...]) -> None:
    found, now = joint([step(), step(), late, step()])
    expected = found.straggler_like_the_median()
    assert isinstance(expected, Expected)
    truth = ranks([step()] * 4)[1]
    assert expected.value == pytest.approx(truth, rel=0.02)
    assert expected.value < 0.9 * now
    assert expected.notes == ("the straggler is rank 2",)


def test_single_rank_keeps_its_collectives_with_a_note() -> None:
    replay = replayed(*ranks([step(), step(45 * US)])[0][0])
    answer = replay.what_if(FamilyScaled("collective", 0.5))
    assert answer == Refusal("the time of a collective depends on all ranks; give the traces of all ranks")
    expected = replay.what_if(SyncRemoved())
    assert isinstance(expected, Expected)
    assert "collectives last as recorded on this rank, their waits for other ranks included" in expected.notes


def test_clocks_of_ranks_may_differ_by_a_constant() -> None:
    recorded, truth = ranks([step(), step(45 * US)])
    trace, of = recorded[1]
    kernels, calls = trace.kernels, trace.calls
    names = ("start_s", "end_s", "launch_start_s", "launch_end_s")
    moved = replace(
        trace,
        kernels=replace(kernels, **{name: getattr(kernels, name) + 5.0 for name in names}),
        calls=replace(calls, start_s=calls.start_s + 5.0, end_s=calls.end_s + 5.0),
        ranges=replace(trace.ranges, start_s=trace.ranges.start_s + 5.0, end_s=trace.ranges.end_s + 5.0),
    )
    later = [one._replace(start_s=one.start_s + 5.0, end_s=one.end_s + 5.0) for one in of]
    found = together([replayed(*recorded[0]), replayed(moved, later)])
    assert isinstance(found, Together)
    assert found.replayed_s == pytest.approx(truth)


def test_ranks_whose_collectives_end_apart_are_refused() -> None:
    recorded, _ = ranks([step(), step()])
    trace, of = recorded[1]
    nccl = trace.kernels.function.codes_where(lambda function: function.name.startswith("nccl"))
    drift = np.where(nccl, np.cumsum(nccl) * 100 * US, 0.0)
    apart = replace(trace, kernels=replace(trace.kernels, end_s=trace.kernels.end_s + drift))
    one, other = replayed(*recorded[0]), replace(replayed(apart, of), why_not=None)
    found = together([one, other])
    assert found == Refusal("the ends of collectives differ by 150 µs between ranks; at most 50 allow a replay")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([Launch(5 * US, name="softmax")], "kernels, so what the straggler would do in place of another is unknown"),
        ([Copied(5 * US)], "kernels, so what the straggler would do in place of another is unknown"),
        ([Launch(5 * US), Record("alone", 7)], "calls, so the host of the straggler cannot be compared"),
    ],
)
def test_straggler_with_other_work_is_not_compared(other: list[object], reason: str) -> None:
    answer = joint([(Launch(5 * US), *step()), (*other, *step())])[0].straggler_like_the_median()
    assert isinstance(answer, Refusal)
    assert answer.reason.endswith(f" different {reason}")


def test_expectation_reaches_as_far_as_the_joint_replay_is_off() -> None:
    found, _ = joint([step(), step(60 * US), step()])
    parts = [replace(part, graph=replace(part.graph, unexplained_s=0.01 * number * float(part.recorded_s.max())))
             for number, part in enumerate(found.parts)]  # fmt: skip
    found = replace(found, parts=tuple(parts))
    expected = found.straggler_like_the_median()
    assert isinstance(expected, Expected)
    off_s = 0.02 / len(parts[2].steps) * found.step_s  # of the rank with the most
    error_s = abs(found.replayed_s / found.step_s - 1) * found.step_s if found.replayed_s else 0.0
    assert expected.high - expected.value == pytest.approx(error_s + off_s, rel=0.05)
    assert expected.value - expected.low == pytest.approx(error_s + off_s, rel=0.05)


def test_ranks_with_other_collectives_are_refused() -> None:
    recorded, _ = ranks([step(), step()])
    alone = [Host(40 * US), *(Launch(30 * US) for _ in range(30)), Sync()]
    without = ranks([alone])[0][0]
    found = together([replayed(*recorded[0]), replayed(*without)])
    assert found == Refusal("the ranks have no collective in common")
    fewer = replayed(*ranks([(*step()[:34], Sync())] * 2)[0][0])  # without the second all-reduce
    assert together([replayed(*recorded[0]), fewer]) == Refusal("the ranks have different numbers of all_reduce")
    trace, of = recorded[1]
    assert together([replayed(*recorded[0]), replayed(trace, of[1:])]) == Refusal(
        "the ranks have different numbers of steps"
    )


@pytest.mark.parametrize(("later", "offset_us"), [(0, [0, 300, 300]), (1, [0, -300, 0])])
def test_clocks_are_aligned_by_the_ends_of_collectives(later: int, offset_us: list[float]) -> None:
    """One rank works on after the last collective, so that its steps begin 300 µs later."""
    steps = [step(), step(45 * US), step()]
    steps[later] = (*steps[later], Host(300 * US))
    found, truth = joint(steps)
    assert found.offset_s.tolist() == pytest.approx(np.array(offset_us) * US)
    assert found.transfer_s.tolist() == pytest.approx([200 * US, 100 * US] * 3)
    assert found.straggler == 1
    assert found.step_s == pytest.approx(truth)
    assert found.replayed_s == pytest.approx(truth)


def test_ranks_that_are_late_in_turn_wait_for_each_other() -> None:
    def half(kernel_s: float, event: str) -> tuple[object, ...]:
        kernels = (Launch(kernel_s) for _ in range(15))
        return (
            *kernels,
            Record(event, 7),
            Wait(30, event),
            Collective(50 * US),
            Record("reduced", 30),
            Wait(7, "reduced"),
        )

    long, short = 60 * US, 30 * US
    ends = (Launch(5 * US), Sync())
    found, truth = joint([(*half(a, "1"), *half(b, "2"), *ends) for a, b in ((long, short), (short, long))])
    assert truth > 15 * 2 * long
    assert found.replayed_s == pytest.approx(truth)


@pytest.mark.parametrize(("apart_us", "is_told"), [(49.5, True), (50.5, False)])
def test_ends_of_a_collective_may_differ_by_fifty_microseconds(apart_us: float, is_told: bool) -> None:
    recorded, _ = ranks([step(), step()])
    trace, of = recorded[1]
    nccl = np.flatnonzero(trace.kernels.function.codes_where(lambda function: function.name.startswith("nccl")))
    end_s = trace.kernels.end_s.copy()
    end_s[nccl[-3::2]] += 2 * apart_us * US  # two of six
    end_s[nccl[-4::2]] += apart_us * US
    one, other = replayed(*recorded[0]), replayed(replace(trace, kernels=replace(trace.kernels, end_s=end_s)), of)
    assert isinstance(together([one, replace(other, why_not=None)]), Together) is is_told


def test_ranks_that_send_to_single_others_are_refused() -> None:
    sent = (*step(), Launch(50 * US, 30, "ncclDevKernel_SendRecv"), Sync())
    found = together([replayed(*one) for one in ranks([sent, sent])[0]])
    assert found == Refusal("ranks send to single other ranks, which the joint replay does not carry")


def test_step_of_a_job_is_that_of_the_slowest_rank() -> None:
    parts = tuple(replayed(*ranks([step(kernel_s)] * 2)[0][0]).parts[0] for kernel_s in (30 * US, 60 * US, 45 * US))
    none = np.zeros((3, 0))
    found = Together(parts, none.astype(np.int64), np.zeros(3), np.zeros(0))
    slowest_s = float(parts[1].recorded_s.max(axis=1).mean())
    assert found.step_s == pytest.approx(slowest_s)
    assert found.replayed_s == pytest.approx(slowest_s)


def test_straggler_is_late_in_its_own_collectives() -> None:
    """The third rank only takes part in later ones, in which it is hardly late."""
    begins = [[0.0, 10.0], [5.0, UNKNOWN], [20.0, 11.0]]
    calls = np.array([[0, 1], [0, UNKNOWN], [UNKNOWN, 1]])
    parts: Any = [
        SimpleNamespace(graph=SimpleNamespace(recorded=SimpleNamespace(begin_s=np.array(one)))) for one in begins
    ]
    assert Together(parts, calls, np.zeros(3), np.zeros(2)).straggler == 1


def test_replay_that_does_not_come_to_rest_is_refused() -> None:
    found, _ = joint([step(), step(45 * US)])
    for known in ({"replayed_s": None}, {"_step_s": lambda self, costs: None, "replayed_s": 1.0}):
        moving: Any = type("Moving", (Together,), known)
        answer = moving(**vars(found)).straggler_like_the_median()
        assert answer == Refusal(
            "the replay of the ranks does not come to rest; compare their traces by analyze --ranks"
        )
