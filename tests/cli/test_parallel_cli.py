"""`cs-systems parallel` as a person meets it. Ranks take seconds to start, so assertions share one run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cs_systems.cli import main
from cs_systems.cli import parallel as parallel_command
from cs_systems.cli._output import deliver_tables
from cs_systems.comparison import strategies as parallel
from cs_systems.record import RunRecord, read_records

LINE = (
    "parallel --size tiny --batch-size 1 --strategy zero1_flat --bucket-size-mb 0.1 --device cpu --warmup 1 --steps 2"
)

NAMED = {"step_s", "in_trace_s", "waiting_s", "recorder_s", "sent_bytes", "component"}  # of each table one column


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """(what was printed, the records, the folder)."""
    folder = tmp_path_factory.mktemp("parallel")
    assert (
        main(
            [
                *LINE.split(),
                "--warmup",
                "1",
                "--steps",
                "2",
                "--out",
                str(folder),
                "--output",
                str(folder / "tables.txt"),
            ]
        )
        == 0
    )
    return (folder / "tables.txt").read_text(), read_records(folder)[0], folder


@pytest.fixture
def records(run: Any) -> list[RunRecord]:
    return run[1]  # type: ignore[no-any-return]


def test_each_cell_is_timed_cleanly_and_recorded_apart(records: list[RunRecord]) -> None:
    cells = [(r.config["strategy"], r.config["world_size"], r.config["profiler"], r.status) for r in records]
    assert sorted(cells) == sorted(
        (*cell, profiler, "ok")
        for cell in (("single", 1), ("zero1_flat", 2))
        for profiler in ("none", "overlap", "rank_memory")
    )
    clean = [r for r in records if r.config["profiler"] == "none"]
    assert not any(w.code == "profiled" for r in clean for w in r.warnings)


def test_the_tables_fit_80_columns_and_name_what_they_hold(run: Any) -> None:
    said = run[0]
    captions = (
        "steps",
        "communication per step",
        "transfer and waiting per step",
        "causes of the longer step, compared with one rank",
        "bytes sent and memory, per rank",
    )
    for caption in (*captions, "memory of a rank after each stage of its first step"):
        assert caption in said
    assert re.search(r"^single +[\d.,]+ +.* 100.0%", said, re.MULTILINE)
    assert len(re.findall(r"^zero1_flat 0.1 MB ", said, re.MULTILINE)) == 8
    assert "on a CPU, communication inside a phase counts as hidden" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(("alone_s", "told"), [(0.1, False), (0.21, True)])
def test_ranks_that_do_more_than_so_many_alone_are_told(records: list[RunRecord], alone_s: float, told: bool) -> None:
    def taking(record: RunRecord, wall_s: float) -> RunRecord:
        assert record.measurement is not None
        samples = tuple(replace(sample, wall_s=wall_s) for sample in record.measurement.samples)
        return replace(record, measurement=replace(record.measurement, samples=samples))

    made = [taking(r, alone_s if r.config["world_size"] == 1 else 0.1) for r in records]
    said = " ".join("".join(parallel_command.texts(made, "markdown", None)).split())
    assert ("efficiency over 100%: the baseline was probably disturbed" in said) is told


def test_each_repeat_has_its_rows_beside_the_baseline_of_its_own_process(records: list[RunRecord]) -> None:
    def slower(record: RunRecord) -> RunRecord:
        """The same, measured again: every step takes twice as long."""
        measured = record.measurement
        assert measured is not None
        samples = tuple(replace(sample, wall_s=2 * sample.wall_s) for sample in measured.samples)
        return replace(record, repeat=1, measurement=replace(measured, samples=samples))

    (group,) = parallel.groups([*records, *map(slower, records)]).values()
    first, again = ([row for row in parallel.steps(group) if row["repeat"] == n] for n in (0, 1))
    assert [row["strategy"] for row in again] == ["single", "zero1_flat 0.1 MB"]
    assert [row["step_s"] for row in again] == [2 * row["step_s"] for row in first]
    assert [row["efficiency"] for row in again] == [row["efficiency"] for row in first]
    longer = [row["by_difference_s"] for row in parallel.communication(group)]
    assert longer[1] == pytest.approx(2 * longer[0])
    assert [row["repeat"] for row in parallel.differences(group)] == [0, 1]
    said = re.sub(r"\x1b\[\d*m", "", "".join(parallel_command.texts(group, "terminal", 80)))
    assert len(re.findall(r"^strategy +repeat ", said, re.MULTILINE)) == 6
    assert max(map(len, said.splitlines())) <= 80
    assert {row["repeat"] for row in parallel.steps(records)} == {None}  # nothing was repeated


def test_numbers_of_ranks_beside_a_long_name_fit_80_columns_as_well(records: list[RunRecord]) -> None:
    told: Any = {"strategy": "fsdp", "strategy_args": ("compute_dtype=bf16",), "bucket_size_mb": None}

    def as_fsdp(record: RunRecord, ranks: int) -> RunRecord:
        return replace(record, config=replace(record.run_config, world_size=ranks, **told).to_dict())

    alone = [r for r in records if r.config["world_size"] == 1]
    several = [as_fsdp(r, ranks) for ranks in (2, 4) for r in records if r.config["world_size"] == 2]
    said = re.sub(r"\x1b\[\d*m", "", "".join(parallel_command.texts([*alone, *several], "terminal", 80)))
    assert len(re.findall(r"^fsdp:compute_dtype=bf16 +[24] ", said, re.MULTILINE)) == 16
    assert max(map(len, said.splitlines())) <= 80


def test_each_table_is_a_csv_file_of_its_own(
    records: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = parallel_command.texts(records, "csv", None)
    deliver_tables(texts, "csv", tmp_path / "t.csv")
    files = [tmp_path / f"t{number}.csv" for number in ("", "-2", "-3", "-4", "-5", "-6")]
    assert capsys.readouterr().err == "".join(f"csv: {file}\n" for file in files)
    tables = [pd.read_csv(file) for file in files]
    assert [NAMED & {*table} for table in tables] == [
        {"step_s"}, {"in_trace_s"}, {"waiting_s"}, {"recorder_s"}, {"sent_bytes"}, {"component"}
    ]  # fmt: skip
    assert all({"single", "zero1_flat 0.1 MB"} & {*table["strategy"]} for table in tables)


def test_what_was_sent_is_what_the_formula_says(records: list[RunRecord]) -> None:
    (row,) = [row for row in parallel.volumes(records) if row["strategy"] != "single"]
    assert row["formula_sent_bytes"] <= row["sent_bytes"] <= 1.01 * row["formula_sent_bytes"]
    assert row["collectives"] > 2  # a reduce-scatter and an all-gather a bucket


def test_a_rank_holds_what_the_formula_says(records: list[RunRecord]) -> None:
    """Of two ranks with the optimizer split each has half of the state, and of the averaged gradients; in the second
    step's forward no gradient is left, of the part that the optimizer steps either."""
    rows = parallel.stages(records)
    assert {row["strategy"] for row in rows} == {"single", "zero1_flat 0.1 MB"}
    assert all(row["off"] < 1e-3 for row in rows)
    alone, split = (
        {row["component"]: row["optimizer_bytes"] for row in rows if row["strategy"].startswith(name)}
        for name in ("single", "zero1_flat")
    )
    assert split["parameters"] == alone["parameters"]
    for component in ("gradients", "optimizer state"):
        assert split[component] == pytest.approx(alone[component] / 2, rel=1e-3)
    (record,) = [r for r in records if r.results.get("rank_memory") and r.config["world_size"] == 2]
    second = [row for row in record.results["rank_memory"] if (row["step"], row["stage"]) == (2, "forward")]
    assert [row["bytes"] for row in second if row["component"] == "gradients"] == [0, 0]


