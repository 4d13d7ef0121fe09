"""Names with HTML, escape sequences, formulas, LaTeX or Typst are escaped in every command and format."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import _progress as progress
from cs_systems.cli import main
from cs_systems.config import RunConfig
from cs_systems.core.caveats import Caveat
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import RunRecord, append_record
from cs_systems.report.figures import plot
from cs_systems.report.tables import records as tables
from cs_systems.report.tables.formats import FORMATS, paragraph
from cs_systems.report.tables.rows import render_rows
from cs_systems.report.tables.table import Table
from tests.report.conftest import H200, attention_config, failed, ok, train_config

NAMES = {
    "html": "<script>alert(1)</script><img src=x onerror=y>&amp;",
    "escapes": "a\x1b[31m\x1b]0;title\x07\x9b2J\r\n\u202egnp\u2066\x00\x7f b",
    "formula": "=cmd|' /C calc'!A0",
    "plus": "+1+cmd|x",
    "at": "@SUM(A1)",
    "latex": r"\input{/etc/passwd} % $x_1^2$ & # ~ \write18{id}",
    "row": "[2pt] * \\",
    "typst": '"); #read("/etc/passwd") #("',
    "markdown": "| a | [b](javascript:c) `d` *e* ![f](g)\n\n# h",
    "mathtext": "$\\frac{1$ $_x^",
    "hidden": "_legend",
    "wide": "注意 🙂",
}
AT_START = ("formula", "plus", "at", "row", "hidden")  # a name begins with them
WHOLE = "mathtext"  # joined with another formula, it would be none
TEXT = " ".join(text for kind, text in NAMES.items() if kind not in (*AT_START, WHOLE))
DRAWN = (TEXT, NAMES[WHOLE], NAMES["hidden"])
FIGURES = ("phases", "time", "warmup", "families", "memory")
# A name that all cells share stands in captions, others stand in rows and columns.
RUNS = {"captions": (TEXT,), "rows": (NAMES[WHOLE], *(NAMES[kind] for kind in AT_START))}
COMMANDS = ("report", "report --columns attention reason device_name note", "compare", "precision", "memory")


def records(name: str) -> list[RunRecord]:
    """Return records of every status with the name in every free-text field."""
    machine = replace(H200, device_name=name, platform=name, cpu=name, driver=name)
    caveat = Caveat(name, name, name)
    configs = [
        *(train_config("small", f"{name}:f", context) for context in (256, 512)),
        *(attention_config(f"{name}:f", seq) for seq in (256, 1024)),
        RunConfig(workload=f"{name}:w"),
    ]
    made = [ok(config, 0.01, 1e12, 10**9, warnings=(caveat,)) for config in configs]
    made[0].results["families"] = [{"family": name, "share": 1.0, "time_s": 1.0, "calls_per_step": 2}]
    made.append(failed(replace(configs[0], batch_size=7), "error", name))
    made.append(failed(replace(configs[0], batch_size=8), "oom", name, 10**12))
    made.append(failed(RunConfig(profiler="dtypes", attention=f"{name}:f"), "error", name))
    made.append(failed(RunConfig(workload="precision_error", attention=f"{name}:f"), "error", name))
    profiled = ok(RunConfig(profiler="memory", attention=f"{name}:f"), 0.01, 1e12, 10**9)
    profiled.results["memory_parts"] = [{"part": name, "bytes": 5, "total": False}]
    profiled.artifacts["snapshot"] = f"{name}.pickle"
    return [replace(record, environment=machine) for record in (*made, profiled)]


def arguments(command: str, folder: Path) -> list[str]:
    first, *rest = command.split()
    places = {"compare": [str(folder)] * 2, "precision": ["--show", str(folder)], "memory": ["--show", str(folder)]}
    return [first, *places.get(first, [str(folder)]), *rest]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each run."""
    folders = {run: tmp_path_factory.mktemp("a run") for run in RUNS}
    for run, folder in folders.items():
        for name in RUNS[run]:
            for record in records(name):
                append_record(folder, record)
    return folders


@pytest.fixture(scope="module")
def tables_made_once() -> Iterator[None]:
    """Keep the tables of a run for its next format: making them takes ten times as long as writing them."""
    made: dict[str, list[Table]] = {}
    make = tables.tables

    def once(records: Sequence[RunRecord], *options: Any) -> list[Table]:
        names = {record.environment.device_name for record in records if record.environment}
        if (key := repr((names, [record.key for record in records], options))) not in made:
            made[key] = make(records, *options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "tables", once)
        yield


