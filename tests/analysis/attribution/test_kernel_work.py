"""Work that kernels tell: of slow and growing steps, products, trials, recomputation, and updates by the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.fusable import fusable_runs
from cs_systems.analysis.attribution.kernel_trials import Trials, kernel_trials
from cs_systems.analysis.attribution.offload import OffloadRow, offload
from cs_systems.analysis.attribution.product_rates import Product, _sizes, product_rates
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.recomputed import Recomputed, recomputed
from cs_systems.analysis.attribution.slow_steps import Beyond, _named_times, beyond
from cs_systems.analysis.attribution.step_growth import Growing, growing, grows_alike
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.readers.forms.trace import Ops, Step
from tests.analysis.attribution.made import ADD, FLASH, PRODUCT, Made

# slow steps

USUAL, SLOW = (Step("step", 0.0, 3.5),), (Step("step", 4.0, 12.0, number=1),)


def more(
    each_s: float,
    *work: tuple[str, float],
    name: str = "",
    named_s: float = 0.0,
    first: str = "forward",
    usually: Sequence[tuple[str, float]] = (),
) -> Beyond:
    """Return what a slow step does beyond one of 4 s: kernels of these phases, and a range of the user's."""
    made, now = Made(), 0.0
    for begin_s in (0.0, 4.0):
        now = begin_s
        for phase, lasts_s in ((first, 1.0), ("backward", 1.0), *(work if begin_s else usually)):
            made.range(phase, now, now + lasts_s)
            made.kernel(PRODUCT, now, now + lasts_s, now + lasts_s / 2)
            now += lasts_s
    if name:
        made.range(name, now, now + named_s)
    usual = Usual(replace(made.profile(), steps=(*USUAL, *SLOW)), 4.0, windows=USUAL)
    return beyond(usual, Apart("slow", (1,), each_s, 4.0, None, SLOW))


@pytest.mark.parametrize(
    ("each_s", "work", "expected"),
    [
        (8.0, [("forward", 1.0), ("loss", 1.0), ("input", 0.5)], Beyond("", True, False)),
        (8.0, [("forward", 1.0), ("loss", 0.99), ("input", 0.5)], Beyond("", False, False)),
        (9.0, [("forward", 1.5), ("loss", 1.0)], Beyond("", True, False)),
        (9.1, [("forward", 1.5), ("loss", 1.0)], Beyond("", False, False)),
        (8.0, [("optimizer", 1.0), ("clip", 1.0)], Beyond("", False, True)),
        (8.1, [("optimizer", 1.0), ("clip", 1.0)], Beyond("", False, False)),
    ],
)
def test_slow_step_is_described_by_the_phases_of_most_of_its_kernels(
    each_s: float, work: list[tuple[str, float]], expected: Beyond
) -> None:
    assert more(each_s, *work)._replace(name="") == expected


def test_slow_step_without_a_phase_spends_no_time_in_it() -> None:
    for first in ("forward", "loss"):
        assert not more(6.0, ("backward", 1.0), first=first).only_forward
    assert not more(7.0, ("forward", 2.0), usually=[("input", 1.0)]).only_forward
    assert more(6.0, ("forward", 2.0)).only_forward


@pytest.mark.parametrize(
    ("name", "each_s", "expected"),
    [
        ("validation", 8.0, Beyond("validation", False, False)),
        ("validation", 8.1, Beyond("", False, False)),
        ("Optimizer.step#SGD.step", 8.0, Beyond("Optimizer.step#SGD.step", False, True)),
    ],
)
def test_slow_step_is_named_by_the_range_of_most_of_it(name: str, each_s: float, expected: Beyond) -> None:
    assert more(each_s, name=name, named_s=2.0) == expected


