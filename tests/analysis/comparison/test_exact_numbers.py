"""Exact numbers of comparisons: sums that begin at 0, turns of ranks, ties, and the larger of two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison import dtypes, numerics, own_code, precision, precision_causes, profiles
from cs_systems.analysis.comparison.late_ranks import is_uneven
from cs_systems.analysis.comparison.loop_growth import time_growth
from cs_systems.analysis.comparison.loop_ranks import _step
from cs_systems.analysis.comparison.loop_time import whole_loop_time
from cs_systems.analysis.comparison.rank_work import KERNELS, OPERATORS, Work, longer, works
from cs_systems.analysis.comparison.ranks import _length_s, leading, merged
from cs_systems.analysis.comparison.runs import speedups
from cs_systems.config import ConfigError, Precision, RunConfig
from cs_systems.core.caveats import Caveat
from cs_systems.readers.forms.trace import Step
from cs_systems.record import RunRecord
from tests.analysis.attribution.made import ADD, PRODUCT, Made
from tests.analysis.comparison import test_loop_ranks as loops
from tests.analysis.comparison.test_limits import call, curve, profiled, rank
from tests.analysis.comparison.test_runs import BASE, record


def made() -> Any:
    """Return two steps with three kernels: two equal products, and an addition in the second step."""
    traced = Made()
    for name, start_s, end_s in ((PRODUCT, 0.0, 0.25), (PRODUCT, 1.0, 1.25), (ADD, 1.5, 1.625)):
        traced.kernel(name, start_s, end_s)
    return replace(traced.profile(), steps=(Step("step", 0.0, 1.0), Step("step", 1.0, 2.0)))


def test_works_of_a_rank_are_means_of_its_steps() -> None:
    found, _ = works(made())
    assert {name: work for (kind, name), work in found.items() if kind == KERNELS} == {
        "matmul": Work(0.25, 1.0, 132.0), "elementwise": Work(0.0625, 0.5, 66.0),
    }  # fmt: skip


def test_kernel_times_by_family_are_means_of_the_steps() -> None:
    assert profiles._times(made(), "family") == {"matmul": 0.25, "elementwise": 0.0625}


@pytest.mark.parametrize(("calls", "words"), [(102.0, "its operators take"), (102.1, "it runs more operators, 1.00 s")])
def test_rank_with_2_percent_more_operators_runs_more(calls: float, words: str) -> None:
    found = longer({(OPERATORS, ""): Work(2.0, calls)}, [{(OPERATORS, ""): Work(1.0, 100.0)}], 1.0)
    assert found is not None
    assert found.cause.startswith(words)


def test_empty_trace_has_no_length() -> None:
    assert _length_s(Made().trace()) == 0.0


@pytest.mark.parametrize(
    ("later_s", "spread"), [((0.0, 0.0, 0.25), "1.00 ns"), ((0.25, 0.0, -0.25), "250 ms"), ((0.0, 0.0, 0.0), "1.00 ns")]
)
def test_ends_of_collectives_agree_within_their_usual_distance(later_s: tuple[float, ...], spread: str) -> None:
    pairs = [(1.0, 1.5), (2.0, 2.75), (3.0, 3.5)]
    other = [call(start_s, end_s + later) for (start_s, end_s), later in zip(pairs, later_s, strict=True)]
    (note,) = merged([rank(0, *(call(*one) for one in pairs)), rank(1, *other)]).notes
    assert note.startswith("3 collectives are matched across the ranks, by order within the step; their ends agree")
    assert note.endswith(f"within {spread}")


def test_rank_delays_the_others_beyond_what_they_delay_it() -> None:
    """Rank 0 is last by 0.25 s, then rank 1 by 0.5 s."""
    first = loops.step(loops.call(0.0), loops.call(0.5), forward=0.0, backward=0.5, other=0.0)
    second = loops.step(loops.call(0.25), loops.call(0.0), forward=0.5, backward=0.25, other=0.0)
    found = _step({0: first, 1: second})
    assert (found.more_s(1), found.more_s(0)) == (0.25, -0.25)
    assert (found.own_s(0), found.own_s(1), found.more_work(0), found.more_work(1)) == (0.0, 0.5, 0.0, 1.0)


@pytest.mark.parametrize(("callers", "ranks", "matched"), [([0], 1, 0), ([0], 2, 0), ([0, 1], 3, 0), ([0, 1], 2, 1)])
def test_collective_is_matched_if_all_ranks_of_its_group_call_it(callers: list[int], ranks: int, matched: int) -> None:
    found = _step({n: loops.step(*[loops.call(0.25, ranks=ranks)] * (n in callers)) for n in (0, 1)})
    assert len(found.transfers) == matched


def test_equal_steps_are_no_growth() -> None:
    assert time_growth([*enumerate([1.0] * 6 + [2.0, 3.0, 4.0, 5.0])]) is None
    assert time_growth([*enumerate([1.0] * 5 + [2.0, 3.0, 4.0, 5.0, 6.0])]) is not None


def test_loop_below_a_second_is_divided_too() -> None:
    (row,) = whole_loop_time([0.125] * 4)
    assert (row["kind"], row["steps"], row["every"], row["total_s"], row["share"]) == ("usual", 4, None, 0.5, 1.0)


def test_peak_of_a_precision_is_the_largest_of_its_repeats() -> None:
    records = [record(BASE, 1.0), record(BASE, 1.0), record(BASE, 1.0)]
    repeats = [
        replace(one, measurement=replace(one.measurement, peak_allocated_bytes=size))  # type: ignore[type-var]
        for one, size in zip(records, (8, 9, None), strict=True)
    ]
    (row,) = precision.gains({Precision.FP32: repeats})
    assert row["peak_allocated_bytes"] == 9


def test_blocks_are_joined_by_their_first_number() -> None:
    rows: Any = [{"what": f"layers.{layer}.experts.{expert}.w"} for layer in (0, 1) for expert in (0, 2)]
    assert [row["what"] for row in dtypes.collapsed(rows)] == ["layers.0–1.experts.0.w", "layers.0–1.experts.2.w"]


@pytest.mark.parametrize(("times", "uneven"), [(None, False), (1.19, False), (1.2, True)])
def test_rank_is_uneven_from_1_2_times_the_mean_on(times: float | None, uneven: bool) -> None:
    assert is_uneven(times) is uneven


@pytest.mark.parametrize(("extra_s", "kind"), [(0.5, KERNELS), (0.4999, None)])
def test_kernels_that_take_half_of_the_lost_time_are_its_cause(extra_s: float, kind: str | None) -> None:
    found = longer({(KERNELS, "matmul"): Work(1.0 + extra_s)}, [{(KERNELS, "matmul"): Work(1.0)}], 1.0)
    assert (found and found.kind) == kind


def test_rank_that_waits_least_leads() -> None:
    ranks = [rank(0, call(0.25, 1.0)), rank(1, call(0.5, 1.0)), rank(2, call(0.0, 1.0))]
    assert leading(merged(ranks)).rank == 1


def test_buckets_of_a_model_of_unknown_size_are_not_early() -> None:
    calls = [loops.call(0.25, is_gradients=True, is_early=True)]
    reports = [loops.report(n, 4 * [loops.step(*calls)], bucket_bytes=[9], parameter_bytes=0) for n in (0, 1)]
    (row,) = loops.EXCHANGE.of(loops.tables_of(reports))
    assert (row["early"], row["early_share"], row["are_gradients"]) == (0, 0.0, True)


@pytest.mark.parametrize(
    ("workload", "profiler", "role"),
    [
        ("mine.py:step", "none", precision.TIMED), ("mine.py:step", "kineto", None),
        ("mine.py:step", "precision_error", precision.ERRORS), (precision.TIMED, "kineto", None),
        (precision.TIMED, "none", precision.TIMED),
    ],
)  # fmt: skip
def test_own_model_has_errors_under_a_profiler_that_compares(workload: str, profiler: str, role: str | None) -> None:
    made = record(replace(BASE, workload=workload, profiler=profiler, rounds=1), 1.0)  # type: ignore[arg-type]
    assert precision._role(made) == role


# precisions


def test_caveats_explain_a_precision_without_a_timing_alone() -> None:
    doubted = replace(record(BASE, 1.0), warnings=(Caveat("unstable", "noisy", ""),))
    broken = replace(doubted, warnings=(Caveat("nan-loss", "the loss is NaN", ""),))
    reasons = [precision.gains({Precision.FP32: [one]})[0]["reason"] for one in (doubted, broken)]
    assert reasons == [None, "the loss is NaN"]


def test_last_repeat_has_the_status_and_the_losses_of_a_precision() -> None:
    repeats = [replace(curve([4.0] * count, "fp32"), status=status)  # type: ignore[arg-type]
               for count, status in ((3, "error"), (4, "timeout"), (2, "ok"))]  # fmt: skip
    (learnt,), (wrong,) = precision.learning({Precision.FP32: repeats}), precision.errors({Precision.FP32: repeats})
    assert (learnt["steps"], learnt["status"], wrong["status"]) == (2, "ok", "ok")


def test_causes_of_a_speedup_need_kernels_and_steps_of_both() -> None:
    a, b = profiled("fp32", {"matmul": 2.0}), profiled("bf16", {"matmul": 1.0})
    assert precision_causes.pairs([a, b]) == [(a, b)]
    assert precision_causes.causes(a, b)["casts_s"] == 0.0
    without = replace(b, results={"families": b.results["families"]})
    assert precision_causes.pairs([a, without]) == []
    with pytest.raises(ConfigError, match="has no table of kernels"):
        precision_causes.causes(a, without)


@pytest.mark.parametrize(("time_s", "words"), [(0.0994, "99 ms"), (0.0995, "100 ms"), (0.00125, "1.2 ms")])
def test_time_of_kernels_has_two_digits(time_s: float, words: str) -> None:
    assert precision_causes._ms(time_s) == words


def test_cell_without_a_timed_step_or_with_a_nan_loss_has_no_speedup() -> None:
    base, other = record(BASE, 1.0), record(replace(BASE, attention="naive"), 1.0)
    assert other.measurement is not None
    samples = tuple(replace(sample, warmup=True) for sample in other.measurement.samples)
    warm = replace(other, measurement=replace(other.measurement, samples=samples))
    broken = replace(other, warnings=(Caveat("nan-loss", "the loss is NaN", ""),))
    found = speedups([base, other, warm, broken], "attention", [True, False, False, False])
    assert [one is not None for one in found] == [True, True, False, False]


# numerics


def of_ranges(*rows: dict[str, Any], **known: Any) -> RunRecord:
    made = RunRecord("key", RunConfig(workload="normalization", precision="fp16").to_dict(), "ok", **known)  # type: ignore[arg-type]
    usual = {"operation": "softmax", "breaks_from": None, "breaks_up_to": None, "overflows": True}
    made.results["normalization_range"] = [usual | row for row in rows]  # type: ignore[typeddict-item]
    return made


def test_range_in_which_a_step_fails_has_both_ends() -> None:
    made = of_ranges({"step": "exp", "breaks_up_to": 0.5, "breaks_from": 8.0}, {"step": "sum", "breaks_from": 4.0,
                     "overflows": False}, {"step": "max"})  # fmt: skip
    assert [row["fails"] for row in numerics.ranges([made])] == [
        {"fp16": "σ ≤ 0.5, σ ≥ 8 (overflow)"}, {"fp16": "σ ≥ 4"},
    ]  # fmt: skip


def test_overflow_of_an_operation_begins_at_the_smaller_size_of_both_orders() -> None:
    made = of_ranges(
        {"step": "exp, sequential", "breaks_from": 8.0}, {"step": "exp, pairwise", "breaks_from": 4.0},
        {"step": "sum, sequential", "breaks_from": 2.0}, {"step": "max", "breaks_from": 1.0, "overflows": False},
        {"step": "sub"}, {"step": "exp", "operation": "norm"},
    )  # fmt: skip
    assert numerics.verdicts(made) == [
        "fp16 softmax: overflows from σ = 2 (sum), σ = 4 (exp) on", "fp16 norm: does not overflow",
    ]  # fmt: skip


def test_devices_of_measured_records_are_named_once() -> None:
    cpu = record(BASE, 1.0).environment
    assert cpu is not None
    gpu = replace(cpu, device="cuda", device_name="NVIDIA T4")
    records = [of_ranges(environment=each) for each in (cpu, gpu, gpu, None)]
    failed = replace(of_ranges(environment=replace(gpu, device_name="other")), status="error")
    assert numerics.where([*records, failed]) == [
        f"measured on {cpu.device_name}, a CPU", "measured on NVIDIA T4",
    ]  # fmt: skip


def test_result_of_which_a_part_is_not_finite_is_no_number_of_roundoffs() -> None:
    row: Any = {"error": 0.5, "unit_roundoff": 0.5, "finite": 0.5}
    assert (numerics._roundoffs(row), numerics._roundoffs(row | {"finite": 1.0})) == (float("inf"), 1.0)


# code of one's own


@pytest.mark.parametrize(("error", "same"), [(1e-3, "yes"), (1.1e-3, "in low precision"), (2.1e-2, "no")])
def test_values_of_own_code_are_the_same_within_a_thousandth(error: float, same: str) -> None:
    assert own_code.sameness(error) == same


def test_largest_difference_of_own_code_is_kept() -> None:
    row = {"option": "part", "code": "mine.py:f", "reference": "f", "same": "yes", "note": ""}
    made = RunRecord("key", RunConfig().to_dict(), "ok")
    made.results["own_code"] = [row | {"error": error} for error in (0.25, 0.5, None, 0.125)]  # type: ignore[typeddict-item]
    assert [one["error"] for one in own_code.compared([made])] == [0.5]
