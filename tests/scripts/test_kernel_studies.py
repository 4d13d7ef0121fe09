"""Tests of the studies that compare kernel times with clock times."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import Mode, Precision, RunConfig
from cs_systems.record import RunRecord, append_record, read_records
from tests.scripts.test_studies import explained, invented, study

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "profiles" / "profile_coverage" / "small.records.jsonl"


def launch_bound(record: RunRecord, *phases: str, longer: float = 1.0) -> RunRecord:
    """Return the record with launch-bound phases; by default all phases.

    The host takes as long as the device, which ends 0.2 ms later. `longer` scales the times of these phases.
    """
    assert record.measurement is not None
    made = []
    for s in record.measurement.samples:
        bound = {p: longer * d for p, d in s.phases_s.items() if p in phases or not phases}
        lag = {**(s.lag_s or {}), **dict.fromkeys(bound, 0.2e-3)}
        made.append(replace(s, phases_s={**s.phases_s, **bound}, submit_s={**s.submit_s, **bound}, lag_s=lag))
    return replace(record, measurement=replace(record.measurement, samples=tuple(made)))


@pytest.mark.parametrize("name", ["step_time", "forward_backward_ratio"])
def test_launch_bound_forward_is_named_in_ratio(skeleton: Any, builders: Any, name: str) -> None:
    config = next(c for c in study(name).full() if c.model.label == "small")
    record = builders.ok(config, 0.1, 1e12, 10**9)
    free = explained(skeleton, name, [record])
    assert "launch-bound:" not in free
    assert "ratio of the launch times" not in free
    bound = explained(skeleton, name, [launch_bound(record)])
    assert re.search(r"backward takes (1\.9|2\.0)\d times as long as forward, the ratio of the launch times", bound)
    usual = explained(skeleton, name, [launch_bound(record, "forward")])
    assert re.search(r"backward takes (1\.9|2\.0)\d times as long as forward, though forward is launch-bound", usual)
    low = explained(skeleton, name, [launch_bound(record, "forward", longer=1.5)])
    assert "times as long as forward, but only forward is launch-bound: the host took" in low


def test_step_time_reports_launch_bound_share(skeleton: Any, builders: Any) -> None:
    step_study = importlib.import_module("step_time")
    config = step_study.full()[0]
    record = builders.ok(config, 0.1, 1e12, 10**9)
    free, bound = step_study.host_and_device(skeleton.cells([record, launch_bound(record)]), "size")
    assert (free["launch-bound"], bound["launch-bound"]) == ("0%", "100%")


def clean_and_profiled(builders: Any, name: str, precision: str = "fp32", **is_: Any) -> list[RunRecord]:
    """Return a study's first profiled cell, measured without and with the profiler; the clean one takes 0.1 s."""
    configs = [c for c in study(name).full() if c.profiler != "none" and c.precision == precision]
    with_profiler = next(c for c in configs if all(getattr(c, key) == value for key, value in is_.items()))
    clean = replace(with_profiler, profiler="none", warmup=3, steps=10)
    return [builders.ok(clean, 0.1, 1e12, 10**9), invented(builders, with_profiler)]


def profile_results(profiler: str = "kineto") -> dict[str, Any]:
    records, _ = read_records(RECORDED)
    return next(r for r in records if (r.config["profiler"], r.config["attention"]) == (profiler, "naive")).results


def test_clean_cell_gets_kernel_times_of_profiled_cell(skeleton: Any, builders: Any) -> None:
    clean, with_profiler = clean_and_profiled(builders, "step_time")
    cell, other = skeleton.cells([clean, with_profiler])
    by_kernels, _ = profile_results()["ratio"]
    assert cell["forward.kernel_s"] == pytest.approx(by_kernels["forward_s"])
    assert cell["kernel_ratio"] == pytest.approx(by_kernels["backward_to_forward"])
    assert cell["busy_share"] == pytest.approx(cell["kernel_s"] / cell["median_s"])
    assert cell["kernels"] == 1684
    assert other["kernel_s"] is None, "times under a profiler must not be used"
    assert [*skeleton.index([cell, other], "size").values()] == [cell]
    in_rounds = replace(clean, config=replace(clean.run_config, rounds=5).to_dict())
    assert skeleton.cells([in_rounds, with_profiler])[0]["kernel_s"] == cell["kernel_s"]
    stranger = replace(with_profiler, config=replace(with_profiler.run_config, batch_size=5).to_dict())
    assert skeleton.cells([clean, stranger])[0]["kernel_s"] is None


