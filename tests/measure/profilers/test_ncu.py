"""Tests of the ncu profiler: its command, the choice of kernels, and cells with forbidden or missing counters."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path

import pytest

import cs_systems
from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, RunConfig
from cs_systems.measure.profilers import ncu
from cs_systems.measure.runtime import profiled, supervisor
from cs_systems.readers import ncu as reports
from cs_systems.record import RunRecord

TINY = RunConfig(
    model=PRESETS["tiny"], batch_size=2, device="cpu", warmup=0, steps=1, profiler="ncu", profiler_args=("-k=a",)
)


@pytest.mark.parametrize("file", ["./mine.py", "../mine.py"])
def test_files_of_a_profiled_cell_are_never_hidden(file: str, tmp_path: Path) -> None:
    assert profiled.prefix(tmp_path, RunConfig(workload=f"{file}:f"), 0).name.startswith("mine.py-f-")


def record(status: str = "ok") -> RunRecord:
    return RunRecord("key", TINY.to_dict(), status)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an ncu that prints only its version, and the package ncu-report."""
    (tmp_path / "ncu").write_text("#!/bin/sh\necho Version 2025.3.1.0\n")
    (tmp_path / "ncu").chmod(stat.S_IRWXU)
    (tmp_path / "ncu_report.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)


def test_command_counts_timed_steps_only() -> None:
    options = [*ncu.chosen("gemm|flash", "scores"), "--launch-count=50"]
    command = ncu.launch(["python", "-m", "worker"], Path("/runs/8f-0"), options, on_cuda=True)
    assert command[0] == "ncu"
    assert command[-6:-3] == ["--kernel-name=regex:gemm|flash", "--nvtx-include=scores/", "--launch-count=50"]
    assert command[-3:] == ["python", "-m", "worker"]
    for option in ("--profile-from-start=off", "--target-processes=all", "--nvtx", "--replay-mode=kernel"):
        assert option in command
    assert "--export=/runs/8f-0" in command
    assert sum(option.startswith("--launch-count") for option in command) == 1
    (metrics,) = (option for option in command if option.startswith("--metrics="))
    assert metrics.removeprefix("--metrics=").split(",") == list(reports.METRICS.values())


@pytest.mark.parametrize(("range", "option"), [("final norm", "final norm/"), ("block 0/*/scores", "block 0/*/scores")])
def test_range_option_includes_push_pop_ranges(range: str, option: str) -> None:
    assert ncu.chosen(None, range) == (f"--nvtx-include={option}",)


def test_kernel_or_range_is_required() -> None:
    with pytest.raises(ConfigError, match=r"requires --kernel REGEX or --range NAME.*; list the kernels with .*kineto"):
        ncu.chosen(None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--with", "ncu"], "--with ncu requires --kernel REGEX"),
        (["--with", "nsys", "--kernel", "gemm"], "--kernel requires --with ncu, got --with nsys"),
        (["--with", "kineto", "--range", "scores"], "--range requires --with ncu, got --with kineto"),
        (["--with", "kineto", "--show-command"], "--show-command requires --with nsys or ncu, got --with kineto"),
        (
            ["--with", "ncu", "--range", "scores"],
            "ncu is not on the PATH; install it with apt install nsight-compute (NVIDIA's CUDA repository)",
        ),
    ],
)
def test_invalid_options_are_refused_before_running(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(ncu, "_DRIVERS", ("/",))
    assert main(["profile", *words, "--size", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fake")
def test_cpu_cell_is_unavailable(tmp_path: Path) -> None:
    (found,) = cs_systems.sweep([TINY], out=tmp_path / "out")
    assert (found.status, found.reason) == (
        "unavailable",
        "the profiler ncu requires a CUDA device; use the profiler kineto",
    )


@pytest.mark.usefixtures("fake")
def test_missing_ncu_report_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ncu.problem() is None
    monkeypatch.setattr(ncu, "_DRIVERS", ("/",))
    monkeypatch.setattr(ncu.importlib.util, "find_spec", lambda name: None)
    assert "lacks the package ncu-report to read its reports; pip install 'cs-systems[ncu]'" in (ncu.problem() or "")


def test_machine_without_a_driver_is_named_before_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(ncu, "_DRIVERS", ("/nowhere",))
    assert (
        ncu.problem()
        == "ncu requires an NVIDIA GPU, and this machine has no NVIDIA driver; use the profiler kineto or nsys"
    )


@pytest.mark.parametrize("status", ["ok", "error", "killed"])
def test_forbidden_counters_make_cell_unavailable(tmp_path: Path, status: str) -> None:
    """The worker's status does not matter, because a program with a failing profiler may end in any way."""
    (tmp_path / "a.ncu.log").write_text(
        "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
        "NVIDIA GPU Performance Counters on the target device 0.\n"
    )
    found = profiled.with_profile(record(status), ncu.PROFILER, tmp_path / "a", keep=True)
    assert (found.status, found.measurement) == ("unavailable", None)
    for word in ("ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN"):
        assert word in (found.reason or "")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "==WARNING== No kernels were profiled.\n",
            "no kernel of the timed steps matches -k=a",
        ),
        ("==ERROR== Failed to find metric sm__nonsense\n", "ncu wrote no report: ==ERROR== Failed to find metric"),
        (None, "ncu wrote neither a report nor a message; run ncu yourself"),
    ],
)
def test_missing_report_is_an_error_with_ncu_message(tmp_path: Path, log: str | None, message: str) -> None:
    if log is not None:
        (tmp_path / "a.ncu.log").write_text(log)
    found = profiled.with_profile(record(), ncu.PROFILER, tmp_path / "a", keep=True)
    assert found.status == "error"
    assert (found.reason or "").startswith(message)


