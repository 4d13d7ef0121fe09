"""Limits and numbers of comparisons: what lies just below each limit, and just above, in made records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.collectives import Collective, _during
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.comparison import numerics, precision, precision_causes, strategies
from cs_systems.analysis.comparison.expert_work import _between
from cs_systems.analysis.comparison.loop_time import loop_time, sentence, whole_loop_time
from cs_systems.analysis.comparison.profiles import difference_of_records
from cs_systems.analysis.comparison.ranks import (
    MOST_TOLD,
    Match,
    Rank,
    Straggler,
    check,
    collective_rows,
    in_words,
    merged,
    rank_rows,
    straggler,
)
from cs_systems.analysis.comparison.runs import is_larger
from cs_systems.analysis.comparison.warmup import warmup_curve
from cs_systems.config import ConfigError, RunConfig
from cs_systems.readers.forms.jobs import Job
from cs_systems.record import Measurement, RunRecord, Sample


def sample(wall_s: float, warmup: bool = False, **known: Any) -> Sample:
    return Sample(known.pop("round", 0), warmup, wall_s, {"forward": wall_s}, {"forward": wall_s}, **known)


def steps(*walls: float, **known: Any) -> Measurement:
    return Measurement("monotonic", tuple(sample(wall_s) for wall_s in walls), 0.0, **known)


# warm-up

STEADY = tuple(sample(1.0, sm_clock_hz=100e6) for _ in range(5))


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (sample(1.0499, True), None),
        (sample(1.0501, True), "first use: lazy loading of kernels, library handles, threads"),
        (sample(2.0, True, compile_s=0.94), "compile and autotune 0.94 s; first use: lazy loading of kernels, library "
         "handles, threads"),
        (sample(2.0, True, compile_s=0.96), "compile and autotune 0.96 s"),
        (sample(2.0, True, compile_s=0.05), "first use: lazy loading of kernels, library handles, threads"),
        (sample(2.0, True, compile_s=0.951, device_mallocs=2, sm_clock_hz=97e6),
         "compile and autotune 0.95 s; 2 cudaMalloc"),
        (sample(2.0, True, compile_s=0.951, sm_clock_hz=96.9e6), "compile and autotune 0.95 s; clock 97 of 100 MHz"),
    ],
)  # fmt: skip
def test_first_step_is_explained_beyond_the_limits(slow: Sample, cause: str | None) -> None:
    assert warmup_curve(Measurement("monotonic", (slow, *STEADY), 0.0))[0]["cause"] == cause


def test_warm_up_step_within_the_noise_of_timed_steps_has_no_cause() -> None:
    noisy = (*(sample(1.0) for _ in range(8)), sample(1.5), sample(1.5))  # nine tenths take up to 1.5 s
    rows = warmup_curve(Measurement("monotonic", (sample(1.49, True), sample(1.51, True), *noisy), 0.0))
    assert [row["cause"] for row in rows[:2]] == [None, "unexplained"]
    assert [row["step"] for row in rows] == [*range(12)]


# precision


def curve(losses: Sequence[float], kind: str) -> RunRecord:
    config = RunConfig(workload="training_curve", precision=kind)  # type: ignore[arg-type]
    record = RunRecord("key", config.to_dict(), "ok")
    rows: Any = [{"step": i, "loss": loss, "loss_scale": None, "skipped": 0} for i, loss in enumerate(losses)]
    record.results["training_curve"] = rows
    return record


def test_last_loss_is_the_mean_of_the_last_tenth() -> None:
    fp32, bf16 = [10.0 - 0.1 * i for i in range(30)], [10.0 - 0.1 * i for i in range(30)]
    bf16[4], bf16[20] = 9.0, 8.5
    of = {name: [curve(losses, name)] for name, losses in (("fp32", fp32), ("bf16", bf16))}
    base, low = precision.learning({precision.Precision(name): records for name, records in of.items()})
    assert (base["steps"], base["first_loss"]) == (30, 10.0)
    assert base["last_loss"] == pytest.approx((7.3 + 7.2 + 7.1) / 3)
    assert (base["largest_deviation"], base["at_step"]) == (None, None)
    assert (low["largest_deviation"], low["at_step"]) == (pytest.approx(0.6), 4)
    (short,) = precision.learning({precision.Precision.FP32: [curve([3.0, 2.0], "fp32")]})
    assert short["last_loss"] == 2.0
    (broken,) = precision.learning({precision.Precision.FP32: [curve([3.0, math.nan, 1.0], "fp32")]})
    assert (broken["last_loss"], broken["reason"]) == (None, "the loss is NaN or infinite from step 1 on")
    (empty,) = precision.learning({precision.Precision.FP32: [curve([], "fp32")]})
    assert (empty["steps"], empty["first_loss"], empty["last_loss"]) == (None, None, None)


@pytest.mark.parametrize(("apart", "verdict"), [(0.05, "no difference"), (0.1, "too noisy")])
def test_speedup_is_too_noisy_if_its_interval_could_hide_a_factor_of_two(apart: float, verdict: str) -> None:
    def timed(kind: str) -> RunRecord:
        walls = [math.exp(apart * place) for place in (-1, 0, 1)]
        samples = tuple(sample(wall_s, round=number) for number, wall_s in enumerate(walls))
        config = RunConfig(precision=kind)  # type: ignore[arg-type]
        return RunRecord("key", config.to_dict(), "ok", measurement=Measurement("monotonic", samples, 0.0))

    row = precision.speedup([timed("fp32")], [timed("bf16")])
    assert (row["speedup"], row["verdict"]) == (pytest.approx(1.0), verdict)
    if verdict == "too noisy":
        assert precision.interval(row) == "too noisy"
    else:
        low, high = row["speedup_low"], row["speedup_high"]
        assert low is not None
        assert high is not None
        assert low * high == pytest.approx(1.0)
        assert low < 1 < high


def profiled(kind: str, times: dict[str, float], **tables: Any) -> RunRecord:
    config = RunConfig(precision=kind, profiler="kineto")  # type: ignore[arg-type]
    record = RunRecord("key", config.to_dict(), "ok")
    families: Any = [{"family": name, "time_s": time_s} for name, time_s in times.items()]
    steps_: Any = [{"device": 0, "wall_s": wall_s, "busy_share": 0.5} for wall_s in (1.0, 4.0, 2.0)]
    record.results.update({"families": families, "steps": [*steps_, {"device": 1, "wall_s": 99.0}], **tables})
    return record


@pytest.mark.parametrize(("rest_s", "as_in_fp32"), [(0.96, True), (0.94, False), (1.04, True), (1.06, False)])
def test_causes_of_a_speedup_have_products_casts_and_the_rest(rest_s: float, as_in_fp32: bool) -> None:
    gaps: Any = [{"device": 0, "cause": "launch-bound", "time_s": 0.5}, {"device": 0, "cause": "copy", "time_s": 0.5}]
    a = profiled("fp32", {"matmul": 4.0, "attention": 2.0, "copy": 0.5, "norm": 1.0})
    b = profiled("bf16", {"matmul": 1.0, "attention": 0.5, "copy": 0.75, "norm": rest_s}, gaps=gaps)
    row = precision_causes.causes(a, b)
    assert (row["a_products_s"], row["b_products_s"], row["casts_s"]) == (6.0, 1.5, 0.25)
    assert (row["a_rest_s"], row["b_rest_s"]) == (pytest.approx(1.0), pytest.approx(rest_s))
    assert row["kernel_speedup"] == pytest.approx(7.5 / (2.25 + rest_s))
    assert (row["launch_bound_share"], row["speedup"]) == (0.25, None)
    text = precision_causes.sentence(row)
    assert "25% of the step under the profiler is launch-bound" in text
    assert "matrix products and fused attention take 1500 ms instead of 6000 ms (4.0×)" in text
    assert "casts and other copies add 250 ms" in text
    assert ("as in fp32" in text) is as_in_fp32
    assert precision_causes.causes(a, profiled("bf16", {"matmul": 1.0}))["launch_bound_share"] == 0.0
    saved = precision_causes.sentence(precision_causes.causes(a, profiled("bf16", {"matmul": 0.0994, "copy": 0.4})))
    assert "matrix products and fused attention take 99 ms instead" in saved
    assert "casts and other copies save 100 ms" in saved


def test_difference_of_records_has_a_row_per_family_and_the_total_last() -> None:
    a = profiled("fp32", {"matmul": 4.0, "norm": 1.0, "copy": 5.0})
    b = profiled("bf16", {"matmul": 1.0, "norm": 2.0, "gelu": 0.5, "copy": 5.0})
    rows = difference_of_records(a, b, "family")
    assert [(row["family"], row["difference_s"], row["change_share"], row["share"]) for row in rows] == [
        ("matmul", -3.0, -0.75, -0.3), ("norm", 1.0, 1.0, 0.1), ("gelu", 0.5, None, 0.05), ("copy", 0.0, 0.0, 0.0),
        ("all", -1.5, -0.15, -0.15),
    ]  # fmt: skip


# runs


@pytest.mark.parametrize(
    ("a", "b", "larger"), [(1000, 1010, False), (1000, 1011, True), (None, 5, False), (5, None, False)]
)
def test_memory_counts_as_larger_from_1_percent_on(a: int | None, b: int | None, larger: bool) -> None:
    row: Any = {"a_peak_bytes": a, "b_peak_bytes": b}
    assert is_larger(row) is larger


# loops


def test_time_of_a_loop_is_divided_by_kind() -> None:
    slow = [sample(3.0 if i % 4 == 2 else 1.0) for i in range(12)]
    made = Measurement("monotonic", (sample(5.0, True), sample(2.0, compiles=1), *slow), 0.0)
    rows = loop_time(made)
    assert [(row["kind"], row["steps"], row["every"], row["median_s"], row["total_s"]) for row in rows] == [
        ("warm-up", 1, None, 5.0, 5.0), ("compiling", 1, None, 2.0, 2.0), ("usual", 9, None, 1.0, 9.0),
        ("slow", 3, 4, 3.0, 9.0),
    ]  # fmt: skip
    assert [row["share"] for row in rows] == pytest.approx([0.2, 0.08, 0.36, 0.36])
    assert sentence(rows) == (
        "14 steps took 25.0 s: 1 warm-up step in 5.00 s (20%), 1 compiling step in 2.00 s (8%), 9 steps in 9.00 s "
        "(36%, median 1.00 s), 3 slow steps, every 4, in 9.00 s (36%, median 3.00 s)"
    )


def test_loop_without_valid_times_has_no_kinds() -> None:
    assert whole_loop_time([]) == whole_loop_time([0.0]) == whole_loop_time([1.0, math.inf]) == []
    assert sentence([]) == ""
    (usual,) = whole_loop_time([1.0, 1.0])
    assert (usual["share"], usual["every"]) == (1.0, None)
    fast = whole_loop_time([4.0] * 20 + [1.0, 1.0])
    assert [row["kind"] for row in fast] == ["usual", "fast"]
    assert ", irregular" not in sentence(fast), "two steps have no regular distance"


# low precision


def normalization(step: str, error: float | None, finite: float = 1.0) -> Any:
    return {"operation": "softmax", "case": "rows", "step": step, "error": error, "finite": finite,
            "unit_roundoff": 0.5}  # fmt: skip


@pytest.mark.parametrize(("error", "needs"), [(1.0, False), (1.01, True), (None, True)])
def test_two_unit_roundoffs_need_no_fp32(error: float | None, needs: bool) -> None:
    record = RunRecord("key", RunConfig(workload="normalization", precision="bf16").to_dict(), "ok")  # type: ignore[arg-type]
    record.results["normalization"] = [
        normalization("all steps, sums sequential", error), normalization("exp", 0.5),
        normalization("sum, sequential", 2.0), normalization("as torch does it", 0.25),
    ]  # fmt: skip
    *summary, detail = numerics.verdicts(record)
    assert bool(summary) is needs
    assert ("needs fp32 inside" in detail) is needs
    assert detail.endswith("(mostly from sum), 0.5 u in torch's implementation")


def test_errors_are_shown_in_roundoffs_with_what_is_not_finite() -> None:
    assert numerics.in_roundoffs(normalization("exp", 0.75)) == "1.5 u"
    assert numerics.in_roundoffs(normalization("exp", 0.75, 0.75)) == "1.5 u, 25% inf or NaN"
    assert numerics.in_roundoffs(normalization("exp", None)) == "inf or NaN"


def test_first_bad_sum_is_the_shortest_beyond_its_roundoffs() -> None:
    rows: Any = [
        {"method": method, "length": length, "median_relative_error": error, "unit_roundoff": 0.5}
        for method, length, error in (("a", 64, 9.0), ("a", 16, 1.0), ("a", 32, 1.1), ("b", 8, 9.0))
    ]
    assert numerics.first_bad(rows, "a", 2.0) == 32
    assert numerics.first_bad(rows, "a", 20.0) is None


# strategies


def cell(strategy: str, ranks: int, *walls: float, **results: Any) -> RunRecord:
    config = RunConfig(strategy=strategy, world_size=ranks, batch_size=2, profiler=results.pop("profiler", "none"))
    made = RunRecord("key", config.to_dict(), "ok", measurement=steps(*walls) if walls else None)
    made.results.update(results)  # type: ignore[typeddict-item]
    return made


def overlap_row(rank: int, step_s: float, compute_s: float, exposed_s: float, idle_s: float, waiting_s: float) -> Any:
    return {"rank": rank, "step_s": step_s, "compute_s": compute_s, "communication_s": 2 * exposed_s, "hidden_s":
            exposed_s, "exposed_s": exposed_s, "idle_s": idle_s, "transfer_s": 0.5, "waiting_s": waiting_s}  # fmt: skip


def test_cost_of_a_strategy_is_its_time_beyond_one_rank() -> None:
    group = [
        cell("single", 1, 2.0, 2.0, 2.0),
        cell("ddp_flat", 2, 3.0, 2.5, 4.0),
        cell("single", 1, 2.0, profiler="overlap", overlap=[overlap_row(0, 2.2, 2.0, 0.0, 0.2, 0.0)]),
        cell("ddp_flat", 2, 9.0, profiler="overlap", overlap=[
            overlap_row(0, 3.1, 2.2, 0.5, 0.4, 0.75), overlap_row(1, 3.3, 2.3, 0.6, 0.4, 0.25),
        ]),
    ]  # fmt: skip
    alone, ranks = strategies.steps(group)
    tokens = 2 * group[0].run_config.tokens_per_sequence
    assert (alone["step_s"], alone["efficiency"], alone["tokens_per_s"]) == (2.0, 1.0, tokens / 2)
    assert (ranks["step_s"], ranks["efficiency"]) == (3.0, pytest.approx(2 / 3))
    assert ranks["tokens_per_s"] == pytest.approx(2 * tokens / 3)
    assert (ranks["p10_s"], ranks["p90_s"]) == (pytest.approx(2.6), pytest.approx(3.8))
    assert ranks["repeat"] is None
    (row,) = strategies.communication(group)
    assert (row["by_difference_s"], row["of_step"]) == (1.0, pytest.approx(1 / 3))
    assert (row["in_trace_s"], row["hidden"], row["waiting_s"]) == (0.6, 0.5, 0.75)
    (difference,) = strategies.differences(group)
    assert difference["difference_s"] == 1.0
    assert difference["exposed_s"] == pytest.approx(0.6)
    assert difference["slower_compute_s"] == pytest.approx(0.3)
    assert difference["waits_longer_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(("alone_s", "shown"), [(2.1, True), (2.11, False)])
def test_cell_faster_than_its_baseline_has_no_extra_time(alone_s: float, shown: bool) -> None:
    traces = {"profiler": "overlap", "overlap": [overlap_row(0, 2.2, 2.0, 0.0, 0.2, 0.0)]}
    group = [
        cell("single", 1, alone_s),
        cell("ddp_flat", 2, 2.0),
        cell("single", 1, alone_s, **traces),
        cell("ddp_flat", 2, 2.0, **traces),
    ]
    (_, row), (communication,) = strategies.steps(group), strategies.communication(group)
    assert (row["efficiency"] is not None) is shown
    assert (communication["by_difference_s"] is not None) is shown
    assert (communication["of_step"] is not None) is shown
    assert len(strategies.differences(group)) == shown
    assert strategies.disturbance(group) == ([] if shown else [strategies.DISTURBED])


def test_exposed_and_hidden_shares_are_of_the_traced_step_and_add_up_to_its_communication() -> None:
    traced = [overlap_row(0, 3.1, 2.2, 0.5, 0.4, 0.75), overlap_row(1, 4.0, 2.3, 0.6, 0.4, 0.25)]
    group = [cell("ddp_flat", 2, 0.5), cell("ddp_flat", 2, 0.5, profiler="overlap", overlap=traced)]
    (row,), (communication,) = strategies.steps(group), strategies.communication(group)
    assert row["exposed"] == pytest.approx(0.6 / 4.0)
    assert row["exposed"] + row["hidden"] == pytest.approx(
        communication["communication_s"] / communication["traced_step_s"]
    )
    assert communication["in_trace_s"] + communication["hidden_s"] == pytest.approx(communication["communication_s"])


def test_memory_by_stage_is_from_the_first_step_of_the_rank_with_most_memory() -> None:
    def row(step: int, stage: str, size: int | None, expected: int | None = None) -> Any:
        return {"step": step, "component": "optimizer_state", "stage": stage, "bytes": size, "expected_bytes": expected}

    rows = [row(0, "built", 5, 4), row(1, "forward", 7, 8), row(1, "forward", 6, 8), row(1, "backward", None),
            row(2, "optimizer", 99)]  # fmt: skip
    (found,) = strategies.stages([cell("fsdp", 2, rank_memory=rows)])
    assert found["component"] == "optimizer state"
    sizes = [found[f"{stage}_bytes"] for stage in strategies.STAGES]  # type: ignore[literal-required]
    assert sizes == [5, 7, None, None]
    assert found["off"] == 1 / 8


# ranks of one job


def call(start_s: float, end_s: float, **known: Any) -> Collective:
    given = {"step": 0, "name": "all_reduce", "group": "", "ranks": None, "sequence": None, "size_bytes": None,
             "hidden_s": 0.0, "beside_s": {}}  # fmt: skip
    return Collective(**{**given, "start_s": start_s, "end_s": end_s, **known})


def rank(
    number: int,
    *calls: Collective,
    began_s: float | None = None,
    host: str = "",
    world: int | None = None,
    **known: Any,
) -> Rank:
    given = {"length_s": 100.0, "steps": 1, "step_s": 1.0, "compute_s": 0.5, "communication_s": 0.2, "exposed_s": 0.1,
             "idle_s": 0.4}  # fmt: skip
    job = Job(rank=number, began_s=began_s, host=host, world_size=world)
    return Rank(number, f"{number}.json", "kineto", job, **{**given, **known}, collectives=calls)


@pytest.mark.parametrize(("begins_s", "refused"), [(160.0, False), (160.1, True)])
def test_recordings_a_minute_apart_are_of_two_jobs(begins_s: float, refused: bool) -> None:
    ranks = [rank(0, began_s=0.0), rank(1, began_s=begins_s)]
    if refused:
        with pytest.raises(ConfigError, match=r"1\.json begins .* after 0\.json ends"):
            check(ranks)
    else:
        check(ranks)


@pytest.mark.parametrize(("late_s", "kept"), [(99e-6, 3), (101e-6, 2)])
def test_rank_cannot_end_100_us_before_another_begins(late_s: float, kept: int) -> None:
    """Three calls align the clocks; of the first, rank 1 begins later than rank 0 ends."""
    others = [call(float(n), n + 0.5) for n in (2, 3)]
    job = merged([rank(0, call(0.0, 0.5), *others), rank(1, call(0.5 + late_s, 0.9), *others)])
    assert len(job.matches) == kept


def test_gain_of_a_straggler_is_limited_by_the_work_of_the_other_ranks() -> None:
    def found(**known: Any) -> Straggler:
        ranks = [rank(0, call(0.2, 0.5), **known), rank(1, call(0.1, 0.5)), rank(2, call(0.4, 0.5))]
        straggler_of_job = straggler(merged(ranks))
        assert straggler_of_job is not None
        return straggler_of_job

    late = found()
    assert (late.rank, late.in_words) == (2, "last to arrive in 1 of 1 collectives")
    assert (late.delay_s, late.least_s) == pytest.approx((0.2, 0.8))
    assert found(host_s=0.9).least_s == pytest.approx(0.9)
    assert found(compute_s=0.95).least_s == 1.0  # with the transfer of 0.1 s
    assert found(host_s=2.0).least_s == 1.0


def test_collectives_at_once_delay_a_step_once() -> None:
    both = [call(0.1, 0.5), call(0.1, 0.6)]
    late = straggler(merged([rank(0, *both), rank(1, call(0.4, 0.5), call(0.4, 0.6))]))
    assert late is not None
    assert late.delay_s == pytest.approx(0.3)
    one, _ = rank_rows(merged([rank(0, *both), rank(1, call(0.4, 0.5), call(0.4, 0.6))]))
    assert (one["waiting_s"], one["transfer_s"]) == pytest.approx((0.3, 0.2))


def test_ranks_that_take_turns_in_being_late_are_not_stragglers() -> None:
    calls = [(call(0.1, 0.3), call(0.5, 0.9)), (call(0.2, 0.3), call(0.4, 0.9))]
    late = straggler(merged([rank(0, *calls[0]), rank(1, *calls[1])]))
    assert late is not None
    assert late.more_s == pytest.approx(0.0)


def test_rows_of_ranks_and_collectives_are_means() -> None:
    first, second = (call(0.0, 1.0, size_bytes=4, hidden_s=0.25, beside_s={"a": 1.0, "b": 2.0, "c": 3.0}),
                     call(2.0, 3.0, size_bytes=4))  # fmt: skip
    job = merged([rank(0, first, second, steps=2), rank(1, call(0.5, 1.0, size_bytes=4), call(2.0, 3.0, size_bytes=4))])
    one, other = rank_rows(job)
    assert (one["busy_share"], one["waiting_s"], one["transfer_s"]) == (pytest.approx(0.6), 0.25, 0.75)
    assert (one["late_s"], one["last_share"]) == (0.0, 0.5)
    assert (other["waiting_s"], other["transfer_s"], other["late_s"], other["last_share"]) == (0.0, 1.5, 0.25, 1.0)
    (row,) = collective_rows(job)
    assert (row["calls_per_step"], row["time_s"], row["waiting_s"]) == (1.0, 0.875, 0.125)
    assert (row["transfer_s"], row["hidden_share"], row["beside"]) == (0.75, pytest.approx(0.25 / 3.5), "c, b")
    assert row["algbw_bytes_per_s"] == pytest.approx(4 / 0.75)


def test_computation_is_after_every_other_exchange_or_the_rest() -> None:
    """The last exchange ends the last stretch; the first computation, before any exchange, is in neither."""
    exchanges = [call(at, at + 0.5, name="all_to_all", size_bytes=4) for at in (1.0, 2.0, 4.0, 8.0)]
    one = rank(
        0, *reversed(exchanges), computing=union(np.array([0.0, 1.5, 2.5, 4.5]), np.array([1.0, 1.75, 3.5, 8.0]))
    )
    assert _between(one, 4) == (0.25 + 3.5, 1.0)


@pytest.mark.parametrize(("more", "told"), [(0, MOST_TOLD), (1, 0)])
def test_each_of_few_ranks_is_told(more: int, told: int) -> None:
    job = merged([rank(number, call(0.0, 1.0)) for number in range(MOST_TOLD + more)])
    assert len(in_words(job)) == told


def test_match_has_arrival_transfer_and_waiting() -> None:
    match = Match({0: call(0.0, 3.0), 1: call(1.0, 4.0)}, {0: 0.0, 1: 1.0}, {0: 3.0, 1: 4.0})
    assert (match.arrived_s, match.transfer_s) == (1.0, 3.0)
    assert [match.waiting_s(number) for number in (0, 1)] == [1.0, 0.0]
    assert [match.late_s(number) for number in (0, 1)] == [0.0, 1.0]


def test_clocks_are_aligned_through_ranks_between() -> None:
    """The clock of rank 1 is 5 s ahead, that of rank 2 by 8 s, and no collective has ranks 0 and 2.

    The recording of rank 0 began 1 s later, which is between the clocks, too.
    """
    job = merged([
        rank(0, call(0.0, 1.0, group="a"), began_s=1.0, host="x"),
        rank(1, call(5.0, 6.0, group="a"), call(7.0, 8.0, group="b"), began_s=0.0, host="y"),
        rank(2, call(10.0, 11.0, group="b"), began_s=0.0, host="y"),
    ])  # fmt: skip
    assert [(match.arrived_s, match.transfer_s) for match in job.matches] == [(0.0, 1.0), (2.0, 1.0)]
    assert [match.waiting_s(1) for match in job.matches] == [0.0, 0.0]
    assert job.notes == (
        "2 collectives are matched across the ranks, by order within the step; their ends agree within 1.00 ns",
        "the hosts' clocks differ by up to 7.00 s; this is corrected",
    )


def test_clocks_are_aligned_by_other_events_if_no_collective_ends_on_all_ranks() -> None:
    job = merged([rank(0, call(0.0, 1.0, name="broadcast")), rank(1, call(5.0, 6.0, name="broadcast"))])
    (match,) = job.matches
    assert (match.waiting_s(0), match.transfer_s) == (0.0, 1.0)
    assert job.notes == ("1 collectives are matched across the ranks, by order within the step",)


def test_collectives_are_not_matched_if_most_have_impossible_times() -> None:
    def calls(*starts: float) -> list[Collective]:
        return [call(start_s, start_s + 0.1) for start_s in starts]

    job = merged([rank(0, *calls(0.0, 2.0, 5.0)), rank(1, *calls(1.0, 2.0, 4.0))])
    assert job.matches == ()
    assert "in 2 of 3 a rank ends before another begins" in job.notes[-1]


def test_eight_of_the_given_ranks_are_named() -> None:
    def note(given: int) -> str:
        return merged([rank(number, call(0.0, 1.0), world=12) for number in range(given)]).notes[0]

    assert note(8).startswith("8 of 12 ranks are given (0, 1, 2, 3, 4, 5, 6, 7): a rank may wait")
    assert note(9).startswith("9 of 12 ranks are given (0, 1, 2, 3, 4, 5, 6, 7 …): a rank may wait")
    assert not note(12).startswith("12 of 12")


def test_time_during_other_work_is_the_overlap_of_both() -> None:
    nothing = union(np.zeros(0), np.zeros(0))
    starts, ends = np.array([0.0, 2.5, 4.0]), np.array([2.0, 4.0, 6.0])
    assert _during(nothing, starts, ends).tolist() == [0.0, 0.0, 0.0]
    busy = union(np.array([1.0, 3.0]), np.array([2.0, 5.0]))
    assert _during(busy, starts, ends).tolist() == [1.0, 1.0, 1.0]


def test_clocks_of_one_host_are_not_said_to_differ() -> None:
    job = merged([rank(0, call(0.0, 1.0), began_s=0.0, host="x"), rank(1, call(5.0, 6.0), began_s=0.0, host="x")])
    assert len(job.notes) == 1