def test_hostile_names_are_escaped_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Together, and without the figures that are drawn alone below, because figures take long to draw.
    fitting = plot._fitting
    monkeypatch.setattr(plot, "_fitting", lambda *of: [*{*fitting(*of)} - {*FIGURES}] or fitting(*of)[:1])
    for name in DRAWN:
        for record in records(name):
            append_record(tmp_path, record)
    assert main(["report", str(tmp_path), "--format", "html"]) == 0
    out, err = capsys.readouterr()
    assert not [c for c in out + err if not c.isprintable() and c != "\n"]
    assert out.count("<svg") >= 2, "figures"
    assert "<script>alert" not in out
    assert "<img" not in out


@pytest.mark.usefixtures("tables_made_once")
@pytest.mark.parametrize("format", sorted({*FORMATS} - {"html"}))
@pytest.mark.parametrize("run", RUNS)
def test_hostile_names_are_escaped_in_every_command_and_format(
    run: str, format: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs[run]
    for command in COMMANDS:
        if format != "terminal" and command == "memory":
            continue
        chosen = [] if command == "memory" else ["--format", format]
        assert main([*arguments(command, folder), *chosen]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert not [c for c in out + err if not c.isprintable() and c != "\n"]
        check(format, out)


def check(format: str, text: str) -> None:
    """Assert that the text holds no command of its format."""
    if format == "csv":
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert not [cell for cell in cells if re.match(r"[=@\t\r]|[+-](?!\d)", cell)]
    elif format == "markdown":
        assert "<script>" not in text
        assert "[b](j" not in text.replace(r"\[", "").replace(r"\]", "")
        assert not re.search(r"^# h", text, re.MULTILINE)
    elif format == "latex":
        assert r"\input" not in text
        assert r"\write18" not in text
        assert not re.search(r"\\\\\n\s*[\[*]", text)
        shown = re.sub(r"^%.*", "", text, flags=re.MULTILINE)  # comments are lines of their own
        assert not re.search(r"(?<!\\)[%$#]", shown)
    elif format == "typst":
        shown = re.sub(r"^  //.*", "", text, flags=re.MULTILINE)
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', shown)
        assert "read(" not in outside
        assert outside.count('"') % 2 == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("figure_kind", FIGURES)
def test_hostile_names_are_drawn_literally_in_figures(figure_kind: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "figure.svg"
    folder.mkdir()
    for name in DRAWN:
        for record in records(name)[:2]:
            append_record(folder, record)
    assert main(["report", str(folder), "--figure", str(file), "--figure-kind", figure_kind]) == 0
    text = file.read_text()
    assert "<script" not in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("kind", NAMES)
def test_progress_with_hostile_names_is_printable_lines(kind: str) -> None:
    for record in records(NAMES[kind]):
        update = Progress(1, 2, record=record, note=NAMES[kind])
        for line in progress.progress_lines(update):
            assert line.endswith("\n")
            assert line[:-1].isprintable()


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"html"}))
@pytest.mark.parametrize("kind", NAMES)
def test_hostile_names_in_tables_and_paragraphs_are_escaped(kind: str, format: str) -> None:
    name = NAMES[kind]
    rows = [{name: name, "kernel": name, "time_s": -1.5}, {name: name, "kernel": name, "time_s": 2.5}]
    text = render_rows(rows, format, name, [name], {"kernel": name} if format != "csv" else {})
    for shown in (text, paragraph(name, format)):
        assert not [c for c in shown if not c.isprintable() and c != "\n"]
        check(format, shown)
    if format == "csv":
        assert "-1.5" in next(csv.reader([text.splitlines()[1]]))


@pytest.mark.parametrize("kind", NAMES)
def test_hostile_names_in_errors_are_printable(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = NAMES[kind]
    for words in (["report", name], [name], ["time", f"--size={name}"], ["time", f"--steps={name}"], ["analyze", name]):
        with contextlib.suppress(SystemExit):  # raised by the parser of options
            assert main(words) == 2
        assert not [c for c in capsys.readouterr().err if not c.isprintable() and c != "\n"]
