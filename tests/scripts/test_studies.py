"""Tests of every study: its description, cells, tables and explanation."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import Precision, RunConfig, grid
from cs_systems.measure.runtime.sweep import check
from cs_systems.record import RunRecord, append_record, read_records

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "scripts" / "studies"
APART = "cuda_kernel_ablation"  # needs a GPU and runs on its own
NAMES = sorted(path.stem for path in SCRIPTS.glob("[a-z]*.py") if path.stem != APART)
UNANSWERED = {"precision_speed"}  # made-up records have one round, so no difference is certain


def study(name: str) -> Any:
    return importlib.import_module(name).STUDY


def invented(builders: Any, config: RunConfig) -> RunRecord:
    """Return a made-up record with time and memory that grow with the work; a profiled one has real tables."""
    if config.shape is None:
        work = config.model.d_model * config.model.num_layers * config.tokens_per_sequence * config.batch_size
        record = builders.ok(config, 1e-9 * work, 1e3 * work, 10**9)
        return builders.recorded(record)  # type: ignore[no-any-return]
    s = config.shape
    rows, whole = s.batch * s.heads * s.seq, 4 * s.batch * s.heads * s.seq**2 * s.d_head
    naive = config.attention in ("naive", "compiled")
    memory = 16 * rows * s.d_head + (6 * rows * s.seq if naive else 4 * rows)
    seconds = 1e-6 + whole / (40e12 if naive else 300e12)
    return builders.ok(config, seconds, whole // (2 if s.causal else 1), memory)  # type: ignore[no-any-return]


def explained(skeleton: Any, name: str, records: list[RunRecord]) -> str:
    return "\n".join(study(name).explain(skeleton.cells(records)))


def test_order_names_every_study_once(skeleton: Any) -> None:
    assert sorted(skeleton.ORDER) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_question_method_output_reason_and_command(name: str) -> None:
    it = study(name)
    text = inspect.cleandoc(it.doc)
    assert it.question[0].isupper()
    assert it.question.endswith("?")
    for part in ("\nQuestion: ", "\nMethod: ", "\nOutput: ", "\nWhy: "):
        assert part in text
    assert it.command == f"python scripts/studies/{name}.py"


def test_figure_leaves_profiled_cells_out_by_default(skeleton: Any, builders: Any) -> None:
    it = study("nsys_and_clock")
    found = skeleton.cells([invented(builders, config) for config in it.full()])
    drawn = [cell.record.run_config.profiler for cell in found if it.drawn(cell)]
    assert set(drawn) == {"none"}
    assert len(drawn) == len(found) / 2


@pytest.mark.parametrize("name", NAMES)
def test_full_size_has_valid_cells_once(name: str) -> None:
    configs = study(name).full()
    check([replace(config, profiler="none") for config in configs])  # nsys may be missing here
    assert len(set(configs)) == len(configs), "a cell occurs twice"
    assert all(config.memory_limit_bytes is None for config in configs) or name == "attention_out_of_memory"


@pytest.mark.parametrize("name", NAMES)
def test_small_size_is_small_and_has_same_workloads(name: str) -> None:
    it = study(name)
    configs = it.small()
    check(configs)
    assert 1 < len(configs) <= 40
    assert len(set(configs)) == len(configs)
    full = it.full()
    assert {c.workload for c in configs} == {c.workload for c in full}
    assert {c.mode for c in configs} <= {c.mode for c in full}
    assert all((c.shape is None or c.shape.seq <= 2048) and c.model.d_model <= 768 for c in configs)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_written_in_markdown_and_another_format(skeleton: Any, builders: Any, name: str) -> None:
    it = study(name)
    configs = it.small()
    records = [invented(builders, config) for config in configs[:-1]]
    records.append(builders.failed(configs[-1], "unavailable", "no such kernel here: use naive"))
    cells = skeleton.cells(records)
    tables = it.tables(cells, "markdown")
    assert all(table.strip() for table in tables)
    assert any("no such kernel here: use naive" in table for table in tables)
    other = ("latex", "typst", "csv")[NAMES.index(name) % 3]  # no study has code for a format of its own
    assert all(table.strip() for table in it.tables(cells, other))


@pytest.mark.parametrize("name", NAMES)
def test_explanation_and_answer_of_full_records_have_numbers(skeleton: Any, builders: Any, name: str) -> None:
    cells = skeleton.cells([invented(builders, config) for config in study(name).full()])
    findings = "\n".join(study(name).explain(cells))
    assert any(c.isdigit() for c in findings)
    answer = skeleton.answered(study(name), cells)
    assert name in UNANSWERED or any(c.isdigit() for c in answer), answer
    assert "nan" not in findings + answer
    assert "None" not in findings + answer


@pytest.mark.parametrize("name", NAMES)
def test_unavailable_records_give_no_answer(skeleton: Any, builders: Any, name: str) -> None:
    it = study(name)
    records = [builders.failed(config, "unavailable", "no CUDA") for config in it.full()]
    cells = skeleton.cells(records)
    assert it.tables(cells, "markdown")[0].count("unavailable") >= 2
    assert not any(backend in " ".join(it.explain(cells)) for backend in ("naive", "sdpa_flash", "small"))
    assert name == "scaling_limits" or skeleton.answered(it, cells) == skeleton.UNANSWERED


def test_step_time_compares_large_with_fewer_layers_to_the_preset(skeleton: Any, builders: Any) -> None:
    records = [invented(builders, c) for c in study("step_time").full()]
    assert "large with 32 layers takes 0.8" in explained(skeleton, "step_time", records)


def test_step_time_reports_drift_within_a_cell(skeleton: Any, builders: Any) -> None:
    config = study("step_time").full()[0]
    record = builders.ok(config, 0.1, 1e12, 10**9)
    steady = explained(skeleton, "step_time", [record])
    assert "no cell drifted" in steady
    samples = tuple(replace(s, wall_s=0.1 - 0.004 * i) for i, s in enumerate(record.measurement.samples))
    falling = replace(record, measurement=replace(record.measurement, samples=samples))
    assert re.search(
        r"drifted: its second half of steps took \d+\.\d% less", explained(skeleton, "step_time", [falling])
    )


def test_warmup_steps_names_causes_of_slow_first_step(skeleton: Any, builders: Any) -> None:
    config = next(c for c in study("warmup_steps").full() if c.warmup == 0)
    record = builders.ok(config, 0.1, 1e12, 10**9)
    first, *rest = record.measurement.samples
    slow = replace(first, wall_s=2.0, compile_s=1.5, device_mallocs=40)
    findings = explained(
        skeleton, "warmup_steps", [replace(record, measurement=replace(record.measurement, samples=(slow, *rest)))]
    )
    assert "warm-up 0: mean 290 ms, median 100 ms" in findings
    assert "compile and autotune 1.50 s; 40 cudaMalloc" in findings


def test_low_precision_sums_compares_sums_with_ulp_arithmetic(skeleton: Any) -> None:
    records, _ = read_records(ROOT / "profiles" / "low_precision_sums" / "cpu")
    findings = explained(skeleton, "low_precision_sums", records)
    assert "4 of the four sums that the question states come out the same here" in findings
    assert "arithmetic on ulps gives 21 of 21 sums to the bit" in findings
    rows = records[0].results["accumulation"]
    other = replace(records[0], results={"accumulation": [row | {"sum": row["sum"] + 1} for row in rows]})
    findings = explained(skeleton, "low_precision_sums", [other])
    assert "0 of the four sums that the question states come out the same here" in findings
    assert "gives 0 of 3 sums" in findings


def test_autocast_dtypes_names_mistakes_and_answers_question(skeleton: Any) -> None:
    records, _ = read_records(ROOT / "profiles" / "autocast_dtypes" / "cpu")
    cells = skeleton.cells(records)
    tables = "\n".join(study("autocast_dtypes").tables(cells, "markdown")).replace("\\", "")
    for cause in ("entered for cuda (and switched off", "called outside of it", "the step enters no autocast"):
        assert cause in tables
    findings = "\n".join(study("autocast_dtypes").explain(cells))
    assert "under bf16 autocast: parameters fp32, fc1 gives bf16" in findings
    assert re.search(
        r"^bf16 needs fp32 inside for errors up to 2 unit roundoffs: "
        r"with sequential sums .*; with pairwise sums LayerNorm \(mean 16 σ\)$",
        findings,
        re.MULTILINE,
    )
    assert "fp16 LayerNorm: overflows from σ = 8 (sum of squares)" in findings


def test_all_reduce_compares_call_time_with_one_stopwatch(skeleton: Any, builders: Any) -> None:
    findings = explained(skeleton, "all_reduce", [invented(builders, config) for config in study("all_reduce").full()])
    assert (
        "2 ranks, from 1 MB to 1 GiB: a call takes 25.0 µs to 5.39 ms, 216 times as much; "
        "one stopwatch around start, init, first call and a call reads 3.55 s to 3.56 s, 1.0 times as much" in findings
    )
    assert "4 ranks: α 20.0 µs, β 200 GB/s (algbw); R² 1.000, at worst 0% off" in findings
    assert "busbw at 1 GiB: 199 GB/s on 2 ranks, 44% of the link; 299 GB/s on 4 ranks, 66% of the link" in findings


def test_attention_sequence_length_shows_effect_of_outlier_on_mean(skeleton: Any, builders: Any) -> None:
    config = study("attention_sequence_length").full()[0]
    record = builders.ok(config, 0.13e-3, 1e6, 10**6)
    first, *rest = record.measurement.samples
    samples = (replace(first, wall_s=26e-3), *(replace(s, wall_s=0.13e-3) for s in rest))
    findings = explained(
        skeleton,
        "attention_sequence_length",
        [replace(record, measurement=replace(record.measurement, samples=samples))],
    )
    assert "took 26.0 ms; counted as one of 30 samples it would have made the mean 992 µs" in findings
    assert "where the median is 130 µs" in findings


def test_attention_causal_mask_reports_credited_flops(skeleton: Any, builders: Any) -> None:
    findings = explained(
        skeleton, "attention_causal_mask", [invented(builders, c) for c in study("attention_causal_mask").full()]
    )
    assert "naive at length 2048: causal is credited with 0.50 of the FLOPs" in findings


def test_attention_out_of_memory_names_oom_length_and_needed_memory(skeleton: Any, builders: Any) -> None:
    configs = [
        c
        for c in study("attention_out_of_memory").full()
        if c.attention == "naive" and c.memory_limit_bytes == 8 * 2**30
    ]
    fits = next(c for c in configs if c.shape.seq == 1024)
    too_long = next(c for c in configs if c.shape.seq == 2048)
    record = builders.ok(fits, 0.1, 1e12, 7 * 2**30)
    record = replace(record, results={**record.results, "memory": [{"predicted_peak_bytes": 7 * 2**30}]})
    failed_record = builders.failed(too_long, "oom", "CUDA out of memory", predicted=26 * 2**30)
    failed_record.results["memory"][0]["failed_allocation_bytes"] = 8 * 2**30
    findings = explained(skeleton, "attention_out_of_memory", [record, failed_record])
    assert "naive on 8.00 GiB: fits at length 1024, not at 2048, which is predicted to need 26.0 GiB" in findings
    assert "failed at an allocation of 8.00 GiB" in findings
    assert "fits 8.00 GiB at length 1024 with 7.00 GiB" in findings
    assert "one score matrix more (2.00 GiB) would need 9.00 GiB" in findings


def test_flash_attention_advantage_checks_that_times_and_rates_agree(skeleton: Any, builders: Any) -> None:
    configs = [c for c in study("flash_attention_advantage").full() if c.attention in ("naive", "sdpa_flash")][:2]
    agreeing = [invented(builders, c) for c in configs]
    assert "agree in 1 of 1 pairs, each at fp16 on both sides" in explained(
        skeleton, "flash_attention_advantage", agreeing
    )
    whole = agreeing[1]
    other_formula = [{**row, "model_flops": row["model_flops"] / 2} for row in whole.results["cost"]]
    differing = [agreeing[0], replace(whole, results={**whole.results, "cost": other_formula})]
    assert "agree in 0 of 1 pairs" in explained(skeleton, "flash_attention_advantage", differing)


def test_flash_attention_advantage_compares_only_equal_precisions(skeleton: Any, builders: Any) -> None:
    naive, flash = (c for c in study("flash_attention_advantage").full()[:2])
    records = [invented(builders, naive), invented(builders, replace(flash, precision=Precision.BF16))]
    assert "times as fast" not in explained(skeleton, "flash_attention_advantage", records)


def test_attention_sample_run_finds_published_call_not_causal(skeleton: Any) -> None:
    findings = explained(skeleton, "attention_sample_run", [])
    assert "credits 1.00 of the unmasked call's 275 GFLOP: it was not causal" in findings


def test_flash_attention_lengths_fits_memory_growth(skeleton: Any, builders: Any) -> None:
    findings = explained(
        skeleton, "flash_attention_lengths", [invented(builders, c) for c in study("flash_attention_lengths").full()]
    )
    assert "flash_triton bf16 d_head 128: from length 4096 to 65536 peak memory grows as length^1.00" in findings
    assert "naive bf16 d_head 128: from length 4096 to 65536 peak memory grows as length^1.9" in findings
    assert re.search(r"flash_triton bf16 d_head 128 against naive: .*faster at length \d+ to 65536", findings)


def test_flash_attention_lengths_gives_verdict_for_each_length(skeleton: Any, builders: Any) -> None:
    """A kernel that is faster by less than the noise is not faster."""
    shares = {128: 0.5, 256: 0.5, 512: 0.999, 1024: 2.0, 2048: 0.4}
    configs = [
        c for c in study("flash_attention_lengths").full() if (c.precision, c.shape.d_head) == (Precision.BF16, 16)
    ]
    times = [1e-3 * (shares.get(c.shape.seq, 1) if c.attention == "flash_triton" else 1) for c in configs]
    records = [
        builders.ok(c, t, 1e9, c.shape.seq) for c, t in zip(configs, times, strict=True) if c.shape.seq in shares
    ]
    verdicts = "faster at length 128 to 256, 2048; no difference at length 512; slower at length 1024"
    assert f"flash_triton bf16 d_head 16 against naive: {verdicts}" in explained(
        skeleton, "flash_attention_lengths", records
    )


def test_torch_compile_reports_compile_time_and_recompilations(skeleton: Any, builders: Any) -> None:
    eager, compiled = (c for c in study("torch_compile").full() if c.workload == "train_step")
    records = [builders.ok(eager, 0.2, 1e12, 10**9), builders.ok(compiled, 0.1, 1e12, 10**9)]
    findings = explained(skeleton, "torch_compile", records)
    assert re.search(r"a step takes \S+ ms eager and \S+ ms with compile=default; compiling took 500 ms", findings)
    assert "paid back after 5 steps" in findings
    assert "compilations in timed steps: none" in findings
    *head, last = records[1].measurement.samples
    recompiled = replace(records[1].measurement, samples=(*head, replace(last, compiles=1, compile_s=3.0)))
    findings = explained(skeleton, "torch_compile", [records[0], replace(records[1], measurement=recompiled)])
    assert "compilations in timed steps: large ctx 256" in findings


def test_bounded_reduces_steps_of_slow_cells(skeleton: Any) -> None:
    short, long = skeleton.bounded(grid(RunConfig(steps=30), size=["small", "10B"], context_length=[512]))
    assert short.steps > long.steps >= 3
    assert long.warmup >= 1


def tiny(it: Any) -> Any:
    """Return the study with two fast cells."""
    configs = [replace(c, steps=3) for c in it.small() if c.attention in ("naive", "sdpa_flash")][:2]
    return replace(it, small=lambda: configs)


def test_interrupted_study_is_resumed_and_published(skeleton: Any, tmp_path: Path, capsys: Any) -> None:
    it = tiny(study("attention_sample_run"))
    skeleton.measure(it, "small", tmp_path, deadline=time.monotonic() - 1)
    assert len(read_records(tmp_path)[0]) == 1
    assert skeleton.publish(it, tmp_path) == 0
    assert "1 cell is not measured yet" in capsys.readouterr().out
    skeleton.measure(it, "small", tmp_path)
    skeleton.measure(it, "small", tmp_path)
    records, _ = read_records(tmp_path)
    assert [r.run_config for r in records] == it.small()
    assert skeleton.publish(it, tmp_path, "latex") == 0
    shown = capsys.readouterr()
    assert r"\begin{tabular}" in shown.out
    assert "not measured yet" not in shown.out + shown.err
    table = (tmp_path / "table.md").read_text()
    assert table.startswith(f"# {it.question}")
    assert "## Findings" in table
    assert table.splitlines()[2] == skeleton.UNANSWERED  # these two cells have no mask
    assert table.index("![") < table.index("**")
    assert it.command in table
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_each_cell_of_warmup_steps_has_own_sweep(skeleton: Any, tmp_path: Path, monkeypatch: Any) -> None:
    it, sweeps, sweep = tiny(study("warmup_steps")), [], skeleton.sweep

    def counted(configs: list[RunConfig], **options: Any) -> Iterator[RunRecord]:
        sweeps.append(configs)
        return sweep(configs, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(skeleton, "sweep", counted)
    skeleton.measure(it, "small", tmp_path)
    assert sweeps == [[config] for config in it.small()]
    assert [r.status for r in read_records(tmp_path)[0]] == ["ok", "ok"]


def test_show_option_prints_records_without_measuring(builders: Any, tmp_path: Path) -> None:
    for config in study("attention_sample_run").small():
        append_record(tmp_path, invented(builders, config))
    command = [
        sys.executable,
        "scripts/studies/attention_sample_run.py",
        "--scale",
        "small",
        "--show",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--format", "csv"], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("attention,causal,forward.median_ms")
    assert "it was not causal" in done.stderr
    missing = subprocess.run(
        [*command[:-1], str(tmp_path / "no")], capture_output=True, text=True, timeout=50, cwd=ROOT
    )
    assert missing.returncode == 2
    assert "; give the folder of a run" in missing.stderr


def test_all_studies_are_listed_and_skipped_without_budget(skeleton: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["_study.py"])
    assert skeleton.main() == 0
    listed = capsys.readouterr().out
    assert all(f"python scripts/studies/{name}.py" in listed for name in NAMES)
    assert skeleton.run_all(None, -1.0, "small") == 0
    left_out = capsys.readouterr().out
    assert left_out.count("left out") == len(NAMES)
    assert [line.partition(":")[0] for line in left_out.splitlines()][:5] == [
        "step_time",
        "forward_backward_ratio",
        "nsys_and_clock",
        "top_kernels",
        "softmax_and_matmul",
    ]


def test_auto_scale_depends_on_cuda(skeleton: Any, capsys: Any) -> None:
    scale, findings = skeleton.decide("auto"), capsys.readouterr().err
    assert findings.startswith(f"the {scale} size, ")
    assert ("no CUDA" in findings) == (scale == "small")


def test_failing_study_does_not_stop_others(skeleton: Any, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device disappeared")

    monkeypatch.setattr(skeleton, "measure", fails)
    assert skeleton.run_all(tmp_path, 60.0, "small") == 2
    assert capsys.readouterr().out.count("the device disappeared") == len(NAMES)


@pytest.mark.parametrize("script", ["_study.py", "autocast_dtypes.py"])
def test_abbreviated_option_is_rejected(script: str, tmp_path: Path) -> None:
    shortened = "--al" if script == "_study.py" else "--dry"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "scripts" / "studies" / script), shortened],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"unrecognized arguments: {shortened}" in done.stderr


def test_growth_exponent_ignores_constant_start() -> None:
    growth = importlib.import_module("_attention").growth
    lengths = [128, 256, 512, 1024, 2048]
    assert growth(lengths, [7 + n**2 for n in lengths]) == pytest.approx(2, abs=0.01)
    assert growth([64, *lengths], [7 + 128**2, *(7 + n**2 for n in lengths)]) == pytest.approx(2, abs=0.01)
    assert growth(lengths, [5] * 5) == 0
