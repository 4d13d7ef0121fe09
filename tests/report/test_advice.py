"""Answer of a search in its folder: the waterfall as a figure and in the page of the records, and malformed files."""

import json
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import main
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, Origin, RunRecord, Sample, append_record, records_path
from cs_systems.report.advice import OTHERS, WATERFALL, TrialRow, read
from cs_systems.report.figures import plot
from cs_systems.report.figures.waterfall import waterfall
from cs_systems.report.tables.rows import render_table
from tests.report import browser

ROOT = Path(__file__).parents[2]


def trial(lever: str, **others: Any) -> dict[str, Any]:
    texts = {"lever": lever, "change": "", "status": "kept", "numbers": "", "code": "", "reason": "", "processes": 1}
    return {**dict.fromkeys(TrialRow.__annotations__), **texts, **others}


START = trial("start", status="", step_s=0.05, peak_bytes=1 << 30, step_j=20.0, tokens_per_j=100.0)
KEPT = trial(
    "bf16 + cuda_graph",
    change="precision bf16, graph step",
    expected_s=0.016,
    step_s=0.014,
    gain=3.6,
    gain_low=3.5,
    gain_high=3.7,
    peak_bytes=1 << 29,
    step_j=7.0,
    tokens_per_j=290.0,
)
OTHER = trial("tf32", change="precision <tf32>", status="rejected", reason="no gain")
UNFIT = trial("allocator", status="not tried", reason="no timed step calls cudaMalloc")


REASONS = (
    "4 pairs of processes cannot prove a gain of 2.5%; the search ended before further pairs",
    "0.982 (0.951 … 1.013) times as fast, side by side; not tried again on what was kept later",
)


def folder_with(folder: Path, **others: Any) -> Path:
    sentences = ["3.60 (3.50 … 3.70) times as fast as the start, measured side by side; 1 of 2 options kept"]
    trials = {"trials": [KEPT, OTHER, UNFIT], "waterfall": [START, KEPT]}
    (folder / "advice.json").write_text(json.dumps({"goal": "time", "sentences": sentences, **trials, **others}))
    samples = tuple(Sample(0, False, 0.05, {"forward": 0.05}, {"forward": 0.01}) for _ in range(3))
    measurement = Measurement("wall", samples, 0.1)
    append_record(records_path(folder), RunRecord("k", RunConfig().to_dict(), "ok", measurement=measurement))
    return folder


def test_reasons_of_rejected_options_wrap_and_stay_whole_at_80_columns() -> None:
    change = "num_workers 2, persistent_workers for the loader of the training set"
    rows = [trial("more_workers", change=change, status="rejected", step_s=0.0123, reason=each) for each in REASONS]
    lines = render_table(OTHERS, rows, width=80).splitlines()  # type: ignore[arg-type]
    assert max(map(len, lines)) <= 80
    heading = next(line for line in lines if line.startswith("change"))
    printed = " ".join(line[heading.index("reason") :].strip() for line in lines)
    assert all(reason in printed for reason in REASONS), printed
    assert {*change.split()} <= {*" ".join(lines).split()}, "it wraps, too"


def test_names_of_parts_and_levers_stay_whole_at_80_columns() -> None:
    advice = read(ROOT / "profiles" / "advise")
    assert advice is not None
    for table, rows in advice.tables:
        printed = render_table(table, rows, width=80)
        assert max(map(len, printed.splitlines())) <= 80
        words = {*printed.split()}
        for row in rows:
            assert {*row["change"].replace("+", " ").split()} <= words
            assert table is OTHERS or {*row["lever"].split()} <= words


def test_answer_of_a_search_that_kept_no_code_is_read(tmp_path: Path) -> None:
    older = {name: value for name, value in KEPT.items() if name != "code"}
    advice = read(folder_with(tmp_path, waterfall=[older]))
    assert advice is not None
    assert [row["code"] for row in advice.waterfall] == [""]


