"""Contract of --format json: a document fits the published schema, is short by default and equal for equal inputs."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import cs_systems
from cs_systems.cli import main, profile
from cs_systems.cli._document import failed, printing
from cs_systems.cli._forecasts import print_fits
from cs_systems.cli._output import joined
from cs_systems.cli._sweep import print_document
from cs_systems.cli.schema import DOCUMENT, RECORD, schema
from cs_systems.config import RunConfig
from cs_systems.core.course import tasks
from cs_systems.core.diagnostic import DIAGNOSTICS
from cs_systems.formulas.memory.fit import CONTEXT_BYTES
from cs_systems.formulas.memory.tables import ForecastRow
from cs_systems.report.reading import some_records
from cs_systems.report.tables import document
from tests.report.test_paper import CASES, MEASURING

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "kineto_h200_step.json.gz"
SNAPSHOT = ROOT / "tests" / "data" / "snapshot_h200_step.pickle.gz"
MANY = ROOT / "profiles" / "softmax_and_matmul"  # of many profiled cells
MORE = {
    "analyze --all": (TRACE, "--all"),
    "analyze --table": (TRACE, "--table", "kernels", "layers"),
    "analyze of one rank": (ROOT / "tests" / "data" / "ranks_h200" / "accumulation_rank0.json.gz",),
    "snapshot --all": (SNAPSHOT, "--all"),
    "report --table": (ROOT / "profiles" / "softmax_and_matmul", "--table", "cells", "kernels", "gaps", "cost"),
    "report of ranks": (ROOT / "profiles" / "sharded_optimizer", "--table", "rank_memory", "ranks", "sent"),
    "compare --all": (
        ROOT / "profiles" / "attention_h200" / "peers",
        ROOT / "profiles" / "attention_h100" / "peers",
        "--all",
    ),
}
WHOLE = {name: words for name, words in {**CASES, **MORE}.items() if "--pivot" not in words}
SHORT = ("analyze", "analyze of ranks", "snapshot", "report", "compare", "analyze of one rank")
# Columns that every row of a record's results begins with; the fields follow that differ among the records.
OF_CELL = {"cell", "repeat"}


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return schema(DOCUMENT)


def written(case: str, capsys: pytest.CaptureFixture[str]) -> str:
    command, words = case.split()[0], WHOLE[case]
    if command in MEASURING:
        records = some_records(Path(str(words[0])))[0]
        return document.document(joined(MEASURING[command](records, "json", None), "json", "", (), records))
    assert main([command, *map(str, words), "--format", "json"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("case", WHOLE)
def test_document_of_every_command_fits_the_schema(
    case: str, published: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(case, capsys)
    found = json.loads(text)
    Draft202012Validator(published).validate(found)
    assert found["tables"]
    assert case not in SHORT or len(text.encode()) <= document.MOST_BYTES
    for table in found["tables"]:
        known = published["$defs"][table["name"]]
        columns = {name for one in known.get("anyOf", [known]) for name in one["properties"]}
        if table["name"] != document.CELLS:  # its columns may be in another unit, or of a phase
            of_cell = OF_CELL | {*published["$defs"][document.CELLS]["properties"]}
            assert {name for row in table["rows"] for name in row} <= columns | of_cell, table["name"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze"], "no file is given"),
        (["analyze", str(SNAPSHOT)], "read it with cs-systems snapshot"),
        (["compare", "x"], "Required options"),
        (["report", str(ROOT / "profiles" / "step_time"), "--table", "kernals"], "unknown table 'kernals'"),
        (["report", str(ROOT / "profiles" / "step_time"), "--pivot", "size:mode:median_s"], "leave out --pivot"),
        (["report", "x", "--nope"], "unknown option --nope"),
    ],
)
def test_error_is_a_document_with_the_exit_status(
    words: list[str], message: str, published: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*words, "--format", "json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    Draft202012Validator(published).validate(found)
    assert status == found["error"]["status"] == 2
    assert message in found["error"]["message"]
    assert message in " ".join(err.split())


def test_run_leaves_standard_output_to_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--format", "json", "--", "no.py"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(err.splitlines()[-1])["error"]["status"] == 2
    assert out == ""
    assert main(["run", "--", "no.py", "--format", "json"]) == 2  # the script's option
    assert "{" not in "".join(capsys.readouterr())


def test_document_of_measured_records_has_their_cells_first_and_sentences_on_standard_error(
    published: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with printing(SimpleNamespace(format="json")):
        print_document(some_records(MANY)[0], MANY, profile.IN_DOCUMENT)
    out, err = capsys.readouterr()
    found = json.loads(out)
    Draft202012Validator(published).validate(found)
    assert len(out.encode()) <= document.MOST_BYTES
    assert [table["name"] for table in found["tables"]][:3] == [document.CELLS, document.CELLS, "overhead"]
    assert all(table["rows"] for table in found["tables"])
    assert found["more"]["kernels"] == 196
    assert f"records: {MANY}/records.jsonl" in err


def test_shown_memory_is_a_document_of_the_recorded_tables(
    published: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "profiles/memory_best_checkpoint"
    assert main(["memory", "--show", str(folder), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(published).validate(found)
    (table,) = [table for table in found["tables"] if table["name"] == "memory_phases"]
    recorded = next(r.results["memory_phases"] for r in some_records(folder)[0] if "memory_phases" in r.results)
    assert {name: table["rows"][0][name] for name in recorded[0]} == recorded[0]


def test_forecast_of_a_workload_of_your_own_is_a_row(
    published: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def forecast(config: RunConfig) -> ForecastRow:
        return {
            "peak_bytes": 1_000_000 * config.batch_size, "flops": None, "stacks": {}, "reads": ["batch_size"],
            "reason": None, "caveats": [], "reserved_bytes": None, "phases": [],
        }  # fmt: skip

    with printing(SimpleNamespace(format="json")):
        print_fits(RunConfig(workload="mine.py:make", batch_size=8), 2 << 30, forecast, None)
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(published).validate(found)
    ((row,),) = [table["rows"] for table in found["tables"]]
    assert (row["needed_bytes"], row["fits"]) == (8_000_000 + CONTEXT_BYTES, True)
    assert (row["largest_batch"], row["largest_context"]) == ((2**31 - CONTEXT_BYTES) // 1_000_000, None)


def test_failed_search_is_an_error_document(capsys: pytest.CaptureFixture[str]) -> None:
    with printing(SimpleNamespace(format="json")):
        print("a sentence")
        assert failed("the start cannot be measured: no memory", 3) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == {"message": "the start cannot be measured: no memory", "status": 3}
    assert err.startswith("a sentence\n")


def test_course_lists_its_tasks_and_gives_their_numbers(
    published: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task,) = [one.name for one in tasks().values() if one.name == "naive_ddp"]
    assert main(["course", "--out", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(published).validate(found)
    rows = {row["task"]: row["state"] for row in found["tables"][0]["rows"]}
    assert (len(rows), rows[task]) == (len(tasks()), "not begun")


def test_comparison_names_only_the_tables_that_it_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = [str(ROOT / "profiles" / name) for name in ("warmup_steps", "softmax_and_matmul")]
    assert main(["compare", few, few, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["more"] == {}
    assert main(["compare", many, many, "--format", "json"]) == 0
    cut = json.loads(capsys.readouterr().out)["more"]
    assert main(["compare", many, many, "--format", "json", "--all"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["more"] == {}
    rows = Counter[str]()
    for table in whole["tables"]:
        rows[table["name"]] += len(table["rows"])
    assert cut == {"differences": rows["differences"]}  # the verdicts are whole


@pytest.mark.parametrize("words", [("report", MANY), ("compare", MANY, MANY), ("compare", *MORE["compare --all"][:2])])
def test_short_answer_about_many_cells_has_the_first_rows(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, words), "--format", "json"]) == 0
    text = capsys.readouterr().out
    tables = json.loads(text)["tables"]
    assert len(text.encode()) <= document.MOST_BYTES
    assert len(tables[0]["rows"]) >= document.FEWEST_ROWS
    assert all(table["rows"] for table in tables)


def test_short_answer_loses_words_before_rows(published: dict[str, Any]) -> None:
    rows = [{"check": f"row {number}", "state": "ok", "found": "x" * 60, "remedy": None} for number in range(20)]
    long = replace(DIAGNOSTICS, caption="caption " * 200, notes=("note " * 300,) * 9)
    pieces = [document.note("sentence " * 400)] * 9 + [document.table(long, rows)] * 30
    found = json.loads(document.document("".join([*pieces, document.more({})])))
    Draft202012Validator(published).validate(found)
    assert len(document.written(found).encode()) <= document.MOST_BYTES
    assert [len(table["rows"]) for table in found["tables"]] == [document.FEWEST_ROWS] * len(found["tables"])
    assert len(found["tables"]) > 3
    assert found["more"] == {DIAGNOSTICS.name: 600}
    assert max(map(len, found["notes"])) == document.LONGEST_NOTE


def test_equal_inputs_give_equal_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert written("snapshot --all", capsys) == written("snapshot --all", capsys)


def test_short_answer_names_the_tables_it_cuts_and_the_number_of_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found, whole = (json.loads(written(case, capsys)) for case in ("analyze", "analyze --all"))
    rows = {table["name"]: len(table["rows"]) for table in whole["tables"]}
    shown = {table["name"]: len(table["rows"]) for table in found["tables"]}
    assert found["more"] == {name: count for name, count in rows.items() if count > shown.get(name, 0)}


def test_diagnosis_has_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    first, _, third = json.loads(written("analyze", capsys))["answer"]["diagnoses"][:3]
    assert first["sure"] == "replayed"
    assert first["at_best_s"] is None or first["at_best_s"] <= first["expected_s"]
    assert first["expected_low_s"] <= first["expected_s"] <= first["expected_high_s"] < first["now_s"]
    assert third["sure"] is None
    assert third["remedy"].startswith("then, when the GPU no longer waits for the host: use a fused kernel")


def test_every_number_of_a_declared_table_with_a_unit_in_its_name_has_it_in_the_schema(
    published: dict[str, Any],
) -> None:
    units = {}
    for known in published["$defs"].values():
        for one in known.get("anyOf", [known]):
            units |= {name: each.get("unit") for name, each in one["properties"].items() if "number" in each["type"]}
    assert units["time_s"] == units["wall_s"] == "s"
    assert (units["share"], units["model_flops_per_s"], units["tokens_per_s"]) == ("fraction", "flops/s", "1/s")
    assert not [name for name, unit in units.items() if name.endswith(("_s", "_bytes", "_share")) and not unit]


def test_cells_have_the_numbers_of_the_frame_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    frame = cs_systems.load(WHOLE["report --table"][0])
    steps = frame[frame["phase"] == "step"].set_index("key")
    tables = json.loads(written("report --table", capsys))["tables"]
    rows = [row for table in tables if table["name"] == document.CELLS for row in table["rows"]]
    assert {row["key"] for row in rows} == {*steps.index}
    for row in rows:
        same = steps.loc[row["key"]]
        named = [name for name in row if name in steps.columns and name != "record" and row[name] is not None]
        assert {"median_s", "mfu", "peak_allocated_bytes", "precision"} <= {*named}
        assert [name for name in named if row[name] != same[name]] == []


def test_every_committed_record_has_known_fields_and_one_of_each_kind_fits_its_schema() -> None:
    """To validate all takes 20 s: records with the same tables are alike."""
    published = schema(RECORD)
    validator, known = Draft202012Validator(published), published["properties"]
    validator.check_schema(published)
    kinds = set[tuple[str, ...]]()
    for file in sorted((ROOT / "profiles").rglob("records.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            config, results = record["config"], record["results"]
            assert {*record} <= {*known}, file
            assert {*config} <= {*known["config"]["properties"]}, file
            assert ":" in config["workload"] or {*results} <= {*known["results"]["properties"]}, file  # or its own
            assert {*(record["measurement"] or ())} <= {*known["measurement"]["properties"]}, file
            if (kind := (config["workload"], config["profiler"], record["status"], *sorted(results))) not in kinds:
                kinds.add(kind)
                validator.validate(record)
    assert len(kinds) > 50


def test_schema_of_a_table_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "gaps"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "gaps"
    assert main(["schema", "gapss"]) == 2
    assert "did you mean gaps" in capsys.readouterr().err


def test_schema_needs_no_torch() -> None:
    code = "import sys; from cs_systems.cli.schema import schema; schema('document'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