@pytest.mark.parametrize(("begin_s", "long_s"), [(0.0, 8.0), (0.25, None)])
def test_range_lasts_from_the_kernels_before_it_until_its_own_have_ended(begin_s: float, long_s: float | None) -> None:
    made = Made()
    made.kernel(ADD, 0.5, 3.0)
    made.kernel(ADD, 3.0, 5.0, 1.5)
    made.kernel(ADD, 5.0, 5.5, 5.25)
    for name, begin, end in (("a", 1.0, 2.0), ("b", 6.0, 7.0), ("b", 6.25, 6.5), ("b", 7.0, 7.5), ("long", 0.0, 8.0),
                             ("c", 5.25, 5.375), ("d", 3.5, 4.5), ("out", 9.0, 10.0)):  # fmt: skip
        made.range(name, begin, end)
    made.function("train.py(8): evaluate", 6.0, 6.5)
    found = _named_times(Usual(made.profile(), 1.0), (Step("step", begin_s, 8.0),))
    expected = {"a": 2.0, "b": 1.5, "c": 0.25, "d": 1.0, "evaluate() at train.py:8": 0.5}
    assert found == expected | ({"long": 8.0} if long_s else {})
    of_two = _named_times(Usual(made.profile(), 1.0), (Step("step", 0.0, 8.0), Step("step", 8.0, 11.0)))
    assert (of_two["a"], of_two["b"], of_two["out"], of_two["long"]) == (1.0, 0.75, 0.5, 4.0)


# growing steps


@pytest.mark.parametrize(
    ("steps", "first_s", "more_s"),
    [(10, 1.5, 8.0), (9, 1.0, 8.0), (4, 1.0, 3.0), (15, 2.0, 12.0)],
    ids=["means of two", "one", "few", "medians of three"],
)
def test_growth_of_a_kernel_is_between_the_first_and_the_last_fifth_of_the_steps(
    steps: int, first_s: float, more_s: float
) -> None:
    made = Made()
    for number in range(steps):
        made.kernel(PRODUCT, 32.0 * number, 32.0 * number + 1 + number)
        made.kernel(ADD, 32.0 * number + 30, 32.0 * number + 31)
    windows = [Step("step", 32.0 * number, 32.0 * number + 31.5, number=number) for number in range(steps)]
    first, second = growing(made.trace().kernels, windows)
    assert (first.family, first.first_s, first.more_s) == ("matmul", first_s, more_s)
    assert (second.family, second.first_s, second.more_s) == ("elementwise", 1.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "alike"),
    [
        ([(10.0, 10.0), (10.0, 5.0)], True),
        ([(0.5, 0.75), (0.5, 0.25)], True),  # half of the growth of all
        ([(0.5, 0.7501), (0.5, 0.2499)], False),
        ([(10.0, 10.0), (9.0, 9.0), (1.0, 0.0)], False),  # a twentieth
        ([(10.0, 10.0), (9.01, 9.0), (0.99, 0.0)], True),
        ([(10.0, 10.0)], False),
        ([(10.0, 10.0), (0.1, 0.1)], False),
    ],
)
def test_kernels_grow_alike_if_all_larger_ones_do(rows: list[tuple[float, float]], alike: bool) -> None:
    assert grows_alike([Growing("k", "other", first_s, more_s) for first_s, more_s in rows]) is alike


# products


def multiplied(*products: tuple[str, float, str, Any], gpu: str = "NVIDIA H100 80GB HBM3") -> Profile:
    """Return two steps, each with these products: (operator, s, kernel, shapes of the inputs)."""
    made, now = Made(gpu), 0.0
    for _ in range(2):
        begin = now
        for operator, lasts_s, kernel, shapes in products:
            made.kernel(kernel, now, now + lasts_s, now + lasts_s / 4)
            made.operator(operator, now, now + lasts_s / 2, *shapes)
            now += lasts_s
        made.range("step", begin, now)
    return made.profile("step")


SQUARE = ((1024, 1024), (1024, 1024))


