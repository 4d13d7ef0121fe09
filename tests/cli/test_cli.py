"""The command line as a whole: help, progress, output streams, exit statuses and errors of the operating system."""

from __future__ import annotations

import errno
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import cs_systems
from cs_systems.analysis.comparison import verdict
from cs_systems.cli import COMMANDS, _sweep, main
from cs_systems.config import RunConfig
from cs_systems.core.printable import command_line
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import RunRecord, read_records
from tests.recorded import DATA

WITHOUT_TORCH = """
import sys
from cs_systems.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stopped:
    status = stopped.code
heavy = ("torch", "pandas", "matplotlib", "numpy", "hashlib", "sqlite3", "statistics", "cs_systems.report.frame")
heavy = [name for name in heavy if name in sys.modules]
assert not heavy, f"{heavy} were imported"
sys.exit(status)
"""
TINY = ["time", "--size", "tiny", "--batch-size", "1", "--device", "cpu", "--warmup", "1", "--steps", "3"]


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "cs_systems", *words]
    return subprocess.run(
        program, capture_output=True, text=True, cwd=cwd, timeout=60, env=os.environ | {"COLUMNS": "80"}
    )


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_the_terminal_and_imports_nothing_heavy(words: list[str]) -> None:
    program = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: cs-systems" in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines[1:] if len(line) > 80] == []  # tyro does not break its usage line
    assert "%%" not in done.stdout
    assert "(default: )" not in done.stdout


def test_tab_completion_offers_every_public_name_without_importing_torch() -> None:
    program = (
        "import sys, cs_systems; print({*cs_systems.__all__} <= {*dir(cs_systems)}, "
        "[name for name in ('torch', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True []\n", "")


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert all(summary in " ".join(shown.split()) for summary in COMMANDS.values())


