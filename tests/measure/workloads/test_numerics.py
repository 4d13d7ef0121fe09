"""Sums and normalisations in low precision: measurement, tables, verdicts and figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cs_systems
from cs_systems.analysis.comparison import numerics
from cs_systems.config import Precision, RunConfig
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell, Unavailable, normalization
from cs_systems.measure.workloads._sums import DTYPES, kahan, pairwise, sequential
from cs_systems.measure.workloads.accumulation import Accumulation, summation
from cs_systems.measure.workloads.normalization import OPERATIONS, Chain, Normalization, steps_of
from cs_systems.record import RunRecord
from cs_systems.report.figures import plot

LOW = (Precision.FP16, Precision.BF16)


def measured(workload: str, precision: Precision) -> RunRecord:
    config = RunConfig(workload=workload, precision=precision, warmup=0, steps=1, device="cpu")
    record = cs_systems.run(config, in_process=True)
    assert record.status == "ok", record.reason
    return record


@pytest.fixture(scope="module")
def sums() -> list[RunRecord]:
    return [measured("accumulation", precision) for precision in (Precision.FP32, *LOW)]


@pytest.fixture(scope="module")
def norms() -> list[RunRecord]:
    return [measured("normalization", precision) for precision in LOW]


@pytest.mark.parametrize("precision", DTYPES)
@given(numbers=st.lists(st.integers(-1, 1), min_size=1, max_size=40))
@settings(max_examples=30)
def test_summation_without_rounding_is_exact(precision: Precision, numbers: list[int]) -> None:
    """Use whole numbers up to 40, which bf16 represents exactly."""
    x = torch.tensor(numbers, dtype=DTYPES[precision])[:, None]
    exact = float(x.double().sum())
    assert float(sequential(x)[len(x)]) == float(kahan(x)[len(x)]) == float(pairwise(x)) == exact


def test_prefix_sums_are_exact() -> None:
    x = torch.arange(1.0, 6.0)[:, None]
    assert {n: float(s) for n, s in sequential(x, [1, 3]).items()} == {1: 1.0, 3: 6.0, 5: 15.0}
    assert {n: float(s) for n, s in kahan(x, [2]).items()} == {2: 3.0, 5: 15.0}


def test_accumulated_sums_are_reproduced_to_the_bit(sums: list[RunRecord]) -> None:
    shown = {(row["variant"], row["count"]): round(row["sum"], 4) for row in numerics.accumulated(sums)}
    names = ("fp32 + fp32", "fp16 + fp16", "fp32 + fp16", "fp32 + (fp16 → fp32)")
    assert [shown[name, 1000] for name in names] == [10.0001, 9.9531, 10.0021, 10.0021]
    assert shown["bf16 + bf16", 1000] == 4.0
    assert numerics.unexplained(sums) == []
    assert len(numerics.ulps(sums)) == 4 + 4 + 3


def test_unexplained_sum_is_detected(sums: list[RunRecord]) -> None:
    row = sums[1].results["accumulation"][0]
    other = {"accumulation": [row | {"sum": row["sum"] + 2**-7}]}
    assert len(numerics.unexplained([RunRecord("", sums[1].config, "ok", results=other)])) == 1


def test_only_sequential_sums_lose_accuracy_with_length(sums: list[RunRecord]) -> None:
    for record in sums:
        rows = record.results["summation"]
        bad = {m: numerics.first_bad(rows, m, 4.0) for m in dict.fromkeys(row["method"] for row in rows)}
        assert bad.pop("sequential") is not None
        assert set(bad.values()) == {None}
        for row in rows:  # 2u for Kahan, log2(n) u for pairwise sums: Higham, Accuracy and Stability, 4.2, 4.3
            if row["method"] in ("Kahan", "pairwise"):
                most = 2 if row["method"] == "Kahan" else row["length"].bit_length()
                assert row["largest_relative_error"] <= most * row["unit_roundoff"]
    line = next(row for row in numerics.summed(sums) if row["dtype"] == "bf16" and row["method"] == "sequential")
    assert line["error"][65536] == pytest.approx(0.99, abs=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", DTYPES)
def test_gpu_sums_equal_cpu_sums(precision: Precision) -> None:
    cpu, gpu = (summation(precision, torch.device(name), 0, 1024) for name in ("cpu", "cuda"))
    expected = [row for row in cpu if row["method"] != "torch.sum"]
    assert expected == [row for row in gpu if row["method"] != "torch.sum"]


def test_operations_without_low_steps_match_torch() -> None:
    x = torch.randn(4, normalization.D, dtype=torch.float64)
    for name, operation in OPERATIONS.items():
        exact = normalization.KERNELS[name.removesuffix(" without max")](x)
        assert torch.allclose(operation(x, Chain(torch.bfloat16, frozenset())), exact, rtol=1e-12)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_low_step_has_a_name_and_changes_the_result(operation: str) -> None:
    x = torch.randn(4, normalization.D, dtype=torch.float64).bfloat16().double()
    exact = OPERATIONS[operation](x, Chain(torch.bfloat16, frozenset()))
    names = steps_of(operation)
    assert len(names) == len(set(names)) >= 4
    for name in names:
        assert not torch.equal(OPERATIONS[operation](x, Chain(torch.bfloat16, frozenset({name}))), exact), name


def test_breaking_step_and_its_input_scale_are_found(norms: list[RunRecord]) -> None:
    fp16, bf16 = ({(r["operation"], r["step"]): r for r in record.results["normalization_range"]} for record in norms)
    rms = {step: fp16["RMSNorm", step]["breaks_from"] for _, step in fp16 if ("RMSNorm", step) in fp16}
    # Squares exceed 65504 from 256 on, their sum over 1024 from 8 on, their mean from 256 on.
    assert rms["sum of squares, pairwise"] == rms["sum of squares, sequential"] == 8.0
    assert rms["square"] in (64.0, 128.0)
    assert rms["mean of squares"] == 256.0
    assert rms["1/sqrt"] is rms["scaling"] is rms["as torch does it"] is None
    assert fp16["softmax without max", "exp"]["breaks_from"] == 4.0
    assert bf16["softmax without max", "exp"]["breaks_from"] == 32.0
    assert not any(row["overflows"] for (name, _), row in bf16.items() if name != "softmax without max")


def test_verdicts_on_fp32_inside_norms(norms: list[RunRecord]) -> None:
    verdicts = numerics.verdicts(norms[1])
    assert any(s.startswith("bf16 RMSNorm, mean 0: needs no fp32 with pairwise sums;") for s in verdicts)
    assert any(s.startswith("bf16 LayerNorm, mean 16 σ: needs fp32 inside;") for s in verdicts)
    assert "bf16 RMSNorm: does not overflow" in verdicts
    steps = {(r["operation"], r["case"], r["step"]): r for r in norms[1].results["normalization"]}
    for (_, _, step), row in steps.items():
        if step in ("as torch does it", "fp32, result rounded"):
            assert row["error"] < row["unit_roundoff"]
    assert any(s.startswith("fp16 RMSNorm: overflows from σ = 8 (sum of squares)") for s in numerics.verdicts(norms[0]))
    shown = {(r["operation"], r["step"]): r for r in numerics.ranges(norms)}
    assert shown["RMSNorm", "square"]["fails"]["bf16"] is None
    assert "(overflow)" in str(shown["RMSNorm", "square"]["fails"]["fp16"])


def test_rows_of_infinities_have_no_error() -> None:
    made = Normalization(Cell(RunConfig(workload="normalization", precision=Precision.FP16)), resolve("cpu"))
    rows = dict(made.errors("softmax without max", 0.0, 8.0))
    assert (rows["exp"]["error"], rows["exp"]["finite"]) == (None, 0.0)
    assert numerics.in_roundoffs(rows["exp"]) == "inf or NaN"


@pytest.mark.parametrize(
    ("workload", "precision", "reason"),
    [
        (
            Accumulation,
            Precision.BF16_PURE,
            "does not support precision bf16-pure; use fp32, bf16 or fp16",
        ),
        (Normalization, Precision.FP32, "normalization requires a low precision, got fp32; use bf16 or fp16"),
    ],
)
def test_unsupported_precision_is_unavailable(workload: Any, precision: Precision, reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        workload(Cell(RunConfig(precision=precision)), resolve("cpu"))


def test_figures_show_their_tables(sums: list[RunRecord], norms: list[RunRecord]) -> None:
    assert (plot.kinds(sums)[0], plot.kinds(norms)[0]) == ("sums", "steps")
    drawn = plot.figure(sums)
    assert [axes.get_title() for axes in drawn.axes] == ["fp32", "fp16", "bf16"]
    assert all(len(axes.lines) >= 5 for axes in drawn.axes)
    steps = plot.figure(norms)
    assert [axes.get_title(loc="left").partition(",")[0] for axes in steps.axes] == ["LayerNorm", "RMSNorm", "softmax"]
