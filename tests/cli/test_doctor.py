"""`cs-systems doctor`: every check has a state, and every problem a remedy."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch

from cs_systems.cli import doctor, main
from cs_systems.core import plugins
from cs_systems.core.diagnostic import NEEDS_GPU, Diagnostic, diagnostic
from cs_systems.measure.profilers import _nsys, ncu
from cs_systems.measure.runtime import doctor as runtime_doctor
from cs_systems.record import Row
from tests.forks import own_fork_server
from tests.nsys_lock import alone_with_nsys


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    from contextlib import redirect_stdout
    from io import StringIO

    with alone_with_nsys(), redirect_stdout(StringIO()) as shown:
        assert main(["doctor", "--format", "json"]) == 0
    (table,) = json.loads(shown.getvalue())["tables"]
    return {row["check"]: row for row in table["rows"]}


def test_every_backend_is_available_or_has_a_reason(rows: dict[str, Row]) -> None:
    backends = {name: rows[f"attention {name}"] for name in plugins.names("attention")}
    assert backends["naive"]["state"] == "ok"
    assert all(row["state"] == "ok" or (row["found"] and row["remedy"]) for row in backends.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_backend_without_gpu_names_the_gpu_as_reason(rows: dict[str, Row]) -> None:
    assert rows["attention flash_cuda"]["found"] == "a Hopper GPU is required"
    assert rows["attention flash_cuda"]["state"] == rows["ncu"]["state"] == NEEDS_GPU


CPU = [diagnostic("GPU", "none", "missing"), diagnostic("attention naive", "on cpu"), diagnostic("nsys", "2024.2")]
TRITON = diagnostic("triton", "not installed", "missing", "pip install 'cs-systems[triton]'")
NSYS = diagnostic("nsys", "not on the PATH", "missing", "install it with apt install nsight-systems-cli")
COMPILER = diagnostic("torch.compile", "no C++ compiler", "missing", "install g++")
UNUSED = diagnostic("attention flex", "no backward on the CPU", NEEDS_GPU, "use the backend sdpa_flash")
TORCH = diagnostic("torch", "an NVIDIA driver is installed", "problem", "install the CUDA build of torch")


@pytest.mark.parametrize(
    ("rows_found", "sentence"),
    [
        (
            [*CPU, UNUSED],
            "Here you can time training steps on the CPU and profile them with kineto and nsys, with 1 of 2 attention "
            "backends; kernel times and GPU memory need a GPU; nothing is left to install.",
        ),
        (
            [diagnostic("GPU 0", "H200"), diagnostic("GPU 1", "H200"), CPU[1], TRITON],
            "Here you can time training steps on 2 GPUs and profile them with kineto, with 1 of 1 attention backends; "
            "first install triton: pip install 'cs-systems[triton]'.",
        ),
        (
            [*CPU[:2], NSYS],
            "Here you can time training steps on the CPU and profile them with kineto, with 1 of 1 attention backends; "
            "kernel times and GPU memory need a GPU; nothing is left to install but nsys, which is seldom useful "
            "without a GPU.",
        ),
        (
            [*CPU[:2], TRITON, NSYS, COMPILER],
            "Here you can time training steps on the CPU and profile them with kineto, with 1 of 1 attention backends; "
            "kernel times and GPU memory need a GPU; first install torch.compile: install g++.",
        ),
        (
            [diagnostic("GPU 0", "H200"), CPU[1], NSYS],
            "Here you can time training steps on 1 GPU and profile them with kineto, with 1 of 1 attention backends; "
            "first install nsys: apt install nsight-systems-cli.",
        ),
        (
            [TRITON, TORCH, *CPU[:1]],
            "Nothing can be measured here; first fix torch: install the CUDA build of torch.",
        ),
    ],
)
def test_last_sentence_says_what_works_and_what_to_install_first(rows_found: list[Diagnostic], sentence: str) -> None:
    assert doctor.conclusion(rows_found) == sentence


def test_one_thread_of_torch_is_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert runtime_doctor._torch()["found"].endswith(", 1 thread")


def test_every_problem_has_a_remedy(rows: dict[str, Row]) -> None:
    assert {"python", "torch", "triton", "torch.compile", "nvtx", "nsys", "ncu", "runs/"} <= set(rows)
    assert {row["state"] for row in rows.values()} <= {"ok", "missing", NEEDS_GPU, "problem"}
    assert [name for name, row in rows.items() if row["state"] == "problem" and not row["remedy"]] == []


def test_table_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: dict[str, Row]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    doctor._show(list(rows.values()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(name) for line in lines) for name in rows)


def fake_tool(folder: Path, name: str, output: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{output}'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_nsys_without_importer_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target-linux-x64"
    fake_tool(target, "nsys", "NVIDIA Nsight Systems version 2024.2.3.38-242334140272v0")
    monkeypatch.setenv("PATH", str(target), prepend=":")
    row = _nsys.check()
    assert row["state"] == "problem"
    assert row["found"] == "2024.2.3.38 lacks its importer and cannot write a .nsys-rep"
    assert "host-linux-x64" in row["remedy"]

    fake_tool(tmp_path / "host-linux-x64", "QdstrmImporter", "")
    assert _nsys.check() == {"check": "nsys", "state": "ok", "found": "2024.2.3.38", "remedy": None}


@pytest.mark.nsys
def test_nvtx_that_loses_ranges_under_nsys_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx")
    installed = _nsys.check()
    assert doctor._nvtx(installed)["found"].endswith(", works with nsys")

    # This module records no range, like nvtx 0.2.16 under nsys 2022.4.
    (tmp_path / "nvtx.py").write_text("push_range = pop_range = lambda *_: None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = doctor._nvtx(installed)
    assert row["state"] == "problem"
    assert row["found"].endswith(f"does not work with nsys {installed['found']}: the emitted range is not in the trace")
    assert row["remedy"] == "pip install nvtx==0.2.11"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no room >&2; exit 1", "nsys profile failed: no room"),
        ("exec sleep 60", "nsys profile did not end within 0.2 s"),
    ],
)
def test_nsys_that_fails_or_hangs_is_reported(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nsys").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(_nsys, "PAIR_TIMEOUT_S", 0.2 if "sleep" in script else 30)
    assert _nsys.loses_ranges() == message


def test_ncu_restricted_to_root_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, "ncu", "Version 2025.3.1.0 (build 36398880) (public-release)")
    (tmp_path / "ncu_report.py").touch()
    (tmp_path / "params").write_text("RmProfilingAdminOnly: 1\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ncu, "_DRIVER_PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(ncu.os, "geteuid", lambda: 1000)
    row = ncu.check()
    assert (row["state"], row["found"]) == (
        "problem",
        "2025.3.1.0, but the driver permits hardware counters to root only",
    )
    assert "NVreg_RestrictProfilingToAdminUsers=0" in row["remedy"]

    monkeypatch.setattr(ncu.os, "geteuid", lambda: 0)
    assert ncu.check()["state"] == "ok"


def test_folder_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor._folder(tmp_path / "runs")["state"] == "ok"
    row = doctor._folder(tmp_path / "file" / "runs")
    assert (row["state"], row["remedy"]) == ("problem", "cd to another folder, or give --out DIR")


def test_broken_torch_is_a_problem_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with own_fork_server():
        assert main(["doctor", "--format", "json"]) == 3
    by_name = {row["check"]: row for row in json.loads(capsys.readouterr().out)["tables"][0]["rows"]}
    assert by_name["worker"]["state"] == "problem"
    assert "libtorch.so is broken" in by_name["worker"]["found"]
    assert by_name["worker"]["remedy"].startswith("pip install")