def test_larger_batch_has_a_longer_step_and_contradicts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = KEPT | {"lever": "batch_size", "step_s": 0.09, "gain": 1.1, "gain_low": 1.05, "gain_high": 1.15}
    assert main(["report", str(folder_with(tmp_path, waterfall=[START, kept], trials=[kept]))]) == 0
    assert "different minutes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("goal", "column", "after", "is_told"),
    [
        ("time", "step_s", 0.014, False),
        ("time", "step_s", 0.0133, False),
        ("time", "step_s", 0.06, True),
        ("time", "step_s", 0.02, True),
        ("energy", "step_j", 25.0, True),
        ("energy", "step_j", 20 / 3.6, False),
        ("memory", "peak_bytes", 1 << 31, False),
    ],
)
def test_steps_that_contradict_a_gain_are_explained(
    goal: str, column: str, after: float, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = KEPT | {column: after}
    folder = folder_with(tmp_path, goal=goal, waterfall=[START, kept], trials=[kept])
    assert main(["report", str(folder)]) == 0
    told = "steps are of different minutes; each gain was measured side by side"
    assert (told in " ".join(capsys.readouterr().out.split())) == is_told


@pytest.mark.parametrize("goal", WATERFALL)
def test_waterfall_is_drawn_for_each_goal(goal: str, tmp_path: Path) -> None:
    advice = read(folder_with(tmp_path, goal=goal))
    assert advice is not None
    assert [row["change"] for row in advice.others] == ["precision <tf32>"]  # a lever that does not apply is no option
    drawn = plot.write(lambda: waterfall(advice), tmp_path / "w.svg")
    (axes,) = drawn.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["start", "precision bf16, graph step"]
    assert axes.texts[1].get_text().endswith(", 3.60 times")


def test_report_draws_the_waterfall_of_a_search_and_shows_it_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    assert main(["report", str(folder), "--figure", str(tmp_path / "w.pdf")]) == 0
    assert "w.pdf" in capsys.readouterr().err
    assert main(["report", str(folder), "--format", "html", "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    texts = browser.texts_between_tags(page)
    assert {"search", "after each kept lever", "kept, each on top of those above it", "no gain"} <= texts
    assert "<tf32>" not in page
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3.60 (3.50 … 3.70) times as fast as the start")
    assert printed.index("kept, each on top of") < printed.index("not kept") < printed.index("train-step")
    (folder / "advice.json").unlink()
    assert main(["report", str(folder), "--figure", str(tmp_path / "w.svg"), "--figure-kind", "waterfall"]) == 2
    assert "has no waterfall; cs-systems advise writes one" in " ".join(capsys.readouterr().err.split())


def folder_of_script(folder: Path) -> Path:
    """Return the folder of a search of a script: a folder of records for each process, the start's not the first."""
    folder.mkdir()
    kept = trial("bf16", change="autocast to bf16", step_s=0.02, gain=1.2, gain_low=1.1, gain_high=1.3)
    data = {"goal": "time", "sentences": ["1.20 times as fast; " * 6], "best": {"levers": ["bf16"], "seed": 0}}
    (folder / "advice.json").write_text(json.dumps(data | {"trials": [kept, OTHER], "waterfall": [START, kept]}))
    steps = {"bf16-0": 0.02, "bf16+tf32-0": 0.03, "start-0": 0.05, "start-1": 0.04, "start-seed1-0": 0.06}
    config = RunConfig(workload="loop train").to_dict()
    for number, (name, step_s) in enumerate(steps.items()):
        samples = tuple(Sample(0, i < 2, step_s, {"forward": step_s}, {"forward": 0.01}) for i in range(5))
        measurement, origin = Measurement("wall", samples, 0.1), Origin(1.8e9 - number, "python train.py")
        record = RunRecord("k", config, "ok", measurement=measurement, origin=origin)
        (folder / name).mkdir()
        append_record(records_path(folder / name), record)
    (folder / "first" / "sampled").mkdir(parents=True)
    return folder


def test_report_of_a_search_of_a_script_has_a_row_for_each_set_of_levers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = folder_of_script(tmp_path / "F")
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.split("median step of the processes")[1].splitlines()[4:7]]
    assert rows == [
        ["start", "3", "50.0", "40.0", "60.0"],
        ["bf16", "+", "tf32", "1", "30.0", "30.0", "30.0"],
        ["bf16", "1", "20.0", "20.0", "20.0"],
    ]
    assert "gains are measured side by side" in printed
    assert "repeat 0" not in printed
    words = " ".join(printed.replace("\\\n", " ").split())
    assert f"report {folder} --columns levers repeat median_ms range_s" in words
    assert main(["report", str(folder), "--columns", "levers", "repeat", "median_ms", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "start,0,60.0", "start,1,40.0", "start,2,50.0", "bf16+tf32,0,30.0", "bf16,0,20.0",
    ]  # fmt: skip


def test_document_of_a_search_of_a_script_names_the_levers_of_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder_of_script(tmp_path / "F")), "--format", "json", "--table", "cells"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert [row["levers"] for row in table["rows"]] == ["start", "start", "start", "bf16+tf32", "bf16"]
    assert main(["report", str(tmp_path / "F"), "--format", "json"]) == 0
    assert "1.20 times as fast" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"goal": "speed"}, {"waterfall": [{**START, "step_s": "fast"}]}, {"trials": 3}])
def test_a_malformed_answer_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **given)
    with pytest.raises(ValueError, match="is not the answer of cs-systems advise"):
        read(folder)


def test_committed_search_is_reported_without_its_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(ROOT / "profiles" / "advise"), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("12.64 (9.91 … 16.14) times as fast as the start")
    assert printed.count("\n|") == 2 * 2 + 7 + 3


def test_page_of_a_search_without_records_begins_with_its_answer_and_has_no_empty_parts(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["report", str(ROOT / "profiles" / "advise"), "--format", "html", "--output", str(file)]) == 0
    page = browser.Page(file.read_text()).text
    assert page.index("12.64 (9.91 … 16.14) times as fast") < page.index("Kept, each on top of those above it")
    assert not [empty for empty in ("unknown device", "cells", "Reproduce", "0 configurations") if empty in page]
