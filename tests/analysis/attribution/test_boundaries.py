"""Profiles at boundaries: times that touch, one range, one name or row more than shown, threads that share a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution import operator_table, tables, timeline
from cs_systems.analysis.attribution.inventory import row_of_profile
from cs_systems.analysis.attribution.known_ranges import with_habits
from cs_systems.analysis.attribution.overlap import of_kernels, picture
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.analysis.attribution.sequence_numbers import route_of
from cs_systems.analysis.comparison.profiles import doubts
from cs_systems.config import ConfigError
from cs_systems.core.sources import Source
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Op, Ops
from tests.analysis.attribution.made import Made
from tests.analysis.attribution.test_foreign import AUTOGRAD, MAIN, event, kernel, marked

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
OTHER = 3  # a thread


def numbered(sequence: int, forward_thread: int | None = None) -> dict[str, int]:
    return {"Sequence number": sequence} | ({} if forward_thread is None else {"Fwd thread id": forward_thread})


# times


def recording() -> list[Event]:
    """Return a recording of 100 µs with launches at 10 and 40 µs."""
    return [marked("all", 0, 100), *kernel("gemm", 20, 30, launched=10), *kernel("gemm", 60, 70, launched=40)]


@pytest.mark.parametrize(
    ("from_us", "to_us", "message"),
    [
        (50, 50, "no part of"), (100, 200, "no part of"), (200, 300, "no part of"),
        (99, 200, "was launched between"), (50, 51, "was launched between"),
    ],
)  # fmt: skip
def test_time_window_without_recorded_events_or_launches_is_refused(
    write_trace: WriteTrace, from_us: float, to_us: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(read(write_trace(recording())), between=(from_us * 1e-6, to_us * 1e-6))


def test_time_that_was_asked_for_is_not_made_longer(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace(recording())), between=(0.0, 65e-6))
    assert made.steps[0].end_s == pytest.approx(65e-6)
    assert not any("until their kernels end" in note for note in made.notes)


def test_recording_that_lasts_no_time_is_damaged(write_trace: WriteTrace) -> None:
    with pytest.raises(ConfigError, match="is damaged: its recording lasts 0 s"):
        profile(read(write_trace([marked("all", 5, 5)])))


def test_outermost_ranges_of_a_phase_that_touch_are_added() -> None:
    made = Made()
    for name, start_s, end_s in (
        *(("step", 1.0, 4.0), ("forward", 1.0, 1.5), ("forward", 1.5, 2.0), ("forward", 1.75, 2.0)),
        *(("backward", 2.0, 3.5), ("backward", 3.75, 4.25)),  # one of two steps is of neither
        *(("step", 4.0, 5.0), ("forward", 4.25, 4.5), ("backward", 4.5, 5.0)),
    ):
        made.range(name, start_s, end_s)
    for launched_s in (1.25, 2.25, 4.5):
        made.kernel("gemm", launched_s, launched_s + 0.25)
    (row,) = (row for row in tables.ratio(made.profile()) if row["measure"] == "wall time")
    assert (row["forward_s"], row["backward_s"], row["backward_to_forward"]) == (0.625, 1.0, 1.6)


def test_range_without_a_duration_is_no_step(write_trace: WriteTrace) -> None:
    steps = [marked("step", 5, 5), marked("step", 5, 35), marked("step", 35, 100)]
    found = profile(read(write_trace([*recording(), *steps]))).steps
    assert [step.start_s for step in found] == [pytest.approx(5e-6), pytest.approx(35e-6)]


@pytest.mark.parametrize("from_us", [45, 20])
def test_refusal_names_the_first_and_the_last_launch_since_the_recording_began(
    write_trace: WriteTrace, from_us: float
) -> None:
    with pytest.raises(ConfigError, match="the launches are from 1e-05 to 4e-05 s"):
        profile(read(write_trace(recording())), between=(from_us * 1e-6, (from_us + 10) * 1e-6))


@pytest.mark.parametrize(("from_us", "left_out"), [(0, 0), (-5, 0), (30, 1)])
def test_step_from_the_start_has_the_kernels_launched_before_it(
    write_trace: WriteTrace, from_us: float, left_out: int
) -> None:
    made = profile(read(write_trace(recording())), between=(from_us * 1e-6, 90e-6))
    assert sum(one.calls for one in made.groups.values()) == 2 - left_out
    assert made.steps[0].start_s - made.trace.ranges.start_s.min() == pytest.approx(max(from_us, 0) * 1e-6)


def test_step_that_launches_nothing_keeps_its_end(write_trace: WriteTrace) -> None:
    """The kernel of the first step ends at 90 µs, in the second step."""
    events = [marked("step", 0, 10), marked("step", 80, 100), *kernel("gemm", 20, 90, launched=5)]
    made = profile(read(write_trace(events)))
    assert [row["wall_s"] * 1e6 for row in tables.steps(made)] == [pytest.approx(80)]
    assert "1 of 2 steps launched no kernel and are left out" in made.notes


# ranges


@pytest.mark.parametrize(("end", "idle_us"), [(100, 90), (25, 20)])
def test_idle_time_of_a_single_range_ends_with_the_step(write_trace: WriteTrace, end: int, idle_us: int) -> None:
    """A kernel takes 10 µs, of which 5 are in the shorter range; that step lasts until the kernel ends."""
    made = profile(read(write_trace([marked("step", 0, end), *kernel("gemm", 20, 30, launched=5)])))
    (row,) = range_tree(made)
    assert (row["idle_s"], row["calls_per_step"]) == (pytest.approx(idle_us * 1e-6), 1.0)
    assert (row["time_s"], row["self_s"], row["share"]) == (pytest.approx(10e-6), pytest.approx(10e-6), 1.0)


def test_range_has_a_rate_where_it_has_flops_and_time(write_trace: WriteTrace) -> None:
    shapes = {"Input Dims": [[8, 16], [16, 32]]}
    events = [
        marked("step", 0, 100), marked("product", 10, 20), marked("sum", 30, 40), marked("no time", 50, 60),
        event("cpu_op", "aten::mm", 11, 15, **shapes), *kernel("gemm", 120, 124, launched=12),
        *kernel("add", 130, 132, launched=32),
        event("cpu_op", "aten::mm", 51, 55, **shapes), *kernel("gemm", 140, 140, launched=52),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    rows = {row["path"]: row for row in range_tree(made)}
    flops = 2 * 8 * 16 * 32
    assert (rows["step / product"]["flops"], rows["step / sum"]["flops"]) == (flops, None)
    assert rows["step / product"]["achieved_flops_per_s"] == pytest.approx(flops / 4e-6)
    assert rows["step / sum"]["achieved_flops_per_s"] is None
    assert (rows["step / no time"]["flops"], rows["step / no time"]["achieved_flops_per_s"]) == (flops, None)
    assert rows["step"]["achieved_flops_per_s"] == pytest.approx(2 * flops / 6e-6)


@pytest.mark.parametrize(("names", "listed"), [(11, "…"), (12, "…"), (13, "…")])
def test_error_names_at_most_twelve_ranges_if_none_matches(write_trace: WriteTrace, names: int, listed: str) -> None:
    events = [marked(f"part {chr(97 + n)}", 10 * n, 10 * n + 5) for n in range(names)]
    trace = read(write_trace([*events, *kernel("gemm", 6, 8, launched=1)]))
    with pytest.raises(ConfigError) as raised:
        with_habits([trace], ["forward=nothing like it"])
    assert str(raised.value).count("'part ") == min(names, 12)
    assert (listed in str(raised.value)) is (names > 12)


@pytest.mark.parametrize("names", [3, 4])
def test_error_lists_at_most_three_step_names_if_no_kernel_is_in_a_step(write_trace: WriteTrace, names: int) -> None:
    events = [marked(f"part {chr(97 + n)}", 10 * n, 10 * n + 5) for n in range(names)]
    with pytest.raises(ConfigError) as raised:
        profile(read(write_trace([*events, *kernel("gemm", 196, 198, launched=191)])), "part *")
    before = str(raised.value).partition("; choose other")[0]
    assert before.count("'part ") == min(names, 3)
    assert before.endswith("…") is (names > 3)


@pytest.mark.parametrize("names", [12, 13])
def test_twelve_ranges_are_offered_as_steps(write_trace: WriteTrace, names: int) -> None:
    events = [marked(f"part {chr(97 + n)}", 10 * n, 10 * n + 5) for n in range(names)]
    with pytest.raises(ConfigError, match="no range is named") as raised:
        profile(read(write_trace([*events, *kernel("gemm", 6, 8, launched=1)])), "other")
    assert str(raised.value).count("'part ") == 12
    assert str(raised.value).endswith("…") is (names > 12)


# operators and sequence numbers


def test_operator_in_no_range_has_no_caller() -> None:
    made = Made()
    made.operator("aten::mm", 0.0, 0.5)
    made.kernel("gemm", 0.25, 0.5)
    made.range("later", 1.0, 2.0)
    assert [(row["caller"], row["callers"]) for row in operator_table.operators(made.profile())] == [(None, 0)]
    made.operator("aten::add", 1.25, 1.5)
    rows = {row["operator"]: (row["caller"], row["callers"]) for row in operator_table.operators(made.profile())}
    assert rows == {"aten::mm": (None, 0), "aten::add": ("later", 1)}


def test_operator_of_another_thread_launches_no_kernel_of_this_one() -> None:
    """The other thread has the next number, and its operator is open at the launch."""
    made = Made()
    made.kernel("gemm", 1.0, 1.5)
    operators = [Op("aten::mm", 0.0, 2.0, MAIN, 1, 0), Op("aten::mm", 0.5, 2.0, MAIN + 1, 2, 0)]
    route = route_of(replace(made.trace(), ops=Ops.of(operators)))
    assert route is not None
    assert route.forward_numbers(np.array([0])) == [(MAIN, 1)]


@pytest.mark.parametrize(("start_s", "is_of"), [(0.75, ("forward",)), (1.0, ("forward",)), (1.125, ())])
def test_forward_operator_begins_no_later_than_its_backward(start_s: float, is_of: tuple[str, ...]) -> None:
    """Operators of another number tell which thread ran forward."""
    made = Made()
    made.range("forward", 0.0, 1.5)
    made.kernel("gemm", 1.25, 1.5, thread=AUTOGRAD)
    operators = [
        Op("aten::mm", 0.25, 0.5, MAIN, 1, 0), Op("aten::mm", start_s, start_s + 0.125, MAIN, 2, 0),
        Op("MmBackward0", 1.0, 1.5, AUTOGRAD, 2, 1), Op("MmBackward0", 2.0, 2.5, AUTOGRAD, 1, 1),
    ]  # fmt: skip
    route = route_of(replace(made.trace(), ops=Ops.of(operators)))
    assert route is not None
    assert route.forward_ranges(np.array([0])) == [is_of]


def test_operator_that_begins_with_a_backward_one_does_not_show_its_forward_thread() -> None:
    made = Made()
    made.kernel("gemm", 1.25, 1.5, thread=AUTOGRAD)
    operators = [Op("aten::mm", 1.0, 1.125, MAIN, 1, 0), Op("MmBackward0", 1.0, 1.5, AUTOGRAD, 1, 1)]
    route = route_of(replace(made.trace(), ops=Ops.of(operators)))
    assert route is not None
    assert route.forward_numbers(np.array([0])) == [None]


@pytest.mark.parametrize(("operators", "more"), [(50, None), (51, "1 more operators"), (53, "3 more operators")])
def test_fifty_operators_are_kept(write_trace: WriteTrace, operators: int, more: str | None) -> None:
    events = [marked("step", 0, 1000), *kernel("gemm", 20, 30, launched=5)]
    events += [event("cpu_op", f"aten::op_{n:02}", 10 + 10 * n, 15 + 10 * n + n / 20) for n in range(operators)]
    rows, said = operator_table.largest(profile(read(write_trace(events))))
    assert len(rows) == min(operators, 50)
    assert [note for note in said if "more operators" in note] == ([more] if more else [])


def of_two_threads(mine: int, others: int) -> list[Event]:
    """Return two threads that count from the same number, and a backward of autograd's thread 1.

    The backward has `mine` of its numbers from the main thread alone and `others` from the other thread alone.
    """
    events = [marked("step", 0, 1000), marked("here", 10, 200, MAIN), marked("there", 10, 200, OTHER)]
    for n in range(mine + others):
        thread = MAIN if n < mine else OTHER
        events.append(event("cpu_op", "aten::mm", 20 + 10 * n, 25 + 10 * n, thread, **numbered(n, 0)))
        start = 300 + 10 * n
        events.append(event("cpu_op", "MmBackward0", start, start + 8, AUTOGRAD, **numbered(n, 1)))
        events += kernel(f"gemm_{n}", start + 500, start + 505, launched=start + 2, thread=AUTOGRAD)
    return events


@pytest.mark.parametrize(("mine", "others", "main_wins"), [(3, 1, True), (1, 3, False), (2, 1, True), (1, 2, False)])
def test_forward_thread_is_the_one_with_most_sequence_numbers(
    write_trace: WriteTrace, mine: int, others: int, main_wins: bool
) -> None:
    route = route_of(read(write_trace(of_two_threads(mine, others))))
    assert route is not None
    threads = {found[0] for found in route.forward_numbers(np.arange(mine + others)) if found}
    assert threads == {MAIN if main_wins else OTHER}


def test_main_thread_counts_as_forward_even_if_it_runs_a_backward_operator(write_trace: WriteTrace) -> None:
    """A checkpoint or a hook runs one in the thread that makes the forward."""
    events = [
        marked("all", 0, 400),
        *(event("cpu_op", "aten::mm", 10 + 10 * n, 15 + 10 * n, **numbered(n, 0)) for n in range(3)),
        *kernel("gemm", 510, 520, launched=11), *kernel("gemm", 530, 540, launched=45),
        event("cpu_op", "MmBackward0", 100, 110, **numbered(2, 1)), *kernel("gemm", 550, 560, launched=101),
        event("cpu_op", "MmBackward0", 120, 130, AUTOGRAD, **numbered(1, 1)),
        *kernel("gemm", 570, 580, launched=121, thread=AUTOGRAD),
        *kernel("add", 590, 600, launched=135, thread=AUTOGRAD),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    assert [place.phase for place in made.places] == ["forward", "forward", "backward", "backward", "backward"]


def test_operators_without_sequence_numbers_show_backward_by_their_names(write_trace: WriteTrace) -> None:
    events = [
        marked("all", 0, 200), event("cpu_op", "aten::mm", 10, 20), *kernel("gemm", 310, 320, launched=11),
        event("cpu_op", "MmBackward0", 30, 40, AUTOGRAD), *kernel("gemm", 330, 340, launched=31, thread=AUTOGRAD),
    ]  # fmt: skip
    trace = read(write_trace(events))
    assert not trace.ops
    assert [place.phase for place in profile(trace).places] == ["forward", "backward"]


# comparisons and pictures


def half_known(write_trace: WriteTrace, known_us: float) -> Profile:
    events = [marked("step", 0, 100), marked("forward", 0, 90), marked("block 0", 10, 20)]
    events += [*kernel("gemm", 200, 200 + known_us, launched=15), *kernel("gemm", 400, 500 - known_us, launched=50)]
    return profile(read(write_trace(events)))


@pytest.mark.parametrize(("known_us", "doubted"), [(54.9, False), (55.1, True), (45.1, False), (44.9, True)])
def test_layer_coverage_that_differs_by_5_percent_is_a_doubt(
    write_trace: WriteTrace, known_us: float, doubted: bool
) -> None:
    a, b = half_known(write_trace, 50), half_known(write_trace, known_us)
    assert (a.layer_coverage, b.layer_coverage) == (pytest.approx(0.5), pytest.approx(known_us / 100))
    assert any("a difference in ranges" in sentence for sentence in doubts(a, b)) is doubted


@pytest.mark.parametrize(
    ("calls", "drawn"),
    [
        ([500_000, 500_000], [0, 1]), ([500_000, 500_001], [0]), ([1_000_001, 1, 1], [1]), ([1, 1_000_000, 1], [1]),
        ([1, 999_998, 1], [0, 1, 2]), ([400_000, 400_000, 100_000, 400_000, 400_000], [1, 2, 3]),
    ],
)  # fmt: skip
def test_page_draws_at_most_a_million_kernels(write_trace: WriteTrace, calls: list[int], drawn: list[int]) -> None:
    events: list[Event] = []
    for n in range(len(calls)):
        events += [marked("step", 100 * n, 100 * n + 50), *kernel("gemm", 100 * n + 10, 100 * n + 20, 100 * n + 5)]
    made = profile(read(write_trace(events)))
    many = {key: sums._replace(calls=count) for (key, sums), count in zip(made.by_step.items(), calls, strict=True)}
    assert timeline.drawn_steps(replace(made, by_step=many), drawn[len(drawn) // 2]) == drawn


def test_steps_by_phases_go_from_forward_to_the_last_phase(write_trace: WriteTrace) -> None:
    """An optimizer's range begins a step only where it holds a forward, as with a closure."""

    def one(at: int) -> list[Event]:
        return [
            marked("forward", at, at + 10), marked("backward", at + 10, at + 20), marked("optimizer", at + 25, at + 30),
            *kernel("gemm", at + 4, at + 6, launched=at + 2),
        ]  # fmt: skip

    made = profile(read(write_trace([*one(0), *one(100)])))
    assert [(round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in made.steps] == [(0, 30), (100, 130)]
    closure = [event for at in (0, 100) for event in (
        marked("optimizer", at, at + 40), marked("forward", at + 5, at + 10), marked("backward", at + 10, at + 20),
        *kernel("gemm", at + 8, at + 12, launched=at + 6),
    )]  # fmt: skip
    made = profile(read(write_trace(closure)))
    assert [(round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in made.steps] == [(0, 40), (100, 140)]


def test_idle_time_of_another_thread_is_divided_among_the_ranges_of_the_main_one(write_trace: WriteTrace) -> None:
    events = [
        marked("step", 0, 100), marked("first", 40, 60), marked("second", 60, 90), marked("hook", 50, 80, AUTOGRAD),
        *kernel("gemm", 110, 115, launched=52, thread=AUTOGRAD),
        *kernel("gemm", 120, 125, launched=70, thread=AUTOGRAD),
    ]  # fmt: skip
    rows = {row["path"]: row["idle_s"] for row in range_tree(profile(read(write_trace(events))))}
    assert rows["step / first / hook"] == pytest.approx(10e-6)
    assert rows["step / second / hook"] == pytest.approx(20e-6)


def test_operators_without_a_formula_give_a_range_no_flops(write_trace: WriteTrace) -> None:
    shapes = {"Input Dims": [[8, 16], [16, 32]]}
    events = [
        marked("step", 0, 100), marked("product", 10, 20), marked("sum", 30, 40),
        event("cpu_op", "aten::mm", 11, 15, **shapes), *kernel("gemm", 120, 124, launched=12),
        event("cpu_op", "aten::add", 31, 35, **shapes), *kernel("add", 130, 132, launched=32),
    ]  # fmt: skip
    rows = {row["path"]: row["flops"] for row in range_tree(profile(read(write_trace(events))))}
    assert rows == {"step": 8192, "step / product": 8192, "step / sum": None}


@pytest.mark.parametrize(("launched", "coverage"), [(15, 1.0), (50, 0.0)])
def test_layer_coverage_is_0_or_1_at_the_extremes(write_trace: WriteTrace, launched: int, coverage: float) -> None:
    events = [marked("step", 0, 100), marked("forward", 0, 90), marked("block 0", 10, 20)]
    made = profile(read(write_trace([*events, *kernel("gemm", 200, 210, launched=launched)])))
    assert made.layer_coverage == coverage
    assert made.coverage.startswith(f"100.0% of the kernel time belongs to a phase, and {coverage:.1%} to a layer")


def test_stream_0_is_shown(write_trace: WriteTrace) -> None:
    events = [marked("step", 0, 100), *kernel("gemm", 20, 30, launched=5, stream=0), *kernel("add", 40, 50, 6)]
    made = timeline.view(profile(read(write_trace(events))))
    assert [stream["stream"] for stream in made["streams"]] == [0, 7]


@pytest.mark.parametrize(("begins", "later_us", "counts"), [
    (100, 0, True), (100, 1, False), (249, 0, True), (251, 0, False), (251, -10, False),
])  # fmt: skip
def test_copies_from_step_start_to_end_of_last_kernel_count_as_inside(
    write_trace: WriteTrace, begins: int, later_us: int, counts: bool
) -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD", begins, begins + 2, device=0, stream=7, bytes=64)
    made = profile(read(write_trace([marked("all", 0, 300), *kernel("gemm", 240, 250, launched=150), copy])))
    start_s = min(made.trace.copies.start_s[0], made.trace.kernels.launch_start_s[0]) + later_us * 1e-6
    found = timeline.within(made, start_s, start_s + 100e-6)
    assert len(found.copies) == counts


def test_picture_shows_each_phase_of_a_step_separately(write_trace: WriteTrace) -> None:
    events = [
        marked("step", 0, 100), marked("forward", 0, 30), marked("backward", 40, 90),
        *kernel("gemm", 10, 20, launched=5), *kernel("gemm", 60, 80, launched=50),
        *kernel("ncclDevKernel_AllReduce_Sum_f32", 70, 95, launched=55, stream=9),
    ]  # fmt: skip
    trace = read(write_trace(events))
    (step,) = of_kernels(trace, profile(trace).steps)
    rows = [(row["stream"], row["phase"], round(row["start_s"] * 1e6), round(row["end_s"] * 1e6))
            for row in picture(trace, step)]  # fmt: skip
    assert rows == [
        ("communication", None, 70, 95), ("compute", "forward", 10, 20), ("compute", "backward", 60, 80),
    ]  # fmt: skip


def test_recording_lasts_from_its_first_to_its_last_time(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace([marked("step", 10, 100), *kernel("gemm", 110, 130, launched=15)])))
    row = row_of_profile(Source(Path("a.json"), "a.json", Path("a.json")), made)
    assert (row["duration_s"], row["kernels"], row["steps"]) == (pytest.approx(120e-6), 1, 1)


@pytest.mark.parametrize(
    ("walls", "opens"),
    [([1.0], None), ([3.0, 1.0], 1), ([3.0, 1.0, 2.0], 2), ([1.0, 2.0, 3.0, 4.0], 1), ([2.0, 2.0, 2.0, 1.0], 0)],
)
def test_page_opens_at_the_median_step_or_the_shorter_of_two_middle_steps(
    walls: list[float], opens: int | None
) -> None:
    rows: Any = [{"step": n, "wall_s": wall_s, "kernels": 1} for n, wall_s in enumerate(walls)]
    shown = tables.drawn_step([*rows, *rows])  # of two devices
    assert (f"opens at step {opens}, which took {walls[opens or 0]:.2f} s" in shown) is (opens is not None)
    assert shown.endswith(f"{len(walls)} steps of {sum(walls) / len(walls):.2f} s on average") is (opens is not None)
    assert tables.drawn_step([{**row, "kernels": 0} for row in rows]) == tables.drawn_step([]) == ""


@pytest.mark.parametrize("faulty", [1, 5, 6])
def test_five_steps_with_kernels_of_no_time_are_named(write_trace: WriteTrace, faulty: int) -> None:
    events: list[Event] = []
    for n in range(8):
        at, end = 100 * n, 100 * n + 50
        events += [marked(f"ProfilerStep#{n}", at, at + 90), *kernel("gemm", at + 20, at + 40, launched=at + 5)]
        events += kernel("add", end, end if n < faulty else end + 5, launched=at + 7)
    made = profile(read(write_trace(events)))
    assert made.incomplete is not None
    assert made.incomplete.count("ProfilerStep#") == min(faulty, 5)
    assert f"in {faulty} of 8 steps" in made.incomplete
    assert ("…" in made.incomplete) is (faulty > 5)
    assert len(made.steps) == 8 - faulty
