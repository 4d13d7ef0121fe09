"""Random programs: what is predicted from the trace of one is what the changed one takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_systems.analysis.replay import Change, Expected, FamilyScaled, HostScaled, Replay, replayed, run
from tests.analysis.replay.simulated import (
    AUTOGRAD,
    US,
    Host,
    Launch,
    Machine,
    Record,
    Run,
    Sync,
    Wait,
    simulated,
    slower,
    times,
)

MACHINE = Machine(launch_s=0.0, gap_s=1 * US, return_s=5 * US)  # the constants of a trace without cases
STREAMS = (7, 20, 21)
TIMES = st.integers(1, 60).map(lambda n: n * US)
NAMES = st.sampled_from(["gemm", "softmax"])
LAUNCH = st.builds(Launch, TIMES, st.sampled_from(STREAMS), NAMES, st.integers(2, 20).map(lambda n: n * US))
HOST = st.builds(Host, st.integers(1, 300).map(lambda n: n * US))
LINK = st.permutations(STREAMS).map(lambda two: (Record(f"{two[0]}", two[0]), Wait(two[1], f"{two[0]}")))
SYNC = st.sampled_from([Sync(), Sync(stream=7), Sync(stream=20)]).map(lambda one: (one,))
EVENT = st.sampled_from(STREAMS).map(lambda z: (Record(f"{z}", z), Launch(20 * US, z), Sync(event=f"{z}")))
ONE = LAUNCH.map(lambda one: (one,)) | HOST.map(lambda one: (one,)) | LINK
PIECES = st.lists(ONE | SYNC | EVENT, max_size=20)
INNER = st.lists(ONE, min_size=6, max_size=30).map(
    flat := lambda pieces: tuple(one for piece in pieces for one in piece)
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[object, ...]:
    """Return a step that uses every stream first, and may hand over to another thread."""
    begin = [Launch(5 * US, z, name) for z in STREAMS for name in ("gemm", "softmax")]
    step = [*begin, *flat(draw(PIECES))]
    if draw(st.booleans()):
        step += [Host(20 * US), Run(AUTOGRAD, (Host(10 * US), *begin, *flat(draw(INNER)))), Host(30 * US)]
        step += flat(draw(PIECES))
    return (*step, Host(10 * US), Sync())


def prediction(replay: Replay, change: Change) -> float:
    answer = replay.what_if(change)
    # A change by less than the spread is refused, and there is no other reason.
    assert isinstance(answer, Expected) or answer.reason.startswith(("it changes the step", "the host waits nowhere"))
    return answer.value if isinstance(answer, Expected) else replay.step_s


@settings(max_examples=25)
@given(programs(), st.sampled_from([0.3, 0.7, 2.0]))
def test_prediction_of_scaled_kernels_equals_the_simulation(step: tuple[object, ...], factor: float) -> None:
    trace, steps, _ = simulated(step, machine=MACHINE)
    truth = simulated(times(step, factor), machine=MACHINE)[2]
    assert prediction(replayed(trace, steps), FamilyScaled("matmul", factor)) == pytest.approx(truth, rel=1e-6)


@settings(max_examples=25)
@given(programs(), st.sampled_from([0.3, 3.0]))
def test_prediction_of_scaled_host_time_equals_the_simulation(step: tuple[object, ...], factor: float) -> None:
    trace, steps, _ = simulated(step, machine=MACHINE)
    machine = Machine(launch_s=0.0, gap_s=1 * US, return_s=5 * US, routine_s=factor * MACHINE.routine_s)
    truth = simulated(slower(step, factor), machine=machine)[2]
    assert prediction(replayed(trace, steps), HostScaled(factor)) == pytest.approx(truth, rel=1e-6)


@settings(max_examples=10)
@given(programs())
def test_replay_of_merged_calls_equals_replay_of_single_calls(step: tuple[object, ...]) -> None:
    trace, steps, _ = simulated(step * 3, machine=MACHINE)
    graph = replayed(trace, steps).parts[0].graph
    fast = run.replay(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SHORT", np.inf)
        slow = run.replay(graph)
    for name in ("start_s", "end_s", "begin_s", "done_s"):
        assert getattr(fast, name) == pytest.approx(getattr(slow, name), abs=1e-12)
