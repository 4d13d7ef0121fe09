"""Tests of the nsys profiler: its command, missing requirements, and, if nsys is installed, a real CPU trace."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

import cs_systems
from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, Mode, RunConfig
from cs_systems.formulas.cost import FULL_MATRIX_CUDA
from cs_systems.formulas.memory.model import kept_by_a_block
from cs_systems.measure.profilers import ProfileLost, _nsys, nsys, nsys_memory
from cs_systems.measure.profilers._blocks import gradients_of_a_block
from cs_systems.readers.nsys import exported
from cs_systems.record import Row, RunRecord, read_records

TINY = RunConfig(model=PRESETS["tiny"], batch_size=2, device="cpu", warmup=1, steps=2, profiler="nsys")


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an nsys that prints only its version."""
    tool(tmp_path / "target-linux-x64", "nsys", "echo NVIDIA Nsight Systems version 2024.2.3.38-242334140272v0")
    tool(tmp_path / "host-linux-x64", "QdstrmImporter", "")
    monkeypatch.setenv("PATH", str(tmp_path / "target-linux-x64"), prepend=":")
    return tmp_path


def test_cuda_command_records_timed_steps_only() -> None:
    command = _nsys.launch(["python", "-m", "worker"], Path("/runs/8f-0"), ["--gpu-metrics-device=0"], on_cuda=True)
    assert command[:2] == ["nsys", "profile"]
    assert command[-5:] == ["--output=/runs/8f-0", "--gpu-metrics-device=0", "python", "-m", "worker"]
    for option in (
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--cuda-graph-trace=node",
    ):
        assert option in command


def test_memory_command_has_usage_and_no_caching_options() -> None:
    command = nsys_memory.launch(["python"], Path("8f-0"), [nsys_memory.UNCACHED], on_cuda=True)
    assert command[-3:] == ["--cuda-memory-usage=true", "--env-var=PYTORCH_NO_CUDA_MEMORY_CACHING=1", "python"]
    assert not any("cuda-memory" in word for word in nsys_memory.launch(["python"], Path("8f-0"), [], on_cuda=False))


@pytest.mark.parametrize("options", [(), (nsys_memory.UNCACHED,)])
def test_blocks_have_prediction_only_without_caching_allocator(options: tuple[str, ...]) -> None:
    config = replace(TINY, profiler="nsys_memory", profiler_args=options)
    rows: list[Row] = [
        {"phase": phase, "layer": layer}
        for phase, layer in (("forward", "embedding"), ("forward", "block 0"), ("backward", "block 0"))
    ]
    measured = Path(__file__).parents[3] / "profiles" / "attention_memory"
    on_a_gpu = read_records(measured)[0][0].environment
    found = nsys_memory.with_prediction(rows, RunRecord("key", config.to_dict(), "ok", environment=on_a_gpu))
    kept = kept_by_a_block(replace(config, device="cuda"), FULL_MATRIX_CUDA)
    expected = [None, kept, gradients_of_a_block(config) - kept] if options else [None] * 3
    assert [row["predicted_bytes"] for row in found] == expected


def test_cpu_command_has_no_cuda_options() -> None:
    command = _nsys.launch(["python"], Path("8f-0"), [], on_cuda=False)
    assert not any("cuda" in word for word in command)
    assert "--capture-range=nvtx" in command
    assert f"--nvtx-capture={_nsys.CAPTURE}" in command
    assert "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in command