@pytest.mark.parametrize(
    "name", ["step_time", "nsys_and_clock", "top_kernels", "softmax_and_matmul", "forward_backward_ratio"]
)
def test_timing_table_excludes_profiled_cells(skeleton: Any, builders: Any, name: str) -> None:
    it = study(name)
    cells = skeleton.cells([invented(builders, config) for config in it.full()])
    first = it.tables(cells, "markdown")[0]
    assert "profiled (" not in first
    assert "under kineto" not in first
    rows = [line for line in first.splitlines() if line.startswith("|")]
    assert len(rows) - 2 == sum(config.profiler == "none" for config in it.full())


@pytest.mark.parametrize("name", ["step_time", "forward_backward_ratio"])
def test_ratio_is_given_by_clock_and_by_kernels(skeleton: Any, builders: Any, name: str) -> None:
    clean, with_profiler = clean_and_profiled(builders, name)
    free = explained(skeleton, name, [clean, with_profiler])
    assert re.search(
        r"backward : forward is (1\.9|2\.0)\d by the clock, and 1\.89 by the kernels, which fill 4\d% of the", free
    )
    bound = explained(skeleton, name, [launch_bound(clean), with_profiler])
    assert re.search(r"by the clock, the ratio of the launch times, and 1\.89 by the kernels", bound)
    assert "by the kernels" not in explained(skeleton, name, [clean])


def test_forward_backward_ratio_has_no_kernel_times_without_profile(skeleton: Any, builders: Any) -> None:
    ratio_study = importlib.import_module("forward_backward_ratio")
    records = clean_and_profiled(builders, "forward_backward_ratio")
    more = replace(records[0].run_config, batch_size=16)
    rows = ratio_study.ratios(skeleton.clean(skeleton.cells([*records, builders.ok(more, 0.2, 1e12, 10**9)])))
    assert [row["forward_kernels_s"] is None for row in rows] == [False, True]
    assert [row["GPU busy"] is None for row in rows] == [False, True]


def test_nsys_and_clock_reports_agreement_within_tolerance(skeleton: Any, builders: Any) -> None:
    nsys_study = importlib.import_module("nsys_and_clock")
    clean, with_profiler = clean_and_profiled(builders, "nsys_and_clock")
    rows = nsys_study.by_phase(skeleton.cells([clean, with_profiler]))
    assert [row["phase"] for row in rows] == ["forward", "backward", "optimizer"]
    for row in rows:
        assert (row["n"], row["nsys n"]) == (10, 3)
        assert row["nsys agrees"] == (abs(row["under_nsys_s"] / row["clock_s"] - 1) <= 0.05)
        assert row["kernels agree"] == (abs(row["kernels_s"] / row["clock_s"] - 1) <= 0.05)
    same = replace(with_profiler, measurement=clean.measurement)
    assert all(row["nsys agrees"] for row in nsys_study.by_phase(skeleton.cells([clean, same])))
    explanation = explained(skeleton, "nsys_and_clock", [clean, same])
    assert "the time under nsys lies within 5% of the clock in 3 of 3 phases\n" in explanation
    assert re.search(
        r"no kernel ran in 28% of the step \(launch-bound 22\.8%, device latency 3\.0%, copy 0\.8%\)", explanation
    )
    assert [nsys_study.agrees(v, 1.0) for v in (0.94, 0.96, 1.04, 1.06, None)] == [False, True, True, False, None]
    alone = nsys_study.by_phase(skeleton.cells([clean]))
    assert {row["nsys agrees"] for row in alone} == {None}
    assert "agree" not in explained(skeleton, "nsys_and_clock", [clean])


def test_top_kernels_reports_largest_and_all_matrix_products(skeleton: Any, builders: Any) -> None:
    records = [
        r for mode in (Mode.FORWARD, Mode.TRAIN_STEP) for r in clean_and_profiled(builders, "top_kernels", mode=mode)
    ]
    products = [row for row in profile_results()["kernels"] if row["family"] == "matmul"]
    largest, every = products[0]["share"], sum(row["share"] for row in products)
    explanation = explained(skeleton, "top_kernels", records)
    assert f"train-step {len(products)} kernels, the largest alone {largest:.1%}, all {every:.1%}" in explanation
    assert re.search(r"grows from forward to train-step: .*optimizer 0\.0% to 2\.2% \(1\.0\d ms\)", explanation)


def test_top_kernels_compares_matrix_products_of_fp32_and_bf16(skeleton: Any, builders: Any) -> None:
    full = [r for r in clean_and_profiled(builders, "top_kernels", mode=Mode.TRAIN_STEP) if r]
    large = [
        replace(r, config=replace(r.run_config, model=study("top_kernels").full()[-1].model).to_dict()) for r in full
    ]
    half = [replace(r, config=replace(r.run_config, precision=Precision.BF16).to_dict()) for r in large]
    explanation = explained(skeleton, "top_kernels", [*large, *half])
    assert "large train-step: from fp32 to bf16 the matrix products go from 38.9 ms to 38.9 ms" in explanation


