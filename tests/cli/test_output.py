"""A table written to a file does not depend on the terminal: it has no colours and no terminal width."""

from __future__ import annotations

import fcntl
import gzip
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from cs_systems.cli._output import told_apart

TESTS = Path(__file__).parent.parent
DATA = TESTS / "data"
SOURCES = {
    "analyze": DATA / "nsys_h200_step.sqlite.gz",
    "snapshot": DATA / "snapshot_h200_step.pickle.gz",
    "report": Path(__file__).parents[2] / "profiles" / "step_time" / "records.jsonl",
}


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        ("/jobs/june/base", "/jobs/june/new", ("base", "new")),
        ("/jobs/base/records.jsonl", "/jobs/new/records.jsonl", ("base/records.jsonl", "new/records.jsonl")),
        ("/jobs/new", "/jobs/old/new", ("jobs/new", "old/new")),
        ("/jobs/new", "/jobs/new", ("new", "new")),
    ],
)
def test_two_paths_are_named_by_the_ends_that_differ(a: str, b: str, ends: tuple[str, str]) -> None:
    assert told_apart(Path(a), Path(b)) == ends


def shown_in_a_terminal(words: list[str], folder: Path, width: int) -> tuple[int, list[str]]:
    """Run a command in a terminal of this width; return its exit status and the lines of both streams."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = os.environ | {"COLUMNS": str(width), "TERM": "dumb"}
    words = [sys.executable, "-m", "cs_systems", *words]
    program = subprocess.Popen(words, stdout=slave, stderr=slave, env=environment, cwd=folder)
    os.close(slave)
    text = b""
    with suppress(OSError):  # reading a terminal without a writer is an error
        while read := os.read(master, 1 << 16):
            text += read
    os.close(master)
    return program.wait(), re.sub(r"\x1b\[[\d;]*m", "", text.decode()).splitlines()


def test_announcement_of_precision_wraps_at_the_terminal_width(tmp_path: Path) -> None:
    words = ["precision", "--size", "tiny", "--timeout-s", "0", "--out", "a-folder-of-runs"]
    status, lines = shown_in_a_terminal(words, tmp_path, 60)
    assert status == 2, "it stops before it measures"
    assert lines[:2] == [
        "a-folder-of-runs has no records yet; measuring 12 cells",
        "(--show DIR prints an earlier run)",
    ]


@pytest.mark.parametrize(("command", "width"), [("analyze", 60), ("analyze", 80), ("snapshot", 56), ("snapshot", 80)])
def test_tables_fit_a_terminal_and_name_hidden_columns(command: str, width: int, tmp_path: Path) -> None:
    source = tmp_path / SOURCES[command].stem
    source.write_bytes(gzip.decompress(SOURCES[command].read_bytes()))
    status, lines = shown_in_a_terminal([command, source.name], tmp_path, width)
    assert status == 0
    assert max(map(len, lines)) <= width
    assert any("hidden columns: " in line for line in lines) == (width < 80)


@pytest.mark.parametrize("command", SOURCES)
def test_output_file_is_equal_from_terminal_and_pipe(command: str, tmp_path: Path) -> None:
    source = SOURCES[command]
    if source.suffix == ".gz":
        (tmp_path / source.stem).write_bytes(gzip.decompress(source.read_bytes()))
        source = tmp_path / source.stem
    argv = [sys.executable, "-m", "cs_systems", command, str(source), "--output"]
    master, slave = pty.openpty()
    for output, stdout in (("terminal", slave), ("pipe", subprocess.DEVNULL)):
        environment = os.environ | {"COLUMNS": "60", "TERM": "xterm-256color"}
        done = subprocess.run(
            [*argv, str(tmp_path / output)], stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True
        )
        assert (done.returncode, done.stderr) == (0, f"terminal: {tmp_path / output}\n")
    os.close(slave)
    os.close(master)
    assert (tmp_path / "terminal").read_text() == (tmp_path / "pipe").read_text()