def test_show_command_runs_nothing_and_needs_no_nsys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["profile", "--with", "nsys", "--size", "tiny", "--device", "cpu", "--out", "here", "--show-command"]
    assert main([*words, "--nsys-arg=--stats=true", "--nsys-arg=-w false"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:3] == ["mkdir", "-p", str(tmp_path / "here")]
    assert command[3:6] == ["&&", "nsys", "profile"]
    assert command[-3:-1] == ["-m", "cs_systems.measure.runtime.worker"]
    assert json.loads(command[-1])["cells"][0]["model"]["name"] == "tiny"
    assert command[command.index("--stats=true") + 1] == "-w false"
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            "nothing",
            "nsys is not on the PATH; install it with apt install nsight-systems-cli (NVIDIA's CUDA repository), or ",
        ),
        (
            "old",
            "nsys 2021.1.3.14 is older than 2022.4, the oldest release that cs-systems records with; install a newer",
        ),
        ("half", "nsys 2024.2.3.38 lacks its importer and cannot write a .nsys-rep; find the folder host-linux-x64"),
    ],
)
def test_unusable_nsys_is_refused_before_running(
    make: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target-linux-x64"
    target.mkdir()
    if make == "old":
        tool(target, "nsys", "echo NVIDIA Nsight Systems version 2021.1.3.14-b695ea9")
        tool(tmp_path / "host-linux-x64", "QdstrmImporter", "")
    if make == "half":
        tool(target, "nsys", "echo NVIDIA Nsight Systems version 2024.2.3.38-242334140272v0")
    monkeypatch.setenv("PATH", str(target) if make == "nothing" else f"{target}:/bin")
    out = tmp_path / "out"
    assert main(["profile", "--with", "nsys", "--size", "tiny", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.endswith(", or use --with kineto\n")
    assert not out.exists()


def test_missing_nsys_has_the_alternative_of_the_command_or_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    begin = "nsys is not on the PATH; install it with apt install nsight-systems-cli (NVIDIA's CUDA repository), or "
    assert main(["memory", "--size", "tiny", "--nsys", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"cs-systems: {begin}leave out --nsys\n"
    with pytest.raises(ConfigError) as raised:
        cs_systems.run(RunConfig(profiler="nsys"))
    assert str(raised.value) == begin + 'use profiler="kineto"'


def test_missing_report_is_an_error(fake: Path, tmp_path: Path) -> None:
    """Run a worker that replies, under a wrapper that writes no report."""
    tool(
        fake / "target-linux-x64",
        "nsys",
        'if [ "$1" = --version ]; then echo version 2024.2.3; exit; fi\n'
        'while [ "$1" != -m ]; do python=$1; shift; done; exec "$python" "$@"',
    )
    forward = replace(TINY, mode=Mode.FORWARD)  # without an optimizer, which imports torch's compiler for 3 s
    (record,) = cs_systems.sweep([forward], out=tmp_path / "out")
    assert record.status == "error"
    assert record.reason == "nsys left no report; read its messages in worker.log, next to the records"
    assert record.measurement is not None
    without_folder = cs_systems.run(forward)
    assert (
        without_folder.reason
        == "nsys left no report; measure again with out=FOLDER, which keeps the files and messages"
    )


def test_failed_export_raises_profile_lost(fake: Path, tmp_path: Path) -> None:
    tool(fake / "target-linux-x64", "nsys", "echo the report is newer than I am >&2; exit 1")
    (tmp_path / "a.nsys-rep").touch()
    with pytest.raises(ProfileLost, match=r"nsys cannot export .*a.nsys-rep: the report is newer than I am"):
        nsys.collect(tmp_path / "a", RunRecord("key", TINY.to_dict(), "ok"))


@pytest.mark.nsys
@pytest.mark.parametrize("compiled", [False, True])
def test_real_trace_has_ranges_of_timed_steps_and_is_analysed(
    compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvtx", reason="nsys without a GPU requires the package nvtx")
    config = replace(TINY, compile="aot_eager" if compiled else "none")
    (record,) = cs_systems.sweep([config], out=tmp_path)
    assert record.status == "ok", record.reason
    assert set(record.artifacts) == {"nsys", "sqlite", "page"} | (set() if compiled else {"modules"})
    assert '"threads":[{' in (tmp_path / record.artifacts["page"]).read_text(encoding="utf-8")
    database = sqlite3.connect(tmp_path / record.artifacts["sqlite"])
    rows = database.execute(
        "SELECT coalesce(text, value), start, end, globalTid FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
        "WHERE eventType = 59 ORDER BY start, -end"
    ).fetchall()
    database.close()
    names = Counter(name for name, *_ in rows)
    blocks = 0 if compiled else 2 * TINY.steps  # forward and backward
    assert (names["step"], names["forward"], names["backward"]) == (TINY.steps,) * 3
    assert (names["block 0"], names["block 1"]) == (blocks, blocks)
    assert all(end is not None for _, _, end, _ in rows)
    open_until: list[int] = []
    for _, start, end, _ in rows:  # on a CPU there is one thread
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)

    assert main(["analyze", str(tmp_path / record.artifacts["nsys"]), "--format", "csv", "--table", "ranges"]) == 0
    analysed = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    calls = {(row["phase"], row["range"]): float(row["calls_per_step"]) for row in analysed}
    assert calls["forward", "forward"] == calls["backward", "backward"] == 1
    assert ("backward", "block 1") in calls or compiled


@pytest.mark.nsys
def test_ranges_of_hooks_agree_with_ranges_placed_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("nvtx", reason="nsys without a GPU requires the package nvtx")
    steps, report = 10, tmp_path / "a.nsys-rep"
    script = str(Path(__file__).with_name("reference_ranges.py"))
    record = ["nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([*record, sys.executable, script, str(steps)], env=environment, check=True)
    with exported(report) as database, closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT coalesce(text, value), start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
            "WHERE eventType = 59 ORDER BY start, -end"
        ).fetchall()
    late_us: dict[str, list[float]] = {}  # range by hand → how much later ours begins, and how much earlier it ends
    stack: list[tuple[str, int, int]] = []
    for name, start, end in rows:
        while stack and stack[-1][2] <= start:
            stack.pop()
        if stack and (found := re.fullmatch(r"(\w+) of (blocks\.\d) by hand", stack[-1][0])):
            by_hand, began, ended = stack[-1]
            assert name == found[2]
            assert [outer for outer, *_ in stack[:-1]] == ["step", found[1], "Net"]
            assert began <= start < end <= ended
            late_us.setdefault(by_hand, []).append((start - began + ended - end) / 1e3)
        stack.append((name, start, end))
    assert {name: len(gaps) for name, gaps in late_us.items()} == {
        f"{phase} of blocks.{number} by hand": steps for phase in ("forward", "backward") for number in (0, 1)
    }
    assert {name: round(median(gaps)) for name, gaps in late_us.items() if median(gaps) > 200} == {}, late_us


@pytest.mark.nsys
def test_shown_command_runs_in_a_shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvtx", reason="nsys without a GPU requires the package nvtx")
    out = tmp_path / "not there yet"
    words = ["profile", "--with", "nsys", "--size", "tiny", "--device", "cpu", "--warmup", "0", "--show-command"]
    assert main([*words, "--out", str(out)]) == 0
    subprocess.run(["sh", "-c", capfd.readouterr().out], check=True)
    modules, report = sorted(out.iterdir())
    assert (modules.name.removesuffix(".modules.json"), report.suffix) == (report.stem, ".nsys-rep")
    with exported(report) as database, closing(sqlite3.connect(database)) as connection:
        names = connection.execute("SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId")
        assert Counter(name for (name,) in names)["step"] == 3


@pytest.mark.nsys
def test_unknown_nsys_option_is_an_error_with_nsys_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--device", "cpu", "--nsys-arg=--nonsense", "--out", str(tmp_path)]
    assert main(["profile", "--with", "nsys", *words]) == 2
    error = capsys.readouterr().err
    assert "the worker process did not start: exited with status 1; its last output: unrecognised option" in error
    assert "--nonsense" in error


@pytest.mark.nsys
def test_cell_that_hangs_under_nsys_times_out(tmp_path: Path) -> None:
    """Killing nsys alone would leave the worker, which runs in its own session."""
    script = tmp_path / "hang.py"
    script.write_text("import time\ndef step():\n    time.sleep(600)\n")
    started = time.monotonic()
    (record,) = cs_systems.sweep(
        [replace(TINY, workload=f"{script}:step", model=PRESETS["small"], batch_size=4)],
        out=tmp_path / "out",
        timeout_s=3,
    )
    assert (record.status, record.artifacts) == ("timeout", {})
    assert time.monotonic() - started < 60
    log = tmp_path / "out" / "worker.log"
    assert [process for process in Path("/proc").glob("[0-9]*") if writes_to(process, log)] == []


def writes_to(process: Path, file: Path) -> bool:
    try:
        return any(descriptor.resolve() == file for descriptor in (process / "fd").iterdir())
    except OSError:  # it ended, or belongs to another user
        return False