def test_products_of_a_step_are_compared_with_the_fastest_and_the_memory() -> None:
    found = product_rates(
        multiplied(
            ("aten::mm", 0.5, PRODUCT, SQUARE),
            ("aten::mm", 0.5, PRODUCT, SQUARE),
            ("aten::addmm", 2.0, "gemm_bf16", ((1024,), *SQUARE)),
            ("aten::bmm", 4.0, "gemm_half", ((4, 1024, 1024), (4, 1024, 1024))),
            ("aten::mm", 1.0, "simt_sgemm", ((8, 8), (8, 8))),
        )
    )
    assert found == [
        Product("aten::bmm", (1024, 1024, 1024), 1.0, 4.0, 2.0),
        Product("aten::addmm", (1024, 1024, 1024), 1.0, 2.0, 0.5),
        Product("aten::mm", (1024, 1024, 1024), 2.0, 1.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("gpu", "kernel", "bytes_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", "gemm_bf16", 3.35e12 / 2),
        ("NVIDIA H100 80GB HBM3", "gemm_tf32", 3.35e12 / 4),
        ("some GPU", "gemm_bf16", 1e12 / 2),
    ],
)
def test_least_time_of_a_product_includes_moving_its_bytes(gpu: str, kernel: str, bytes_per_s: float) -> None:
    shapes = ((2, 1 << 20, 1), (2, 1, 1 << 10))
    slow, fast = product_rates(
        multiplied(("aten::bmm", 1.0, kernel, shapes), ("aten::mm", 0.03125, PRODUCT, (2 * (1 << 15,),) * 2), gpu=gpu)
    )
    assert fast.least_s == pytest.approx(fast.time_s)
    assert slow.least_s == pytest.approx(2 * ((1 << 20) + (1 << 10) + (1 << 30)) / bytes_per_s)


@pytest.mark.parametrize(("fast_s", "counts"), [(0.0205, True), (0.0203, False)])
def test_product_with_2_percent_of_the_time_sets_the_rate_of_others(fast_s: float, counts: bool) -> None:
    slow, _ = product_rates(multiplied(("aten::mm", 1.0, PRODUCT, SQUARE), ("aten::bmm", fast_s, PRODUCT, (
        (2, 1024, 1024), (2, 1024, 1024),
    ))))  # fmt: skip
    assert slow.least_s == pytest.approx(fast_s / 2 if counts else 1.0)


def test_product_that_takes_no_time_is_limited_by_the_memory() -> None:
    made = Made()
    made.kernel(ADD, 0.0, 1.0)
    made.kernel("gemm_bf16", 0.5, 0.5)
    made.operator("aten::mm", 0.25, 0.75, *SQUARE)
    (found,) = product_rates(made.profile())
    assert (found.time_s, found.least_s) == (0.0, pytest.approx(2 * 3 * 1024**2 / 3.35e12))


def test_product_in_two_kernels_is_one_call() -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 1.0, 0.125)
    made.kernel(PRODUCT, 1.0, 2.0, 0.25)
    made.operator("aten::mm", 0.0, 0.5, *SQUARE)
    made.kernel(PRODUCT, 2.0, 3.0, 2.5)  # of no operator
    (found,) = product_rates(made.profile())
    assert (found.calls, found.time_s, found.least_s) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", ((2, 3), (3, 4)), (1, (2, 3, 4))),
        ("aten::bmm", ((5, 2, 3), (5, 3, 4)), (5, (2, 3, 4))),
        ("aten::addmm", ((4,), (2, 3), (3, 4)), (1, (2, 3, 4))),
        ("aten::baddbmm", ((4,), (5, 2, 3), (5, 3, 4)), (5, (2, 3, 4))),
        ("aten::mm", ((2, 3), (3, 4), (2, 4)), (1, (2, 3, 4))),
        ("aten::addmm", ((2, 3), (3, 4)), None),
        ("aten::mm", ((2, 3),), None),
        ("aten::mm", ((2, 3), (4, 4)), None),
        ("aten::mm", ((2, 0), (0, 4)), None),
        ("aten::mm", ((2, 3), (3, (1 << 31) - 1)), (1, (2, 3, (1 << 31) - 1))),
        ("aten::mm", ((2, 3), (3, 1 << 31)), None),
        ("aten::mm", ((3,), (3,)), None),
        ("aten::mm", ((2, 3), (1, 3, 4)), None),
        ("aten::mm", ((5, 5, 2, 3), (5, 5, 3, 4)), None),
        ("aten::linear", ((2, 3), (3, 4)), None),
        ("aten::mm", None, None),
    ],
)
def test_sizes_of_a_product_are_rows_inner_and_columns(name: str, shapes: Any, expected: Any) -> None:
    assert _sizes(name, shapes) == expected


