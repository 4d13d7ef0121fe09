"""`cs-systems analyze`: its tables, formats and error messages."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cs_systems.analysis.attribution import module_tables
from cs_systems.analysis.attribution.timeline import DECLARED
from cs_systems.analysis.comparison import SIDES
from cs_systems.cli import main
from tests.recorded import MAIN

DATA = Path(__file__).parents[1] / "data"


def analyze(*words: object) -> int:
    return main(["analyze", *map(str, words)])


def test_analyze_prints_every_table_in_80_columns(nsys_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(nsys_path, "--all") == 0
    sentences, _, rest = capsys.readouterr().out.partition("\n\n")
    assert sentences.startswith("1. 72% of the step the GPU waits for kernel launches: compile (torch.compile),\n")
    assert 2 <= len([line for line in sentences.splitlines() if line[:3].strip()]) <= 3
    lines = rest.splitlines()
    assert max(map(len, [*sentences.splitlines(), *lines[1:]])) <= 80
    assert lines[0] == f"{nsys_path} · nsys · NVIDIA H200 · 3 steps of 238 kernels"
    assert lines[1] == "recorded 2026-11-20 11:03 UTC"
    assert "not as timings" in lines[2]
    # One GPU does not communicate, nsys records no operators, the host makes a CUDA call every few µs, and the GPU
    # updates the weights.
    lacking = {name for name, table in DECLARED.items() if table.caption not in lines} - {*module_tables.TABLES}
    assert lacking == {"overlap", "operators", "host_gaps", "cpu_updates"}
    assert any(line.startswith("elementwise direct_copy ") for line in lines)
    assert "30.8% of the time is in 30 more kernels; --top shows more" in lines


def test_short_answer_fits_a_screen_and_ends_with_its_first_cause_and_the_command_that_tries_its_remedy(
    nsys_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(nsys_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 43  # 9 of them the causes, and 3 below headings, which a terminal shows in bold instead
    captions = [name for name, table in DECLARED.items() if table.caption in lines]
    assert captions == ["phases", "kernels", "gaps"]
    more = " ".join(lines).partition("more with --all, or --table NAME: ")[2]
    assert more.startswith("steps, ratio, phases, families, kernels, layers,")
    more, advise = more.split(" advise:  ")
    assert more.endswith(f" {lines[0].removeprefix('1. ')} or capture the step in a CUDA graph (torch.cuda.graph)")
    assert advise == "cs-systems advise --levers compile reduce_overhead -- YOUR_SCRIPT.py"


@pytest.mark.parametrize(
    ("command", "file"), [("analyze", "kineto_h200_step.json"), ("snapshot", "snapshot_h200_step.pickle")]
)
def test_short_answer_takes_at_most_forty_lines_of_a_terminal_with_80_columns(
    command: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cs_systems.cli._tables.terminal_width", lambda *_: 80)
    monkeypatch.chdir(Path(__file__).parents[1] / "data")
    assert main([command, f"{file}.gz"]) == 0
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("more with --all")).endswith(", …")


def test_short_answer_of_a_trace_without_kernels_has_its_first_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranges = [
        {"ph": "X", "cat": "user_annotation", "name": n, "ts": 0, "dur": d} for n, d in (("step", 9), ("load", 5))
    ]
    (path := tmp_path / "trace.json").write_text(
        json.dumps({"traceEvents": [{"pid": 1, "tid": 1, **one} for one in ranges]})
    )
    assert analyze(path) == 0
    out = capsys.readouterr().out
    assert DECLARED["ranges"].caption in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--all", "--table", "kernels"), "leave out one of them"),
        (("--all", "--format", "markdown"), "--format markdown shows every table already"),
        (("--all", "--what-if", "launches=free"), "--what-if shows its own table"),
    ],
)
def test_all_without_effect_is_refused(
    nsys_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], said: str
) -> None:
    assert analyze(nsys_path, *words) == 2
    assert said in capsys.readouterr().err


def test_options_choose_tables_and_number_of_rows(kineto_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(kineto_path, "--table", "families", "kernels", "--top", "3") == 0
    out = capsys.readouterr().out
    assert DECLARED["families"].caption in out
    assert DECLARED["gaps"].caption not in out
    assert "37 more kernels" in out


@pytest.mark.parametrize("table", sorted({*DECLARED} - {*module_tables.TABLES, "cpu_updates"}))  # there are none
def test_csv_has_all_columns_and_rows(
    nsys_path: Path, kineto_path: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    path = kineto_path if table in ("operators", "host_gaps") else nsys_path
    assert analyze(path, "--table", table, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {*DECLARED[table].columns} == {*rows[0]}
    if table == "kernels":
        assert len(rows) == 40
        assert "at::native::" in rows[6]["kernel"]  # in full


@pytest.mark.parametrize(
    ("format", "sign"), [("markdown", "| kernel"), ("latex", r"\begin{table}"), ("typst", "#figure(")]
)
def test_document_starts_with_the_syntax_of_its_format(
    nsys_path: Path, capsys: pytest.CaptureFixture[str], format: str, sign: str
) -> None:
    assert analyze(nsys_path, "--table", "kernels", "--format", format) == 0
    out = capsys.readouterr().out
    assert sign in out
    assert out.startswith({"markdown": "**", "latex": r"\begin", "typst": "#figure"}[format])
    assert "not as timings" in out


def test_two_traces_are_compared(nsys_path: Path, kineto_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(nsys_path, kineto_path) == 0
    lines = capsys.readouterr().out.splitlines()
    made = {nsys_path: "2026-11-20 11:03 UTC", kineto_path: "2026-11-20 10:59 UTC"}
    heading = [f"{side}: {path} · recorded {at}" for side, (path, at) in zip(SIDES, made.items(), strict=True)]
    first, _, rest = " ".join(lines).partition("  ")
    assert first == (
        "a step of the candidate takes 8.83 ms instead of 6.32 ms (+40%), with the different overheads of two "
        "profilers: +2.51 ms without a kernel on the GPU, −4.19 µs with one (optimizer −4.30 µs, matmul +506 ns, "
        "elementwise −494 ns)"
    )
    assert rest.startswith(" ".join(heading))  # a long path wraps
    assert sum(line.startswith("kernel time per step by ") for line in lines) == 3
    assert analyze(nsys_path, kineto_path, "--table", "families", "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("family,a_s,b_s,difference_s,change_share,share\n")


def test_markup_in_names_is_escaped(export: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Escape HTML, control characters and line breaks in names."""
    evil = "<script>alert('x')</script>\x1b[31m\n| fake | row |"
    path = export(
        ranges=[("step", 0, 1000, MAIN), (evil, 0, 900, MAIN), (evil, 10, None, MAIN)], kernels=[(evil, 200, 300, 1)]
    )
    for format in ("terminal", "markdown", "latex", "typst"):
        assert analyze(path, "--format", format) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\n| fake" not in out
        assert "&lt;script&gt;" in out or format != "markdown"
        assert "<script>" not in out or format != "markdown"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "kernel"], "unknown table 'kernel'; did you mean kernels"),
        (["--top", "0"], "--top is 0; it must be at least 1"),
        (["--format", "csv"], "--format csv writes one table; choose one with --table:"),
        (["--range", "epoch"], "no range is named 'epoch'; choose among "),
        (["--between", "0", "1e-6"], "choose other times: the launches are from 0."),
        (["--process", "1"], "no kernel of process 1; choose the process among"),
    ],
)
def test_invalid_options_exit_2(
    nsys_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert analyze(nsys_path, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_invalid_comparison_exits_2(nsys_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(nsys_path, nsys_path, "--table", "gaps") == 2
    assert "unknown table of a comparison 'gaps'; choose among phases, families, layers" in capsys.readouterr().err
    assert analyze(nsys_path, tmp_path / "b.sqlite") == 2
    assert "b.sqlite does not exist" in capsys.readouterr().err


def test_tables_import_neither_torch_nor_pandas(nsys_path: Path) -> None:
    program = (
        "import sys; from cs_systems.analysis.attribution import tables, profile; "
        "from cs_systems.readers import read; "
        "made = profile.profile(read(__import__('pathlib').Path(sys.argv[1]))); "
        "[table(made, tables.NO_COSTS) for table in tables.TABLES.values()]; "
        "print([name for name in ('torch', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(nsys_path)], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_tables_of_step_without_modules_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "data" / "kineto_h200_step.json.gz"
    assert analyze(path, "--table", "parts", "ranges") == 0
    shown = capsys.readouterr().out
    assert "parts of a transformer block, sum over all blocks, per step\nno data\n100.0% of the kernel time" in shown
    assert "Optimizer.ze…mW.zero_grad" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80  # the first line holds the path


def test_empty_table_names_tables_with_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("outer"):
        (torch.ones(8, 8) @ torch.ones(8, 8)).sum()
    trace.export_chrome_trace(str(path))
    assert analyze(path, "--table", "range_tree", "kernels") == 0
    shown = capsys.readouterr().out
    assert shown.count("no data\n") == 2
    assert shown.count("the trace has no kernels; tables with data: ranges, operators\n") == 1
    assert analyze(path, "--table", "ranges", "operators") == 0
    shown = capsys.readouterr().out
    assert "outer" in shown
    assert "no data" not in shown


def test_note_is_printed_once_and_top_cuts_layers(nsys_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze(nsys_path, "--table", "phases", "layers", "parts", "attention", "--top", "2") == 0
    out = capsys.readouterr().out
    assert out.count("of the kernel time belongs to a phase") == 1
    assert "4 more layers; --top shows more" in out


def test_page_numbers_a_device_that_the_trace_does_not_name(tmp_path: Path) -> None:
    whole = json.loads(gzip.decompress((DATA / "kineto_h200_step.json.gz").read_bytes()))
    for devices, name in (
        (whole["deviceProperties"], "NVIDIA H200"), ([{"id": 0, "name": ""}], "GPU 0"), ([], "GPU 0"),
    ):  # fmt: skip
        (tmp_path / "trace.json").write_text(json.dumps(whole | {"deviceProperties": devices}))
        assert analyze(tmp_path / "trace.json", "--format", "html", "--output", tmp_path / "page.html") == 0
        assert f"<dt>device</dt><dd>{name}</dd>" in (tmp_path / "page.html").read_text()