def test_commands_and_their_modules_match() -> None:
    folder = Path(cs_systems.__file__).parent / "cli"
    assert {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")} == set(COMMANDS)


def test_time_prints_progress_table_and_paths(tmp_path: Path) -> None:
    words = (*TINY, "--mode", "forward", "train-step", "--attention", "naive", "sdpa_flash", "--record-host")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [line[:5] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "tiny ctx 64 batch 1 · naive · fp32 · forward: " in lines[0]
    assert re.search(r"per step.* \(\d+ s\)$", lines[0])
    assert re.search(r"per step.* \(\d+ s\)$", lines[3])

    *table, _, where, report = done.stdout.replace(" \\\n          ", "").splitlines()
    assert max(map(len, table)) <= 80
    assert all(word in done.stdout for word in ("naive", "sdpa_flash", "train-step"))
    file = tmp_path / where.removeprefix("records: ")
    assert file.parent.parent == tmp_path / "runs"
    records = read_records(file)[0]
    assert [r.status for r in records] == ["ok"] * 4
    typed = command_line("cs-systems", *words)
    assert {(r.origin.command, r.origin.host) for r in records if r.origin} == {(typed, socket.gethostname())}
    assert report.startswith(f"report:  cs-systems report {file.parent.relative_to(tmp_path)} --format html --open")


def test_progress_bar_on_a_terminal_shows_cell_and_elapsed_time(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    program = [sys.executable, "-m", "cs_systems", *TINY, "--mode", "forward", "train-step", "--out", str(tmp_path)]
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 1 << 16):
            shown += chunk
    except OSError:  # Linux reports a closed terminal as an error
        pass
    os.close(master)
    assert process.wait() == 0
    text = shown.decode()
    assert "1/2" in text
    assert re.search(r"\d s · forward", text), "what differs names the cell"
    assert "train-step" in text


def test_names_with_rich_markup_are_printed_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print brackets and colons in names, which rich would read as styles and emoji."""
    named = RunConfig(workload="[red]/own.py:factory")
    record = RunRecord("key", named.to_dict(), "error", reason="install cs-systems[flash-attn]")
    with _sweep._Bar() as bar:
        bar.update(Progress(0, 2, named, record, "[red] is :skull: beside it"))
    error = " ".join(capsys.readouterr().err.split())
    assert "[red]/own.py:factory: error: install cs-systems[flash-attn]" in error
    assert "[red] is :skull: beside it" in error
    (tmp_path / "[red]").mkdir()
    (tmp_path / "[red]" / "own.py").write_text("nothing = 0\n")
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--attention", "[red]/own.py:nothing", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "[red]/own.py:nothing ·" in output
    assert output.count("[red]/own.py:nothing") == 2


def test_dry_run_lists_cells_with_memory_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*TINY, "--attention", "naive", "sdpa_cudnn", "--repeats", "3", "--dry-run"]) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    assert "\n2 cells, each 3 times\n" in printed
    assert [line for line in printed.splitlines() if line != line.rstrip()] == []
    assert re.search(r"\d MiB", printed), "the memory of a tiny model is given in MiB"
    assert "sdpa_cudnn: " in printed
    assert list(tmp_path.iterdir()) == []


def piped(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `{cs}` stands for the program, with Python's default buffering of its output."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment
    script = line.format(cs=f"{sys.executable} -m cs_systems") + "; exit ${PIPESTATUS[0]}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=cwd, env=inherited)


@pytest.mark.parametrize("words", ["--help", "--version", "time --help", "memory --size tiny --fits 8GiB"])
@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_closed_pipe_does_not_cause_an_error(words: str, reader: str, tmp_path: Path) -> None:
    done = piped(f"{{cs}} {words} | {reader}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["_study.py", "step_time.py --out {out} --measured {run}"])
def test_closed_pipe_of_a_study_does_not_cause_an_error(words: str, tmp_path: Path) -> None:
    root = Path(cs_systems.__file__).parent.parent
    script = words.format(out=tmp_path, run=root / "profiles/step_time")
    done = piped(f"{sys.executable} {root}/scripts/studies/{script} | true", tmp_path, PYTHONUNBUFFERED="1")
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if not line.startswith(f"{tmp_path}: ")] == []


@pytest.mark.parametrize("words", ["--help", "time --help", "memory --size tiny --fits 8GiB"])
def test_full_standard_output_gives_one_error(words: str, tmp_path: Path) -> None:
    done = piped(f"{{cs}} {words} > /dev/full", tmp_path)
    output = "cs-systems: standard output: No space left on device; free some space, then run the same command again\n"
    assert (done.returncode, done.stderr) == (2, output)


def test_closed_output_streams_keep_the_exit_status(tmp_path: Path) -> None:
    assert piped("{cs} memory --size tiny --fits 8GiB >&-", tmp_path).returncode == 0
    assert piped("{cs} report nowhere 2>&-", tmp_path).returncode == 2


def test_characters_outside_the_encoding_have_legible_replacements(tmp_path: Path) -> None:
    commands = "{cs} memory --size tiny --fits 8GiB && {cs} compare --help"
    done = piped(
        f"{commands} && {{cs}} analyze --all {DATA}/kineto_h200_small2.json.gz", tmp_path, PYTHONIOENCODING="ascii"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny ctx 64 batch 4 - naive" in done.stdout
    assert "\nstep  kernels          ms        ms              ms         %           us\n----------" in done.stdout
    assert "\\" not in done.stdout


def test_interrupt_of_a_reader_mentions_no_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cs_systems.cli.analyze.run", interrupted)
    assert main(["analyze", "trace.json"]) == 130
    assert capsys.readouterr().err == "cs-systems: interrupted\n"


def test_unreadable_file_is_named_with_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raise the error in place of the system, because root may read every file."""
    closed = tmp_path / "trace.json"
    closed.touch()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(closed))

    monkeypatch.setattr(Path, "open", refused)
    assert main(["analyze", str(closed)]) == 2
    message = f"cs-systems: {closed}: Permission denied; change its permissions, or give another path\n"
    assert capsys.readouterr().err == message


TIMED = [
    "time",
    "--size",
    "tiny",
    "--context-length",
    "32",
    "--batch-size",
    "1",
    "--attention",
    "naive",
    "sdpa_flash",
    "--steps",
    "2",
]


def test_error_wraps_at_terminal_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["memory", "--size", "tinny"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("cs-systems: unknown size 'tinny'; did you mean tiny? The names are ")
    assert rest == ["medium, large, xl, xl-2025, 2.7B, xl-2026, 10B, 8B"]
    assert main(["memory", "--size", "xl", "--fits", "80GiB"]) == 0
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80


@pytest.mark.parametrize("words", [["course"], TIMED])
def test_text_for_a_terminal_has_no_line_of_more_than_80_columns(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verdict, "verdict", lambda records: "naive is as fast as sdpa_flash, " * 3)
    assert main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("xl", "size xl means xl-2025 (d_model 1600, d_ff 6400, 48 layers, 25 heads); "),
        ("xl-2025", ""),
        ("xl-2026", ""),
    ],
)
def test_command_states_the_shape_of_plain_xl(size: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--size", size, "--fits", "500GiB"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{size} ctx 512 batch 4")
    assert err.startswith(said)
    assert bool(err) == bool(said)


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "--columns meen": "unknown column 'meen'; did you mean mean_w or mean_s",
        "--columns forwrad.mean": "unknown phase 'forwrad'; did you mean forward?",
        "--columns forward.forward": "unknown column 'forward'",
        "--workload mine.py:step --columns own.meen": "unknown column 'meen'; did you mean mean_w or mean_s",
        "--columns mean --format json": "--format json has every column; leave out --columns",
    }.items(),
)
def test_added_columns_are_checked_before_measuring(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cs-systems 0.")