# trials


def tried(names: Sequence[str], waits: Sequence[int], has_operators: bool = True, calls: int = 2) -> Trials | None:
    """Return the trials of steps in which each call runs these kernels, with a wait after those of these numbers."""
    made, now = Made(), 0.0
    for _ in range(2):
        begin = now
        for _ in range(calls):
            start = now
            for number, name in enumerate(names):
                made.kernel(name, now, now + 0.5)
                now += 0.75
                if number in waits:
                    made.call("cudaEventSynchronize", now - 0.125, now - 0.0625)
            if has_operators:
                made.operator("aten::mm", start, now - 0.25)
            made.call("cudaDeviceSynchronize", now - 0.125, now - 0.0625)
            made.kernel(ADD, now, now + 0.25)
            made.call("cudaDeviceSynchronize", now + 0.25, now + 0.375)
            now += 0.5
        made.range("step", begin, now)
    return kernel_trials(made.profile("step"))


GEMMS = ("gemm_a", "gemm_b", "gemm_c", "gemm_d")


@pytest.mark.parametrize(
    ("names", "waits", "kernels"),
    [
        ([*GEMMS[:3], "gemm_a"], [0, 1, 2], 3.0),
        ([*GEMMS[:3], "gemm_a"], [0, 2], 3.0),
        ([*GEMMS[:3], "gemm_a"], [1], None),
        ([*GEMMS[:2], "gemm_b", "gemm_a"], [0, 1, 2], None),
        ([*GEMMS], [0, 1, 2], 4.0),
    ],
)
def test_three_kernels_for_one_product_with_waits_are_trials(
    names: list[str], waits: list[int], kernels: float | None
) -> None:
    found = tried(names, waits)
    assert found == (kernels and Trials("aten::mm", 2.0, kernels, 2 * 2.25))


def test_trials_without_operators_are_runs_of_single_products_between_waits() -> None:
    found = tried([*GEMMS[:3], "gemm_a"], [0, 1, 2], has_operators=False)
    assert found == Trials("", 2.0, 3.0, 2 * 2.25)
    assert tried([*GEMMS[:3], "gemm_a"], [0, 2], has_operators=False) is None, "two kernels between two waits"
    assert tried([*GEMMS[:2], "gemm_a"], [0, 1, 2], has_operators=False) is None, "two kernels"
    assert tried([*GEMMS[:2], ADD, "gemm_c"], [0, 1, 2, 3], has_operators=False) is None, "no product among them"
    assert tried([ADD, ADD], [0, 1]) is None


# recomputation


@pytest.mark.parametrize(
    ("first", "again", "time_s"),
    [(4, 1, 2.0), (4, 2, 4.0), (4, 0, 0.0), (2, 4, 4.0), (0, 2, 0.0)],
)
def test_forward_kernels_in_backward_give_the_recomputed_share_of_forward(
    first: int, again: int, time_s: float
) -> None:
    """Forward takes as long in other kernels; no more than all of it is computed again."""
    made, now = Made(), 0.0
    for _ in range(2):
        begin = now
        for phase, names in (("forward", first * [FLASH, PRODUCT]), ("backward", [*again * [FLASH], PRODUCT])):
            start = now
            for name in names:
                made.kernel(name, now, now + 1.0)
                now += 1.0
            made.range(phase, start, now)
        made.range("step", begin, now)
    assert recomputed(made.profile("step")) == Recomputed(time_s, is_estimated=True)