def test_the_difference_to_one_rank_is_explained_without_a_rest(records: list[RunRecord]) -> None:
    (row,) = parallel.differences(records)
    parts = ("exposed_s", "slower_compute_s", "waits_longer_s", "recorder_s")
    assert sum(row[part] for part in parts) == pytest.approx(row["difference_s"])
    (told,) = parallel.communication(records)
    assert told["by_difference_s"] == row["difference_s"]
    assert told["in_trace_s"] == row["exposed_s"]  # the baseline communicates nothing
    assert told["hidden_s"] >= 0


def test_each_rank_has_its_row_and_one_of_them_waits_for_nobody(records: list[RunRecord]) -> None:
    (record,) = [r for r in records if r.results.get("overlap") and r.config["world_size"] == 2]
    rows = record.results["overlap"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["hidden_s"] + row["exposed_s"] == pytest.approx(row["communication_s"])
    assert rows[0]["transfer_s"] == rows[1]["transfer_s"] > 0
    assert {row["stream"] for row in record.results["streams"]} == {"compute", "communication"}
    assert set(record.artifacts) == {"trace", "trace_rank1"}


def test_analyze_says_of_each_recording_in_the_folder_which_cell_it_is_of(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(run[2])]) == 2
    said = capsys.readouterr().err
    cell = "tiny ctx 64 batch 1 · naive · fp32 · train-step"
    assert len(re.findall(rf"-0\.trace\.json\.gz \({cell} · under overlap\)$", said, re.MULTILINE)) == 1
    on_ranks = rf"-0(-rank1)?\.trace\.json\.gz \({cell} · zero1_flat · buckets of 0.1 MB · 2 ranks · under overlap\)$"
    assert len(re.findall(on_ranks, said, re.MULTILINE)) == 2


