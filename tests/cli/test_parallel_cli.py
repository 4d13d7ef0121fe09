"""`cs-systems parallel`: its records, tables and error messages. All tests share one run: ranks start slowly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.cli import main
from cs_systems.cli import parallel as parallel_command
from cs_systems.cli._output import deliver_tables
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.record import RunRecord, read_records

LINE = (
    "parallel --size tiny --batch-size 1 --strategy zero1_flat --bucket-size-mb 0.1 --device cpu --warmup 1 --steps 2"
)

# one column of each table
NAMED = {"step_s", "in_trace_s", "waiting_s", "exposed_s", "sent_bytes", "component"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Return the printed tables, the records and the folder of one run.

    A baseline that other programs disturbed hides what these tests read, and is measured again.
    """
    for _ in range(3):
        folder = tmp_path_factory.mktemp("parallel")
        assert main([*LINE.split(), "--out", str(folder), "--output", str(folder / "tables.txt")]) == 0
        text = (folder / "tables.txt").read_text()
        if "efficiency over 105%" not in text:
            break
    return text, read_records(folder)[0], folder


FOREIGN = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
    def forward(self, x):
        x = x * self.scale[:, None]
        for block in self.blocks: x = torch.relu(block(x))
        return self.norm(x)
def model(config, device): return Net(), torch.randn(4, 8, 16)
"""
FOREIGN_BYTES = 4 * (8 + 3 * (8 * 8 * 3 + 8) + 2 * 8)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    """Return the records of a user's own model."""
    folder = tmp_path_factory.mktemp("foreign")
    source = folder / "mine.py"
    source.write_text(FOREIGN)
    line = "parallel --strategy ddp_flat fsdp tp --with rank_memory --device cpu --warmup 0 --steps 2 --workload"
    files = ["--out", str(folder), "--output", str(folder / "tables.txt")]
    assert main([*line.split(), f"{source}:model", *files]) == 0
    return read_records(folder)[0]


def test_strategy_is_applied_to_a_foreign_model_or_the_cell_is_unavailable(foreign: list[RunRecord]) -> None:
    found = {r.config["strategy"]: (r.status, r.reason or "") for r in foreign if r.config["profiler"] == "none"}
    assert {name for name, (status, _) in found.items() if status == "ok"} == {"single", "ddp_flat", "fsdp"}
    status, reason = found["tp"]
    assert status == "unavailable"
    assert reason.startswith("tp requires the attention or feed-forward blocks of BasicTransformerLM, and Net has none")