def test_kernels_inside_a_checkpoint_s_node_alone_are_recomputed() -> None:
    """A node inside it is of backward, and so is what runs outside."""
    made = Made()
    for begin in (0.0, 16.0):
        made.operator("CheckpointFunctionBackward", begin, begin + 4)
        for name, start, end in (("aten::mm", 0, 1), ("aten::linear", 1, 3), ("aten::t", 1.25, 2.75),
                                 ("aten::mm", 1.5, 2), ("AddmmBackward0", 3, 4), ("aten::mm", 3.25, 3.75),
                                 ("AddmmBackward0", 5, 6), ("aten::mm", 8, 9)):  # fmt: skip
            made.operator(name, begin + start, begin + end)
        for number, launched in enumerate((0.5, 1.75, 3.5, 5.5, 8.5, 9.5)):
            made.kernel(PRODUCT, begin + 4 + number, begin + 4 + number + 2.0**-number, begin + launched)
        made.range("step", begin, begin + 12)
    assert recomputed(made.profile("step")) == Recomputed(1.5)
    assert recomputed(replace(made.profile("step"), trace=Made().trace())) == Recomputed(0.0)


def test_operator_outside_of_the_last_checkpoint_is_not_recomputed() -> None:
    """The trace may have no operator with a sequence number."""
    made = Made()
    made.operator("aten::mm", 0.0, 1.0)
    made.operator("CheckpointFunctionBackward", 2.0, 3.0)
    for start in (0.5, 2.5):
        made.kernel(PRODUCT, start, start + 0.5)
    found = made.profile()
    for ops in (None, Ops.of([])):
        assert recomputed(replace(found, trace=replace(found.trace, ops=ops))) == Recomputed(0.5)


# updates by the CPU


def updated(
    gap_s: float = 4.0,
    down_s: float = 0.25,
    up_s: float = 0.25,
    range_s: float | None = None,
    work_s: float = 2.0,
    kernel: str = PRODUCT,
    order: Sequence[str] = ("DtoH", "HtoD"),
    tail_s: float = 1.0,
    rate: float | None = 2.0**20,
    size_bytes: int | None = 1,
) -> OffloadRow | None:
    """Return the updates of two steps with two gaps of which each has a copy to the host and one to the device.

    rate: bytes per second of the copies; None for copies of size_bytes.
    """
    made, now = Made(), 0.0
    lasts = dict(zip(("DtoH", "HtoD"), (down_s, up_s), strict=True))
    for _ in range(2):
        begin = now
        for _ in range(2):
            for phase in ("forward", "backward"):
                made.range(phase, now, now + work_s / 2)
                made.kernel(kernel if phase == "backward" else PRODUCT, now, now + work_s / 2)
                now += work_s / 2
            for number, direction in enumerate(order):
                at = now + (gap_s / 8 if number == 0 else gap_s / 2)
                size = int(lasts[direction] * rate) if rate else size_bytes
                made.copy(f"{direction} pageable", at, at + lasts[direction], size)
            if range_s is not None:
                made.range("Optimizer.step#SGD.step", now, now + range_s)
            now += gap_s
        made.kernel(PRODUCT, now, now + tail_s)
        now += tail_s
        made.range("step", begin, now)
    return offload(made.profile("step"))


SHORT = {"gap_s": 2.0**-9, "down_s": 2.0**-12, "up_s": 2.0**-12, "work_s": 2.0**-7, "tail_s": 2.0**-7}


