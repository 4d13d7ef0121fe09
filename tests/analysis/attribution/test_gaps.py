"""Time without a kernel, compared with a count of it nanosecond by nanosecond."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.analysis.attribution.gaps import (
    CAUSES,
    HOST,
    LATENCY,
    LAUNCH,
    LOST,
    causes,
    gap_rows,
    gaps_in,
    silences,
)
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.columns import Categorical, Ranges
from cs_systems.readers.forms.trace import NO_KERNELS, Call, Calls, Copies, Copy, Function, Kernels, Step, Trace

END = 40
Spans = list[tuple[int, int]]
Runs = list[tuple[int, int, float]]
Called = list[tuple[str, int, int]]
SPAN = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda s: (min(s), max(s)))
SPANS = st.lists(SPAN, max_size=6)
NAMES = ("cudaFree", "cudaDeviceSynchronize")


def kernels(runs: Runs) -> Kernels:
    """Return kernels made from (start, end, time at which the launch had returned, NaN if it was not recorded)."""
    start, end, returned = np.array(sorted(runs), float).reshape(-1, 3).T
    zeros = np.zeros(len(runs), np.int64)
    function = Categorical([Function("gemm", None, None, None, None)], zeros)
    return Kernels(function, start, end, zeros, zeros, zeros, returned - 1, returned, zeros > 0, zeros - 1)


def trace(runs: Runs, copies: Spans, calls: Called, own: Spans) -> Trace:
    return Trace(
        source="made",
        profiler="nsys",
        devices={},
        kernels=kernels(runs),
        copies=Copies.of(Copy("memcpy", start, end, 0, 0, None) for start, end in copies),
        calls=Calls.of(Call(*call, 1) for call in calls),
        ranges=Ranges(Categorical([], np.zeros(0, np.int64)), np.zeros(0), np.zeros(0), np.zeros(0, np.int64)),
        overheads=[(float(start), float(end)) for start, end in own],
        ops=None,
        limitations=(),
    )


def count(made: Trace, steps: list[Step]) -> Counter[str]:
    """Return by cause how many of the times 0, 1, 2, … within the steps it explains."""
    found: Counter[str] = Counter()
    rows = list(made.kernels)
    for time in range(END):
        if not any(s.start_s <= time < s.end_s for s in steps) or any(k.start_s <= time < k.end_s for k in rows):
            continue
        following = next((k for k in rows if k.start_s > time), None)
        pending = following is not None and following.launch_end_s is not None and following.launch_end_s <= time
        lost = all(k.launch_end_s is None for k in ([following] if following else rows))
        spans: list[tuple[str, float, float]] = [("copy", c.start_s, c.end_s) for c in made.copies]
        if not pending and not lost:
            spans += [("profiler", *span) for span in made.overheads]
            spans += [(str(stalls(c.name)), c.start_s, c.end_s) for c in made.calls]
            launching = any(k.launch_start_s <= time < k.launch_end_s for k in rows if k.launch_end_s is not None)
            if not launching and not any(c.start_s <= time < c.end_s for c in made.calls):
                spans.append((HOST, time, time + 1))
        on = [cause for cause, start, end in spans if start <= time < end]
        found[min(on, key=CAUSES.index, default=LATENCY if pending else LOST if lost else LAUNCH)] += 1
    return found


@given(
    st.lists(
        st.tuples(SPAN, st.integers(0, END) | st.just(np.nan)).map(lambda k: (*k[0], k[1])), min_size=1, max_size=6
    ),
    SPANS,
    st.lists(st.tuples(st.sampled_from(NAMES), SPAN).map(lambda c: (c[0], *c[1])), max_size=4),
    SPANS,
    st.lists(st.integers(0, END), min_size=2, max_size=6, unique=True).map(sorted),
)
def test_idle_time_is_divided_among_causes(
    runs: Runs, copies: Spans, calls: Called, own: Spans, edges: list[int]
) -> None:
    made = trace(runs, copies, calls, own)
    steps = [Step("step", *span) for span in zip(edges[::2], edges[1::2], strict=False)]
    gaps = gaps_in(made.kernels, steps)
    expected = count(made, steps)
    times = {cause: lasted.sum() for cause, lasted in causes(made, 0, gaps[0]).items()}
    assert {cause: time for cause, time in times.items() if time} == expected
    assert sum(gaps[0].idle_s(len(steps))) == sum(expected.values())
    rows = gap_rows(made, gaps, steps)
    assert {row["cause"]: round(row["time_s"] * len(steps), 9) for row in rows} == expected


def test_latency_of_a_launch_is_the_host_s_and_a_longer_wait_the_device_s() -> None:
    made = trace([(50, 60, 40)], [], [], [])
    short = replace(made.kernels, start_s=np.array([40 + 50e-6]))
    steps = [Step("step", 0, 60)]
    late, soon = (causes(replace(made, kernels=k), 0, gaps_in(k, steps)[0]) for k in (made.kernels, short))
    assert (late[HOST].sum(), late[LAUNCH].sum(), late[LATENCY].sum()) == (39, 1, 10)
    assert (soon[HOST].sum(), soon[LAUNCH].sum(), soon[LATENCY].sum()) == pytest.approx((39, 1 + 50e-6, 0))


@pytest.mark.parametrize(("apart_s", "cause"), [(0.9e-3, LAUNCH), (1.1e-3, HOST)])
def test_host_without_a_call_for_over_a_millisecond_is_not_launch_bound(apart_s: float, cause: str) -> None:
    """Five kernels of 1 µs each, launched in 5 µs, and nothing between the launches."""
    starts = np.arange(5) * (apart_s + 5e-6)
    known = replace(kernels([(0, 1, 0)] * 5), start_s=starts + 6e-6, end_s=starts + 7e-6)
    known = replace(known, launch_start_s=starts, launch_end_s=starts + 5e-6)
    made = replace(trace([], [], [], []), kernels=known)
    found = causes(made, 0, gaps_in(known, [Step("step", 0.0, float(starts[-1]) + 7e-6)])[0])
    assert found[cause].sum() == pytest.approx(4 * apart_s, rel=0.01)
    assert silences(made, 0.0, 1.0)[-1][1] == 1.0


@pytest.mark.parametrize(("waited_us", "cause"), [(99, LAUNCH), (101, LATENCY)])
def test_kernel_that_starts_100_microseconds_after_its_launch_is_late(waited_us: int, cause: str) -> None:
    made = trace([(1, 2, 1)], [], [], [])
    late = replace(made.kernels, start_s=np.array([1 + waited_us * 1e-6]))
    found = causes(replace(made, kernels=late), 0, gaps_in(late, [Step("step", 1, 2)])[0])
    assert [name for name, lasted in found.items() if lasted.any()] == [cause]


def test_gaps_are_separate_by_device_and_empty_without_kernels() -> None:
    made = kernels([(0, 10, 0), (20, 30, 0), (0, 30, 0)])
    steps = [Step("step", 0, 30)]
    of_two = gaps_in(replace(made, device=np.array([3, 1, 3])), steps)
    assert {device: gaps.idle_s(1) for device, gaps in of_two.items()} == {1: [pytest.approx(0)], 3: [10]}
    assert gaps_in(NO_KERNELS, steps) == {}
