"""Usual steps of a recording: which steps are set apart, what repeats, and where a start-up ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.usual_steps import (
    Apart,
    _by_optimizer,
    _by_range,
    _by_repetition,
    _by_rhythm,
    _named,
    _of_process,
    _of_steps,
    _silent_s,
    _times,
    _warm,
    _without_pauses,
    busiest,
    long_calls,
    paced,
    ranges_before,
    usual_steps,
    whole_graph_share,
)
from cs_systems.config import ConfigError
from cs_systems.readers.forms.columns import Range
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import ADD, MAIN, PRODUCT, Made


def in_steps(*lasts: float, calls: Sequence[tuple[str, float, float]] = (), pause_s: float = 0.0) -> Profile:
    """Return steps that follow each other, each with a kernel that ends with it."""
    made, now = Made(), 0.0
    for number, lasts_s in enumerate(lasts):
        made.kernel(PRODUCT, now + lasts_s / 2, now + lasts_s)
        made.range(f"ProfilerStep#{number}", now, now + lasts_s)
        now += lasts_s + pause_s
    for call in calls:
        made.call(*call)
    return made.profile()


@pytest.mark.parametrize(
    ("lasts", "apart"),
    [
        ((1.0,) * 4, ()),
        ((1.515625, 1.0, 1.0, 1.0), (Apart("start-up", (0,), 1.515625, 1.0),)),
        ((1.5, 1.0, 1.0, 1.0), ()),
        ((5.0, 1.0), (Apart("start-up", (0,), 5.0, 1.0),)),
        ((5.0, 1.0, 1.0), (Apart("start-up", (0,), 5.0, 1.0),)),
        ((9.0,) * 5 + (1.0,) * 4, (Apart("start-up", (0, 1, 2, 3), 9.0, 1.0), Apart("slow", (4,), 9.0, 1.0))),
        ((1.75,) * 4 + (1.25, 1.25, 1.0, 1.0), (Apart("start-up", (0, 1, 2, 3), 1.75, 1.125),)),
        ((2.0, 3.0, 1.0, 1.0), (Apart("start-up", (0, 1), 2.5, 1.0),)),
        ((9.0, 9.0, 9.0, 1.0, 1.0, 1.0), (Apart("start-up", (0, 1, 2), 9.0, 1.0),)),
        ((1.0, 1.0, 1.0, 9.0) * 4, (Apart("periodic", (3, 7, 11, 15), 9.0, 1.0, 4),)),
        ((1.0,) * 5 + (9.0,) + (1.0,) * 8, (Apart("slow", (5,), 9.0, 1.0),)),
    ],
)
def test_slow_first_steps_and_slower_kinds_are_set_apart(lasts: tuple[float, ...], apart: tuple[Apart, ...]) -> None:
    usual = _of_steps(in_steps(*lasts))
    assert tuple(one._replace(windows=()) for one in usual.apart) == apart
    assert [[window.end_s - window.start_s for window in one.windows] for one in usual.apart] == [
        [lasts[number] for number in one.steps] for one in apart
    ]
    others = {number for one in apart for number in one.steps}
    kept = [lasts_s for number, lasts_s in enumerate(lasts) if number not in others]
    assert (usual.step_s, usual.total_s) == (pytest.approx(sum(kept) / len(kept)), sum(lasts))
    assert [window.end_s - window.start_s for window in usual.windows] == kept
    assert usual.start_up_s == pytest.approx(sum(one.beyond_s for one in apart if one.kind == "start-up"))


@pytest.mark.parametrize(("load_s", "kind"), [(4.01, "start-up"), (4.0, "slow")])
def test_slow_step_that_loads_code_for_most_of_its_time_is_start_up(load_s: float, kind: str) -> None:
    lasts = (1.0,) * 5 + (9.0,) + (1.0,) * 8
    (apart,) = _of_steps(in_steps(*lasts, calls=[("cuModuleLoadData", 5.25, 5.25 + load_s)])).apart
    assert apart.kind == kind


def test_causes_of_slow_first_and_later_steps_are_added() -> None:
    lasts = (5.0, *(1.0,) * 5, 9.0, *(1.0,) * 8)
    calls = [("cuModuleLoadData", 1.0, 2.0), ("cuModuleLoadData", 10.25, 14.5), ("cudaMalloc", 12.0, 12.5)]
    usual = _of_steps(in_steps(*lasts, calls=calls))
    assert usual.start_up == ("5.25 s in cuModuleLoadData", "500 ms in cudaMalloc")
    assert usual.start_up_s == 4.0 + 8.0
    assert usual.name == "13 usual of 15 steps"


def test_single_step_is_cold_if_first_uses_take_three_tenths() -> None:
    for lost_s, is_cold in ((3.0, False), (3.01, True)):
        usual = _of_steps(in_steps(10.0, calls=[("cuModuleLoadData", 1.0, 1.0 + lost_s)]))
        of_first_uses = lost_s + is_cold  # the silence before the call, too
        assert (usual.is_cold, usual.is_once, usual.start_up_s) == (is_cold, True, pytest.approx(of_first_uses))
        assert (usual.step_s, usual.total_s) == (10.0, 10.0)


def test_step_lasts_from_the_kernels_of_the_one_before_to_its_own() -> None:
    made = Made()
    for begin, end, last in ((0.0, 4.0, 5.0), (4.0, 8.0, 8.5), (12.5, 16.5, 17.0), (20.75, 24.75, 25.0)):
        made.range(f"ProfilerStep#{begin}", begin, end)
        made.kernel(PRODUCT, begin + 1, begin + 2)
        made.kernel(PRODUCT, end - 0.5, last, end - 0.5)
    of = replace(made.profile(), steps=tuple(
        Step("step", begin, end, number=n) for n, (begin, end) in enumerate(((0.0, 4.0), (4.0, 8.0), (12.5, 16.5),
                                                                             (20.75, 24.75)))
    ))  # fmt: skip
    assert [(window.start_s, window.end_s) for window in paced(of)] == [
        (0.0, 5.0), (5.0, 8.5), (12.5, 17.0), (17.0, 25.0),
    ]  # fmt: skip


def test_pause_inside_a_repetition_belongs_to_a_step() -> None:
    """Each repetition begins where the one before ends, so there is no time between them."""
    made, begins = Made(), (0.0, 4.0, 6.0, 13.0, 16.0)
    for number, (begin, end) in enumerate(pairwise(begins)):
        made.kernel(PRODUCT, begin, begin + 0.5)
        made.range(f"ProfilerStep#{number}", begin, end)
    windows = paced(made.profile())
    assert [(window.start_s, window.end_s) for window in windows[1:]] == [(0.5, 4.5), (4.5, 6.5), (6.5, 13.5)]


@pytest.mark.parametrize(("call", "is_cold"), [("cuLinkCreate_v2", True), ("cudaMemcpyAsync", False)])
def test_silence_before_a_module_is_linked_is_compilation(call: str, is_cold: bool) -> None:
    made = Made()
    for number in range(4):
        made.call(call, 2.0 * number + 1.0, 2.0 * number + 1.0001)
        made.kernel(f"k{number}", 2.0 * number + 1.0005, 2.0 * number + 1.5)
    usual = usual_steps(made.profile(profiler="nsys"))
    assert usual.is_cold == is_cold
    assert any("such as compilation" in words for words in usual.start_up) == is_cold


@pytest.mark.parametrize(
    ("numbers", "count", "name", "expected"),
    [
        ([1, 2, 3], 4, "", "steps 1–3 of 4"),
        ([0], 4, "", "steps 0 of 4"),
        ([0, 2], 4, "", "2 usual of 4 steps"),
        ([0, 1], 4, "repetitions", "repetitions 0–1 of 4"),
    ],
)
def test_label_of_usual_steps_lists_their_step_numbers(
    numbers: list[int], count: int, name: str, expected: str
) -> None:
    assert _named([Step("step", 0.0, 1.0, number=number) for number in numbers], count, name) == expected


def test_device_with_most_kernel_time_is_judged() -> None:
    made = Made()
    for number, device in enumerate((0, 1, 1)):
        made.kernel(PRODUCT, number, number + (1.5 if device == 0 else 1.0), device=device)
    assert busiest(made.profile()) == 1
    assert usual_steps(made.profile()).profile.devices == [1]


def test_process_lasts_as_long_as_its_calls_and_copies() -> None:
    made = Made()
    made.kernel(PRODUCT, 4.0, 5.0)
    whole = Step("recording", 4.0, 5.0)
    assert _of_process(Made().trace(), whole) == whole
    made.call("cudaMalloc", 1.0, 6.0)
    assert _of_process(made.trace(), whole) == Step("recording", 1.0, 6.0)
    made.copy("DtoH", 5.0, 8.0)
    assert _of_process(made.trace(), whole) == Step("recording", 1.0, 8.0)


# what repeats


@pytest.mark.parametrize(
    ("outside_s", "expected"), [(1.0, [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]), (1.01, [])], ids=["a tenth", "more"]
)
def test_range_of_the_steps_holds_nine_tenths_of_the_kernels(
    outside_s: float, expected: list[tuple[float, float]]
) -> None:
    made = Made()
    for begin in (0.0, 3.0, 6.0):
        made.range("train", begin, begin + 3)
        made.range("train", begin, begin + 1)  # inside
        made.kernel(PRODUCT, begin, begin + 3.0)
    made.kernel(PRODUCT, 9.5, 9.5 + outside_s)
    steps, name = _by_range(made.trace())
    assert [(step.start_s, step.end_s) for step in steps] == expected
    assert name == ("ranges 'train'" if expected else "")


@pytest.mark.parametrize(("count", "name"), [(3, "ranges 'part'"), (2, "range 'short'")])
def test_range_that_occurs_three_times_comes_before_a_shorter_one(count: int, name: str) -> None:
    made = Made()
    made.range("long", 0.0, 16.0)
    made.range("short", 0.5, 8.0)
    for number in range(count):
        made.range("part", 4.0 * number, 4.0 * number + 4)
    for number in range(4):
        made.kernel(PRODUCT, 1.0 + number, 2.0 + number)
    assert _by_range(made.trace())[1] == name
    for _ in range(5):
        made.range("empty", 20.0, 20.0)
    assert _by_range(made.trace())[1] == name


@pytest.mark.parametrize(
    ("ranges", "name"),
    [
        ([("outer", 0.0, 16.0), ("inner", 4.0, 15.0)], "range 'inner'"),
        ([("outer", 4.0, 15.0), ("inner", 4.0, 15.0)], "range 'outer'"),
        ([("part", 4.0, 7.0), ("part", 8.0, 12.0)], "ranges 'part'"),
        ([("aten::mm", 0.0, 16.0)], ""),
        ([("one", 5.0, 5.75), ("one", 9.0, 9.75), ("one", 10.0, 10.75)], "ranges 'one'"),
    ],
)
def test_range_of_the_steps_is_the_shortest_that_holds_the_kernels(
    ranges: list[tuple[str, float, float]], name: str
) -> None:
    made = Made()
    for each in ranges:
        made.range(*each)
    for begin in (5.0, 9.0, 10.0):
        made.kernel(PRODUCT, begin, begin + 0.5)
    assert _by_range(made.trace())[1] == name


def test_runs_of_the_optimizer_may_follow_each_other_at_once() -> None:
    made = Made()
    for begin in (1.0, 2.0, 5.0):
        made.range("Optimizer.step#SGD.step", begin, begin + 1)
    assert [(step.start_s, step.end_s) for step in _by_optimizer(made.trace())[0]] == [(2.0, 3.0), (3.0, 6.0)]


@pytest.mark.parametrize(
    ("lasts", "ends"),
    [
        ([1.0, 1.0, 1.0, 5.0], [1.0, 2.0, 3.0, 8.0]),
        ([1.0, 1.0, 1.0, 6.0], [1.0, 2.0, 3.0, 3.5]),  # over five times the usual time: a pause
        ([1.0, 6.0, 1.0, 6.0, 1.0, 1.0], [1.0, 1.5, 8.0, 8.5, 15.0, 16.0]),
        ([1.0, 6.0, 1.0, 6.0, 1.0, 6.0, 1.0], [1.0, 7.0, 8.0, 14.0, 15.0, 21.0, 22.0]),  # three are other work
    ],
)
def test_repetition_ends_before_a_pause(lasts: list[float], ends: list[float]) -> None:
    made, begins, now = Made(), list[float](), 0.0
    for lasts_s in lasts:
        begins.append(now)
        made.kernel(PRODUCT, now, now + 0.5)
        now += lasts_s
    assert _without_pauses(made.trace().kernels, begins, [*begins[1:], now]) == ends


def test_steps_are_between_runs_of_the_optimizer() -> None:
    made = Made()
    for begin in (1.0, 5.0, 9.0):
        made.range("Optimizer.step#SGD.step", begin, begin + 1)
        made.range("optimizer", begin + 0.25, begin + 0.5)
    steps, name = _by_optimizer(made.trace())
    assert [(step.start_s, step.end_s) for step in steps] == [(2.0, 6.0), (6.0, 10.0)]
    assert name == "steps between runs of the optimizer"


def repeating(text: str) -> list[tuple[float, float]]:
    """Return the steps in a sequence of kernels, each named by a letter and 1 s long."""
    made = Made()
    for number, letter in enumerate(text):
        made.kernel(letter, float(number), number + 1.0)
    return [(step.start_s, step.end_s) for step in _by_repetition(made.trace())[0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc" * 3, [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]),
        ("abc" * 2, []),
        ("ab" * 3, [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)]),
        ("a" * 9, []),
        ("x" + "abcdefghi" * 3, [(1.0, 10.0), (10.0, 19.0), (19.0, 28.0)]),
        ("xxx" + "abcdefghi" * 3, [(3.0, 12.0), (12.0, 21.0), (21.0, 30.0)]),
        ("abcdefghij" + "abcdefghxj" + "abcdefghij", [(0.0, 10.0), (10.0, 20.0), (20.0, 30.0)]),
        ("xxxx" + "abcdefghi" * 3, []),  # less than nine tenths repeat
        ("abcdefghij" * 3 + "ab", [(2.0, 12.0), (12.0, 22.0), (22.0, 32.0)]),
        ("abcdefghij" * 2 + "abcdefghix", [(0.0, 10.0), (10.0, 20.0), (20.0, 30.0)]),  # alike
        ("abcdefghij" * 2 + "abcdefxxxx", []),
        ("abbb" * 5 + "b" + "abbb" * 6, [*pairwise([*range(0, 20, 4), *range(21, 49, 4)])]),  # nine of ten are regular
        ("abbb" * 4 + "b" + "abbb" * 6, []),
    ],
)
def test_sequence_of_kernels_that_repeats_three_times_is_of_steps(
    text: str, expected: list[tuple[float, float]]
) -> None:
    assert repeating(text) == expected


@pytest.mark.parametrize(
    ("gaps", "count"),
    [
        ((1.0,) * 4, 4),
        ((1.0, 1.0), 0),
        ((1.0,) * 3, 3),
        ((0.001,) * 4, 0),  # no pause
        ((0.00101,) * 4, 4),
        ((1.0,) * 9 + (9.0,), 10),
        ((1.0,) * 8 + (9.0,), 0),
    ],
)
def test_single_kernel_is_a_step_if_it_repeats_at_regular_intervals(gaps: tuple[float, ...], count: int) -> None:
    made, now = Made(), 0.0
    for gap in (0.0, *gaps):
        now += gap
        made.kernel(PRODUCT, now, now + 0.25)
        now += 0.25
    assert len(_by_rhythm(made.trace())[0]) == count
    made.kernel(ADD, now, now + 1)
    assert _by_rhythm(made.trace())[0] == []


# start-up


def loaded(load_s: float, before: int, after: int, long_s: float = 1.0) -> tuple[Step, bool]:
    """Return the warm part of a window of 100 s in which one launch loads code, with kernels of 1 s around it."""
    made, now = Made(), 1.0
    for _ in range(before):
        made.kernel(PRODUCT, now, now + long_s)
        now += long_s
    made.kernel(PRODUCT, now + load_s, now + load_s + 1.0, now, launching_s=load_s)
    now += load_s + 1.0
    for _ in range(after):
        made.kernel(PRODUCT, now, now + 1.0)
        now += 1.0
    return _warm(made.trace(), Step("range", 0.0, 100.0))


@pytest.mark.parametrize(
    ("load_s", "before", "after", "long_s", "start_s"),
    [
        (0.0625, 3, 4, 1.0, 4.0625),  # half of the eight kernels follow the launch
        (0.0625, 4, 4, 1.0, 1.0),
        (0.0625, 2, 4, 1.5, 4.0625),
        (0.0625, 2, 4, 2.5, 1.0),  # less than half of their time
        (0.004, 3, 4, 1.0, 1.0),
    ],
)
def test_start_up_ends_with_the_last_launch_that_loads_code_before_half_of_the_kernels(
    load_s: float, before: int, after: int, long_s: float, start_s: float
) -> None:
    window, is_cold = loaded(load_s, before, after, long_s)
    assert (window.start_s, is_cold) == (start_s, False)
    assert window.end_s == 1.0 + before * long_s + load_s + 1.0 + after


@pytest.mark.parametrize(
    ("call", "lasts_s", "expected"),
    [
        ("cudaMalloc", 0.0051, {"cudaMalloc": pytest.approx(0.0051)}),
        ("cudaMalloc", 0.0049, {}),
        ("cuModuleLoadData", 0.001, {"cuModuleLoadData": pytest.approx(0.001)}),
        ("cudaLaunchKernel", 1.0, {"first kernel launches": 1.0}),
        ("cudaMemcpyAsync", 1.0, {}),
        ("cudaDeviceSynchronize", 1.0, {}),
        ("cudaMalloc", 9.0, {"cudaMalloc": 7.0}),  # until the end, while no kernel runs
    ],
)
def test_long_calls_of_an_idle_device_are_counted(call: str, lasts_s: float, expected: dict[str, Any]) -> None:
    made = Made()
    made.kernel(PRODUCT, 4.0, 5.0)
    made.call(call, 2.0, 2.0 + lasts_s)
    made.call("cudaFree", 10.0, 11.0)
    assert long_calls(made.trace(), 2.0, 10.0) == expected
    assert long_calls(made.trace(), 2.001, 10.0) == {}


def test_ranges_before_the_usual_work_are_the_outermost_that_last() -> None:
    made = Made()
    for name, begin, end in (("load", 0.0, 2.0), ("inner", 0.5, 1.5), ("short", 2.0, 2.5), ("warm", 2.5, 3.5),
                             ("late", 3.5, 5.0)):  # fmt: skip
        made.range(name, begin, end)
    assert [each.name for each in ranges_before(made.trace(), 4.0, 1.0)] == ["load", "warm"]
    assert [each.name for each in ranges_before(made.trace(), 5.0, 0.5)] == ["load", "short", "warm", "late"]
    found = _times([Range("a", 0.0, 1.0, MAIN), Range("b", 1.0, 4.0, MAIN), Range("a", 4.0, 5.0, MAIN)])
    assert [*found.items()] == [("range 'b'", 3.0), ("range 'a'", 2.0)]


def test_longest_call_comes_first_and_one_at_the_end_is_left_out() -> None:
    made = Made()
    for name, begin, end in (("cudaMalloc", 1.0, 2.0), ("cuModuleLoadData", 3.0, 5.0), ("cudaFree", 8.0, 9.0)):
        made.call(name, begin, end)
    assert [*long_calls(made.trace(), 0.0, 8.0).items()] == [("cuModuleLoadData", 2.0), ("cudaMalloc", 1.0)]


def test_ranges_before_the_usual_work_are_the_users() -> None:
    made = Made()
    for name, begin in (("aten::mm", 0.0), ("load", 1.0)):
        made.range(name, begin, begin + 1)
    assert [each.name for each in ranges_before(made.trace(), 4.0, 0.5)] == ["load"]


def test_name_of_over_sixty_characters_is_shortened() -> None:
    whole, shortened = (next(iter(_times([Range("x" * count, 0.0, 1.0, MAIN)]))) for count in (60, 61))
    assert whole == f"range '{'x' * 60}'"
    assert len(shortened) <= len(whole)


def test_silence_counts_only_outside_of_ranges() -> None:
    made = Made()
    made.call("cudaMalloc", 2.0, 3.0)
    made.kernel(PRODUCT, 8.0, 9.0)
    trace = made.trace()
    assert _silent_s(trace, 0.0, 8.0, []) == 7.0
    assert _silent_s(trace, 0.0, 8.0, [Range("a", 1.0, 2.5, MAIN), Range("b", 7.0, 12.0, MAIN)]) == 5.0
    assert _silent_s(trace, 8.0, 8.0, []) == 0.0


def test_share_of_whole_graphs_is_of_the_kernels() -> None:
    made = Made()
    made.kernel("CUDA graph 7", 0.0, 1.0)
    made.kernel(PRODUCT, 1.0, 4.0)
    assert whole_graph_share(made.profile()) == 0.25


@pytest.mark.parametrize(
    ("wait_s", "name", "is_rest"),
    [(0.00501, "range 'train' after the start-up", True), (0.005, "range 'train'", False)],
)
def test_single_range_is_usual_from_its_first_launch_on(wait_s: float, name: str, is_rest: bool) -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 0.5)
    made.range("train", 10.0, 20.0)
    for number in range(8):
        made.kernel(PRODUCT, 10.0 + wait_s + number, 11.0 + wait_s + number)
    usual = usual_steps(made.profile())
    assert (usual.name, usual.is_rest, usual.is_once, usual.is_named) == (name, is_rest, True, True)
    assert usual.total_s == 20.0
    assert usual.start_up_s == pytest.approx(9.5 + wait_s)  # without the time in which other work ran
    assert usual.step_s == pytest.approx(8.0)
    assert usual.start_up == ("10.0 s in stretches without a CUDA call",)


def test_time_after_a_recording_is_refused_with_its_end() -> None:
    made = Made()
    made.kernel(PRODUCT, 1.0, 3.5)
    with pytest.raises(ConfigError, match=r"choose times from 0 to 2\.5 s, when its recording ends"):
        profile(made.trace(), between=(2.5, 9.0))


@pytest.mark.parametrize("profiler", ["nsys", "kineto"])
def test_recording_of_a_whole_process_begins_with_its_first_call(profiler: str) -> None:
    made = Made()
    made.range("load", 0.25, 2.25)
    made.call("cuModuleLoadData", 2.25, 4.25)
    for number in range(3):
        made.kernel(PRODUCT, 8.0 + 2 * number, 9.0 + 2 * number)
        made.kernel(ADD, 9.0 + 2 * number, 9.5 + 2 * number)
    made.call("cudaFree", 16.0, 22.25)
    usual = usual_steps(made.profile(profiler=profiler))
    end_s = 22.25 if profiler == "nsys" else 13.5
    assert (usual.name, usual.is_named, usual.step_s) == ("repetitions of 2 kernels", False, pytest.approx(5.5 / 3))
    assert (usual.total_s, usual.start_up_s) == (end_s - 0.25, 7.75)
    assert usual.start_up == (
        "2.00 s in range 'load'", "3.75 s in stretches without a CUDA call", "2.00 s in cuModuleLoadData",
    )  # fmt: skip


@pytest.mark.parametrize(("silent_s", "is_told"), [(1.0, True), (0.99, False)])
def test_silence_of_5_percent_of_the_recording_is_reported(silent_s: float, is_told: bool) -> None:
    made = Made()
    made.call("cudaFree", 0.0, 4.0 - silent_s)
    for number in range(3):
        made.kernel(PRODUCT, 4.0 + 2 * number, 5.0 + 2 * number)
        made.kernel(ADD, 5.0 + 2 * number, 6.0 + 2 * number)
    made.call("cudaDeviceSynchronize", 10.0, 20.0)
    usual = usual_steps(made.profile(profiler="nsys"))
    assert any("stretches" in words for words in usual.start_up) is is_told


@pytest.mark.parametrize(("lost_s", "is_cold"), [(4.0, True), (2.9, False)])
def test_recording_that_loads_code_until_its_end_is_cold(lost_s: float, is_cold: bool) -> None:
    """Most of the kernels run before the last launch that loads code."""
    made = Made()
    for number in range(4):
        made.kernel(f"k{number}", float(number) / 2, number / 2 + 0.5)
    made.kernel("k4", 2.0 + lost_s, 10.0, 2.0)
    made.call("cuModuleLoadData", 2.0, 2.0 + lost_s)
    trace = made.trace()
    ends = trace.kernels.launch_end_s.copy()
    ends[-1] = 2.0 + lost_s
    trace = replace(trace, kernels=replace(trace.kernels, launch_end_s=ends))
    usual = usual_steps(profile(trace))
    assert (usual.is_cold, usual.is_once) == (is_cold, True)
    assert usual.start_up_s == pytest.approx(lost_s + 2.0 if is_cold else 0.0, rel=1e-5)  # and the silence before
