"""Tests of precisions compared with fp32: times, training curves and explanations, on records of an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.analysis.comparison import precision
from cs_systems.analysis.comparison.precision_causes import causes, explained, pairs, sentence
from cs_systems.config import ConfigError, Precision
from cs_systems.core.caveats import Caveat
from cs_systems.record import Row, RunRecord, read_records

PROFILES = Path(__file__).parents[3] / "profiles"


@pytest.fixture(scope="module")
def large() -> list[RunRecord]:
    return read_records(PROFILES / "top_kernels")[0]


@pytest.fixture(scope="module")
def small() -> list[RunRecord]:
    records, _ = read_records(PROFILES / "profile_coverage" / "small.records.jsonl")
    return [r for r in records if r.config["profiler"] == "kineto" and r.config["compile"] == "none"]


def test_sentence_explains_timed_and_profiled_step(large: list[RunRecord]) -> None:
    assert sentence(explained(large)[-1]) == (
        "large ctx 256 batch 4 · naive · train-step, bf16: 1.29× fp32's speed (0.77–2.17): 67% of the step is "
        "launch-bound; matrix products take 12 ms instead of 149 ms (12.3×); casts and other copies add 8.7 ms; "
        "all other kernels take 22 ms as in fp32"
    )
    assert [row["cell"].rpartition(" ")[2] for row in explained(large)] == ["forward", "forward-backward", "train-step"]


def test_timed_record_is_matched_when_one_record_names_device(large: list[RunRecord]) -> None:
    def on(record: RunRecord, device: str) -> RunRecord:
        return replace(record, config=replace(record.run_config, device=device).to_dict())

    assert {r.config["device"] for r in large} == {"auto"}
    named = [on(r, "cuda") if r.config["profiler"] == "kineto" else r for r in large]
    assert [row["speedup"] for row in explained(named)] == [row["speedup"] for row in explained(large)]
    assert None not in [row["speedup"] for row in explained(named)]


def test_gains_count_tokens_of_all_ranks_and_synchronize_time() -> None:
    records = [r for r in read_records(PROFILES / "data_parallel_variants")[0] if r.config["strategy"] == "ddp_naive"]
    (cell,) = precision.by_cell(records, precision.TIMED).values()
    (row,) = precision.gains(cell)
    config = records[0].run_config
    assert config.world_size == 2
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(2 * config.batch_size * config.tokens_per_sequence)
    assert row["synchronize_s"] > 0


def test_gain_is_the_ratio_of_the_two_step_times_in_its_row() -> None:
    records = [r for r in read_records(PROFILES / "precision_speed")[0] if r.is_timing]
    checked = 0
    for cell in precision.by_cell(records, precision.TIMED).values():
        baseline, *others = precision.gains(cell)
        assert (baseline["precision"], baseline["speedup"]) == ("fp32", None)
        for row in others:
            assert baseline["step_s"] is not None
            assert row["step_s"] is not None
            assert row["speedup"] == pytest.approx(baseline["step_s"] / row["step_s"], rel=1e-9)
            checked += 1
    assert checked >= 10


def test_sentence_counts_fp8_scale_kernels_among_other_kernels(large: list[RunRecord]) -> None:
    row = explained(large)[-1] | {"precision": "fp8"}
    assert "all other kernels (those for fp8's scales included) take 22 ms as in fp32" in sentence(row)


def test_kernel_families_sum_to_kernel_time(large: list[RunRecord]) -> None:
    a, b = pairs(large)[-1]
    row = causes(a, b)
    copies = {r["family"]: r["time_s"] for r in b.results["families"]}["copy"]
    assert row["b_products_s"] + copies + row["b_rest_s"] == pytest.approx(row["b_kernel_s"])
    assert row["b_kernel_s"] == pytest.approx(sum(r["time_s"] for r in b.results["phases"] if r["family"] == "all"))


def test_profile_without_timed_record_has_no_speedup(small: list[RunRecord]) -> None:
    row = causes(*small)
    assert row["speedup"] is None
    text = sentence(row)
    assert "kernels 4.22× as fast as fp32's: 90% of the step under the profiler is launch-bound" in text
    assert "matrix products and fused attention take 3.6 ms" in text
    assert text.endswith("not only the precision differs, but also: attention")
    assert pairs(small) == [], "the records also differ in attention"


def test_record_without_kernel_table_is_rejected(large: list[RunRecord]) -> None:
    a, b = pairs(large)[-1]
    with pytest.raises(ConfigError, match="has no table of kernels; profile it on a GPU"):
        causes(a, replace(b, results={}))


def timed(large: list[RunRecord]) -> dict[Precision, list[RunRecord]]:
    cells = precision.by_cell([r for r in large if r.config["mode"] == "train-step"], "train_step")
    return next(found for cell, found in cells.items() if cell.model.num_layers == 36)


def test_gains_compare_bf16_with_fp32(large: list[RunRecord]) -> None:
    fp32, bf16 = precision.gains(timed(large))
    assert (fp32["precision"], fp32["speedup"], bf16["precision"]) == ("fp32", None, "bf16")
    assert bf16["speedup_low"] < bf16["speedup"] < bf16["speedup_high"]
    assert bf16["speedup"] == pytest.approx(fp32["step_s"] / bf16["step_s"], rel=0.05)
    assert bf16["tokens_per_s"] == pytest.approx(1024 / bf16["step_s"])
    assert bf16["mfu"] < fp32["mfu"] < 1, "each precision has its own peak"


def test_nan_loss_or_failed_cell_has_reason_and_no_speedup(large: list[RunRecord]) -> None:
    found = timed(large)
    (bf16,) = found[Precision.BF16]
    broken = replace(bf16, warnings=(Caveat("nan-loss", "the loss is NaN", "use another precision"),))
    row = precision.gains({**found, Precision.BF16: [broken]})[1]
    assert (row["speedup"], row["step_s"], row["reason"]) == (None, None, "the loss is NaN")
    refused = replace(bf16, status="unavailable", measurement=None, reason="no bf16 here")
    row = precision.gains({**found, Precision.BF16: [refused]})[1]
    assert (row["status"], row["reason"], row["step_s"]) == ("unavailable", "no bf16 here", None)


def curve(record: RunRecord, losses: list[float], scales: list[float | None]) -> list[RunRecord]:
    rows: list[Row] = [
        {"step": i, "loss": loss, "loss_scale": scale, "skipped": i + 1 < len(scales) and scales[i + 1] != scale}
        for i, (loss, scale) in enumerate(zip(losses, scales, strict=True))
    ]
    return [replace(record, results={"training_curve": rows})]


def test_learning_reports_deviation_loss_scale_and_nan(large: list[RunRecord]) -> None:
    none: list[float | None] = [None] * 4
    found = {
        Precision.FP32: curve(large[0], [4.0, 3.0, 2.0, 1.0], none),
        Precision.FP16: curve(large[0], [4.0, 3.5, 2.0, 1.1], [8.0, 4.0, 4.0, 4.0]),
        Precision.BF16: curve(large[0], [4.0, float("nan"), float("nan"), float("nan")], none),
    }
    fp32, fp16, bf16 = precision.learning(found)
    assert (fp32["first_loss"], fp32["last_loss"], fp32["largest_deviation"]) == (4.0, 1.0, None)
    assert (fp16["largest_deviation"], fp16["at_step"]) == (0.5, 1)
    assert (fp16["loss_scale"], fp16["skipped"]) == ("8; 4 from step 1", 1)
    assert bf16["reason"] == "the loss is NaN or infinite from step 1 on"
    assert bf16["last_loss"] is None


def test_interval_is_too_noisy_when_samples_vary_30_fold(large: list[RunRecord]) -> None:
    found = timed(large)
    (bf16,) = found[Precision.BF16]
    assert bf16.measurement is not None
    samples = tuple(replace(s, wall_s=s.wall_s * 30 ** (i % 3)) for i, s in enumerate(bf16.measurement.samples))
    noisy = replace(bf16, measurement=replace(bf16.measurement, samples=samples))
    row = precision.gains({**found, Precision.BF16: [noisy]})[1]
    assert (row["speedup_low"], row["verdict"], precision.interval(row)) == (None, "too noisy", "too noisy")