def test_every_collective_is_recorded_on_whichever_thread_it_was_started(records: list[RunRecord]) -> None:
    (record,) = [r for r in records if r.results.get("overlap") and r.config["world_size"] == 2]
    (sent,) = [row for row in parallel.volumes(records) if row["strategy"] != "single"]
    assert [row["collectives"] for row in record.results["overlap"]] == [sent["collectives"]] * 2


def test_the_streams_are_drawn(run: Any) -> None:
    drawing = (run[2] / "streams.svg").read_text()
    assert drawing.count("<path") > 10


def test_a_group_is_what_differs_in_strategy_and_ranks_alone(records: list[RunRecord]) -> None:
    assert len(parallel.groups(records)) == 1


def test_a_strategy_that_torch_sends_for_has_a_formula_and_no_count() -> None:
    row = {"collectives": None, "sent_bytes": None, "formula_sent_bytes": 1.0}
    record = RunRecord("key", {"strategy": "torch_ddp", "world_size": 2}, "ok", results={"sent": [row]})
    (found,) = parallel.volumes([record])
    assert (found["sent_bytes"], found["formula_sent_bytes"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp --tp-degree 2", "--tp-degree requires --strategy fsdp+tp or ddp_*+tp; add one, or leave out"),
        (
            "fsdp+tp",
            "tp with another strategy requires tp_degree; set it to the number of ranks that divide each block",
        ),
        (
            "fsdp --bucket-size-mb 1",
            "--bucket-size-mb requires a strategy with buckets; add one to --strategy, such as ddp_b",
        ),
        (
            "ddp_bucketed:comm_dtype=bf16,max_ctas=2",
            "'max_ctas=2' is not a strategy; join options by colons, as in ddp",
        ),
        ("ddp --bucket-size-mb 1", "unknown parallel strategy 'ddp'"),
    ],
)
def test_what_no_strategy_takes_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "--size", "tiny", "--strategy", *words.split(), "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_lists_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE.split(), "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6 cells" in said
    assert "buckets of 0.1 MB · 2 ranks · under rank_memory" in said
