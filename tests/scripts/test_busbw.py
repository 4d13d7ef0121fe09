"""Test of the bus bandwidth benchmark on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import torchrun

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "busbw.py"


def test_both_methods_report_the_same_calls() -> None:
    words = ["--device", "cpu", "--size", "3KiB", "6KiB", "--dtype", "bf16", "--collective", "all_gather"]
    done = torchrun(str(SCRIPT), *words, "--rounds", "3", "--samples", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["size_bytes"], row["dtype"], row["world_size"]) for row in rows] == [
        (3072, "bf16", 2),
        (6144, "bf16", 2),
    ]
    for row in rows:
        for method in ("bare", "own"):  # half of the bytes of an all-gather cross the link
            rate = 0.5 * row["size_bytes"] / row[f"{method}_call_s"]
            assert row[f"{method}_busbw_bytes_per_s"] == pytest.approx(rate)
        assert 0 < row["launch_s"] <= row["bare_call_s"] * 1.0001
        assert row["ratio_ci_low"] <= row["ratio_median"] <= row["ratio_ci_high"]