def test_bytes_of_a_foreign_model_are_measured_or_empty(foreign: list[RunRecord]) -> None:
    rows = {row["strategy"]: row for row in parallel.volumes(foreign) if row["strategy"] in ("ddp_flat", "fsdp")}
    averaged, sharded = rows["ddp_flat"], rows["fsdp"]
    assert averaged["formula_sent_bytes"] == FOREIGN_BYTES
    assert FOREIGN_BYTES <= averaged["sent_bytes"] <= FOREIGN_BYTES + 33 * 9
    assert sharded["sent_bytes"] > FOREIGN_BYTES
    assert sharded["formula_sent_bytes"] is None
    assert {row["predicted_peak_bytes"] for row in rows.values()} == {None}
    assert {row["tokens_per_s"] for row in parallel.steps(foreign)} == {None}
    kept = {(row["strategy"], row["component"]): row for row in parallel.stages(foreign)}
    assert kept["single", "parameters"]["built_bytes"] == FOREIGN_BYTES
    assert kept["ddp_flat", "parameters"]["built_bytes"] == FOREIGN_BYTES
    for component, moments in (("parameters", 1), ("gradients", 1), ("optimizer state", 2)):
        half = moments * FOREIGN_BYTES / 2
        assert half <= kept["fsdp", component]["optimizer_bytes"] <= half + 16 * 2 * 9
        assert kept["fsdp", component]["off"] is None
    described = [r.results["ran"][0]["parameters"] for r in foreign if r.status == "ok"]
    assert described == [FOREIGN_BYTES // 4] * len(described)


@pytest.fixture
def records(run: Any) -> list[RunRecord]:
    return run[1]  # type: ignore[no-any-return]


def test_each_cell_is_timed_without_a_profiler_and_traced_separately(records: list[RunRecord]) -> None:
    cells = [(r.config["strategy"], r.config["world_size"], r.config["profiler"], r.status) for r in records]
    assert sorted(cells) == sorted(
        (*cell, profiler, "ok")
        for cell in (("single", 1), ("zero1_flat", 2))
        for profiler in ("none", "overlap", "rank_memory")
    )
    clean = [r for r in records if r.config["profiler"] == "none"]
    assert not any(w.code == "profiled" for r in clean for w in r.warnings)


def test_tables_have_captions_and_notes(run: Any) -> None:
    output = run[0]
    captions = (
        "steps",
        "communication per step",
        "transfer and waiting per step",
        "causes of the longer step, compared with one rank",
        "bytes sent and memory, per rank",
    )
    for caption in (*captions, "memory of a rank after each stage of its first step"):
        assert caption in output
    assert re.search(r"^single +[\d.,]+ ", output, re.MULTILINE)
    assert len(re.findall(r"^zero1_flat 0.1 MB ", output, re.MULTILINE)) == 8
    assert "on a CPU, communication inside a phase counts as hidden" in output


def test_sentences_are_about_the_strategies_of_the_command(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    alone = LINE.replace("zero1_flat --bucket-size-mb 0.1", "single")
    assert main([*alone.split(), "--out", str(run[2])]) == 0
    sentences, _, tables = capsys.readouterr().out.partition(": steps\n")
    assert "zero1_flat" not in sentences
    assert "zero1_flat" in tables


def test_short_answer_fits_a_screen_and_names_the_other_tables(records: list[RunRecord]) -> None:
    output = "\n".join(parallel_command.texts(records, "terminal", 80, short=True))
    assert output.count("\n") <= 24
    assert "transfer and waiting" not in output
    assert "bytes sent and memory, per rank" in output
    assert output.count("on a CPU, communication inside a phase") == 1
    assert output.endswith("more with --all, and --out as below: communication, skew, differences, stages\n")


def test_narrow_table_of_steps_keeps_hidden_and_exposed_communication(records: list[RunRecord]) -> None:
    steps = next(text for text in parallel_command.texts(records, "terminal", 80) if ": steps" in text)
    assert re.search(r"^strategy .*exposed +hidden", re.sub(r"\x1b\[\d*m", "", steps), re.MULTILINE)


def test_tables_fit_a_terminal_of_80_columns(records: list[RunRecord]) -> None:
    output = re.sub(r"\x1b\[\d*m", "", "".join(parallel_command.texts(records, "terminal", 80)))
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("kept", ["none", "none overlap rank_memory"])
def test_columns_are_explained_only_below_a_table_that_has_them(records: list[RunRecord], kept: str) -> None:
    chosen = [r for r in records if r.config["profiler"] in kept.split()]
    tables = parallel_command.texts(chosen, "terminal", None)
    explanation = re.compile(r"^([a-z]+)(?::| =) .*", re.MULTILINE)
    assert any(map(explanation.findall, tables))
    for table in tables:
        assert {*explanation.findall(table)} <= {*re.findall("[a-z]+", explanation.sub("", table))}, table


@pytest.mark.parametrize(("alone_s", "noted"), [(0.1, False), (0.21, True)])
def test_efficiency_over_100_percent_is_noted(records: list[RunRecord], alone_s: float, noted: bool) -> None:
    def taking(record: RunRecord, wall_s: float) -> RunRecord:
        assert record.measurement is not None
        samples = tuple(replace(sample, wall_s=wall_s) for sample in record.measurement.samples)
        return replace(record, measurement=replace(record.measurement, samples=samples))

    made = [taking(r, alone_s if r.config["world_size"] == 1 else 0.1) for r in records]
    output = " ".join("".join(parallel_command.texts(made, "markdown", None)).split())
    assert ("an efficiency over 105% is not shown, nor the time beyond that baseline" in output) is noted
    assert ("longer (" in output) is not noted


def test_each_repeat_is_compared_with_its_own_baseline(records: list[RunRecord]) -> None:
    def slower(record: RunRecord) -> RunRecord:
        """Return a repeat of the record in which every step takes twice as long."""
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
    output = re.sub(r"\x1b\[\d*m", "", "".join(parallel_command.texts(group, "terminal", 80)))
    assert len(re.findall(r"^strategy +repeat ", output, re.MULTILINE)) == 6
    assert max(map(len, output.splitlines())) <= 80
    assert {row["repeat"] for row in parallel.steps(records)} == {None}  # nothing was repeated


def test_long_strategy_names_on_several_world_sizes_fit_80_columns(records: list[RunRecord]) -> None:
    options: Any = {"strategy": "fsdp", "strategy_args": ("compute_dtype=bf16",), "bucket_size_mb": None}

    def as_fsdp(record: RunRecord, ranks: int) -> RunRecord:
        return replace(record, config=replace(record.run_config, world_size=ranks, **options).to_dict())

    alone = [r for r in records if r.config["world_size"] == 1]
    several = [as_fsdp(r, ranks) for ranks in (2, 4) for r in records if r.config["world_size"] == 2]
    output = re.sub(r"\x1b\[\d*m", "", "".join(parallel_command.texts([*alone, *several], "terminal", 80)))
    assert len(re.findall(r"^fsdp:compute_dtype=bf16 +[24] ", output, re.MULTILINE)) == 16
    assert max(map(len, output.splitlines())) <= 80


def test_csv_writes_one_file_per_table(
    records: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = parallel_command.texts(records, "csv", None)
    deliver_tables(texts, "csv", tmp_path / "t.csv")
    files = [tmp_path / f"t{number}.csv" for number in ("", "-2", "-3", "-4", "-5", "-6")]
    assert capsys.readouterr().err == "".join(f"csv: {file}\n" for file in files)
    tables = [pd.read_csv(file) for file in files]
    assert [NAMED & {*table} for table in tables] == [
        {"step_s"}, {"in_trace_s"}, {"waiting_s"}, {"exposed_s"}, {"sent_bytes"}, {"component"}
    ]  # fmt: skip
    assert all({"single", "zero1_flat 0.1 MB"} & {*table["strategy"]} for table in tables)


def test_sent_bytes_match_the_formula(records: list[RunRecord]) -> None:
    (row,) = [row for row in parallel.volumes(records) if row["strategy"] != "single"]
    assert row["formula_sent_bytes"] <= row["sent_bytes"] <= 1.01 * row["formula_sent_bytes"]
    assert row["collectives"] > 2  # a reduce-scatter and an all-gather per bucket


def test_memory_of_a_rank_matches_the_formula(records: list[RunRecord]) -> None:
    """Each of two ranks holds half of the optimizer state and half of the averaged gradients.

    The second step's forward holds no gradients.
    """
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


def test_causes_of_the_longer_step_add_up(records: list[RunRecord]) -> None:
    (row,) = parallel.differences(records)
    parts = ("exposed_s", "slower_compute_s", "waits_longer_s")
    assert sum(row[part] for part in parts) == pytest.approx(row["traced_difference_s"])
    traced = {r.config["world_size"]: parallel.straggler(r)["step_s"] for r in records if r.results.get("overlap")}
    assert row["traced_difference_s"] == pytest.approx(traced[2] - traced[1])
    (communication,) = parallel.communication(records)
    assert communication["by_difference_s"] == row["difference_s"]
    assert communication["in_trace_s"] == row["exposed_s"]  # the baseline does not communicate
    assert communication["hidden_s"] >= 0


def test_each_rank_has_a_row_with_equal_transfer_time(records: list[RunRecord]) -> None:
    (record,) = [r for r in records if r.results.get("overlap") and r.config["world_size"] == 2]
    rows = record.results["overlap"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["hidden_s"] + row["exposed_s"] == pytest.approx(row["communication_s"])
    assert rows[0]["transfer_s"] == rows[1]["transfer_s"] > 0
    assert {row["stream"] for row in record.results["streams"]} == {"compute", "communication"}
    assert set(record.artifacts) == {"trace", "trace_rank1"}


def test_analyze_of_a_run_names_the_cell_of_each_trace(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(run[2])]) == 0
    out = capsys.readouterr().out
    assert "not known to be ranks of one job: each is listed, none analyzed" in out
    cells = " ".join(out[out.index("contents of the files") :].split())
    assert cells.count("tiny ctx 64 batch 1") == 3
    assert cells.count("zero1_flat") == 2


def test_trace_has_every_collective_of_all_threads(records: list[RunRecord]) -> None:
    (record,) = [r for r in records if r.results.get("overlap") and r.config["world_size"] == 2]
    (sent,) = [row for row in parallel.volumes(records) if row["strategy"] != "single"]
    assert [row["collectives"] for row in record.results["overlap"]] == [sent["collectives"]] * 2


def test_streams_figure_is_drawn(run: Any) -> None:
    drawing = (run[2] / "streams.svg").read_text()
    assert drawing.count("<path") > 10


def test_cells_that_differ_only_in_strategy_and_ranks_are_one_group(records: list[RunRecord]) -> None:
    assert len(parallel.groups(records)) == 1


def test_torch_ddp_has_predicted_but_no_counted_bytes() -> None:
    row = {"collectives": None, "sent_bytes": None, "formula_sent_bytes": 1.0}
    record = RunRecord("key", {"strategy": "torch_ddp", "world_size": 2}, "ok", results={"sent": [row]})
    (found,) = parallel.volumes([record])
    assert (found["sent_bytes"], found["formula_sent_bytes"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tp --tp-degree 2", "--tp-degree requires a strategy such as fsdp+tp, got tp; add fsdp+tp to --strategy, or"),
        (
            "fsdp+tp",
            "tp with another strategy requires --tp-degree; set it to the number of ranks that share one block",
        ),
        (
            "fsdp --bucket-size-mb 1",
            "--bucket-size-mb requires a strategy with buckets; add one to --strategy, such as ddp_b",
        ),
        (
            "ddp_bucketed:comm_dtype=bf16,max_ctas=2",
            "'max_ctas=2' is an option without its strategy; join both by a colon, as in ddp",
        ),
        (
            "single fsdp --no-baseline",
            "--no-baseline leaves out `single`, which --strategy names; leave out one of them",
        ),
        ("ddp --bucket-size-mb 1", "unknown parallel strategy 'ddp'"),
    ],
)
def test_option_without_a_strategy_for_it_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parallel", "--size", "tiny", "--strategy", *words.split(), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_lists_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE.split(), "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "6 cells" in output
    assert "buckets of 0.1 MB · 2 ranks · under rank_memory" in output


def test_strategies_that_declare_a_place_are_compared_by_default() -> None:
    places = {name: plugins.get("parallel", name).compared for name in plugins.names("parallel")}
    compared = {place: name for name, place in places.items() if place}
    assert parallel_command.Parallel().strategy == tuple(compared[place] for place in range(1, len(compared) + 1))


def test_global_batch_is_divided_among_ranks_with_rows_of_their_own() -> None:
    args = parallel_command.Parallel(strategy=("ddp_naive", "tp"), world_size=(2, 4), global_batch_size=8, with_=())
    found = {(c.strategy, c.world_size, c.batch_size) for c in parallel_command.cells(args)}
    on_ranks = {("ddp_naive", 2, 4), ("ddp_naive", 4, 2), ("tp", 2, 8), ("tp", 4, 8)}
    assert found == on_ranks | {("single", 1, size) for size in (2, 4, 8)}, "a baseline for each batch of a rank"


def test_check_compares_each_built_in_strategy_with_one_process() -> None:
    args = parallel_command.Parallel(strategy=("ddp_naive", "fsdp"), with_=("check",))
    compared = [cell for cell in parallel_command.cells(args) if cell.subject is Subject.STRATEGY_ERROR]
    assert [(cell.strategy, cell.device, cell.profiler) for cell in compared] == [
        ("ddp_naive", "cpu", "none"),
        ("fsdp", "cpu", "none"),
    ]


def test_without_a_baseline_only_the_strategies_are_measured() -> None:
    args = parallel_command.Parallel(strategy=("fsdp",), no_baseline=True, with_=("overlap",))
    assert {cell.strategy for cell in parallel_command.cells(args)} == {"fsdp"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--global-batch-size 7", "--global-batch-size 7 cannot be divided among 2 ranks of ddp_naive"),
        (
            "--global-batch-size 8 --batch-size 4",
            "--batch-size is for each rank and --global-batch-size for all ranks together",
        ),
    ],
)
def test_invalid_global_batch_is_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "--strategy", "ddp_naive", *options.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