def test_softmax_and_matmul_counts_flops_and_bytes() -> None:
    softmax_study = importlib.import_module("softmax_and_matmul")
    config = study("softmax_and_matmul").full()[0]
    assert (config.model.d_head, config.model.num_heads, config.tokens_per_sequence) == (64, 20, 256)
    scores = sum(1 for _ in range(4 * 20) for _ in range(256)) * 256
    assert softmax_study.work(config, "attention.scores") == (128 * scores, 4 * (scores + 2 * 4 * 20 * 256 * 64))
    assert softmax_study.work(config, "attention.softmax") == (3 * scores, 8 * scores)
    half = replace(config, precision=Precision.BF16)
    assert softmax_study.work(half, "attention.value")[1] == softmax_study.work(config, "attention.value")[1] / 2
    assert softmax_study.work(half, "attention.softmax") == softmax_study.work(config, "attention.softmax"), (
        "autocast runs softmax in fp32"
    )


def test_softmax_and_matmul_explains_softmax_and_outliers(skeleton: Any, builders: Any) -> None:
    clean, with_profiler = clean_and_profiled(builders, "softmax_and_matmul")
    clean = replace(clean, results={**clean.results, "ceiling": profile_results()["ceiling"]})
    explanation = explained(skeleton, "softmax_and_matmul", [clean, with_profiler])
    assert "1/43 of the FLOPs" in explanation
    assert "by the ceilings, softmax is memory-bound in every cell" in explanation
    assert re.search(
        r"a call's softmax takes [\d.]+ µs, the products [\d.]+ µs \(scores\) and [\d.]+ µs \(value\)", explanation
    )
    assert "scaling, masking and casts take" in explanation
    assert re.search(
        r"step 1 \(warm-up\) 9\.\d times \(compile and autotune 0\.50 s; 40 cudaMalloc; first use", explanation
    )
    steady = replace(clean.measurement, samples=clean.measurement.samples[-10:])  # type: ignore[union-attr, type-var]
    assert "times its cell's median" in explained(
        skeleton, "softmax_and_matmul", [replace(clean, measurement=steady), with_profiler]
    )
    unknown = replace(clean, results={**clean.results, "ceiling": []})
    explanation = explained(skeleton, "softmax_and_matmul", [unknown, with_profiler])
    assert "a call's softmax takes" in explanation
    assert "ceilings" not in explanation


@pytest.mark.parametrize(
    "name", ["step_time", "nsys_and_clock", "top_kernels", "softmax_and_matmul", "forward_backward_ratio"]
)
def test_cpu_records_state_that_kernels_need_a_gpu(skeleton: Any, builders: Any, name: str) -> None:
    records = [invented(builders, config) for config in study(name).small()]
    assert all(record.environment for record in records)
    here = [replace(r, environment=replace(r.environment, device="cpu")) for r in records]
    assert "kernel times require a GPU" in explained(skeleton, name, here)
    assert "kernel times require a GPU" not in explained(skeleton, name, records)


def test_failed_profiled_cells_are_counted_with_reason(skeleton: Any, builders: Any) -> None:
    with_profiler = [c for c in study("step_time").full() if c.profiler != "none"]
    failed = [builders.failed(c, "error", "torch.profiler left no trace") for c in with_profiler]
    explanation = explained(skeleton, "step_time", failed)
    assert (
        f"{len(with_profiler)} profiled cells have no kernel times: error (torch.profiler left no trace)" in explanation
    )


