"""The studies that set kernel time beside the clock: what joins the two, and what they say of both."""

from __future__ import annotations

import importlib
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
    """In these phases (in all, where none is named) the host takes as long as the device, which ends 0.2 ms after it.

    longer: so many times the time that they had.
    """
    assert record.measurement is not None
    made = []
    for s in record.measurement.samples:
        bound = {p: longer * d for p, d in s.phases_s.items() if p in phases or not phases}
        lag = {**(s.lag_s or {}), **dict.fromkeys(bound, 0.2e-3)}
        made.append(replace(s, phases_s={**s.phases_s, **bound}, submit_s={**s.submit_s, **bound}, lag_s=lag))
    return replace(record, measurement=replace(record.measurement, samples=tuple(made)))


@pytest.mark.parametrize("name", ["step_time", "forward_backward_ratio"])
def test_a_forward_that_waits_for_the_host_is_named(skeleton: Any, builders: Any, name: str) -> None:
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


def test_c2_says_how_much_of_the_time_is_launch_bound(skeleton: Any, builders: Any) -> None:
    c2 = importlib.import_module("step_time")
    config = c2.full()[0]
    record = builders.ok(config, 0.1, 1e12, 10**9)
    free, bound = c2.host_and_device(skeleton.cells([record, launch_bound(record)]), "size")
    assert (free["launch-bound"], bound["launch-bound"]) == ("0%", "100%")


def both(builders: Any, name: str, precision: str = "fp32", **is_: Any) -> list[RunRecord]:
    """The first cell of a study that is profiled, clean and profiled; the clean one takes 0.1 s."""
    configs = [c for c in study(name).full() if c.profiler != "none" and c.precision == precision]
    watched = next(c for c in configs if all(getattr(c, key) == value for key, value in is_.items()))
    clean = replace(watched, profiler="none", warmup=3, steps=10)
    return [builders.ok(clean, 0.1, 1e12, 10**9), invented(builders, watched)]


def real(profiler: str = "kineto") -> dict[str, Any]:
    records, _ = read_records(RECORDED)
    return next(r for r in records if (r.config["profiler"], r.config["attention"]) == (profiler, "naive")).results


def test_a_clean_cell_gets_the_kernel_times_of_its_twin(skeleton: Any, builders: Any) -> None:
    clean, watched = both(builders, "step_time")
    cell, other = skeleton.cells([clean, watched])
    by_kernels, _ = real()["ratio"]
    assert cell["forward.kernel_s"] == pytest.approx(by_kernels["forward_s"])
    assert cell["kernel_ratio"] == pytest.approx(by_kernels["backward_to_forward"])
    assert cell["busy_share"] == pytest.approx(cell["kernel_s"] / cell["median_s"])
    assert cell["kernels"] == 1684
    assert other["kernel_s"] is None, "its own times are no timings"
    assert [*skeleton.index([cell, other], "size").values()] == [cell]
    in_rounds = replace(clean, config=replace(clean.run_config, rounds=5).to_dict())
    assert skeleton.cells([in_rounds, watched])[0]["kernel_s"] == cell["kernel_s"]
    stranger = replace(watched, config=replace(watched.run_config, batch_size=5).to_dict())
    assert skeleton.cells([clean, stranger])[0]["kernel_s"] is None


@pytest.mark.parametrize(
    "name", ["step_time", "nsys_and_clock", "top_kernels", "softmax_and_matmul", "forward_backward_ratio"]
)
def test_no_time_of_a_profile_stands_among_the_timings(skeleton: Any, builders: Any, name: str) -> None:
    it = study(name)
    cells = skeleton.cells([invented(builders, config) for config in it.full()])
    first = it.tables(cells, "markdown")[0]
    assert "profiled (" not in first
    assert "under kineto" not in first
    rows = [line for line in first.splitlines() if line.startswith("|")]
    assert len(rows) - 2 == sum(config.profiler == "none" for config in it.full())