@pytest.mark.parametrize(
    ("known", "time_s"),
    [
        ({}, 8.0),
        ({"order": ("HtoD", "DtoH")}, None),
        ({"order": ("DtoH", "DtoH")}, None),
        ({"kernel": "multi_tensor_apply_kernel<FusedAdamMathFunctor>"}, None),
        ({"kernel": "multi_tensor_apply_kernel<FusedAdamMathFunctor>", "range_s": 2.0}, 8.0),  # half of the gap
        ({"range_s": 1.99}, None),
        ({"up_s": 1.0}, 8.0),  # four times the bytes
        ({"up_s": 1.01}, None),
        ({"up_s": 1.01, "rate": None}, 8.0),  # equal bytes
        ({"up_s": 1.01, "rate": None, "size_bytes": None}, None),  # unknown bytes
        ({"down_s": 0.125, "up_s": 0.5}, 8.0),
        ({"gap_s": 2.0**-9, "down_s": 2.0**-12, "up_s": 2.0**-12, "work_s": 2.0**-7}, None),  # steps of 1 s, no copies
        (SHORT, 2.0**-8),
        (SHORT | {"gap_s": 2.0**-10}, None),  # no millisecond
    ],
)
def test_update_on_the_cpu_is_a_gap_with_copies_in_both_directions(known: dict[str, Any], time_s: float | None) -> None:
    found = updated(**known)
    assert (found and found["time_s"]) == time_s
    if found:
        copied = found["to_host_s"], found["to_device_s"]
        assert copied == pytest.approx((2 * known.get("down_s", 0.25), 2 * known.get("up_s", 0.25)))


def test_update_on_the_cpu_goes_on_after_the_end_of_its_step() -> None:
    """A step ends with the optimizer, and the weights are copied back at the start of the next."""
    made = Made()
    for begin in (0.0, 10.0):
        made.kernel(PRODUCT, begin + 1, begin + 3)
        made.range("backward", begin + 2, begin + 3)
        made.copy("DtoH pageable", begin + 3, begin + 4)
        made.range("Optimizer.step#AdamW.step", begin + 4, begin + 10)
        made.range("step", begin, begin + 10)
        made.copy("HtoD pageable", begin + 10, begin + 11)
    found = offload(made.profile("step"))
    assert found == {"time_s": 8.0, "to_host_s": 1.0, "to_device_s": 1.0}


def working(*busy: tuple[float, float], steps: Sequence[float], gap: str = "optimizer") -> Made:
    """Return a program that computes in these times of steps that end at others, with a range in each gap."""
    made = Made()
    for start, end in zip((0.0, *steps), steps, strict=False):
        made.range("step", start, end)
    for start, end in busy:
        made.range("forward", start, end)
        made.kernel(PRODUCT, start, end)
    for start, end in zip((0.0, *(end for _, end in busy)), (*(start for start, _ in busy), steps[-1]), strict=True):
        made.range(gap, start, end)
    return made


def offloaded(made: Made, *copies: tuple[str, float, float]) -> tuple[float, float, float] | None:
    for direction, start, end in copies:
        made.copy(f"{direction} pageable", start, end, round((end - start) * 2**20))
    found = offload(made.profile("step"))
    return found and (found["time_s"], found["to_host_s"], found["to_device_s"])


@pytest.mark.parametrize(
    ("down", "up", "found"),
    [
        ((2.5, 2.75), (3.0, 3.25), (2.0, 0.25, 0.25)),
        ((3.0, 3.25), (3.0, 3.25), (2.0, 0.25, 0.25)),  # at once
        ((1.75, 2.25), (3.0, 3.25), None),  # half of it before the gap
        ((2.5, 2.75), (3.75, 4.25), None),  # half of it after the gap
        ((2.5, 2.54), (3.0, 3.04), (2.0, 0.04, 0.04)),  # a hundredth of the step
    ],
)
def test_copies_of_an_update_begin_in_turn_and_lie_in_the_gap(
    down: tuple[float, float], up: tuple[float, float], found: tuple[float, ...] | None
) -> None:
    made = working((0.0, 2.0), steps=[4.0])
    assert offloaded(made, ("DtoH", *down), ("HtoD", *up)) == (found and pytest.approx(found))


@pytest.mark.parametrize(
    ("down_s", "up_s", "is_update"), [(1.0, 1.0, True), (0.96875, 1.0, False), (1.0, 0.96875, False)]
)
def test_copies_of_exactly_a_hundredth_of_the_steps_are_an_update(down_s: float, up_s: float, is_update: bool) -> None:
    made = working((0.0, 50.0), steps=[100.0])
    assert (offloaded(made, ("DtoH", 60.0, 60.0 + down_s), ("HtoD", 70.0, 70.0 + up_s)) is not None) is is_update