def test_possible_cells_omit_missing_profilers_and_have_clean_cells_first(
    skeleton: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    configs = [RunConfig(profiler=name) for name in ("kineto", "nsys", "none")]
    monkeypatch.setenv("PATH", str(tmp_path))
    fine, left_out = skeleton.possible(configs)
    assert [c.profiler for c in fine] == ["none", "kineto"]
    (why,) = left_out
    assert why.startswith("1 cells under nsys are left out: nsys is not on the PATH; install it with apt")


@pytest.mark.parametrize("name", ["step_time", "nsys_and_clock", "forward_backward_ratio"])
def test_drop_tables_removes_unused_tables_only(skeleton: Any, builders: Any, name: str, tmp_path: Path) -> None:
    it = study(name)
    for record in clean_and_profiled(builders, name):
        append_record(tmp_path, record)
    whole, _ = read_records(tmp_path)
    assert "kernels" in whole[1].results
    before = it.explain(skeleton.cells(whole))
    skeleton.drop_tables(tmp_path, it.drops)
    kept, _ = read_records(tmp_path)
    assert kept[0] == whole[0]
    assert not set(it.drops) & set(kept[1].results)
    assert set(whole[1].results) - set(it.drops) == set(kept[1].results)
    assert it.explain(skeleton.cells(kept)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_drop_tables_keeps_file_with_incomplete_line(skeleton: Any, builders: Any, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(clean_and_profiled(builders, "step_time")[1].to_json() + "\n{torn\n")
    before = file.read_bytes()
    skeleton.drop_tables(tmp_path, ["kernels"])
    assert file.read_bytes() == before


def test_table_of_presets_excludes_profiled_records(builders: Any, tmp_path: Path) -> None:
    readme = importlib.import_module("readme_table")
    clean, with_profiler = (
        replace(r, config=replace(r.run_config, steps=3).to_dict()) for r in clean_and_profiled(builders, "step_time")
    )
    at_512 = replace(with_profiler.run_config.model, context_length=512)
    belongs = [
        readme._belongs(replace(r, config=replace(r.run_config, model=at_512).to_dict()))
        for r in (clean, with_profiler)
    ]
    assert belongs == [True, False]


@pytest.mark.parametrize(
    ("name", "cell", "other"),
    [
        ("README.md", "| 2.7B   |", "| 2.8B   |"),
        ("docs/results.md", "| xl     | fp3", "| xl     | fp6"),
        ("docs/results.md", "| 4 × 16 × 1,024 × 64", "| 5 × 16 × 1,024 × 64"),
        ("docs/results.md", "| torch_fsdp2 ", "| torch_fsdp3 "),
    ],
)
def test_readme_and_docs_tables_match_committed_records(name: str, cell: str, other: str) -> None:
    readme = importlib.import_module("readme_table")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert readme.filled(text, name) == text, "make readme"
    altered = text.replace(cell, other)
    assert altered != text
    assert readme.filled(altered, name) == text


def test_headline_marks_a_launch_bound_llama(tmp_path: Path) -> None:
    readme = importlib.import_module("readme_table")
    fast = {"variant": "fast", "wall_s": 0.02, "submit_s": 1e-4, "floor_s": 0.01, "mfu": 0.5}
    rows = [
        {"size": size, "context": 512} | row
        for size, submit_s in (("small", 0.02), ("large", 0.039))
        for row in (fast, {"variant": "llama compiled", "wall_s": 0.04, "submit_s": submit_s})
    ]
    (tmp_path / "training_step").mkdir()
    for name in (readme.TRAINING_STEP, readme.AGAIN):
        (tmp_path / name).write_text(json.dumps(rows))
    small, large = (line for line in readme.headline(tmp_path).splitlines() if line.startswith(("| small", "| large")))
    assert "waits" not in small
    assert "Llama waits for its host" in large


def test_readme_table_rejects_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    readme = importlib.import_module("readme_table")
    with pytest.raises(SystemExit, match="2"):
        readme.main(["--check"])
    assert "unrecognized arguments: --check" in capsys.readouterr().err


def test_precision_speed_groups_cells_by_model(skeleton: Any) -> None:
    precision_study = importlib.import_module("precision_speed")
    clean_first = sorted(precision_study.full(), key=lambda config: config.profiler != "none")
    groups = skeleton._groups(precision_study.STUDY, clean_first)
    assert [{config.model.name for config in group} for group in groups] == [{size} for size in precision_study.SIZES]
    assert [config.profiler for config in groups[0]] == ["none"] * 3 + ["kineto"] * 3
    assert sorted(map(repr, clean_first)) == sorted(repr(config) for group in groups for config in group)


def test_precision_speed_explains_bf16_speedup(skeleton: Any) -> None:
    precision_study = importlib.import_module("precision_speed")
    assert min(c.rounds for c in precision_study.full() if c.profiler == "none") >= 3, (
        "an interval needs several rounds"
    )
    records, _ = read_records(ROOT / "profiles" / "top_kernels")
    cells = skeleton.cells([r for r in records if r.config["mode"] == Mode.TRAIN_STEP])
    explanation = precision_study.explain(cells)
    assert (
        "bf16: 1.29× fp32's speed (0.77–2.17): 67% of the step is launch-bound; matrix products take 12 ms instead of"
        in explanation[0]
    )
    assert "bf16 is 1.29× as fast as fp32 (0.77–2.17): no difference; its fp32 products ran as ieee" in explanation[1]
    (row,) = precision_study.decomposed(cells)
    assert row["products_s"] < row["fp32 products_s"] / 10
    assert row["casts, more_s"] > 0
    alone = skeleton.cells([r for r in records if r.config["profiler"] == "none"])
    assert precision_study.decomposed(alone) == []
