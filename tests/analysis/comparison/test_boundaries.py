"""Comparisons at boundaries: two blocks, a sum's binades, cells without a baseline, collectives at a step's edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.comparison import dtypes, numerics, precision, precision_causes, strategies
from cs_systems.analysis.comparison.ranks import merged, summary
from cs_systems.analysis.comparison.runs import speedups
from cs_systems.config import ConfigError, Precision, RunConfig, preset
from cs_systems.readers import read
from cs_systems.readers.forms.jobs import Job
from cs_systems.record import RunRecord
from tests.analysis.attribution.test_foreign import AUTOGRAD, marked
from tests.analysis.comparison.test_limits import call, cell, profiled, rank, steps
from tests.analysis.comparison.test_runs import BASE, record


@pytest.mark.parametrize(
    ("blocks", "shown"),
    [
        ([0], ["layers.0.attn"]), ([0, 1], ["layers.0–1.attn"]), ([3, 4, 5], ["layers.3–5.attn"]),
        ([0, 2], ["layers.0.attn", "layers.2.attn"]), ([1, 0], ["layers.1.attn", "layers.0.attn"]),
    ],
)  # fmt: skip
def test_rows_of_blocks_in_a_row_are_one(blocks: list[int], shown: list[str]) -> None:
    rows: Any = [{"what": f"layers.{number}.attn", "inputs": "bf16"} for number in blocks]
    assert [row["what"] for row in dtypes.collapsed(rows)] == shown
    other: Any = [{**row, "inputs": f"of {number}"} for number, row in enumerate(rows)]
    assert dtypes.collapsed(other) == other, "unlike rows stay apart"


# sums in low precision


def accumulation(*rows: tuple[str, str, int, float]) -> RunRecord:
    made = RunRecord("key", RunConfig(workload="accumulation").to_dict(), "ok")
    made.results["accumulation"] = [
        {"variant": f"{accumulator} + {addend}", "accumulator": accumulator, "addend": addend, "count": count,
         "exact": count / 100, "sum": found, "error": found - count / 100}
        for accumulator, addend, count, found in rows
    ]  # fmt: skip
    return made


def test_sum_that_differs_by_a_bit_is_unexplained() -> None:
    total = np.float32(0)
    for _ in range(1000):
        total += np.float32(0.01)
    right = ("fp32", "fp32", 1000, float(total))
    wrong = ("fp32", "fp32", 1000, float(np.nextafter(total, np.float32(9))))
    stuck = ("bf16", "bf16", 1000, 4.0)
    assert [row["sum"] for row in numerics.unexplained([accumulation(right, wrong, stuck)])] == [wrong[-1]]


def test_table_of_binades_goes_from_1_to_the_value_at_which_the_sum_stops_growing() -> None:
    """In bf16 0.01 is 41/4096, and a binade's numbers are 1/128, 1/64 and 1/32 apart."""
    made = accumulation(("bf16", "bf16", 1000, 4.0), ("fp32", "bf16", 1000, 10.0), ("bf16", "bf16", 999, 4.0))
    assert [
        (row["range"], row["ulp"], row["addend_in_ulps"], row["added_in_ulps"]) for row in numerics.ulps([made])
    ] == [("1 … 2", 2**-7, 1.281, 1.0), ("2 … 4", 2**-6, 0.641, 1.0), ("4 … 8", 2**-5, 0.32, 0.0)]
    assert [row["additions"] for row in numerics.ulps([made])][1] == 128
    assert len(numerics.ulps([made], 999)) == 3
    assert numerics.ulps([made], 1001) == []


def test_sums_are_shown_at_lengths_that_grow_by_a_factor_of_16() -> None:
    made = RunRecord("key", RunConfig(workload="summation", precision="bf16").to_dict(), "ok")  # type: ignore[arg-type]
    lengths = [length + more for length in (16, 256, 4096, 65536) for more in (-1, 0, 1)]
    rows: Any = [
        {"method": "pairwise", "length": n, "median_relative_error": n / 2, "unit_roundoff": 1} for n in lengths
    ]
    made.results["summation"] = rows
    (row,) = numerics.summed([made])
    assert row == {"dtype": "bf16", "method": "pairwise", "error": {16: 8, 256: 128, 4096: 2048, 65536: 32768}}


# cells


def test_name_of_a_timed_cell_has_its_mode() -> None:
    cells = [replace(BASE, workload=workload) for workload in (precision.TIMED, precision.ERRORS, precision.CURVES)]
    assert ["train-step" in precision.name_of(cell) for cell in cells] == [True, False, False]


@pytest.mark.parametrize(("phases", "mfu"), [(("forward", "step"), 0.25), (("step", "forward"), 0.5), ((), None)])
def test_model_flops_of_the_step_give_the_utilisation(phases: Sequence[str], mfu: float | None) -> None:
    made = RunRecord("key", BASE.to_dict(), "ok", measurement=steps(2.0, 2.0, 2.0))
    rows: Any = [{"phase": phase, "model_flops": 1e12 if phases[0] == phase else 5e11} for phase in phases]
    peak: Any = [{"peak_flops_per_s": 1e12}]
    made.results.update({"cost": rows, "ceiling": peak})
    (row,) = precision.gains({Precision.FP32: [made]})
    assert row["step_s"] == 2.0
    assert row["mfu"] == mfu