@pytest.mark.parametrize(("gap_s", "is_update"), [(1e-3, False), (1.01e-3, True)])
def test_gap_of_an_update_is_longer_than_a_millisecond(gap_s: float, is_update: bool) -> None:
    made = working((gap_s, 0.01), steps=[0.01])
    assert (offloaded(made, ("DtoH", 1e-4, 4e-4), ("HtoD", 5e-4, 8e-4)) is not None) is is_update


def test_copies_of_no_bytes_are_compared_by_their_times() -> None:
    made = working((0.0, 2.0), steps=[4.0])
    for direction, start, size in (("DtoH", 2.5, 1), ("HtoD", 3.0, 100), ("HtoD", 1.0, 0)):
        made.copy(f"{direction} pageable", start, start + 0.25, size)
    assert offload(made.profile("step")) == {"time_s": 2.0, "to_host_s": 0.25, "to_device_s": 0.25}


def test_program_without_backward_or_optimizer_updates_nothing() -> None:
    copies = ("DtoH", 2.5, 2.75), ("HtoD", 3.0, 3.25)
    assert offloaded(working((0.0, 2.0), steps=[4.0], gap="other"), *copies) is None
    made = working((0.0, 2.0), steps=[4.0], gap="other")
    made.range("backward", 1.0, 2.0)
    made.kernel(PRODUCT, 1.5, 2.0)
    assert offloaded(made, *copies) == (2.0, 0.25, 0.25)


@pytest.mark.parametrize(
    ("busy", "time_s"),
    [([(1.0, 3.0), (5.0, 7.0), (9.0, 11.0)], 2.0), ([(1.0, 3.0), (4.0, 7.0), (9.0, 11.0)], 1.5)],
    ids=["after each step", "after the second step"],
)
def test_updates_that_go_on_in_the_next_step_count_in_all_but_the_last(
    busy: Sequence[tuple[float, float]], time_s: float
) -> None:
    copies = [
        one for end in (3.0, 7.0, 11.0) for one in (("DtoH", end + 0.25, end + 0.5), ("HtoD", end + 0.5, end + 0.75))
    ]
    assert offloaded(working(*busy, steps=[4.0, 8.0, 12.0]), *copies) == (time_s, 0.25, 0.25)


@pytest.mark.parametrize(("copy_s", "is_update"), [(0.0651, True), (0.0649, False)])
def test_copies_of_an_update_take_a_hundredth_of_the_step_each(copy_s: float, is_update: bool) -> None:
    """A step takes 13 s, so that a hundredth of it is 0.065 s in both gaps each."""
    assert (updated(down_s=copy_s, up_s=copy_s) is not None) is is_update


def test_runs_that_a_compiler_could_fuse_keep_their_longest_kernel() -> None:
    """A run ends at a product, and at the end of its step."""
    made, add = Made(), "vectorized_elementwise_kernel<4, AddFunctor>"
    for begin in (0.0, 10.0):
        made.kernel(add, begin, begin + 1)
        made.kernel(add, begin + 1, begin + 4)
        made.kernel(PRODUCT, begin + 4, begin + 6)
        made.kernel(add, begin + 6, begin + 7)  # alone
        made.kernel(PRODUCT, begin + 7, begin + 8)
        made.kernel(add, begin + 8, begin + 9)  # the next step begins with such a kernel
        made.range("step", begin, begin + 10)
    assert fusable_runs(made.profile("step")) == {"fusable_per_step": 2.0, "time_s": 4.0, "saved_s": 1.0}


def test_products_alone_cannot_be_fused() -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 1.0)
    assert fusable_runs(made.profile()) == {"fusable_per_step": 0.0, "time_s": 0.0, "saved_s": 0.0}