@pytest.mark.parametrize("name", ["step_time", "forward_backward_ratio"])
def test_the_ratio_by_kernels_stands_beside_the_hosts(skeleton: Any, builders: Any, name: str) -> None:
    clean, watched = both(builders, name)
    free = explained(skeleton, name, [clean, watched])
    assert re.search(
        r"backward : forward is (1\.9|2\.0)\d by the clock, and 1\.89 by the kernels, which fill 4\d% of the", free
    )
    bound = explained(skeleton, name, [launch_bound(clean), watched])
    assert re.search(r"by the clock, the ratio of the launch times, and 1\.89 by the kernels", bound)
    assert "by the kernels" not in explained(skeleton, name, [clean])


def test_c18_leaves_kernel_times_of_what_was_not_profiled_empty(skeleton: Any, builders: Any) -> None:
    c18 = importlib.import_module("forward_backward_ratio")
    records = both(builders, "forward_backward_ratio")
    more = replace(records[0].run_config, batch_size=16)
    rows = c18.ratios(skeleton.clean(skeleton.cells([*records, builders.ok(more, 0.2, 1e12, 10**9)])))
    assert [row["forward_kernels_s"] is None for row in rows] == [False, True]
    assert [row["GPU busy"] is None for row in rows] == [False, True]


def test_c3_says_within_which_tolerance_two_values_agree(skeleton: Any, builders: Any) -> None:
    c3 = importlib.import_module("nsys_and_clock")
    clean, watched = both(builders, "nsys_and_clock")
    rows = c3.by_phase(skeleton.cells([clean, watched]))
    assert [row["phase"] for row in rows] == ["forward", "backward", "optimizer"]
    for row in rows:
        assert (row["n"], row["nsys n"]) == (10, 3)
        assert row["nsys agrees"] == (abs(row["under_nsys_s"] / row["clock_s"] - 1) <= 0.05)
        assert row["kernels agree"] == (abs(row["kernels_s"] / row["clock_s"] - 1) <= 0.05)
    same = replace(watched, measurement=clean.measurement)
    assert all(row["nsys agrees"] for row in c3.by_phase(skeleton.cells([clean, same])))
    said = explained(skeleton, "nsys_and_clock", [clean, same])
    assert "the time under nsys lies within 5% of the clock in 3 of 3 phases\n" in said
    assert re.search(
        r"no kernel ran in 28% of the step \(launch-bound 22\.8%, device latency 3\.0%, copy 0\.8%\)", said
    )
    assert [c3.agrees(v, 1.0) for v in (0.94, 0.96, 1.04, 1.06, None)] == [False, True, True, False, None]
    alone = c3.by_phase(skeleton.cells([clean]))
    assert {row["nsys agrees"] for row in alone} == {None}
    assert "agree" not in explained(skeleton, "nsys_and_clock", [clean])


def test_c4_counts_all_kernels_of_matrix_products_beside_the_largest(skeleton: Any, builders: Any) -> None:
    records = [r for mode in (Mode.FORWARD, Mode.TRAIN_STEP) for r in both(builders, "top_kernels", mode=mode)]
    products = [row for row in real()["kernels"] if row["family"] == "matmul"]
    largest, every = products[0]["share"], sum(row["share"] for row in products)
    said = explained(skeleton, "top_kernels", records)
    assert f"train-step {len(products)} kernels, the largest alone {largest:.1%}, all {every:.1%}" in said
    assert re.search(r"grows from forward to train-step: .*optimizer 0\.0% to 2\.2% \(1\.0\d ms\)", said)


