"""Tests of sanitize.sh with fake tools, since the real ones need a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "sanitize.sh"
CLEAN = "echo '========= ERROR SUMMARY: 0 errors'; exit 0"
PLANTED = "*planted?outside*|*planted?race*|*handed_by_one*"
FINDS = 'case "$*" in {pattern}) echo "========= ERROR SUMMARY: 1 error"; exit 99;; *) ' + CLEAN + ";; esac"


def sanitize(
    folder: Path, sanitizer: str | None, alone: str = "exit 0", backend: str = "flash_triton"
) -> subprocess.CompletedProcess[str]:
    """Run the script with fake programs: compute-sanitizer, nvcc, and the fuzzer without a tool."""
    programs = {"nvcc": "exit 0", "python3": alone} | ({"compute-sanitizer": sanitizer} if sanitizer else {})
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    command = ["bash", str(SCRIPT), str(folder / "out"), backend]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PATH": path})


def test_missing_compute_sanitizer_exits_with_2_and_remedy(tmp_path: Path) -> None:
    done = sanitize(tmp_path, None)
    assert done.returncode == 2
    assert "no compute-sanitizer on PATH: it comes with the CUDA toolkit" in done.stderr


@pytest.mark.parametrize(
    ("pattern", "status", "message"),
    [
        (PLANTED, 0, "== flash_triton_racecheck: status 0"),
        ("nothing", 1, "memcheck did not find the planted error: what it says below proves nothing"),
        ("nothing", 1, "racecheck follows an arrival of one lane for its warp now"),
        (f"{PLANTED}|*handed_by_all*", 1, "racecheck reports a hand-over that is right"),
        (f"{PLANTED}|*memcheck*fuzz_attention*", 1, "== flash_triton_memcheck: status 99"),
        (f"{PLANTED}|*racecheck*fuzz_attention*", 1, "== flash_triton_racecheck: status 99"),
    ],
    ids=["clean", "finds-nothing", "follows-one-lane", "finds-what-is-right", "memcheck", "racecheck"],
)
def test_status_is_0_only_if_exactly_planted_errors_are_found(
    tmp_path: Path, pattern: str, status: int, message: str
) -> None:
    done = sanitize(tmp_path, FINDS.format(pattern=pattern))
    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stdout


def test_sanitizer_runs_the_tests_of_a_part(tmp_path: Path) -> None:
    sanitizer = FINDS.format(pattern=f"{PLANTED}|*memcheck*pytest*tests/model/training/test_feed_forward.py*")
    done = sanitize(tmp_path, sanitizer, backend="fused_feed_forward")
    assert "== fused_feed_forward_memcheck: status 99" in done.stdout
    assert "== fused_feed_forward_racecheck: status 0" in done.stdout
    assert (ROOT / "tests/model/training/test_feed_forward.py").is_file()


def test_calls_that_fail_without_a_tool_are_not_checked(tmp_path: Path) -> None:
    done = sanitize(tmp_path, FINDS.format(pattern=PLANTED), alone="echo 'case 3 failed'; exit 1")
    assert done.returncode == 1
    assert "case 3 failed" in done.stdout
    assert "flash_triton_memcheck" not in done.stdout
