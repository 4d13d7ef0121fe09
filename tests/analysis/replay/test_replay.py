"""The gate before predictions, the range of an answer, and the recorded steps of an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.replay import (
    Clean,
    CopiesOverlapped,
    Expected,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    Refusal,
    Replay,
    SyncRemoved,
    replayed,
)
from cs_systems.readers import read
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.readers.forms.trace import NO_KERNELS, Calls, Step
from cs_systems.record import Measurement, Sample
from tests.analysis.replay.simulated import (
    MS,
    US,
    Close,
    Graph,
    Host,
    Launch,
    Open,
    Sync,
    simulated,
    slower,
    times,
)

STEP = (Host(100 * US), *(Launch(20 * US) for _ in range(20)), Sync(), Host(50 * US))


def refused(replay: Replay) -> str:
    answer = replay.what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(answer, Refusal)
    return answer.reason


def test_a_delay_that_nothing_explains_forbids_predictions() -> None:
    trace, steps, _ = simulated(STEP)
    kernels = trace.kernels
    late = np.where(np.arange(len(kernels)) % 20 == 10, 100 * US, 0.0)
    late = np.cumsum(late)
    moved = replace(kernels, start_s=kernels.start_s + late, end_s=kernels.end_s + late)
    calls = trace.calls
    assert refused(replayed(replace(trace, kernels=moved, calls=calls), steps)).endswith(
        "of the step passes in delays that the trace does not explain; at most 2% allow a prediction"
    )


def test_missing_kernels_forbid_predictions() -> None:
    trace, steps, _ = simulated(STEP)
    lost = replace(trace, lost_launches=np.array([steps[0].start_s + 10 * US, 0.0]))
    assert refused(replayed(lost, steps)) == "1 launched kernel of the steps are missing in the trace"
    assert refused(replayed(replace(trace, lacks_kernels=True), steps)) == (
        "the GPU ran kernels that the trace does not hold, so its idle time is unknown"
    )
    unlaunched = replace(
        trace.kernels, call=np.where(np.arange(len(trace.kernels)) % 10 == 5, UNKNOWN, trace.kernels.call)
    )
    assert refused(replayed(replace(trace, kernels=unlaunched), steps)) == "10% of the kernels have no recorded launch"
    assert refused(replayed(replace(trace, kernels=NO_KERNELS), steps)) == (
        "the trace holds no kernel, so nothing can be replayed"
    )
    assert refused(replayed(replace(trace, calls=Calls.of(())), steps)) == (
        "the trace holds no launch of a kernel, so what the GPU waited for is unknown"
    )


def test_cold_steps_forbid_predictions() -> None:
    trace, steps, _ = simulated((Launch(5 * US, cost_s=3 * MS), *STEP))
    assert refused(replayed(trace, steps)) == (
        "9.00 ms of the steps pass in the first launches of kernels, which load their code; choose steps after "
        "a warm-up"
    )


def test_a_trace_without_steps_is_refused() -> None:
    trace, _, _ = simulated(STEP)
    with pytest.raises(TypeError, match="a trace has no steps: give them"):
        replayed(trace)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (HostScaled(0.0, "augment"), "no host time of the steps is in a range named 'augment'; choose among step"),
        (InputRemoved(), "no range of the steps marks the loading of data; mark it with the range input"),
        (FamilyScaled("norm", 0.5), "no kernel is of family 'norm'; choose among matmul"),
        (SyncRemoved("step"), None),
        (SyncRemoved("a"), "the host waits nowhere in a range named 'a' for the GPU; there is nothing to remove"),
        (CopiesOverlapped(), "no copy between host and device is in the steps"),
    ],
)  # fmt: skip
def test_change_that_matches_no_event_is_refused(change: object, reason: str | None) -> None:
    trace, steps, _ = simulated(STEP)
    answer = replayed(trace, steps).what_if(change)  # type: ignore[arg-type]
    assert (answer.reason if isinstance(answer, Refusal) else None) == reason


def test_refusal_lists_the_first_twelve_ranges() -> None:
    names = [f"part {number:02}" for number in range(14)]
    trace, steps, _ = simulated((*(one for name in names for one in (Open(name), Host(10 * US), Close())), *STEP))
    answer = replayed(trace, steps).what_if(HostScaled(0.0, "augment"))
    assert isinstance(answer, Refusal)
    assert answer.reason.count(", ") == 11, answer.reason


def test_kernels_of_a_graph_recorded_whole_cannot_be_scaled() -> None:
    trace, steps, _ = simulated((*STEP, Graph((1 * MS,)), Sync()))
    functions = trace.kernels.function
    functions.values = [f._replace(name="CUDA graph 3") if f.name == "node 0" else f for f in functions.values]
    replay = replayed(trace, steps)
    answer = replay.what_if(FamilyScaled("matmul", 0.5))
    assert isinstance(answer, Refusal)
    assert (
        answer.reason == "the trace holds CUDA graphs without their kernels; record with nsys --cuda-graph-trace=node"
    )
    assert isinstance(replay.what_if(SyncRemoved()), Expected)


def test_a_gain_below_the_spread_of_the_steps_is_refused() -> None:
    trace, _, _ = simulated((Open("one"), *STEP, Close(), Open("two"), *STEP, Host(0.3 * MS), Close()), count=4)
    steps = [Step(r.name, r.start_s, r.end_s) for r in trace.ranges.named(lambda name: name in ("one", "two"))]
    answer = replayed(trace, steps[2:]).what_if(HostScaled(0.9))
    assert isinstance(answer, Refusal)
    assert answer.reason.startswith("it changes the step by ")
    assert answer.reason.endswith("by which the 6 steps differ; measure it")


def test_a_long_stretch_of_the_host_stays_and_widens_the_range() -> None:
    trace, steps, now = simulated((Host(20 * MS), *STEP))
    expected = replayed(trace, steps).what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(expected, Expected)
    assert expected.value == pytest.approx(20 * MS, rel=0.01)
    assert expected.low == pytest.approx(20 * 21 * US, rel=0.2)
    assert expected.notes[0].startswith("the host's stretches over 5.00 ms stay; without them ")
    assert expected.share == pytest.approx(1 - 20 * MS / now, abs=0.01)


def test_range_of_a_prediction_includes_the_slowdown_by_kineto() -> None:
    slow = (Host(20 * US), *(one for _ in range(60) for one in (Host(16 * US), Launch(8 * US, cost_s=9 * US))), Sync())
    trace, steps, _ = simulated(slow)
    replay = replayed(replace(trace, profiler="kineto"), steps)
    expected = replay.what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(expected, Expected)
    truth = 60 * 9 * US
    assert expected.low <= truth <= expected.high
    assert expected.value == pytest.approx(truth, rel=0.01)
    assert expected.is_estimated
    assert expected.notes[0].startswith("the usual slowdown by kineto, about 20 µs per kernel, is taken out")


def test_a_clean_step_gives_the_hosts_own_time() -> None:
    fast = (Open("forward"), Host(200 * US), *(Launch(8 * US, cost_s=6 * US) for _ in range(60)), Close(), Sync())
    slow = slower(fast, 2.0)
    trace, steps, _ = simulated(slow)
    _, _, clean_s = simulated(fast)
    clean = Clean(clean_s, host_s={"forward": 200 * US + 60 * 6 * US})
    expected = replayed(trace, steps).what_if(FamilyScaled("matmul", 2.0), clean=clean)
    assert isinstance(expected, Expected)
    twice = [one._replace(time_s=16 * US) if isinstance(one, Launch) else one for one in fast]
    truth = simulated(twice)[2]
    assert expected.now == clean_s
    assert expected.value == pytest.approx(truth, rel=0.01)
    assert expected.low <= truth <= expected.high


def test_a_clean_step_gives_the_devices_own_time() -> None:
    fast = (Open("forward"), *(Launch(18 * US) for _ in range(60)), Close(), Sync())
    slow = (Open("forward"), *(Launch(24 * US) for _ in range(60)), Close(), Sync())
    trace, steps, _ = simulated(slow)
    _, _, clean_s = simulated(fast)
    clean = Clean(clean_s, device_s={"forward": 60 * 18 * US})
    expected = replayed(trace, steps).what_if(FamilyScaled("matmul", 0.5), clean=clean)
    assert isinstance(expected, Expected)
    truth = simulated(times(slow, 9 / 24))[2]
    assert expected.value == pytest.approx(truth, rel=0.01)


def test_a_clean_step_is_the_median_of_a_measurement() -> None:
    samples = [
        Sample(0, number == 0, wall, {"forward": wall / 2}, {"forward": wall / 4})
        for number, wall in enumerate([9.0, 1.0, 3.0, 2.0])
    ]
    assert Clean.of(Measurement("cuda_event", tuple(samples), 0.0)) == Clean(2.0, {"forward": 0.5}, {"forward": 1.0})
    assert Clean.of(Measurement("cuda_event", (), 0.0)) is None


def test_only_the_first_steps_are_replayed_above_the_limit_of_activities(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, steps, _ = simulated(STEP, count=10)
    for most, count in ((50, 2), (40, 2), (39, 1)):  # a step has 20
        monkeypatch.setattr("cs_systems.analysis.replay.MOST_ACTIVITIES", most)
        assert len(replayed(trace, steps).steps) == count
    monkeypatch.setattr("cs_systems.analysis.replay.MOST_ACTIVITIES", 1)
    assert len(replayed(trace, steps).steps) == 1


def test_steps_far_apart_are_replayed_each_from_its_own_start() -> None:
    trace, steps, _ = simulated(STEP, count=16)
    replay = replayed(trace, [steps[0], *steps[3:6]])
    assert [len(part.steps) for part in replay.parts] == [1, 3]
    assert replay.error < 1e-6
    assert isinstance(replay.what_if(SyncRemoved()), Expected)


DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["kineto_h200_step.json.gz", "kineto_h200_small2.json.gz"])
def test_recorded_steps_of_an_h200_are_reproduced(name: str) -> None:
    replay = replayed(profile(read(DATA / name)))
    assert replay.why_not is None
    assert replay.error < 0.001
    assert replay.unexplained < 0.001
    expected = replay.what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(expected, Expected)
    kernels = replay.trace.kernels
    busy_s = float((kernels.end_s - kernels.start_s).sum()) / len(replay.steps)
    assert 0.8 * busy_s < expected.low < expected.value < expected.high < 0.5 * expected.now
    assert busy_s < expected.value