def test_c4_tells_what_a_lower_precision_shortens(skeleton: Any, builders: Any) -> None:
    full = [r for r in both(builders, "top_kernels", mode=Mode.TRAIN_STEP) if r]
    large = [
        replace(r, config=replace(r.run_config, model=study("top_kernels").full()[-1].model).to_dict()) for r in full
    ]
    half = [replace(r, config=replace(r.run_config, precision=Precision.BF16).to_dict()) for r in large]
    said = explained(skeleton, "top_kernels", [*large, *half])
    assert "large train-step: from fp32 to bf16 the matrix products go from 38.9 ms to 38.9 ms" in said


def test_c5_counts_what_softmax_and_products_must_do() -> None:
    c5 = importlib.import_module("softmax_and_matmul")
    config = study("softmax_and_matmul").full()[0]
    assert (config.model.d_head, config.model.num_heads, config.tokens_per_sequence) == (64, 20, 256)
    scores = sum(1 for _ in range(4 * 20) for _ in range(256)) * 256
    assert c5.work(config, "attention.scores") == (128 * scores, 4 * (scores + 2 * 4 * 20 * 256 * 64))
    assert c5.work(config, "attention.softmax") == (3 * scores, 8 * scores)
    half = replace(config, precision=Precision.BF16)
    assert c5.work(half, "attention.value")[1] == c5.work(config, "attention.value")[1] / 2
    assert c5.work(half, "attention.softmax") == c5.work(config, "attention.softmax"), "autocast widens it"


def test_c5_explains_softmax_by_bytes_and_outliers_by_what_was_recorded(skeleton: Any, builders: Any) -> None:
    clean, watched = both(builders, "softmax_and_matmul")
    clean = replace(clean, results={**clean.results, "ceiling": real()["ceiling"]})
    said = explained(skeleton, "softmax_and_matmul", [clean, watched])
    assert "1/43 of the FLOPs" in said
    assert "by the ceilings, softmax is memory-bound in every cell" in said
    assert re.search(
        r"a call's softmax takes [\d.]+ µs, the products [\d.]+ µs \(scores\) and [\d.]+ µs \(value\)", said
    )
    assert "scaling, masking and casts take" in said
    assert re.search(r"step 1 \(warm-up\) 9\.\d times \(compile and autotune 0\.50 s; 40 cudaMalloc; first use", said)
    steady = replace(clean.measurement, samples=clean.measurement.samples[-10:])  # type: ignore[union-attr, type-var]
    assert "times its cell's median" in explained(
        skeleton, "softmax_and_matmul", [replace(clean, measurement=steady), watched]
    )
    unknown = replace(clean, results={**clean.results, "ceiling": []})
    said = explained(skeleton, "softmax_and_matmul", [unknown, watched])
    assert "a call's softmax takes" in said
    assert "ceilings" not in said


@pytest.mark.parametrize(
    "name", ["step_time", "nsys_and_clock", "top_kernels", "softmax_and_matmul", "forward_backward_ratio"]
)
def test_without_a_gpu_the_missing_kernels_are_named(skeleton: Any, builders: Any, name: str) -> None:
    records = [invented(builders, config) for config in study(name).small()]
    assert all(record.environment for record in records)
    here = [replace(r, environment=replace(r.environment, device="cpu")) for r in records]
    assert "kernel times require a GPU" in explained(skeleton, name, here)
    assert "kernel times require a GPU" not in explained(skeleton, name, records)


def test_profiled_cells_that_failed_are_counted(skeleton: Any, builders: Any) -> None:
    watched = [c for c in study("step_time").full() if c.profiler != "none"]
    failed = [builders.failed(c, "error", "torch.profiler left no trace") for c in watched]
    said = explained(skeleton, "step_time", failed)
    assert f"{len(watched)} profiled cells have no kernel times: error (torch.profiler left no trace)" in said