def test_reason_names_the_log_only_if_it_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cell-0.ncu.log").write_text("==ERROR== Failed to write to /tmp/cell-0.ncu-rep\n")
    kept, deleted = (
        profiled.with_profile(record(), ncu.PROFILER, tmp_path / "cell-0", keep=keep).reason or ""
        for keep in (True, False)
    )
    assert kept.endswith(f"; read all its messages in {tmp_path / 'cell-0.ncu.log'}")
    assert deleted == (
        "ncu wrote no report: ==ERROR== Failed to write to its report; "
        "measure again with out=FOLDER, which keeps the files and messages"
    )


def test_remedy_names_no_file_if_none_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cell-0.ncu-rep").touch()
    found = profiled.with_profile(record(), ncu.PROFILER, tmp_path / "cell-0", keep=False)
    assert found.reason == "its report is empty: the report was never written; check the disk space and record again"


def test_counters_are_recorded_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cs_systems.cli.profile import print_profile

    row = {"kernel": "gemm()", "ranges": "step > scores", "grid": "1×1×1", "block": None} | dict.fromkeys(
        reports.METRICS, 0.5
    )
    monkeypatch.setattr(reports, "read", lambda path: [row])
    (tmp_path / "a.ncu-rep").touch()
    found = profiled.with_profile(record(), ncu.PROFILER, tmp_path / "a", keep=True)
    assert (found.results["counters"], found.artifacts) == ([row], {"ncu": "a.ncu-rep"})
    print_profile(RunRecord.from_dict(json.loads(found.to_json())), tmp_path)
    shown = capsys.readouterr().out
    assert "under ncu" in shown
    assert "occupancy and efficiency" in shown
    assert shown.endswith(f"ncu: {tmp_path / 'a.ncu-rep'}\n")


@pytest.mark.gpu
@pytest.mark.ncu
def test_kernels_of_range_are_counted_on_gpu(tmp_path: Path) -> None:
    config = RunConfig(
        model=PRESETS["tiny"], steps=1, warmup=2, profiler="ncu", profiler_args=ncu.chosen(None, "scores")
    )
    (found,) = cs_systems.sweep([config], out=tmp_path)
    assert found.status == "ok" or "ERR_NVGPUCTRPERM" in (found.reason or "")
    if found.status == "ok":
        assert all(row["ranges"].endswith("> scores") for row in found.results["counters"])


def test_show_command_prints_ncu_command_without_ncu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["profile", "--with", "ncu", "--kernel", "gemm", "--size", "tiny", "--device", "cpu", "--show-command"]
    monkeypatch.setattr(supervisor.Supervisor, "on_cuda", lambda self, config: True)
    assert main(words) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[4] == "ncu"
    assert "--kernel-name=regex:gemm" in command