def test_cell_has_a_speedup_where_it_and_its_baseline_are_timed() -> None:
    fast = record(replace(BASE, precision=Precision.BF16), 0.5)
    failed = replace(fast, status="oom", measurement=None)
    slow, elsewhere = record(BASE, 1.0), record(replace(BASE, batch_size=8), 1.0)

    def ratios(records: Sequence[RunRecord], *baselines: bool) -> list[float | None]:
        return [found and round(found.ratio, 1) for found in speedups(records, "precision", baselines)]

    assert ratios([slow, fast], True, False) == [1.0, 0.5]
    assert ratios([slow, fast], False, False) == [None, None]
    assert ratios([elsewhere, fast], True, False) == [1.0, None]
    assert ratios([slow, failed], True, False) == [1.0, None]


@pytest.mark.parametrize(
    ("field", "changed", "ratio"),
    [
        ("batch_size", {"batch_size": 8}, 0.5), ("attention", {"attention": "flex"}, 0.5),
        ("size", {"model": preset("small", context_length=64)}, 0.5),
        ("size", {"model": preset("small", context_length=32)}, None),
        ("context_length", {"model": preset("tiny", context_length=32)}, 0.5),
        ("attention", {"attention": "flex", "batch_size": 8}, None),
    ],
)  # fmt: skip
def test_baseline_differs_in_the_field_alone(field: str, changed: dict[str, Any], ratio: float | None) -> None:
    records = [record(BASE, 1.0), record(replace(BASE, **changed), 0.5)]
    _, found = speedups(records, field, [True, False])
    assert (found and round(found.ratio, 1)) == ratio


def test_unknown_field_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="'nothing' is not a setting"):
        speedups([record(BASE, 1.0)], "nothing", [True])


@pytest.mark.parametrize(("copies_s", "said"), [(0.5, "save 500 ms"), (1.0, "add 0 ms"), (1.5, "add 500 ms")])
def test_casts_with_unchanged_time_do_not_explain_a_speedup(copies_s: float, said: str) -> None:
    a = profiled("fp32", {"matmul": 4.0, "copy": 1.0})
    row = precision_causes.causes(a, profiled("bf16", {"matmul": 1.0, "copy": copies_s}))
    assert f"casts and other copies {said}" in precision_causes.sentence(row)


def test_communication_of_a_strategy_without_one_rank_is_unknown() -> None:
    alone = [cell("ddp_flat", 2, 3.0, 3.0, 3.0)]
    (row,) = strategies.communication(alone)
    assert (row["by_difference_s"], row["of_step"], row["hidden"]) == (None, None, None)


# ranks


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ((20, 120), [("all_reduce", 0, 20), ("all_reduce", 1, 120)]),
        ((120, 20), [("all_reduce", 0, 20), ("all_reduce", 1, 120)]),
        ((0, 99, 100), [("all_reduce", 0, 0), ("all_reduce", 0, 99), ("all_reduce", 1, 100)]),
        ((250,), []),
    ],
)
def test_collectives_on_a_cpu_count_if_they_begin_in_a_step(
    write_trace: Callable[..., Path], starts: Sequence[int], found: list[tuple[str, int, int]]
) -> None:
    events = [marked("step", 0, 100), marked("step", 100, 200), marked("forward", 5, 50), marked("forward", 105, 150)]
    events += [marked("gloo:all_reduce", start, start + 4, AUTOGRAD) for start in starts]
    made = profile(read(write_trace(events)))
    one = summary(made, 0)
    assert [(call.name, call.step, round(call.start_s * 1e6)) for call in one.collectives] == found
    assert [round((call.end_s - call.start_s) * 1e6) for call in one.collectives] == [4] * len(found)
    assert one.job == Job(began_s=0.0)
    assert summary(replace(made, trace=replace(made.trace, job=None)), 0).job == Job()


@pytest.mark.parametrize(
    ("mine", "others", "matched"),
    [(("a",), ("a",), 1), (("a", "a"), ("a",), 0), (("a", "b"), ("a",), 1), (("a", "a"), ("a", "a"), 2)],
)
def test_process_groups_with_equal_numbers_of_calls_on_two_ranks_are_matched(
    mine: Sequence[str], others: Sequence[str], matched: int
) -> None:
    """Each letter is the group of a call; a group of one rank has nothing to match."""
    ranks = [
        rank(number, *(call(float(n), n + 0.5, group=group) for n, group in enumerate(groups)))
        for number, groups in enumerate((mine, others))
    ]
    job = merged(ranks)
    assert len(job.matches) == matched
    lost = len(mine) + len(others) - 2 * matched
    assert any(note.startswith(f"{lost} calls of collectives have no counterpart") for note in job.notes) is (
        lost > 0 and matched > 0
    )