def test_cells_whose_profiler_is_missing_are_left_out_and_the_clean_come_first(
    skeleton: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    configs = [RunConfig(profiler=name) for name in ("kineto", "nsys", "none")]
    monkeypatch.setenv("PATH", str(tmp_path))
    fine, left_out = skeleton.possible(configs)
    assert [c.profiler for c in fine] == ["none", "kineto"]
    (why,) = left_out
    assert why.startswith("1 cells under nsys are left out: nsys: not on PATH")
    assert "install Nsight Systems" in why


@pytest.mark.parametrize("name", ["step_time", "nsys_and_clock", "forward_backward_ratio"])
def test_tables_that_a_study_does_not_use_are_dropped_from_its_records(
    skeleton: Any, builders: Any, name: str, tmp_path: Path
) -> None:
    it = study(name)
    for record in both(builders, name):
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


def test_a_file_with_a_torn_line_is_left_as_it_is(skeleton: Any, builders: Any, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(both(builders, "step_time")[1].to_json() + "\n{torn\n")
    before = file.read_bytes()
    skeleton.drop_tables(tmp_path, ["kernels"])
    assert file.read_bytes() == before


def test_the_headline_holds_timings_alone(builders: Any, tmp_path: Path) -> None:
    readme = importlib.import_module("readme_table")
    clean, watched = (replace(r, config=replace(r.run_config, steps=3).to_dict()) for r in both(builders, "step_time"))
    at_512 = replace(watched.run_config.model, context_length=512)
    belongs = [
        readme._belongs(replace(r, config=replace(r.run_config, model=at_512).to_dict())) for r in (clean, watched)
    ]
    assert belongs == [True, False]


@pytest.mark.parametrize(
    ("name", "cell", "other"),
    [
        ("README.md", "| xl     | fp3", "| xl     | fp6"),
        ("docs/results.md", "| 4 × 16 × 1,024 × 64", "| 5 × 16 × 1,024 × 64"),
        ("docs/results.md", "| torch_fsdp2 ", "| torch_fsdp3 "),
    ],
)
def test_a_page_holds_what_the_committed_records_say(name: str, cell: str, other: str) -> None:
    readme = importlib.import_module("readme_table")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert readme.filled(text, name) == text, "make readme"
    altered = text.replace(cell, other)
    assert altered != text
    assert readme.filled(altered, name) == text


def test_what_writes_the_readme_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    readme = importlib.import_module("readme_table")
    with pytest.raises(SystemExit, match="2"):
        readme.main(["--check"])
    assert "unrecognized arguments: --check" in capsys.readouterr().err


def test_c8_finishes_one_model_before_the_next(skeleton: Any) -> None:
    c8 = importlib.import_module("precision_speed")
    clean_first = sorted(c8.full(), key=lambda config: config.profiler != "none")
    groups = skeleton._groups(c8.STUDY, clean_first)
    assert [{config.model.name for config in group} for group in groups] == [{size} for size in c8.SIZES]
    assert [config.profiler for config in groups[0]] == ["none"] * 3 + ["kineto"] * 3
    assert sorted(map(repr, clean_first)) == sorted(repr(config) for group in groups for config in group)


def test_c8_says_what_bf16_gains_and_why_it_is_not_more(skeleton: Any) -> None:
    c8 = importlib.import_module("precision_speed")
    assert min(c.rounds for c in c8.full() if c.profiler == "none") >= 3, "an interval is over rounds"
    records, _ = read_records(ROOT / "profiles" / "top_kernels")
    cells = skeleton.cells([r for r in records if r.config["mode"] == Mode.TRAIN_STEP])
    said = c8.explain(cells)
    assert (
        "bf16: 1.26× fp32's speed (0.75–2.12): 67% of the step is launch-bound; matrix products take 12 ms instead of"
        in said[0]
    )
    assert "bf16 is 1.26× as fast as fp32 (0.75–2.12): no difference; its fp32 products ran as ieee" in said[1]
    (row,) = c8.decomposed(cells)
    assert row["products_s"] < row["fp32 products_s"] / 10
    assert row["casts, more_s"] > 0
    alone = skeleton.cells([r for r in records if r.config["profiler"] == "none"])
    assert c8.decomposed(alone) == []
