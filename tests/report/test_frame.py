"""Frame of records: its rows, columns, rates and nulls."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cs_systems.config import ConfigError, Mode, RunConfig, preset
from cs_systems.record import Measurement, RunRecord, Sample, append_record
from cs_systems.report.frame import CELL_COLUMNS, PHASE_COLUMNS, frame, load
from cs_systems.report.tables.records import render
from tests.report.conftest import OVERHEAD_S, Build, ok


def test_frame_has_row_for_each_phase_and_the_step(train_records: list[RunRecord]) -> None:
    data = frame(train_records)
    assert sorted(data.columns) == sorted([*CELL_COLUMNS, *PHASE_COLUMNS])
    assert list(data[data["record"] == 0]["phase"]) == ["forward", "loss", "backward", "optimizer", "step"]
    assert data["record"].nunique() == len(train_records)


def test_p99_is_shown_on_request() -> None:
    samples = tuple(Sample(0, False, n / 1000, {"forward": n / 1000}, {}) for n in range(1, 102))
    record = RunRecord("a", RunConfig().to_dict(), "ok", measurement=Measurement("monotonic", samples, 0.0))
    assert frame(record).set_index("phase")["p99_s"].to_dict() == pytest.approx({"forward": 0.1, "step": 0.1})
    text = render([record], "markdown", columns=["size", "p99_s", "forward.p99_s"])
    assert "| size | p99 (ms) | forward p99 (ms) |" in " ".join(text.split())
    assert "p99" not in render([record], "markdown")


def test_prompt_of_80_columns_shows_the_times_the_peak_and_the_mfu(train_records: list[RunRecord]) -> None:
    data = frame(train_records)
    assert [*data.columns[:4], *data.columns[-3:]] == [
        *("phase", "median_s", "p10_s", "p90_s"),
        *("peak_allocated_bytes", "mfu", "status"),
    ]
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        shown = data.to_string(max_cols=6, line_width=80).splitlines()[0].split()
    assert shown == ["phase", "median_s", "p10_s", "...", "peak_allocated_bytes", "mfu", "status"]


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        (Mode.FORWARD, ["forward", "step"]),
        (Mode.FORWARD_BACKWARD, ["forward", "loss", "backward", "step"]),
    ],
)
def test_frame_has_only_phases_of_mode(build: Build, mode: Mode, phases: list[str]) -> None:
    assert list(frame([build(RunConfig(mode=mode), 0.01, 1e12, 10**9)])["phase"]) == phases


def test_medians_exclude_warmup_samples(build: Build) -> None:
    record = build(RunConfig(steps=9, rounds=3), 0.01, 1e12, 10**9)
    data = frame([record]).set_index("phase")
    assert record.measurement is not None
    timed = sorted(s.wall_s for s in record.measurement.samples if not s.warmup)
    step = data.loc["step"]
    assert step["n"] == 9
    assert step["median_s"] == timed[4]
    assert step["ci_low_s"] < step["median_s"] < step["ci_high_s"]
    assert step["wall_minus_phases_s"] == pytest.approx(OVERHEAD_S)
    assert step["submit_median_s"] == pytest.approx(0.2 * 0.01)
    assert data.loc["forward", "lag_median_s"] == pytest.approx(0.7 * 0.003)
    assert step["lag_median_s"] == data.loc["optimizer", "lag_median_s"]


def test_rates_divide_cost_by_median_and_ceiling(build: Build) -> None:
    step = frame([build(RunConfig(precision="bf16"), 0.01, 3e12, 10**9)]).set_index("phase").loc["step"]
    assert step["model_flops_per_s"] == pytest.approx(3e12 / step["median_s"])
    assert step["mfu"] == pytest.approx(3e12 / step["median_s"] / 989.5e12)
    assert step["hfu"] == pytest.approx(1.1 * step["mfu"])
    assert step["tokens_per_s"] == pytest.approx(4 * 512 / step["median_s"])


def test_unknown_values_are_null(build: Build) -> None:
    known = build(RunConfig(), 0.01, 1e12, 10**9)
    bare = replace(known, results={}, environment=None)
    assert bare.measurement is not None
    bare = replace(bare, measurement=replace(bare.measurement, peak_allocated_bytes=None, peak_reserved_bytes=None))
    data = frame([bare])
    unknown = ["mfu", "hfu", "model_flops", "model_flops_per_s", "tokens_per_s", "tokens", "peak_allocated_bytes"]
    unknown += ["predicted_peak_bytes", "device_name", "torch", "ceiling_flops_per_s"]
    assert data[unknown].isna().all(axis=None)
    assert data["median_s"].notna().all()


def test_failed_record_is_one_row_with_reason(broken_records: list[RunRecord]) -> None:
    rows = frame(broken_records)
    failed = rows[rows["status"] != "ok"]
    assert list(failed["status"]) == ["error", "timeout", "killed", "unavailable"]
    assert failed["phase"].isna().all()
    assert failed["median_s"].isna().all()
    assert failed["reason"].notna().all()


def test_nan_samples_are_excluded(broken_records: list[RunRecord]) -> None:
    rows = frame(broken_records)
    step = rows[rows["phase"] == "step"].iloc[0]
    assert step["n"] == 9
    assert step["median_s"] > 0


def test_columns_of_other_workloads_are_null(
    train_records: list[RunRecord], attention_records: list[RunRecord]
) -> None:
    train, attention = frame(train_records), frame(attention_records)
    assert set(train["size"]) == {"small", "medium", "large"}
    assert train[["seq", "heads", "causal"]].isna().all(axis=None)
    assert set(attention["seq"]) == {256, 1024, 4096, 16384}
    assert set(attention["seq_k"]) == {256, 1024, 4096, 16384}
    assert attention[["size", "batch_size", "context_length", "optimizer"]].isna().all(axis=None)


def test_size_includes_model_overrides(build: Build) -> None:
    data = frame([build(RunConfig(model=preset("large", num_layers=32), seq_len=128), 0.01, 1e12, 10**9)])
    assert data["size"].iloc[0] == "large+num_layers=32"
    assert (data["context_length"].iloc[0], data["seq_len"].iloc[0]) == (512, 128)


def test_frame_without_records_is_empty_with_all_columns() -> None:
    data = frame([])
    assert len(data) == 0
    assert sorted(data.columns) == sorted([*CELL_COLUMNS, *PHASE_COLUMNS])


def test_load_drops_failed_attempts_that_were_repeated(tmp_path: Path, train_records: list[RunRecord]) -> None:
    done = train_records[0]
    failed = replace(done, status="error", reason="RuntimeError: once", measurement=None)
    for record in (failed, done, replace(failed, repeat=1)):
        append_record(tmp_path, record)
    data = load(tmp_path)
    assert list(data.drop_duplicates("record")["status"]) == ["ok", "error"]
    expected = frame([done])
    assert data[data["repeat"] == 0]["median_s"].tolist() == expected["median_s"].tolist()


def test_load_warns_of_lines_without_a_record(tmp_path: Path, train_records: list[RunRecord]) -> None:
    append_record(tmp_path, train_records[0])
    file = tmp_path / "records.jsonl"
    whole = file.read_text()
    file.write_text(f'{whole}{whole[:40]}\n{{"a": 1,}}\n')
    with pytest.warns(RuntimeWarning) as given:
        data = load(tmp_path)
    assert data["median_s"].tolist() == frame(train_records[:1])["median_s"].tolist()
    assert [str(warning.message) for warning in given] == [
        f"{file}: 2 lines skipped, first: line 2 is incomplete (the run was interrupted while writing it); repeat the "
        "run to measure what is missing, then delete the lines that read_records(path)[1] lists"
    ]
    assert given[0].filename == __file__


def test_load_of_no_path_is_rejected_with_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^path is 5; give the folder of a run, or its file records\.jsonl$"):
        load(5)  # type: ignore[arg-type]


def test_malformed_record_is_named_by_number_and_key(train_records: list[RunRecord]) -> None:
    broken = replace(train_records[1], results={"cost": [{"flops": 1}]})
    with pytest.raises(ConfigError, match=rf"record 2 \(key {broken.key}\) is malformed: it lacks .*; delete its line"):
        frame([train_records[0], broken])


@pytest.mark.parametrize(("value", "shown"), [([1], "is"), ("fast", "is 'fast'")])
def test_value_other_than_a_number_is_named(train_records: list[RunRecord], value: object, shown: str) -> None:
    broken = replace(train_records[0], config={**train_records[0].config, "batch_size": value})
    with pytest.raises(
        ConfigError, match=f"record with key {broken.key} is malformed: its batch_size {shown}.*; delete its line of"
    ):
        frame([broken])


def test_report_imports_neither_torch_nor_heavy_libraries() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it raises
from cs_systems.cli import report
from cs_systems.report.figures import kinds as figures, plot
from cs_systems.report.tables import formats, records as table
from cs_systems.core import units
from cs_systems.report import frame
from cs_systems.report.pages import records as html
heavy = {"pandas", "matplotlib", "tabulate", "rich"} & set(sys.modules)
assert not heavy, f"imported before they are needed: {heavy}"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def custom_workload_record(build: Build, stated: dict[str, object], **fields: object) -> RunRecord:
    record = build(RunConfig(workload="mine.py:step", **fields), 0.01, 1e12, 10**9)  # type: ignore[arg-type]
    return replace(record, results={**record.results, "ran": [{"tokens": None, "uses": "", **stated}]})


def test_workload_without_config_has_no_config_columns(build: Build) -> None:
    data = frame(
        [
            custom_workload_record(build, {"takes_config": False}),
            custom_workload_record(build, {"takes_config": False}, batch_size=8),
        ]
    )
    named = ["size", "d_head", "context_length", "batch_size", "attention", "precision", "mode", "optimizer"]
    assert data[[*named, "mfu", "ceiling_flops_per_s"]].isna().all().all()
    assert (data["steps"] == 10).all(), "the number of steps is known"


def test_custom_workload_has_stated_and_used_columns(build: Build) -> None:
    stated = {"attention": "flex", "precision": "fp32", "batch_size": "many", "uses": "seq_len"}
    data = frame([custom_workload_record(build, stated, seq_len=n) for n in (64, 128)])
    assert set(data["attention"]) == {"flex"}, "the config's backend, naive, did not run"
    assert set(data["seq_len"]) == {64, 128}
    assert data[["size", "mode"]].isna().all().all()
    assert data["mfu"].notna().any(), "the ceiling of a stated precision is known"
    other = frame([custom_workload_record(build, {"precision": "bf16"})])
    assert other["mfu"].isna().all(), "the recorded ceiling is for fp32"


def test_fields_of_a_cell_that_did_not_run_are_those_used_by_its_workload(build: Build) -> None:
    ran = custom_workload_record(build, {"uses": "batch_size"}, batch_size=2)
    config = replace(ran.run_config, attention="flex", model=preset("large"))
    refused = RunRecord(config.key(), config.to_dict(), "unavailable", reason="it does not use --attention")
    data = frame([ran, refused])
    assert list(data["batch_size"].dropna().unique()) == [2]
    assert data[["attention", "size", "d_model", "precision"]].isna().all().all()


def test_frame_has_profiler_of_each_record(build: Build) -> None:
    records = [build(RunConfig(profiler=name), 0.01, 1e12, 10**9) for name in ("none", "nsys")]
    assert list(frame(records).drop_duplicates("record")["profiler"]) == ["none", "nsys"]


def test_arguments_of_a_factory_distinguish_cells() -> None:
    configs = [RunConfig(workload="mine.py:make", workload_args=(f"width={width}", "lr=3e-4")) for width in (64, 128)]
    records = [ok(config, 0.01, 1e9, 10**6) for config in configs]
    assert [*frame(records)["workload_args"].drop_duplicates()] == ["width=64 lr=3e-4", "width=128 lr=3e-4"]
    assert "| width=128 lr=3e-4 |" in render(records, "markdown")
