"""`cs-systems analyze --what-if`: its table, its notes and its error messages."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from cs_systems.cli import main


def analyze(*words: object) -> int:
    return main(["analyze", *map(str, words)])


def test_changes_are_rows_of_a_table(kineto_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(kineto_path, "--what-if", "launches=free", "host:backward=0.5", "copies=overlapped") == 0
    out = capsys.readouterr().out
    assert "what if: duration of a step after a change" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "=" in line.split(" ")[0]}
    recorded, replayed, unprofiled, expected, low, high, saved = map(float, rows["launches=free"])
    assert recorded == replayed == 8.83
    assert low < expected < high < recorded
    assert recorded > unprofiled
    assert saved == pytest.approx(100 * (1 - expected / unprofiled), abs=0.1)
    assert rows["copies=overlapped"][2:] == ["–"] * 5
    text = " ".join(out.split())
    assert "replayed 3 steps: off by 0.00%, 0.00% of the time is unexplained; changes are predicted" in text
    assert "copies=overlapped: no copy between host and device is in the steps" in text


def test_csv_has_every_column(nsys_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(nsys_path, "--what-if", "launches=free", "input=0", "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["what_if"] for row in rows] == ["launches=free", "input=0"]
    assert float(rows[0]["low_s"]) < float(rows[0]["expected_s"]) < float(rows[0]["recorded_s"])
    assert rows[1]["expected_s"] == rows[1]["saved_share"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nix=3"],
            "unknown change --what-if 'nix=3'; write launches=free; host=FACTOR or host:RANGE=FACTOR; input=0; ",
        ),
        (["launches"], "unknown change --what-if 'launches'; write launches=free"),
        (["family=3"], "unknown change --what-if 'family=3'; write family:NAME=FACTOR"),
        (["input:x=0"], "unknown change --what-if 'input:x=0'; write input=0"),
        (["launches=0"], "--what-if launches=0 is not possible; write launches=free"),
        (["host=-1"], "--what-if host=-1: '-1' is not a factor; write a number from 0, such as 0.5"),
        (["host:step=fast"], "--what-if host:step=fast: 'fast' is not a factor; write a number from 0, such as 0.5"),
        (["precision=bf16"], "--what-if precision=bf16: a change of precision cannot be told from a trace: "),
        (["straggler=median"], "--what-if straggler=median compares ranks; give the traces of all ranks of a job"),
        (["compile=1"], "--what-if compile=1: compiling cannot be told from a trace: "),
        (["sync=0", "--table", "gaps"], "--what-if shows its own table; leave out --table"),
        (["sync=0", "--format", "html"], "--what-if has no page; leave out --format html and --open"),
    ],
)
def test_requests_without_an_answer_are_refused(
    kineto_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert analyze(kineto_path, "--what-if", *words) == 2
    assert message in capsys.readouterr().err


def test_two_traces_are_refused(kineto_path: Path, nsys_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(kineto_path, nsys_path, "--what-if", "sync=0") == 2
    assert "--what-if replays one trace; give one file" in capsys.readouterr().err


def test_ranks_take_changes_of_ranks_alone(
    kineto_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads(gzip.decompress(kineto_path.read_bytes()))
    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps({**trace, "distributedInfo": {"rank": rank, "world_size": 2}}))
    assert analyze(*paths, "--ranks", "--what-if", "straggler=median", "--no-cache") == 0
    assert "no change is predicted: the ranks have no collective in common" in capsys.readouterr().out
    assert analyze(*paths, "--ranks", "--what-if", "sync=0", "--no-cache") == 2
    assert "--what-if sync=0 replays one trace; give one file" in capsys.readouterr().err


def test_steps_with_unexplained_delays_have_no_predictions(
    kineto_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads(gzip.decompress(kineto_path.read_bytes()))
    for number, event in enumerate(e for e in trace["traceEvents"] if e.get("cat") == "kernel"):
        event["ts"] += 50 * (number + 1)
    path = tmp_path / "late.json"
    path.write_text(json.dumps(trace))
    assert analyze(path, "--what-if", "launches=free", "--no-cache") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no change is predicted: " in text
    assert "of the step passes in delays that the trace does not explain; at most 2% allow a prediction" in text


def test_the_page_shows_a_step_as_recorded_and_as_replayed(kineto_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert analyze(kineto_path, "--format", "html", "--output", page) == 0
    text = page.read_text()
    assert ">Replay of step 2</h2>" in text
    assert "off by 0.00% over 3 steps, 0.00% of the time is unexplained; changes can be predicted" in text
    picture = text[text.index("<svg", text.index(">Replay of step 2</h2>")) :]
    for version in ("recorded: 7.77 ms", "replayed: 7.77 ms", "launches free: 1."):
        assert version in picture[: picture.index("</svg>")]
